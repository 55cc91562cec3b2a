"""Atomic writes: a reader finds the old file or the complete new one, never a part. Streams are written directly."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from selfnorm.runtime.escapes import TerminalText

try:
    import fcntl
except ImportError:  # Windows has no such module; temporary files are not locked there, and leftovers stay
    fcntl = None  # type: ignore[assignment]

os.umask(_UMASK := os.umask(0o077))  # the umask can only be read by setting it
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ATTEMPTS = 100  # to create a temporary file before another process removes it
_DESCRIPTORS = {"/dev/stdout": 1, "/dev/stderr": 2}


def temporary_name(path: Path, token: str) -> str:
    """Returns the temporary name of a path for a token; it has the suffix, from which some writers choose a format.

    The token "*" makes it a glob pattern.
    """
    return f".{path.stem}.{token}.part{path.suffix}"


@contextmanager
def replacing(path: Path, *, is_new: bool = False) -> Iterator[Path]:
    """Yields a temporary path in the same folder to write to, then moves it to `path`; removes it if the block raises.

    is_new:  raises OSError instead of replacing a file that another program has written meanwhile.

    The temporary file is there already, empty, and locked until the end. Those that killed processes left while they wrote the
    same file are not locked, and are removed first.
    """
    if not path.parent.is_dir():
        raise OSError(f"{path}: expected a folder to write it to, got none at {path.parent}")
    named, path = path, path.resolve()  # so that a symbolic link stays one
    if path.exists() and not path.is_file():  # otherwise a device such as /dev/stdout would be replaced by a file
        raise OSError(f"{path}: expected a regular file or no file yet, got something else")
    remove_leftovers(path)
    try:
        temporary, lock = _locked_temporary(path)
    except OSError as error:
        with naming_full_disk(named):
            if error.errno in _FULL:
                raise
        raise OSError(f"{named}: expected a folder that can be written to, got {error.strerror!r} at {named.parent}") from None
    try:
        with naming_full_disk(named):
            yield temporary
            with temporary.open("rb+") as written:
                os.fsync(written.fileno())  # otherwise a power cut could leave the new name without its content
            temporary.chmod(0o666 & ~_UMASK)  # some writers create files that only their owner can read
            if is_new:
                _move_to_new(temporary, path, named)
            else:
                temporary.replace(path)
    finally:
        try:
            with suppress(OSError):  # the folder may have vanished, and the error of the block says more
                temporary.unlink(missing_ok=True)
        finally:
            if lock is not None:
                os.close(lock)


@contextmanager
def replacing_file(path: Path, *, is_new: bool = False) -> Iterator[BinaryIO]:
    """Context manager like `replacing` that yields the temporary file, opened for writing bytes."""
    with replacing(path, is_new=is_new) as temporary, temporary.open("wb") as file:
        yield file


@contextmanager
def written_output(path: Path, *, is_new: bool = False) -> Iterator[BinaryIO]:
    """Yields an open file for the bytes of a path that a user named: a stream is written directly, a file replaced at the end.

    A terminal shows control characters instead of obeying them; pipes, like files, get every byte.
    """
    if not is_stream(path):
        with replacing_file(path, is_new=is_new) as file:
            yield file
        return
    with naming_full_disk(path), open(_stream_descriptor(path), "wb") as stream:
        if not stream.isatty():
            yield stream
            return
        shown = TerminalText(stream)
        yield cast(BinaryIO, shown)
        shown.finish()


def is_stream(path: Path) -> bool:
    """Returns whether a path is standard output, a pipe, or a device, which is written to rather than replaced."""
    if str(path) in _DESCRIPTORS or path.parent == Path("/dev/fd"):
        return True
    with suppress(OSError):
        mode = path.stat().st_mode
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    return False


def remove_leftovers(path: Path) -> None:
    """Removes temporary files that killed processes left while they wrote `path`; those of running ones are locked, and stay."""
    if fcntl is None:
        return
    path = path.resolve()
    before, after = map(re.escape, temporary_name(path, "\0").split("\0"))
    name = re.compile(before + "[0-9a-f]{8}" + after)
    try:
        found = [each for each in os.listdir(path.parent) if name.fullmatch(each)]  # noqa: PTH208  (faster in a large folder)
    except OSError:
        return
    for each in found:
        with suppress(OSError):
            descriptor = os.open(path.with_name(each), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.with_name(each).unlink()
            finally:
                os.close(descriptor)


def _locked_temporary(path: Path) -> tuple[Path, int | None]:
    """Returns a new temporary file for `path`, and the descriptor that holds its lock until it is closed."""
    for _ in range(ATTEMPTS):
        temporary = path.with_name(temporary_name(path, secrets.token_hex(4)))
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        if fcntl is None:
            os.close(descriptor)
            return temporary, None
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if temporary.exists():  # else another process took it for a leftover before it was locked
            return temporary, descriptor
        os.close(descriptor)
    raise OSError(errno.EAGAIN, "new files vanish at once")


def _move_to_new(temporary: Path, path: Path, named: Path) -> None:
    try:
        path.hardlink_to(temporary)  # fails if it exists, which a move does not
    except FileExistsError:
        raise OSError(f"{named}: expected a new file, got one that was written meanwhile; choose another name") from None
    except OSError:  # a file system without links
        temporary.replace(path)


def _stream_descriptor(path: Path) -> int:
    """Returns a new descriptor of a stream; raises OSError for a pipe that nobody reads, for which opening would wait."""
    number = _DESCRIPTORS.get(str(path), path.name if path.parent == Path("/dev/fd") else "")
    if isinstance(number, int) or number.isdigit():  # opening it by name would start at the beginning of a file again
        for text in (sys.stdout, sys.stderr):
            text.flush()
        return os.dup(int(number))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(f"{path}: expected a pipe that a program reads, got none; start its reader first") from None
        raise
    os.set_blocking(descriptor, True)
    return descriptor


@contextmanager
def naming_full_disk(path: Path | str) -> Iterator[None]:
    """Adds the file's name, and how to go on, to the errors of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL and "(os error 28)" not in str(error):  # the latter from a library written in Rust
            raise
        what = "No space left on device" if error.errno is None else os.strerror(error.errno)
        raise OSError(
            f"{path}: expected room to write it, got {what!r}; free some space, then repeat the command, or resume the run"
        ) from None


def byte_count(size: int) -> str:
    """Returns a number of bytes in a unit in which it is at least 1, such as "1.5 MB"."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= unit), (1, "bytes"))
    return f"{size / unit:,.{0 if unit == 1 else 1}f} {name}"


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns standard JSON; NaN and infinities, which it cannot express, become null."""
    return json.dumps(_without_nan(value), allow_nan=False, indent=indent)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

"""What is checked before a file is read: what kind of file it is, whether its content fits into memory, how many there are."""

from __future__ import annotations

import io
import os
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from selfnorm.data.labels import listed
from selfnorm.runtime.files import byte_count
from selfnorm.runtime.locks import LOCK_NAME
from selfnorm.runtime.memory import available_memory

STANDARD_INPUT = Path("/dev/stdin")
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# Their files are made by the kernel: some never end, and reading others has side effects.
SYSTEM_FOLDERS = frozenset({"/proc", "/sys", "/dev"})
MAX_OTHERS = 100_000  # entries of a folder that are no images, beyond the number of images
NOTICE_SECONDS = 1.0
# A folder with one of these files, and another beside it, holds a run or a comparison, whose figures are no data.
RUN_MARKS = {"recipe.toml": (LOCK_NAME, "best.safetensors", "last.safetensors"), "comparison.json": (LOCK_NAME,)}


def byte_source(path: Path) -> Callable[[], BinaryIO]:
    """Returns a function that opens a file for reading, as often as it is called; raises ValueError for a file that is not
    regular or does not fit into memory.

    /dev/stdin, which can be read only once, is read at once and kept.
    """
    if path == STANDARD_INPUT:
        content = _standard_input()
        return lambda: io.BytesIO(content)
    expect_regular(path)
    expect_fits_memory(path, path.stat().st_size)
    return lambda: path.open("rb")


def _standard_input() -> bytes:
    available = available_memory()
    # The numbers take eight bytes for a digit and a separator.
    most = sys.maxsize if available is None else available // 4
    found = bytearray()
    while chunk := sys.stdin.buffer.read(min(1 << 20, most + 1 - len(found))):
        found += chunk
    if len(found) > most:
        raise ValueError(f"{STANDARD_INPUT}: expected a table that fits into the available memory, got a larger one")
    return bytes(found)


def expect_regular(path: Path, remedy: str = "save the data in a file first") -> None:
    """Raises ValueError unless the path is a regular file. Call it before opening a file that a user or a recipe names: opening
    a named pipe waits for a writer, and a device may have no end.

    remedy:  what to do if there is something else.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise ValueError(f"{path}: expected a file that can be read, got none ({reason(error)})") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: expected a regular file, got {_kind(mode)}; {remedy}")


def kind_of(path: Path) -> str | None:
    """Returns what is at a path, such as "a named pipe"; None for a regular file, and if nothing is there."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else _kind(mode)


def _kind(mode: int) -> str:
    return next((name for is_kind, name in KINDS if is_kind(mode)), "something else")


def expect_fits_memory(who: object, size: int) -> None:
    """Raises ValueError if `size` bytes, as computed from a file's header, are more than the memory that is available."""
    available = available_memory()
    if available is not None and size > available:
        raise ValueError(
            f"{who}: expected data that fits into the available memory, {byte_count(available)}, got {byte_count(size)}; "
            "use fewer or smaller examples"
        )


def files_below(folder: Path, endings: tuple[str, ...], what: str) -> list[Path]:
    """Returns the files below a folder, at any depth, whose names end so, sorted by path.

    Skips hidden names, links to folders, and the system folders /proc, /sys and /dev. Skips folders that hold a run, and says so.
    Warns of folders that cannot be read, and once if the search takes long. Raises ValueError if there are many more other
    entries than files: this is no folder of them.
    """
    return sorted(Path(entry.path) for entry in _entries_below(folder, endings, what))


def is_among(file: Path, folder: Path, endings: tuple[str, ...], what: str) -> bool:
    """Returns whether an existing file is one of `files_below`, by whatever name: links in the folder may lead out of it."""
    status = file.stat()
    with warnings.catch_warnings(action="ignore"):  # they were shown when the data were read
        # Only these are looked at one by one, which takes long for a million files.
        candidates = (
            entry for entry in _entries_below(folder, endings, what) if entry.is_symlink() or entry.inode() == status.st_ino
        )
        return any(_leads_to(entry, status) for entry in candidates)


def would_be_among(file: Path, folder: Path, endings: tuple[str, ...]) -> bool:
    """Returns whether `files_below` would find a file that is written to this path."""
    written, folder = file.resolve(), folder.resolve()
    if not written.name.lower().endswith(endings) or not written.is_relative_to(folder):
        return False
    inner = written.relative_to(folder)
    between = [folder / parent for parent in inner.parents if parent.name]
    return not any(part.startswith(".") for part in inner.parts) and not any(map(_holds_run, between))


def _leads_to(entry: os.DirEntry[str], status: os.stat_result) -> bool:
    try:
        return os.path.samestat(entry.stat(), status)
    except OSError:  # a link to nothing
        return False


def _entries_below(folder: Path, endings: tuple[str, ...], what: str) -> Iterator[os.DirEntry[str]]:
    """Yields the entries of `files_below` in any order."""
    unread: list[str] = []
    runs: list[str] = []
    found, others, noticed, start = 0, 0, False, time.monotonic()
    waiting = [str(folder)]
    while waiting:
        place = waiting.pop()
        try:
            if place != str(folder) and _holds_run(Path(place)):
                runs.append(place)
                continue
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if entry.path not in SYSTEM_FOLDERS:
                            waiting.append(entry.path)
                    elif entry.name.lower().endswith(endings) and not (
                        entry.is_symlink() and Path(entry.path).is_dir()  # entry.is_dir() fails for a link to itself
                    ):
                        found += 1
                        yield entry
                        continue
                    others += 1
                    if others > MAX_OTHERS + found:
                        raise ValueError(
                            f"{folder}: expected a folder of {what} ({', '.join(endings)}), got {others:,} others "
                            f"and {found:,} {what} so far; name the folder that holds the {what}"
                        )
        except OSError as error:
            unread.append(f"{place} ({reason(error)})")
        if not noticed and time.monotonic() - start > NOTICE_SECONDS:
            noticed = True
            warnings.warn(f"{folder}: looking for {what}; {found:,} so far, and {others:,} others", stacklevel=3)
    if unread:
        more = f", the first is {unread[0]}" if len(unread) > 1 else f": {unread[0]}"
        count = "1 folder" if len(unread) == 1 else f"{len(unread):,} folders"
        warnings.warn(f"{folder}: {count} could not be read, so {what} there are left out{more}", stacklevel=3)
    if runs:
        count = "1 folder that holds a run" if len(runs) == 1 else f"{len(runs):,} folders that hold runs"
        warnings.warn(f"{folder}: {what} in {count} are left out: {listed(sorted(runs))}", stacklevel=3)


def _holds_run(folder: Path) -> bool:
    return any(
        (folder / mark).is_file() and any((folder / other).exists() for other in others) for mark, others in RUN_MARKS.items()
    )


def reason(error: Exception) -> str:
    """Returns why a call of the operating system failed, without the path, which the message names already."""
    return getattr(error, "strerror", None) or str(error)

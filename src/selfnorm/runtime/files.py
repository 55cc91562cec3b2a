"""Atomic writes: a reader finds the old file or the complete new one, never a part."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

os.umask(_UMASK := os.umask(0o077))  # the umask can only be read by setting it


def temporary_pattern(path: Path) -> str:
    """Returns the glob pattern of the temporary names for a path, with its suffix, from which some writers choose a format."""
    return f".{path.stem}.*.part{path.suffix}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder to write to, then moves it to `path`; removes it if the block raises."""
    if not path.parent.is_dir():
        raise OSError(f"{path}: expected a folder to write it to, got none at {path.parent}")
    path = path.resolve()  # so that a symbolic link stays one
    if path.exists() and not path.is_file():  # otherwise a device such as /dev/stdout would be replaced by a file
        raise OSError(f"{path}: expected a regular file or no file yet, got something else")
    temporary = path.with_name(temporary_pattern(path).replace("*", secrets.token_hex(4)))
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())  # otherwise a power cut could leave the new name without its content
        temporary.chmod(0o666 & ~_UMASK)  # some writers create files that only their owner can read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """Context manager like `replacing` that yields the temporary file, opened for writing bytes."""
    with replacing(path) as temporary, temporary.open("xb") as file:
        yield file


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

"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

os.umask(_UMASK := os.umask(0o077))  # the only way to learn it is to set it


def temporary_pattern(path: Path) -> str:
    """A pattern of the temporary names for a path. The ending stays, since some writers choose a format by it."""
    return f".{path.stem}.*.part{path.suffix}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; at the end it takes path's place, or vanishes if the writing failed."""
    if not path.parent.is_dir():
        raise OSError(f"{path}: expected a folder to write it to, got none at {path.parent}")
    path = path.resolve()  # a link stays a link
    if path.exists() and not path.is_file():  # or a device such as /dev/stdout would become a file
        raise OSError(f"{path}: expected a plain file or nothing there yet, got something else")
    temporary = path.with_name(temporary_pattern(path).replace("*", secrets.token_hex(4)))
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())  # or a power cut could leave the new name on old blocks
        temporary.chmod(0o666 & ~_UMASK)  # some writers make files that are for their owner alone
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """The same, opened for writing bytes."""
    with replacing(path) as temporary, temporary.open("xb") as file:
        yield file


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON as the standard has it: NaN and infinities, for which it has no word, become null."""
    return json.dumps(_without_nan(value), allow_nan=False, indent=indent)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """The whole text, or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

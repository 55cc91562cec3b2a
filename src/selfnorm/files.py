"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; at the end it takes path's place, or vanishes if the writing failed."""
    # The suffix stays, since some writers choose a format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())  # or a power cut could leave the new name on old blocks
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The whole text, or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

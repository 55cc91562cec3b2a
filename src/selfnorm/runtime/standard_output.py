"""Standard output whose errors name it, also those of other libraries that print."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from selfnorm.runtime.files import naming_full_disk

CLOSED = "standard output: expected an open stream, got a closed one; redirect it to /dev/null to discard what is printed"


class NamedOutput(io.TextIOWrapper):
    """A text stream that adds "standard output" to the error of a full disk."""

    def write(self, text: str) -> int:
        with naming_full_disk("standard output"):
            return super().write(text)

    def flush(self) -> None:
        with naming_full_disk("standard output"):
            super().flush()


@contextmanager
def named_standard_output() -> Iterator[None]:
    """Context manager in which the errors of standard output name it; raises OSError if it is closed.

    What cannot be written by the end is discarded, so that Python does not fail once more at exit.
    """
    if sys.stderr is None:  # else the next file that is opened could get the errors
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stdout is None:
        raise OSError(CLOSED)
    before = sys.stdout
    if isinstance(before, io.TextIOWrapper):
        before.flush()
        sys.stdout = NamedOutput(before.buffer, before.encoding, before.errors, line_buffering=before.line_buffering)
    try:
        yield
    finally:
        discard_unwritten(sys.stdout, sys.stderr)


def discard_unwritten(*streams: TextIO) -> None:
    """Discards what is written from now on to streams that take no more, such as pipes whose reader has left."""
    for stream in streams:
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
                os.dup2(nowhere.fileno(), stream.fileno())

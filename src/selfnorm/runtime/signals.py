"""Ends the command on a signal: at once while it imports its modules, later by an exception, so that files are cleaned up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class TerminatedError(BaseException):
    """SIGTERM arrived. As with KeyboardInterrupt, this is no Exception, so that no `except Exception` handles it as an error."""


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler that ends the process with one line. An exception would not do: imports can turn it into another error."""
    os.write(2, b"selfnorm: stopped\n")
    os._exit(128 + number)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Context manager in which SIGINT raises KeyboardInterrupt, and SIGTERM TerminatedError; a second SIGTERM ends the process.

    Signals that are ignored, or that the program handles itself, stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():  # where Python cannot handle signals
        yield
        return
    new = {signal.SIGINT: (end_at_once, signal.default_int_handler), signal.SIGTERM: (signal.SIG_DFL, _raise_once)}
    changed = {number: before for number, (before, _) in new.items() if signal.getsignal(number) is before}
    try:
        for number in changed:
            signal.signal(number, new[number][1])
        yield
    finally:
        for number, before in changed.items():
            signal.signal(number, before)


def _raise_once(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise TerminatedError

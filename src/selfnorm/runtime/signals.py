"""How the command ends on a signal: at once and quietly while it starts, by an exception, which cleans up, while it works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class TerminatedError(BaseException):
    """SIGTERM arrived. Not an Exception, just as KeyboardInterrupt, so that nothing on the way takes it for a failure."""


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler that ends the process without a traceback. Imports can turn an exception into another error."""
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

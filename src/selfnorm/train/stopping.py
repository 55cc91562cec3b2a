"""Leaving a run early: on a signal, or when training diverges."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

import torch

# Errors whose message alone tells the user what to change. Any other exception is a bug, shown with its type and place.
USER_ERRORS = (ValueError, OSError, MemoryError, torch.OutOfMemoryError)


class StoppedError(BaseException):
    """A signal asked the run to stop, and the run saved itself. Like the signals' usual effects it is no `Exception`.

    `StoppedError(number)` is a `KeyboardInterrupt` as well for SIGINT, and a `SystemExit` of status 143 for SIGTERM.
    """

    def __new__(cls, number: int) -> StoppedError:
        kinds: dict[int, type[StoppedError]] = {signal.SIGINT: _StoppedBySigintError, signal.SIGTERM: _StoppedBySigtermError}
        return super().__new__(kinds.get(number, cls))

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    def __reduce__(self) -> tuple[type[StoppedError], tuple[int]]:
        return StoppedError, (self.number,)


class _StoppedBySigintError(StoppedError, KeyboardInterrupt):
    pass


class _StoppedBySigtermError(StoppedError, SystemExit):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


class DivergedError(Exception):
    """Training produced non-finite numbers, or its exact likelihood fell far behind its best."""


class StopRequests:
    """Context manager that records SIGINT and SIGTERM; `check` raises `StoppedError` for them where the run can be saved.

    A second signal of either kind has its usual effect at once. A signal that is ignored, as SIGINT in what a script starts with
    `&`, stays ignored. Outside the main thread, where Python cannot handle signals, the context manager does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._requested: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in self.SIGNALS}  # None if C code handles it
            self._previous = {number: known for number, known in handlers.items() if known not in (None, signal.SIG_IGN)}
            for number in self._previous:
                signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested = number
        self._restore()

    def check(self) -> None:
        """Raises `StoppedError` if a signal has arrived."""
        if self._requested is not None:
            raise StoppedError(self._requested)

    def deliver(self) -> None:
        """Lets a signal that has arrived have its usual effect."""
        if self._requested is not None:
            self._restore()
            signal.raise_signal(self._requested)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Context manager at whose end SIGINT and SIGTERM take effect that arrive within it; a second one does so at once."""
    stop = StopRequests()
    try:
        with stop:
            yield
    finally:
        stop.deliver()

"""Leaving early: a signal that asks to stop, and training that no longer makes sense."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# In the environment: the id of the process without which this one is to stop.
PARENT = "SELFNORM_PARENT"


class StoppedError(Exception):
    """A run was asked to stop by a signal, and saved itself."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class DivergedError(Exception):
    """Training left the finite numbers, or its exact likelihood fell far behind its best."""


class StopRequests:
    """While entered, SIGINT and SIGTERM only leave a note, which `check` turns into `StoppedError` where the run can be saved.

    A second signal of either kind takes its usual effect at once. Outside the main thread, where Python takes no signals, this
    does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._requested: int | None = None
        self._previous: dict[int, Any] = {}
        self._parent = os.environ.get(PARENT)

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}
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
        """Raise `StoppedError` if a signal came, or the process for which this one works is gone."""
        if self._parent is not None and self._requested is None and str(os.getppid()) != self._parent:
            self._note(signal.SIGTERM, None)
        if self._requested is not None:
            raise StoppedError(self._requested)

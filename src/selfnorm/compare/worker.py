"""Runs a function in its own process and returns how it ended, even if that process is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

from selfnorm.runtime.checks import one_line
from selfnorm.train.loop import Report
from selfnorm.train.stopping import USER_ERRORS, DivergedError, StoppedError, StopRequests

POSIX = os.name == "posix"


@dataclass(frozen=True)
class Outcome:
    """How a worker ended. reason: one line, empty if the work finished."""

    kind: Literal["finished", "diverged", "failed", "stopped"]
    reason: str = ""


class ForwardedStops(StopRequests):
    """Stop requests that are also sent to the current worker, which then saves its run.

    A second signal has its usual effect in this process. The worker sees only the first one.
    """

    worker: int | None = None  # process id

    def _note(self, number: int, frame: FrameType | None) -> None:
        super()._note(number, frame)
        self.forward()

    def forward(self) -> None:
        """Sends the signal that arrived, if any, to the worker."""
        # On Windows, Ctrl-C reaches every process of the console by itself.
        if self.worker is not None and self._requested is not None and POSIX:
            with suppress(ProcessLookupError):
                os.kill(self.worker, self._requested)


def run_in_worker(work: Callable[[Report], object], report: Report, stop: ForwardedStops) -> Outcome:
    """Calls `work(report)` in a fresh process and returns how it ended.

    work:    must be picklable. The worker does not import `__main__`, so functions defined there do not qualify.
    report:  is called in this process with each record, unchanged.
    stop:    forwards signals to the worker while it runs.

    The worker does not share memory, signals, standard output or standard error with this process. If this process is killed, the
    worker gets SIGTERM.
    """
    _occupy_standard_streams()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    outcome: Outcome | None = None
    with tempfile.TemporaryDirectory() as folder, receiver:
        output = Path(folder) / "output"
        process = context.Process(target=_serve, args=(work, sender, output), daemon=True)
        with sender, _without_main(), _signals_held():
            process.start()
        stop.worker = process.pid
        stop.forward()  # a signal that arrived before the worker existed
        try:
            for message in _messages(receiver):
                if isinstance(message, Outcome):
                    outcome = message
                else:
                    report(message)
        except BaseException:
            process.terminate()
            raise
        finally:
            stop.worker = None
            process.join()
        assert process.exitcode is not None
        return outcome or Outcome("failed", death_reason(process.exitcode, _printed(output)))


def death_reason(code: int, output: str) -> str:
    """Returns why a process ended without an outcome: the signal that killed it, or the last line that it printed."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return (output.strip().splitlines() or [f"exit status {code} without a message"])[-1]


def _messages(receiver: Connection[Any, Any]) -> Iterator[Any]:
    with suppress(EOFError, OSError):  # OSError: the worker was killed in the middle of a message
        while True:
            yield receiver.recv()


def _printed(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


@contextmanager
def _without_main() -> Iterator[None]:
    """Keeps the new process from importing `__main__`, which would run a script without a `__name__` guard a second time."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _signals_held() -> Iterator[None]:
    """Context manager in whose block a started process holds signals back until `_serve` is ready for them.

    Without this, a terminal's Ctrl-C during the worker's imports would end it with a traceback.
    """
    if not POSIX:
        yield
        return
    resource_tracker.ensure_running()  # its start would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, StopRequests.SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(work: Callable[[Report], object], sender: Connection[Any, Any], output: Path) -> None:
    """Runs in the worker: does the work and sends records, then the outcome."""

    def send(message: Any) -> None:
        with suppress(BrokenPipeError):  # the parent is gone; SIGTERM follows
            sender.send(message)

    try:
        _set_up_process(output)
        work(send)
        outcome = Outcome("finished")
    except StoppedError as error:
        outcome = Outcome("stopped", f"{error}, all saved; run the same comparison again to continue")
    except KeyboardInterrupt:
        outcome = Outcome("stopped", "stopped by a signal before training; run the same comparison again to continue")
    except DivergedError as error:
        outcome = Outcome("diverged", _one_line(error))
    except Exception as error:
        outcome = Outcome("failed", _one_line(error))
    send(outcome)


def _occupy_standard_streams() -> None:
    """Opens the null device for closed standard streams: the worker redirects its own, and a pipe must not have their numbers."""
    for stream in (0, 1, 2):
        try:
            os.fstat(stream)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest free number


def _set_up_process(output: Path) -> None:
    """Gives the worker its own process group, output file and signal handling."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for number in StopRequests.SIGNALS:
        signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt, until training installs its own handler
    if POSIX:
        # In the parent's group, a terminal's Ctrl-C would arrive twice, and the second one ends a run without saving it.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, StopRequests.SIGNALS)
    threading.Thread(target=_stop_with_parent, daemon=True).start()


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    signal.raise_signal(signal.SIGTERM)


def _one_line(error: Exception) -> str:
    line = one_line(error)
    if isinstance(error, (*USER_ERRORS, DivergedError)):
        return line
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{line} ({type(error).__name__} at {Path(place.filename).name}:{place.lineno})"

"""Runs the command in forks of a process that has imported everything, so that a call starts in milliseconds, and disturbs it.

A fault is a signal, a full disk, a limit on the size of files, a folder that cannot be written to or that vanishes, or a second
process that does the same. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import io
import os
import random
import resource
import runpy
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from selfnorm.runtime.signals import end_at_once
from selfnorm.train.folder import RunFolder

LONGEST = 90.0  # seconds that a call may take
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Kinds of faults. "event" means: at a moment when the call opens a file to write, renames, deletes, or makes a folder.
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
STOPPING = (signal.SIGTERM, signal.SIGINT)
WRITES = ("os.rename", "os.remove", "os.mkdir", "os.truncate", "os.chmod")


@dataclass(frozen=True)
class Fault:
    """A disturbance of a call.

    kind:   a signal's name, "full disk", "file limit", "read-only", "renamed", "deleted" or "second process"; empty for none.
    event:  the number of the event, from 1, at which it happens; 0 if it happens after `delay` seconds.
    size:   the size in bytes of the largest file that can be written, for "file limit".
    """

    kind: str = ""
    event: int = 0
    delay: float = 0.0
    size: int = 0

    def __str__(self) -> str:
        when = f"at event {self.event}" if self.event else f"after {self.delay:.3f} s"
        return f"{self.kind} {f'of {self.size} bytes' if self.size else when}" if self.kind else "nothing"


@dataclass(frozen=True)
class Ended:
    """How a call ended.

    code:    the exit status; negative for the signal that killed the call, None if it took longer than `LONGEST` and was killed.
    events:  the number of events in the call; 0 if it was killed.
    """

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    events: int


def prepare() -> None:
    """Imports what the command needs, and makes this process adopt the processes that a killed call leaves behind."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job that a shell has started in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in (
        "numpy",
        "torch",
        "selfnorm.cli",
        "selfnorm.report.figures",
        "matplotlib.backends.backend_agg",
        "matplotlib.pyplot",
        "PIL.PngImagePlugin",
        "safetensors.torch",
        "torch._dynamo",
        "numpy.random",
    ):
        import_module(name)
    torch, figures = import_module("torch"), import_module("selfnorm.report.figures")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # a first figure imports more, and reads fonts
        figures.sample_scatter(Path(folder, "x.png"), torch.randn(9, 2), {"samples": torch.randn(9, 2)}, None)
    gc.freeze()  # so that no fork copies all that by looking for garbage


def end_with_parent() -> None:
    """Makes this process end when its parent does, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Call:
    """A call in progress, in its own folder."""

    def __init__(self, args: Sequence[str], home: Path, fault: Fault = Fault()) -> None:  # noqa: B008  (frozen)
        self.fault = fault
        self.began = time.monotonic()
        self._buffers = dict.fromkeys(("stdout", "stderr", "events"), b"")
        pipes = {name: os.pipe() for name in self._buffers}
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until the call handles them itself
        self.pid = os.fork()
        if not self.pid:
            _serve(list(args), home, fault, {name: pipe[1] for name, pipe in pipes.items()})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for _, write in pipes.values():
            os.close(write)
        self._open = {pipe[0]: name for name, pipe in pipes.items()}

    def wait(self, until: float | None = None) -> Ended | None:
        """Reads the output until the call ends, and returns how it ended; None if it has not ended at the moment `until`."""
        while self._open:
            now = time.monotonic()
            if until is not None and now >= until:
                return None
            if now - self.began > LONGEST:
                self.send(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return Ended(None, self._text("stdout"), self._text("stderr"), now - self.began, 0)
            ready, _, _ = select.select(list(self._open), [], [], 1.0 if until is None else min(1.0, until - now))
            for file in ready:
                if chunk := os.read(file, 65536):
                    self._buffers[self._open[file]] += chunk
                else:
                    del self._open[file]
                    os.close(file)
        _, status = os.waitpid(self.pid, 0)
        events = int(self._text("events") or 0)
        seconds = time.monotonic() - self.began
        return Ended(os.waitstatus_to_exitcode(status), self._text("stdout"), self._text("stderr"), seconds, events)

    def end(self) -> Ended:
        ended = self.wait()
        assert ended is not None
        return ended

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _text(self, name: str) -> str:
        return self._buffers[name].decode(errors="replace")


def wait_for_orphans() -> None:
    """Waits for the workers of killed calls, which end by themselves; until then they hold the lock of their run."""
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.02)


def disturbed(args: Sequence[str], home: Path, fault: Fault, target: Path, other: Sequence[str] = ()) -> list[Ended]:
    """Runs a call with a fault, then undoes what the fault did to the folder; returns how the call, or both calls, ended.

    target:  the folder that the call writes to, which the fault renames, deletes or protects.
    other:   further arguments of the second process.
    """
    call = Call(args, home, fault)
    if fault.event or fault.kind in ("", "full disk", "file limit"):
        return [call.end()]
    ended = call.wait(call.began + fault.delay)
    if fault.kind == "second process":
        second = Call([*args, *other], home)
        return [ended or call.end(), second.end()]
    if ended is not None:
        return [ended]
    undo = strike(call, fault, target)
    found = call.end()
    undo()
    return [found]


def strike(call: Call, fault: Fault, target: Path) -> Callable[[], None]:
    """Sends a call its signal, or changes the folder that it writes to; returns a function that undoes the change."""
    if fault.kind in SIGNALS:
        call.send(SIGNALS[fault.kind])
    elif target.is_dir() and fault.kind == "read-only":
        mode = target.stat().st_mode
        target.chmod(0o555)
        return lambda: target.chmod(mode)
    elif target.is_dir() and fault.kind == "renamed":
        away = target.with_name(f"{target.name}-away")
        target.rename(away)

        def undo() -> None:
            shutil.rmtree(target, ignore_errors=True)
            away.rename(target)

        return undo
    elif target.is_dir() and fault.kind == "deleted":
        shutil.rmtree(target, ignore_errors=True)
        return lambda: _remove_rests(target)
    return lambda: None


def _remove_rests(target: Path) -> None:
    """Removes what is left of deleted runs, as the user is told to: deleting a folder fails if a run writes at that moment."""
    for place in {target, *(path.parent for path in target.rglob("*.*"))}:
        run = RunFolder(place)
        if not run.recipe.exists() and any(path.exists() for path in run.own_files() if path != run.lock):
            shutil.rmtree(place, ignore_errors=True)


def random_fault(kind: str, chance: random.Random, seconds: float, events: int, largest: int) -> Fault:
    """Returns a fault of a kind at a random moment.

    seconds, events, largest:  of an undisturbed call: its time, its number of events, and the size of its largest file.
    """
    if kind == "file limit":
        return Fault(kind, size=round(2 ** chance.uniform(0, largest.bit_length())))
    soon = chance.random() < 0.3  # the first moments, in which a folder and its first files are made, are few
    if kind == "full disk":  # the second half of the events are renames and the like, which need no room
        return Fault(kind, event=chance.randint(1, max(1, events // 2)))
    if kind in SIGNALS and chance.random() < 0.5:
        return Fault(kind, event=chance.randint(1, max(1, 6 if soon else events)))
    if kind == "second process" and chance.random() < 0.5:
        return Fault(kind, delay=0.0)  # as close as can be
    return Fault(kind, delay=chance.uniform(0, 0.02 if soon else 1.05 * seconds))


def _serve(args: list[str], home: Path, fault: Fault, streams: dict[str, int]) -> None:
    """Runs the call in the forked process, and ends that process."""
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(streams["stdout"], 1)
        os.dup2(streams["stderr"], 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8", write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), encoding="utf-8", write_through=True)
        os.chdir(home)
        if fault.kind == "read-only" and not os.getuid():
            _obey_modes()
        if fault.kind == "file limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.size, resource.RLIM_INFINITY))
        seen = _watch_writes(home, fault)
        run: Any = import_module("selfnorm.train.run")
        for function in (run.start_run, run.resume_run, run.start_runs, run.resume_runs):
            function.__kwdefaults__["save_every"] = 0.0  # so that most moments are between two checkpoints
        # As `main` sets it in its first line. What comes earlier, while Python itself starts, is not the command's.
        signal.signal(signal.SIGINT, end_at_once)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        sys.argv = ["selfnorm", *args]
        try:
            runpy.run_module("selfnorm", run_name="__main__", alter_sys=False)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException as error:
            traceback.print_exc()
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
        os.write(streams["events"], str(seen[0]).encode())
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError, ValueError):
            sys.stderr.flush()
    finally:
        os._exit(code)


def _obey_modes() -> None:
    """Gives up root's right to write to read-only files and folders."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice
    overriding = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capget(header, rights):
        raise OSError(ctypes.get_errno(), "capget")
    rights[0] &= ~overriding
    rights[1] &= ~overriding
    if libc.capset(header, rights):
        raise OSError(ctypes.get_errno(), "capset")


def _watch_writes(home: Path, fault: Fault) -> list[int]:
    """Counts the events in which the call writes below its folder, in the list that it returns, and makes the fault happen.

    A signal is sent at one event. A full disk stays full from that event on.
    """
    seen = [0]
    place = str(home)

    def happen(event: str, path: str) -> None:
        seen[0] += 1
        if fault.event and seen[0] >= fault.event:
            if fault.kind in SIGNALS:
                if seen[0] == fault.event:
                    os.kill(os.getpid(), SIGNALS[fault.kind])
            elif event in ("open", "os.mkdir"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, str) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in WRITES:
            path = os.fspath(arguments[0]) if isinstance(arguments[0], str | os.PathLike) else ""
        else:
            return
        if os.path.abspath(path).startswith(place):  # noqa: PTH100  (a Path would be slower)
            happen(event, path)

    sys.addaudithook(hook)
    return seen

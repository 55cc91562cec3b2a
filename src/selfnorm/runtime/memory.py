"""The most memory that a piece of work held."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # not on Windows, where the figure is then not known
    resource = None  # type: ignore[assignment]

_PROCESS = Path("/proc/self")


class PeakMemory:
    """From its making on: on CUDA the most that torch had allocated there; else how far the process's peak rose above what it
    held at first, which takes in what torch loads on first use.

    Linux can forget an earlier peak. Elsewhere one that was higher hides what came after it. And only the first in a process
    knows: later ones would find much of what they need already there.
    """

    _is_first = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._before: float | None = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu" and PeakMemory._is_first:
            PeakMemory._is_first = False
            with suppress(OSError):
                (_PROCESS / "clear_refs").write_text("5")
            self._before = _resident_peak()

    def mebibytes(self) -> float | None:
        """So far; None where it cannot be known."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        now = None if self._before is None else _resident_peak()
        if now is None or self._before is None or now <= self._before:
            return None
        return now - self._before


def _resident_peak() -> float | None:
    """The most MiB of memory that this process has held."""
    # Not ru_maxrss if there is a choice: on Linux a process starts with its parent's.
    with suppress(OSError, ValueError, IndexError):
        return int((_PROCESS / "status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20

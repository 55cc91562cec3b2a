"""Peak memory of a piece of work, and the memory that is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows has no such module; the peak is then unknown
    resource = None  # type: ignore[assignment]

_PROCESS = Path("/proc/self")
_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")


class PeakMemory:
    """Measures peak memory from its creation on.

    On CUDA, that is the most that torch had allocated there. On the CPU, it is how far the peak of the process rose above its
    size at creation, including what torch loads on first use. Linux can reset the peak of a process; elsewhere an earlier, higher
    peak hides later ones. On the CPU only the first instance in a process gives a figure: later ones would reuse memory that the
    process already holds.
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
        """Returns the peak so far in MiB, or None where it cannot be measured."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        now = None if self._before is None else _resident_peak()
        if now is None or self._before is None or now <= self._before:
            return None
        return now - self._before


def _resident_peak() -> float | None:
    """Returns the peak resident memory of this process in MiB."""
    # Preferred to ru_maxrss, which a Linux process inherits from its parent.
    with suppress(OSError, ValueError, IndexError):
        return int((_PROCESS / "status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, other systems KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def available_memory() -> int | None:
    """Returns how many bytes this process can still use without swapping, or None where that is unknown."""
    found = [*_free_in_groups()]
    with suppress(OSError, ValueError, IndexError):
        found.append(1024 * int(_MEMORY.read_text().split("MemAvailable:")[1].split()[0]))
    if not found:
        with suppress(AttributeError, OSError, ValueError):  # without /proc, as on macOS: all memory that there is
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def _free_in_groups() -> Iterator[int]:
    """Yields what is left of the limit of each control group, as containers set, that this process is in."""
    with suppress(OSError, IndexError):
        groups = (_PROCESS / "cgroup").read_text().split("0::", 1)[1].splitlines()[0]
        for name in (groups, *map(str, Path(groups).parents)):
            place = _GROUPS / name.lstrip("/")
            with suppress(OSError, ValueError, IndexError):  # ValueError: "max", no limit
                limit, used = (int((place / f"memory.{part}").read_text()) for part in ("max", "current"))
                # Pages of files that can be dropped are counted as used.
                cached = int((place / "memory.stat").read_text().split("\ninactive_file ")[1].split()[0])
                yield limit - used + cached

"""Records conditions that affect a measurement: the clock of a GPU, and the load that other processes put on the CPU."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

MIN_SECONDS = 0.5  # the shortest useful measurement: Linux counts in hundredths of a second, per core
BUSY_CORES = 0.2  # of other processes, above which a table warns: threads that wait for each other are slowed down


@dataclass(frozen=True)
class Conditions:
    """The conditions at one moment.

    at:      the time in seconds, by a monotonic clock.
    clock:   of a GPU, in MHz.
    others:  CPU seconds used by other processes since the machine started.
    """

    at: float
    clock: int | None
    others: float | None

    @classmethod
    def now(cls, device: torch.device) -> Conditions:
        return cls(time.monotonic(), clock_mhz(device), None if device.type == "cuda" else _taken_by_others())

    def until(self, after: Conditions, device: torch.device) -> dict[str, str | None]:
        """Returns the conditions from this moment until `after`, for the provenance of a table; None for what is unknown."""
        if device.type == "cuda":
            clocks = self.clock, after.clock
            return {"SM clock": None if clocks == (None, None) else f"{clocks[0]} MHz before, {clocks[1]} MHz after"}
        cores = self.cores_taken(after)
        if cores is None:
            return {"taken by others": None}
        warning = "; on an idle machine it may be much faster" if cores > BUSY_CORES else ""
        return {"taken by others": f"{cores:.1f} of {os.cpu_count()} cores{warning}"}

    def cores_taken(self, after: Conditions) -> float | None:
        """Returns how many cores other processes kept busy on average; None if unknown or measured too briefly."""
        if self.others is None or after.others is None or after.at - self.at < MIN_SECONDS:
            return None
        return max(0.0, (after.others - self.others) / (after.at - self.at))


def clock_mhz(device: torch.device) -> int | None:
    """Returns the clock of a GPU's multiprocessors in MHz, after some work, since an idle GPU lowers it; None if unknown."""
    if device.type != "cuda":
        return None
    a = torch.ones(4096, 4096, device=device, dtype=torch.float32)
    for _ in range(20):
        a @ a
    torch.cuda.synchronize(device)
    try:
        return int(torch.cuda.clock_rate(device))
    except (ImportError, RuntimeError, OSError, AttributeError, ValueError):
        pass
    try:
        which = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        query = ["nvidia-smi", "-i", which, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
        return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0])
    except (AttributeError, OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _taken_by_others() -> float | None:
    """Returns CPU seconds used by other processes, as Linux counts them; time taken by a hypervisor is included."""
    try:
        user, nice, system, _idle, _waiting, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])

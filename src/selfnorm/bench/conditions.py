"""What a measurement depends on beside the code: a GPU's clock, and what others take of the CPU meanwhile."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

SHORT = 0.5  # seconds: Linux counts in hundredths, for each core
MUCH = 0.2  # of a core, taken by others: threads that wait for each other then wait for them, too


@dataclass(frozen=True)
class Conditions:
    """At one moment.

    clock:   of a GPU, in MHz.
    others:  seconds of all cores that went to other processes since some time long ago.
    """

    at: float
    clock: int | None
    others: float | None

    @classmethod
    def now(cls, device: torch.device) -> Conditions:
        return cls(time.monotonic(), clock_mhz(device), None if device.type == "cuda" else _taken_by_others())

    def until(self, after: Conditions, device: torch.device) -> dict[str, str | None]:
        """For a table's provenance; None for what nobody tells."""
        if device.type == "cuda":
            clocks = self.clock, after.clock
            return {"SM clock": None if clocks == (None, None) else f"{clocks[0]} MHz before, {clocks[1]} MHz after"}
        cores = self.cores_taken(after)
        if cores is None:
            return {"taken by others": None}
        warning = "; with the machine to itself it may be much faster" if cores > MUCH else ""
        return {"taken by others": f"{cores:.1f} of {os.cpu_count()} cores{warning}"}

    def cores_taken(self, after: Conditions) -> float | None:
        """How many cores others kept busy on average; None if it was too short to tell."""
        if self.others is None or after.others is None or after.at - self.at < SHORT:
            return None
        return max(0.0, (after.others - self.others) / (after.at - self.at))


def clock_mhz(device: torch.device) -> int | None:
    """The clock of a GPU's multiprocessors after a moment's work, since it falls when idle; None where nobody tells."""
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
    """As Linux counts it: what was not idle, less what this process and its children had; what a hypervisor kept is in it."""
    try:
        user, nice, system, _idle, _waiting, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])

"""Records where a measurement comes from: command, commit, machine, date."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import torch

import selfnorm


def provenance(device: torch.device | str = "cpu", command: str | None = None) -> dict[str, str | None]:
    """Returns what to store with a measurement. The commit is None outside a git repository, and ends in -dirty if the
    library's own files differ from it."""
    device = torch.device(device)
    here = Path(selfnorm.__file__).parent
    try:
        commit = _git("rev-parse", "--short", "HEAD", cwd=here) + (
            "-dirty" if _git("status", "--porcelain", ".", cwd=here) else ""
        )
    except (OSError, subprocess.CalledProcessError):
        commit = None
    program = Path(sys.argv[0]).name.replace("__main__.py", "selfnorm")
    return {
        "command": command or shlex.join([program, *(word for word in sys.argv[1:] if word != "--force")]),
        "commit": commit,
        "version": selfnorm.__version__,
        "machine": machine_of(device),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
    }


def machine_of(device: torch.device, threads: Iterable[int] = ()) -> str:
    """Returns the name of a GPU, or the type of the CPU and its number of threads, by default those that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    used = sorted({*threads} or {torch.get_num_threads()})
    return f"{platform.machine()} {device.type.upper()}, {' and '.join(map(str, used))} thread{'s' * (used != [1])}"


def _git(*arguments: str, cwd: Path) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()

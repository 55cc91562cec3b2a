"""Kills training runs at random moments, resumes them, and compares the results, bit for bit, with uninterrupted runs.

    python benchmarks/kills.py [--seed 0] [--json results/kills-cpu.json]

SIGKILL gives a process no chance to clean up. Before every other kill, a checkpoint is written after each step, and the kill
waits until one is being written, so that some are left half written; before the others, one is written ten times a second. After
the last kill, `selfnorm train --resume` finishes the run. Exits with 1 if anything but the time differs. About four minutes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import Cell, parser, record
from selfnorm.report.provenance import provenance
from selfnorm.train.checkpoint import Checkpoint, read_checkpoint
from selfnorm.train.experiments import find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.run import resume_run, start_run
from selfnorm.train.settings import override

HALF_WRITTEN = ".*.part*"  # the temporary names of `selfnorm.runtime.files`
SAVE_EVERY = (0.1, 0.0)  # seconds, by turns; 0 saves after each step
MAX_DELAY = 1.5  # seconds of training before a kill


@dataclass(frozen=True)
class Case:
    """A run to kill, with settings that make it last longer than its kills."""

    recipe: str
    settings: tuple[str, ...]
    kills: int

    @property
    def name(self) -> str:
        return " ".join([self.recipe, *self.settings])


CASES = [
    Case("digits-fc-snf", ("epochs=600",), 8),
    Case("digits-fc-snf", ("epochs=400", "penalty=geco", "weight=320", "probes=16"), 4),
    Case("digits-conv-snf", ("epochs=60",), 4),
    Case("moons-fc-snf", ("epochs=10",), 4),
]


def drive(case: Case, path: Path, save_every: float) -> None:
    """Starts or resumes a run in this process, since the command cannot save this often. Prints each reported step."""

    def report(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            print(event["step"], event["total"], flush=True)

    if RunFolder(path).recipe.exists():
        resume_run(path, report=report, save_every=save_every)
    else:
        start_run(override(find_recipe(case.recipe), case.settings), path, report=report, save_every=save_every)


def kill_once(index: int, path: Path, delay: float, save_every: float) -> float:
    """Kills a run after `delay` seconds of training, mid-save if it saves after each step; returns the epoch to resume from."""
    command = [sys.executable, __file__, "--drive", str(index), str(path), str(save_every)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline().split()
        if not first:
            raise RuntimeError(f"kills: expected {CASES[index].name} to train, got exit code {process.wait()}")
        time.sleep(delay)
        give_up = time.monotonic() + 1
        while not save_every and not any(path.glob(HALF_WRITTEN)) and time.monotonic() < give_up:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.stdout.read()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"kills: expected {CASES[index].name} to run until it was killed, got exit code {process.returncode}")
    checkpoint = read_checkpoint(RunFolder(path).last)
    return checkpoint.recipe.optimiser.epochs * float(checkpoint.progress["step"]) / int(first[1])


def selfnorm(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "selfnorm", *arguments, "--device", "cpu", "--quiet"], check=True, stdout=subprocess.DEVNULL
    )


def differences(killed: RunFolder, whole: RunFolder) -> tuple[int, list[str]]:
    """Returns the number of tensors compared, and what differs between two runs, except for times."""
    compared, found = 0, []
    for one, other in ((killed.best, whole.best), (killed.last, whole.last)):
        a, b = read_checkpoint(one), read_checkpoint(other)
        names = sorted(a.tensors.keys() | b.tensors.keys())
        compared += len(names)
        found += [f"{one.name}: {name}" for name in names if _bytes(a, name) != _bytes(b, name)]
        # The length of the log in bytes depends on how many digits the times have.
        timeless = [{k: v for k, v in c.progress.items() if k not in ("seconds", "log_length")} for c in (a, b)]
        found += [f"{one.name}: progress"] if timeless[0] != timeless[1] else []
    times = ("seconds", "step_seconds")
    logs = [[{k: v for k, v in line.items() if k not in times} for line in folder.read_log()] for folder in (killed, whole)]
    return compared, found + (["metrics.jsonl"] if logs[0] != logs[1] else [])


def _bytes(checkpoint: Checkpoint, name: str) -> tuple[Any, ...] | None:
    value = checkpoint.tensors.get(name)
    return None if value is None else (value.dtype, value.shape, value.contiguous().numpy().tobytes())


def measure(index: int, parent: Path, moments: random.Random) -> tuple[list[Cell], list[str]]:
    """Returns the row of one case, and what differed."""
    case = CASES[index]
    killed, whole = RunFolder(parent / f"killed-{index}"), RunFolder(parent / f"whole-{index}")
    epochs, partial = [], set()
    for kill in range(case.kills):
        epochs.append(kill_once(index, killed.path, moments.uniform(0, MAX_DELAY), SAVE_EVERY[kill % len(SAVE_EVERY)]))
        partial |= set(killed.path.glob(HALF_WRITTEN))  # deleted by the next start
        print(f"{case.name}: killed; resumes at epoch {epochs[-1]:.2f}", flush=True)
    selfnorm("train", "--resume", str(killed.path))
    settings = [word for setting in case.settings for word in ("--set", setting)]
    selfnorm("train", case.recipe, *settings, "--run", str(whole.path))
    compared, found = differences(killed, whole)
    print(f"{case.name}: {len(found)} differences {found or ''}", flush=True)
    landed = ", ".join(f"{epoch:.1f}" for epoch in epochs)
    return [case.name, case.kills, landed, len(partial), compared, len(whole.read_log()), len(found)], found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seed", type=int, default=0, help="of the random moments")
    options.add_argument(
        "--drive", nargs=3, metavar=("CASE", "RUN", "SECONDS"), help="for internal use: the script calls itself with it"
    )
    chosen = options.parse_args()
    if chosen.drive:
        index, path, save_every = chosen.drive
        drive(CASES[int(index)], Path(path), float(save_every))
        return

    moments = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        measured = [measure(index, Path(folder), moments) for index in range(len(CASES))]
    total = sum(case.kills for case in CASES)
    record(
        chosen.json,
        title=f"{total} kills in mid-training",
        about=(
            "Runs killed by SIGKILL at random moments and resumed each time, against the same runs never killed: tensors of "
            "best.safetensors and last.safetensors (weights, multipliers, Adam's moments, sums) bit for bit, and the lines of "
            f"metrics.jsonl without their times. Checkpoints were written alternately every {SAVE_EVERY[0]} s or after each "
            "step, with the kill aimed at one; half written is the number of unfinished files that the kills left."
        ),
        columns=["run", "kills", "resumed at epoch", "half written", "tensors", "lines", "differences"],
        rows=[row for row, _ in measured],
        provenance=provenance(command=f"python benchmarks/kills.py --seed {chosen.seed}"),
    )
    found = [f"{row[0]}: {what}" for row, differing in measured for what in differing]
    if found:
        sys.exit("kills: expected no differences, got\n" + "\n".join(found))


if __name__ == "__main__":
    main()

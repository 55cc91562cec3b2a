"""Measures the peak resident memory of training on the CPU, on data of MNIST's shape.

    python benchmarks/training_memory.py [--json results/memory-cpu.json]

Each recipe trains for an epoch on 60,000 random images in a separate process, with one exact validation on 10,000 more, and
writes checkpoints. Exits with 1 if one needs 2 GiB or more. About two minutes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from record import Cell, parser, record
from selfnorm.data.dataset import Dataset
from selfnorm.report.provenance import provenance
from selfnorm.train.experiments import find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Trainer

RECIPES = ("mnist-fc-snf", "mnist-conv-snf")
MAX_MIB = 2048
STAGES = ("imports", "data", "start", "training", "validation", "checkpoints")


def peak() -> float:
    """Returns the peak memory of this process so far, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def train(name: str) -> dict[str, float]:
    """Returns the peak up to the end of each stage, in MiB."""
    peaks = {"imports": peak()}
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (70_000, 1, 28, 28), dtype=torch.uint8, generator=generator)
    dataset = Dataset("made up", images[:60_000], images[60_000:], images[:1], levels=256)
    peaks["data"] = peak()

    def report(event: dict[str, Any]) -> None:
        if event["kind"] in ("epoch", "validation"):
            peaks["training" if event["kind"] == "epoch" else "validation"] = peak()

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(find_recipe(name).changed(epochs=1), dataset, folder=RunFolder(Path(folder)), report=report)
        trainer.start()
        peaks["start"] = peak()
        trainer.run()
    peaks["checkpoints"] = peak()
    return peaks


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--one", choices=RECIPES, help="for internal use: the script calls itself with it")
    chosen = options.parse_args()
    if chosen.one:
        print(json.dumps(train(chosen.one)))
        return

    rows: list[list[Cell]] = []
    for name in RECIPES:
        print(f"{name} …", flush=True)
        # The peak of a child starts from the memory of its parent, so the parent must hold no more than its imports.
        done = subprocess.run([sys.executable, __file__, "--one", name], check=True, stdout=subprocess.PIPE, text=True)
        peaks = json.loads(done.stdout)
        rows.append([name, *(round(peaks[stage]) for stage in STAGES)])
    record(
        chosen.json,
        title="Peak memory of training on the CPU",
        about=(
            "Peak resident memory in MiB up to the end of each stage: 60,000 + 10,000 random images of MNIST's shape, an epoch "
            f"at batch 100, one exact validation, both checkpoints. The target is below {MAX_MIB}."
        ),
        columns=["recipe", *STAGES],
        rows=rows,
        provenance=provenance(command="python benchmarks/training_memory.py"),
    )
    most = max(float(row[-1] or 0) for row in rows)
    if most >= MAX_MIB:
        sys.exit(f"training_memory: expected less than {MAX_MIB} MiB, got {most:.0f}")


if __name__ == "__main__":
    main()

"""Trains variants of the convolutional flow on MNIST over its full budget: the objective, λ, and the size of the inverse kernel.

    python benchmarks/conv_gap.py [--epochs 1000] [--only NAME …] [--run runs/conv-gap] [--json results/conv_gap-h200.json]

First times the steps of all variants in turn, on an otherwise idle machine, then trains them together from the same seed. They
are compared by the exact validation NLL; the test set plays no part. The same command continues where it was stopped.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from record import Cell, at_least, parser, record, run
from selfnorm.bench.timing import Effort, Timing, measure
from selfnorm.bench.training import training_step
from selfnorm.bench.workloads import SHAPES, Model
from selfnorm.cli.options import resolve_device
from selfnorm.report.provenance import provenance
from selfnorm.runtime.precision import precision
from selfnorm.train.experiments import find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.recipe import Recipe
from selfnorm.train.run import Result, resume_runs, start_runs

BASE = find_recipe("mnist-conv-snf")
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper-objective": {"inverse_likelihood": True},
    "small-weight": {"reconstruction_weight": 0.3},
    "inverse-5x5": {"inverse_kernel_size": 5},
    "inverse-7x7": {"inverse_kernel_size": 7},
}
COLUMNS = ["objective", "λ", "kernel of r", "validation NLL", "best epoch", "‖RW − I‖/√D", "ms per step"]


def step_times(recipes: list[Recipe], device: torch.device) -> list[float | None]:
    """Returns the milliseconds of a training step of each recipe; they take turns."""
    steps = [training_step(Model(recipe.name, recipe, *SHAPES[recipe.data.source]), device) for recipe in recipes]
    found = measure({recipe.name: step.work for recipe, step in zip(recipes, steps, strict=True)}, device, Effort.of(1.0))
    return [1e3 * each.median if isinstance(each, Timing) else None for each in found.values()]


def row_of(recipe: Recipe, folder: RunFolder, step_ms: float | None) -> list[Cell]:
    """Returns the row of a trained variant, with empty cells if it diverged before its first validation."""
    validations = [each for each in folder.read_log() if each["kind"] == "validation"]
    found: list[Cell] = [None, None, None]
    if validations:
        best = min(validations, key=lambda each: each["nll"])
        errors = [math.inf if error is None else error for error in validations[-1]["inverse_error"]]
        found = [round(best["nll"], 2), best["epoch"], float(f"{max(errors):.2g}")]
    side = recipe.architecture.inverse_kernel_size or recipe.architecture.kernel_size
    return [
        "the paper's" if recipe.objective.inverse_likelihood else "one-sided",
        recipe.objective.reconstruction_weight,
        f"{side}×{side}",
        *found,
        None if step_ms is None else float(f"{step_ms:.3g}"),
    ]


def _expect_same_runs(stored: list[RunFolder], folders: list[RunFolder], recipes: list[Recipe]) -> None:
    """Raises ValueError unless all runs can be resumed, and have the settings that were asked for."""
    if len(stored) < len(folders):
        raise ValueError(f"--run: expected all of the runs or none, got {len(stored)} of {len(folders)}; choose another folder")
    for folder, recipe in zip(folders, recipes, strict=True):
        if changed := folder.read_recipe().changed(folder=recipe.data.folder).differences(recipe):
            raise ValueError(f"{folder.path}: expected a run with these settings, got a different {', '.join(changed)}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--epochs", type=at_least(1), default=BASE.optimiser.epochs)
    options.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options.add_argument("--run", type=Path, default=Path("runs/conv-gap"), help="folder of all runs, new or to continue")
    options.add_argument("--data", help="folder of the data set")
    options.add_argument("--device", default="auto")
    chosen = options.parse_args()
    device = resolve_device(chosen.device)
    folders = [RunFolder(chosen.run / name) for name in chosen.only]
    recipes = [
        BASE.changed(name=f"{BASE.name}-{name}", epochs=chosen.epochs, folder=chosen.data, **VARIANTS[name])
        for name in chosen.only
    ]
    stored = [folder for folder in folders if folder.recipe.exists()]
    if stored:
        _expect_same_runs(stored, folders, recipes)
    with precision(BASE.optimiser.precision):
        times = step_times(recipes, device)
    print("training, after steps of", ", ".join("?" if each is None else f"{each:.3g} ms" for each in times), flush=True)
    paths = [folder.path for folder in folders]
    reports = [lambda record: None for _ in paths]
    if stored:
        outcomes = resume_runs(paths, data_dir=chosen.data, device=device, reports=reports)
    else:
        outcomes = start_runs(recipes, paths, device=device, reports=reports)
    diverged = [f"{name}: {each}" for name, each in zip(chosen.only, outcomes, strict=True) if not isinstance(each, Result)]
    rows = [row_of(*each) for each in zip(recipes, folders, times, strict=True)]
    record(
        chosen.json,
        title=f"Convolutions on MNIST: objective, λ and size of the inverse kernel, {chosen.epochs:,} epochs",
        about=" ".join(
            [
                f"Variants of {BASE.name}, one seed each: best exact validation NLL in nats and its epoch, the largest error of "
                "a learned inverse at the end, and the time of a training step alone on the machine.",
                *diverged,
            ]
        ),
        columns=COLUMNS,
        rows=rows,
        provenance=provenance(device, command=f"python benchmarks/conv_gap.py --epochs {chosen.epochs}")
        | {"epochs": str(chosen.epochs)},
    )


if __name__ == "__main__":
    run(main)

"""Trains a recipe and variants of it together, and compares their exact validation likelihoods and the times of their steps.

    python benchmarks/variants.py mnist-conv-snf --variant reconstruction_weight=0.3 --variant inverse_kernel_size=5
    python benchmarks/variants.py mnist-glow-snf --set epochs=40 --variant reconstruction_weight=1 --json results/glow-h200.json

A variant is one or several settings, separated by commas. First times the steps of all variants in turn, on an otherwise idle
machine, then trains them together from the same seed. The test set plays no part. The same command continues where it was
stopped.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from record import Cell, command, parser, record, run
from selfnorm.bench.timing import Effort, Timing, measure
from selfnorm.bench.training import training_step
from selfnorm.bench.workloads import SHAPES, Model
from selfnorm.cli.options import resolve_device
from selfnorm.report.provenance import provenance
from selfnorm.runtime.precision import precision
from selfnorm.train.experiments import find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.recipe import Recipe
from selfnorm.train.result import Result
from selfnorm.train.run import resume_runs, start_runs
from selfnorm.train.settings import override

COLUMNS = ["variant", "validation NLL", "best epoch", "‖RW − I‖/√D", "ms per step"]
ITSELF = "the recipe"


def step_times(recipes: list[Recipe], device: torch.device) -> list[float | None]:
    """Returns the milliseconds of a training step of each recipe; they take turns."""
    steps = [training_step(Model(recipe.name, recipe, *SHAPES[recipe.data.source]), device) for recipe in recipes]
    found = measure({str(index): step.work for index, step in enumerate(steps)}, device, Effort.of(1.0))
    return [1e3 * each.median if isinstance(each, Timing) else None for each in found.values()]


def row_of(variant: str, folder: RunFolder, step_ms: float | None) -> list[Cell]:
    """Returns the row of a trained variant, with empty cells if it diverged before its first validation."""
    validations = [each for each in folder.read_log() if each["kind"] == "validation"]
    found: list[Cell] = [None, None, None]
    if validations:
        best = min(validations, key=lambda each: each["nll"])
        errors = [math.inf if error is None else error for error in validations[-1].get("inverse_error", [])]
        found = [round(best["nll"], 2), best["epoch"], float(f"{max(errors):.2g}") if errors else None]
    return [variant, *found, None if step_ms is None else float(f"{step_ms:.3g}")]


def expect_same_runs(stored: list[RunFolder], folders: list[RunFolder], recipes: list[Recipe]) -> None:
    """Raises ValueError unless all runs can be resumed, and have the settings that were asked for."""
    if len(stored) < len(folders):
        raise ValueError(f"--run: expected all of the runs or none, got {len(stored)} of {len(folders)}; choose another folder")
    for folder, recipe in zip(folders, recipes, strict=True):
        if changed := folder.read_recipe().changed(folder=recipe.data.folder).differences(recipe):
            raise ValueError(f"{folder.path}: expected a run with these settings, got a different {', '.join(changed)}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("recipe")
    options.add_argument(
        "--variant", action="append", required=True, metavar="SETTINGS", help="key=value[,key=value…], repeatable"
    )
    options.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="for all of them")
    options.add_argument("--run", type=Path, help="folder of all runs, new or to continue; default runs/variants-RECIPE")
    options.add_argument("--data", help="folder of the data set")
    options.add_argument("--device", default="auto")
    chosen = options.parse_args()
    device = resolve_device(chosen.device)
    base = override(find_recipe(chosen.recipe), chosen.settings).changed(folder=chosen.data)
    variants = {ITSELF: base} | {variant: override(base, variant.split(",")) for variant in chosen.variant}
    recipes = list(variants.values())
    parent = chosen.run or Path("runs") / f"variants-{base.name}"
    folders = [RunFolder(parent / variant.replace("/", "-")) for variant in variants]
    stored = [folder for folder in folders if folder.recipe.exists()]
    if stored:
        expect_same_runs(stored, folders, recipes)
    with precision(base.optimiser.precision):
        times = step_times(recipes, device)
    print("training, after steps of", ", ".join("?" if each is None else f"{each:.3g} ms" for each in times), flush=True)
    paths = [folder.path for folder in folders]
    reports = [lambda record: None for _ in paths]
    if stored:
        outcomes = resume_runs(paths, data_dir=chosen.data, device=device, reports=reports)
    else:
        outcomes = start_runs(recipes, paths, device=device, reports=reports)
    diverged = [f"{name}: {each}." for name, each in zip(variants, outcomes, strict=True) if not isinstance(each, Result)]
    record(
        chosen.json,
        title=f"Variants of {base.name}, {base.optimiser.epochs:,} epochs",
        about=" ".join(
            [
                "One seed each: best exact validation NLL in nats and its epoch, the largest error of a learned inverse at the "
                "end, and the time of a training step alone on the machine.",
                *diverged,
            ]
        ),
        columns=COLUMNS,
        rows=[row_of(*each) for each in zip(variants, folders, times, strict=True)],
        provenance=provenance(device, command=command()) | {"epochs": str(base.optimiser.epochs)},
    )


if __name__ == "__main__":
    run(main)

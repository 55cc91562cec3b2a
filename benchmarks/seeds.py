"""Times training several seeds of a recipe at once in one process, against one alone.

    python benchmarks/seeds.py [RECIPE ...] [--epochs 40] [--json results/seeds-h200.json]

Times whole epochs without validation, except the first quarter, in which kernels are compiled and graphs captured.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import torch

from record import Cell, at_least, command, parser, record, run
from selfnorm.cli.options import resolve_device
from selfnorm.data.dataset import Dataset
from selfnorm.report.provenance import provenance
from selfnorm.train.experiments import find_recipe
from selfnorm.train.loop import Trainer
from selfnorm.train.recipe import Recipe
from selfnorm.train.source import dataset_of, with_absolute_data_path
from selfnorm.train.together import run_together

SEEDS = (1, 3, 6)


def milliseconds(recipe: Recipe, dataset: Dataset, seeds: int, device: torch.device) -> float:
    """Returns the milliseconds of one step of all seeds together."""
    ended: list[float] = []  # the time at which each epoch of the first seed ended

    def report(event: dict[str, Any]) -> None:
        if event["kind"] == "epoch":
            ended.append(time.perf_counter())

    first = Trainer(recipe, dataset, device=device, report=report)
    trainers = [first, *(Trainer(recipe.changed(seed=seed), dataset, device=device) for seed in range(1, seeds))]
    for trainer in trainers:
        trainer.start()
    run_together(trainers)
    epochs = [after - before for before, after in pairwise(ended)][recipe.optimiser.epochs // 4 :]
    return 1e3 * statistics.median(epochs) / first.batches.steps_per_epoch


def main() -> None:
    options = parser(__doc__)
    options.add_argument("recipes", nargs="*", default=["mnist-fc-snf", "mnist-conv-snf"])
    options.add_argument("--epochs", type=at_least(1), default=40)
    chosen = options.parse_args()
    if chosen.epochs < 3:
        raise ValueError(f"--epochs: expected at least 3, since the first are left out, got {chosen.epochs}")
    device = resolve_device("auto")
    rows: list[list[Cell]] = []
    for name in chosen.recipes:
        recipe = with_absolute_data_path(find_recipe(name).changed(epochs=chosen.epochs, validate_every=chosen.epochs))
        dataset = dataset_of(recipe)
        times = {seeds: milliseconds(recipe, dataset, seeds, device) for seeds in SEEDS}
        for seeds, taken in times.items():
            rows.append([name, seeds, round(taken, 4), round(taken / seeds, 4), round(seeds * times[1] / taken, 2)])
            print(rows[-1], flush=True)
    record(
        chosen.json,
        title="Several seeds at once",
        about="Milliseconds per training step, for all seeds and for each, and the speed-up over one seed after another.",
        columns=["recipe", "seeds", "ms for all", "ms for each", "gain"],
        rows=rows,
        provenance=provenance(device, command=command()) | {"epochs": str(chosen.epochs)},
    )


if __name__ == "__main__":
    run(main)

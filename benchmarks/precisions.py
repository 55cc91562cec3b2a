"""Evaluates the exact test likelihood of one checkpoint in float32, in TF32, and with coupling networks in bfloat16.

    python benchmarks/precisions.py [RECIPE] [--epochs 10] [--json results/precisions-h200.json]

Trains the recipe (mnist-glow-snf) for a few epochs, then evaluates its best weights three times with the same noise. Exits with 1
if TF32 changes the likelihood by more than 0.1 nats or bfloat16 by more than 1. Without a GPU, TF32 is float32.
"""

from __future__ import annotations

import sys
from typing import Any

from record import Cell, at_least, command, parser, record, run
from selfnorm.cli.options import resolve_device
from selfnorm.data.batches import Examples
from selfnorm.evaluate.likelihood import likelihood
from selfnorm.report.provenance import provenance
from selfnorm.runtime.precision import PRECISIONS, Precision
from selfnorm.train.experiments import find_recipe
from selfnorm.train.loop import Trainer
from selfnorm.train.source import dataset_of, with_absolute_data_path

MAX_CHANGE: dict[Precision, float] = {"float32": 0.0, "tf32": 0.1, "bf16": 1.0}  # nats


def report(event: dict[str, Any]) -> None:
    if event["kind"] == "validation":
        print(f"epoch {event['epoch']}: {event['nll']:.2f} nats", flush=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("recipe", nargs="?", default="mnist-glow-snf")
    options.add_argument("--epochs", type=at_least(1), default=10)
    chosen = options.parse_args()
    recipe = with_absolute_data_path(find_recipe(chosen.recipe).changed(epochs=chosen.epochs, warmup_epochs=1.0))
    dataset = dataset_of(recipe)
    trainer = Trainer(recipe, dataset, device=resolve_device("auto"), report=report)
    trainer.start()
    flow = trainer.run().flow().to(trainer.device)
    test = Examples(dataset.test, dataset.levels, trainer.device)
    found = {
        value: likelihood(
            flow, test, batch_size=recipe.evaluation.batch_size, samples=1, seed=recipe.optimiser.seed, precision=value
        )
        for value in PRECISIONS
    }
    moved = {value: found[value].nll - found["float32"].nll for value in PRECISIONS}
    rows: list[list[Cell]] = [
        [value, round(found[value].nll, 4), round(found[value].standard_error, 2), round(moved[value], 4)] for value in PRECISIONS
    ]
    record(
        chosen.json,
        title="One checkpoint in three precisions",
        about=(
            f"Exact test NLL in nats of {recipe.name} after {chosen.epochs} epochs, over {len(dataset.test)} images with one "
            f"dequantisation sample each, the same for all. TF32 may change it by {MAX_CHANGE['tf32']:g}, "
            f"bf16 by {MAX_CHANGE['bf16']:g}."
        ),
        columns=["precision", "test NLL", "±", "moved by"],
        rows=rows,
        provenance=provenance(trainer.device, command=command()) | {"epochs": str(trainer.epoch)},
    )
    for value, most in MAX_CHANGE.items():
        if not abs(moved[value]) <= most:
            sys.exit(f"precisions: expected {value} to change the likelihood by at most {most:g} nats, got {moved[value]:.3f}")


if __name__ == "__main__":
    run(main)

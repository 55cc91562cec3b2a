"""Trains the digits flow and its exact-gradient twin with the recipes' full budget, and compares their exact test likelihoods.

    python benchmarks/digits_twins.py [--json results/digits_twins-cpu.json]

With the same seed, both start from the same weights and see the same batches. Exits with 1 if the means differ by more than 0.3
nats. About 20 seconds per run, 6 runs.
"""

from __future__ import annotations

import statistics
import sys

from record import Cell, parser, record
from selfnorm.data import load_dataset
from selfnorm.data.batches import Examples
from selfnorm.data.dataset import Dataset
from selfnorm.evaluate.likelihood import Likelihood, likelihood
from selfnorm.report.provenance import provenance
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.experiments import find_recipe
from selfnorm.train.loop import Trainer
from selfnorm.train.recipe import Recipe

TWINS = ("digits-fc-snf", "digits-fc-exact")
SEEDS = (0, 1, 2)
MAX_DIFFERENCE = 0.3  # nats between the means


def train(recipe: Recipe, dataset: Dataset) -> tuple[Likelihood, int]:
    """Returns the exact test likelihood of the best weights, and the number of epochs."""
    trainer = Trainer(recipe, dataset)
    trainer.start()
    best = trainer.run()
    test = Examples(dataset.test, dataset.levels, trainer.device)
    size, samples = recipe.evaluation.batch_size, recipe.evaluation.test_samples
    found = likelihood(best.flow(), test, batch_size=size, samples=samples, seed=recipe.optimiser.seed)
    print(
        f"{recipe.name}, seed {recipe.optimiser.seed}: {found}; "
        f"best epoch {trainer.progress.best_step // trainer.batches.steps_per_epoch} "
        f"of {trainer.epoch}, {trainer.progress.seconds:.0f} s",
        flush=True,
    )
    return found, trainer.epoch


def main() -> None:
    options = parser(__doc__).parse_args()
    recipes = [find_recipe(name) for name in TWINS]
    dataset = load_dataset(recipes[0].data.source)
    epochs: set[int] = set()
    values: list[list[float]] = []  # a row for each seed, a column for each twin
    with cpu_threads(recipes[0].optimiser.threads):
        for seed in SEEDS:
            found = [train(recipe.changed(seed=seed), dataset) for recipe in recipes]
            values.append([test.nll for test, _ in found])
            epochs |= {run for _, run in found}
        source = provenance(command="python benchmarks/digits_twins.py")

    means = [statistics.mean(column) for column in zip(*values, strict=True)]
    difference = means[0] - means[1]
    rows: list[list[Cell]] = [
        [name, *(round(value, 3) for value in pair), round(pair[0] - pair[1], 3)]
        for name, pair in zip([*(f"seed {seed}" for seed in SEEDS), "mean"], [*values, means], strict=True)
    ]
    samples = recipes[0].evaluation.test_samples
    record(
        options.json,
        title="Digits: a self-normalizing flow and its exact-gradient twin",
        about=(
            f"Exact test NLL in nats of the best weights by validation, over {len(dataset.test)} images with {samples} "
            f"dequantisation samples each; lower is better. The means may differ by at most {MAX_DIFFERENCE} nats."
        ),
        columns=["run", *TWINS, "difference"],
        rows=rows,
        provenance=source | {"epochs": ", ".join(map(str, sorted(epochs)))},
    )
    if abs(difference) > MAX_DIFFERENCE:
        sys.exit(f"digits_twins: expected means at most {MAX_DIFFERENCE} nats apart, got {difference:.3f}")


if __name__ == "__main__":
    main()

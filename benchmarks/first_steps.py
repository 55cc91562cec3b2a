"""The losses of the first steps of a run, taken as CUDA graphs with fused kernels, against the eager step's in plain PyTorch.

    python benchmarks/first_steps.py [RECIPE ...] [--steps 50] [--json results/first_steps-h200.json]

Both in float32 without TF32, on the recipe's own data, from the same weights, with the same batches, noise and rates: half the
recipe's learning rate, so that the weights move. Exits with 1 if a loss differs by more than 1e-4 of itself. On a CPU there are
neither graphs nor kernels to compare.
"""

from __future__ import annotations

import sys
import time

import torch

from record import Cell, any_device, parser, record
from selfnorm.data.batches import Examples, TrainingBatches
from selfnorm.kernels.dispatch import used_on
from selfnorm.precision import precision
from selfnorm.recipe import Recipe
from selfnorm.recipes import build_flow, build_loss, find_recipe
from selfnorm.report.provenance import provenance
from selfnorm.runs import dataset_of, settled
from selfnorm.train.captured import CapturedStep
from selfnorm.train.step import EagerStep, Step, adam

RECIPES = ("mnist-fc-snf", "mnist-fc-tracked", "mnist-fc-relative", "mnist-conv-snf", "mnist-conv-exp", "mnist-glow-snf")
MOST = 1e-4


def losses(recipe: Recipe, data: Examples, steps: int, *, captured: bool) -> torch.Tensor:
    """Of so many steps from the start."""
    torch.manual_seed(recipe.seed)
    loss = build_loss(recipe, build_flow(recipe, data.shape, data.levels)).to(data.device)
    batches = TrainingBatches(data, recipe.batch_size, recipe.seed, recipe.flip, recipe.jitter)
    loss.flow.initialize(batches.batch(0, 0))
    step: Step = (CapturedStep if captured else EagerStep)(loss, adam(loss), batches, recipe.clip)
    found: list[torch.Tensor] = []
    while len(found) < steps:
        index = len(found)
        step(0, index, *[recipe.learning_rate / 2] * step.reach(index))
        found += step.losses.double().cpu()
    return torch.stack(found[:steps])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("recipes", nargs="*", default=RECIPES)
    options.add_argument("--steps", type=int, default=50)
    chosen = options.parse_args()
    device = any_device()
    rows: list[list[Cell]] = []
    for name in chosen.recipes:
        recipe, began = settled(find_recipe(name)), time.time()
        dataset = dataset_of(recipe)
        data = Examples(dataset.train, dataset.levels, device)
        with precision("float32"):
            with used_on():
                plain = losses(recipe, data, chosen.steps, captured=False)
            fast = losses(recipe, data, chosen.steps, captured=True)
        off = float(((fast - plain) / plain).abs().max())
        rows.append([name, round(float(plain[0]), 2), round(float(plain[-1]), 2), float(f"{off:.1e}")])
        print(f"{name}: {off:.1e}, {time.time() - began:.0f} s", flush=True)
    record(
        chosen.json,
        title=f"The first {chosen.steps} steps, fast and plain",
        about=(
            "Loss of the first and the last of these steps, and the largest relative difference between steps as CUDA graphs "
            f"with fused kernels and eager steps in plain PyTorch, TF32 off, at half the recipe's rate; {MOST:g} is allowed."
        ),
        columns=["recipe", "first loss", "last loss", "largest difference"],
        rows=rows,
        provenance=provenance(device, command="python benchmarks/first_steps.py"),
    )
    worst = max(float(row[-1] or 0) for row in rows)
    if not worst <= MOST:
        sys.exit(f"first_steps: expected differences of at most {MOST:g}, got {worst:.1e}")


if __name__ == "__main__":
    main()

"""Compares the losses of the first steps of a run, as CUDA graphs with fused kernels, with those of eager steps in PyTorch.

    python benchmarks/first_steps.py [RECIPE ...] [--steps 50] [--json results/first_steps-h200.json]

Both run in float32 without TF32, on the recipe's data, from the same weights, with the same batches, noise and learning rates:
first those of the recipe, which warm up, then half the recipe's rate from the first step on. Plain steps from weights changed by
1e-7 show how large a difference to expect at that rate. Exits with 1 if a loss at the recipe's rates differs by more than a
relative 1e-4. On a CPU there are neither graphs nor kernels to compare.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from record import Cell, at_least, command, parser, record, run
from selfnorm.cli.options import resolve_device
from selfnorm.data.batches import Examples, TrainingBatches
from selfnorm.kernels.dispatch import used_on
from selfnorm.report.provenance import provenance
from selfnorm.runtime.precision import precision
from selfnorm.train.adam import make_adam
from selfnorm.train.build import build_flow, build_loss
from selfnorm.train.captured import CapturedStep
from selfnorm.train.experiments import find_recipe
from selfnorm.train.recipe import Recipe
from selfnorm.train.source import dataset_of, with_absolute_data_path
from selfnorm.train.step import EagerStep, Step, learning_rate_at

RECIPES = (
    "mnist-fc-snf",
    "mnist-fc-tracked",
    "mnist-fc-relative",
    "mnist-conv-snf",
    "mnist-conv-exp",
    "mnist-glow-snf",
    "mnist-glow-exact",
)
MAX_DIFFERENCE, WEIGHT_NOISE = 1e-4, 1e-7
Rate = Callable[[int], float]  # from the number of a step to its learning rate


def losses(
    recipe: Recipe, data: Examples, steps: int, rate: Rate, *, captured: bool = False, weight_noise: float = 0.0
) -> torch.Tensor:
    """Returns the losses of the first steps, from weights with relative noise of this size."""
    torch.manual_seed(recipe.optimiser.seed)
    loss = build_loss(recipe, build_flow(recipe, data.shape, data.levels)).to(data.device)
    batches = TrainingBatches(data, recipe.optimiser.batch_size, recipe.optimiser.seed, recipe.data.flip, recipe.data.jitter)
    loss.flow.initialize(batches.batch(0, 0))
    with torch.no_grad():
        for parameter in loss.parameters() if weight_noise else ():
            parameter.mul_(1 + weight_noise * torch.randn_like(parameter))
    step: Step = (CapturedStep if captured else EagerStep)(loss, make_adam(loss), batches, recipe.optimiser.clip)
    found: list[torch.Tensor] = []
    while len(found) < steps:
        taken = len(found)
        epoch, index = divmod(taken, batches.steps_per_epoch)
        step(epoch, index, *(rate(at) for at in range(taken, taken + step.steps_per_call(index))))
        found += step.losses.double().cpu()
    return torch.stack(found[:steps])


def compare(recipe: Recipe, data: Examples, steps: int) -> list[Cell]:
    """Returns the first and last loss, then the largest differences: at the recipe's rates; at half its rate; of plain steps
    from noisy weights."""
    chosen = recipe.optimiser
    per_epoch = len(data) // chosen.batch_size

    def scheduled(step: int) -> float:
        return learning_rate_at(step, per_epoch, chosen.epochs, chosen.learning_rate, chosen.warmup_epochs, chosen.decay)

    def half(step: int) -> float:
        return chosen.learning_rate / 2

    with precision("float32"):
        with used_on():
            plain, plain_half = losses(recipe, data, steps, scheduled), losses(recipe, data, steps, half)
            moved = losses(recipe, data, steps, half, weight_noise=WEIGHT_NOISE)
        fast, fast_half = (losses(recipe, data, steps, rate, captured=True) for rate in (scheduled, half))
    differences = [((a - b) / b).abs().max().item() for a, b in ((fast, plain), (fast_half, plain_half), (moved, plain_half))]
    return [round(plain[0].item(), 2), round(plain[-1].item(), 2), *(float(f"{each:.1e}") for each in differences)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("recipes", nargs="*", default=RECIPES)
    options.add_argument("--steps", type=at_least(1), default=50)
    chosen = options.parse_args()
    if chosen.steps < 1:
        raise ValueError(f"--steps: expected at least 1, got {chosen.steps}")
    device = resolve_device("auto")
    rows: list[list[Cell]] = []
    for name in chosen.recipes:
        recipe, began = with_absolute_data_path(find_recipe(name)), time.time()
        dataset = dataset_of(recipe)
        rows.append([name, *compare(recipe, Examples(dataset.train, dataset.levels, device), chosen.steps)])
        print(f"{name}: {rows[-1][3]}, {time.time() - began:.0f} s", flush=True)
    record(
        chosen.json,
        title=f"The first {chosen.steps} steps, fast and plain",
        about=(
            "The loss of the first and the last of these steps, and the largest relative difference between steps as CUDA graphs "
            f"with fused kernels and eager steps in plain PyTorch, without TF32; {MAX_DIFFERENCE:g} is allowed. Then the "
            "same at half the recipe's learning rate from the first step on, and the difference of plain steps from weights "
            f"changed by {WEIGHT_NOISE:g}."
        ),
        columns=[
            "recipe",
            "first loss",
            "last loss",
            "difference",
            "at half the rate",
            f"plain, weights off by {WEIGHT_NOISE:g}",
        ],
        rows=rows,
        provenance=provenance(device, command=command()),
    )
    if wrong := [row[0] for row in rows if not float(row[3] or 0) <= MAX_DIFFERENCE]:  # true for NaN, too
        sys.exit(f"first_steps: expected differences of at most {MAX_DIFFERENCE:g}, got more for {', '.join(map(str, wrong))}")


if __name__ == "__main__":
    run(main)

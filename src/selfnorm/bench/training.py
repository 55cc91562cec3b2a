"""A recipe's training step on made-up data, as `selfnorm train` would take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from selfnorm.bench.models import Model
from selfnorm.bench.timing import Work
from selfnorm.data.batches import Examples, TrainingBatches
from selfnorm.objective import Loss
from selfnorm.train.adam import make_adam
from selfnorm.train.build import build_flow, build_loss
from selfnorm.train.captured import CapturedStep, can_be_captured
from selfnorm.train.step import EagerStep, Step

STEPS = 200  # in an epoch; each of them draws its order anew
FAILED_STEP = "a step had a non-finite loss or gradient, or lost a tracked inverse"
RATE = 1e-5  # small, so that noise for data leads no model astray, however long it is timed


@dataclass(frozen=True)
class TrainingStep:
    """Steps of training.

    work:        takes some of them.
    eager:       takes one, operation by operation: what a floor is counted on. Only to be used before `work`.
    failed:      whether a step had a non-finite loss or gradient, or lost a tracked inverse; reads the device.
    data_bytes:  of examples that lie on the device.
    """

    work: Work
    eager: Callable[[], object]
    loss: Loss
    failed: Callable[[], bool]
    data_bytes: int


def training_step(model: Model, device: torch.device) -> TrainingStep:
    """The whole step of a model's recipe: batch, loss, backward, clipping, Adam, tracking; as graphs where training does that."""
    recipe = model.recipe
    batches = _batches(model, device, STEPS)
    if odd := STEPS % batches.block:
        batches = _batches(model, device, STEPS - odd)
    examples = batches.examples
    loss = build_loss(recipe, build_flow(recipe, model.shape, model.levels)).to(device)
    chosen = recipe.optimiser
    loss.flow.initialize(examples.spread(chosen.init_examples or chosen.batch_size, chosen.seed))
    one = EagerStep(loss, make_adam(loss), batches, chosen.clip)
    captures = can_be_captured(loss, batches)
    step: Step = CapturedStep(loss, make_adam(loss), batches, chosen.clip) if captures else one  # its Adam counts in its own way
    # A call of a captured step takes some steps of a block of batches: a whole block is a whole number of such calls.
    return TrainingStep(
        Work(_Stepper(step, batches, batches.block if captures else 1), batches.block if captures else 1),
        _Stepper(one, batches, 1),
        loss,
        lambda: any(bool(flag) for flag in (one.failed, step.failed, step.lost)),
        examples.stored.nbytes if examples.stored.device.type == device.type != "cpu" else 0,
    )


def _batches(model: Model, device: torch.device, steps: int) -> TrainingBatches:
    """So many to an epoch."""
    optimiser, data = model.recipe.optimiser, model.recipe.data
    examples = Examples(examples_of(model)[: steps * optimiser.batch_size], model.levels, device)
    return TrainingBatches(examples, optimiser.batch_size, optimiser.seed, data.flip, data.jitter)


class _Stepper:
    """Takes the next n steps at each call, epoch after epoch."""

    def __init__(self, step: Step, batches: TrainingBatches, n: int) -> None:
        self.step, self.batches, self.n = step, batches, n
        self._epoch = self._index = 0

    def __call__(self) -> None:
        left = self.n
        while left > 0:
            several = self.step.steps_per_call(self._index)
            self.step(self._epoch, self._index, *[RATE] * several)
            left -= several
            self._index += several
            if self._index >= self.batches.steps_per_epoch:
                self._epoch, self._index = self._epoch + 1, 0
        if left < 0:
            raise RuntimeError(f"bench: expected {self.n} steps to be a whole number of calls, got {-left} too many")


def examples_of(model: Model) -> Tensor:
    """Noise of the shape of a model's examples, on the host."""
    return _made_up(model.shape, model.levels, STEPS * model.recipe.optimiser.batch_size)


@lru_cache(maxsize=1)  # a family's models share it
def _made_up(shape: tuple[int, ...], levels: int | None, n: int) -> Tensor:
    """n examples of noise: bytes below `levels`, or numbers."""
    generator = torch.Generator().manual_seed(0)
    if levels is None:
        return torch.randn(n, *shape, generator=generator, dtype=torch.float32)
    return torch.randint(levels, (n, *shape), generator=generator, dtype=torch.uint8)

"""Builds the training step of a recipe, as `selfnorm train` takes it, on random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from selfnorm.bench.timing import Work
from selfnorm.bench.workloads import Model
from selfnorm.data.batches import Examples, TrainingBatches
from selfnorm.objective import Loss
from selfnorm.train.adam import make_adam
from selfnorm.train.build import build_flow, build_loss
from selfnorm.train.captured import CapturedStep, can_be_captured
from selfnorm.train.step import EagerStep, Step

STEPS_PER_EPOCH = 200
FAILED_STEP = "a step had a non-finite loss or gradient, or lost a tracked inverse"
STEP_LEARNING_RATE = 1e-5  # small enough that no model diverges on random data, even if it is timed for long


@dataclass(frozen=True)
class TrainingStep:
    """The training step of a model.

    work:        takes one or more steps per call.
    eager:       takes one step without a graph, to count operations for the floor. Use it only before `work`.
    failed:      returns whether a step had a non-finite loss or gradient, or lost a tracked inverse; reads the device.
    data_bytes:  of the examples that are stored on the device.
    """

    work: Work
    eager: Callable[[], object]
    loss: Loss
    failed: Callable[[], bool]
    data_bytes: int


def training_step(model: Model, device: torch.device) -> TrainingStep:
    """Returns the whole step of a model's recipe: batch, loss, backward, clipping, Adam, tracking; in graphs as in training."""
    recipe = model.recipe
    batches = _batches(model, device, STEPS_PER_EPOCH)
    if odd := STEPS_PER_EPOCH % batches.block:
        batches = _batches(model, device, STEPS_PER_EPOCH - odd)
    examples = batches.examples
    loss = build_loss(recipe, build_flow(recipe, model.shape, model.levels)).to(device)
    chosen = recipe.optimiser
    loss.flow.initialize(examples.random_examples(chosen.init_examples or chosen.batch_size, chosen.seed))
    one = EagerStep(loss, make_adam(loss), batches, chosen.clip)
    captures = can_be_captured(loss, batches)
    # A captured step needs a separate optimiser.
    step: Step = CapturedStep(loss, make_adam(loss), batches, chosen.clip) if captures else one
    # A call of a captured step takes several steps of a block of batches; a whole number of calls fills the block.
    return TrainingStep(
        Work(_Stepper(step, batches, batches.block if captures else 1), batches.block if captures else 1),
        _Stepper(one, batches, 1),
        loss,
        lambda: any(bool(flag) for flag in (one.failed, step.failed, step.lost)),
        examples.stored.nbytes if examples.stored.device.type == device.type != "cpu" else 0,
    )


def _batches(model: Model, device: torch.device, steps: int) -> TrainingBatches:
    """Returns batches with this many steps per epoch."""
    recipe = model.recipe
    examples = Examples(examples_of(model)[: steps * recipe.optimiser.batch_size], model.levels, device)
    return TrainingBatches(examples, recipe.optimiser.batch_size, recipe.optimiser.seed, recipe.data.flip, recipe.data.jitter)


class _Stepper:
    """Takes the next n steps at each call, epoch after epoch."""

    def __init__(self, step: Step, batches: TrainingBatches, n: int) -> None:
        self.step, self.batches, self.n = step, batches, n
        self._epoch = self._index = 0

    def __call__(self) -> None:
        left = self.n
        while left > 0:
            several = self.step.steps_per_call(self._index)
            self.step(self._epoch, self._index, *[STEP_LEARNING_RATE] * several)
            left -= several
            self._index += several
            if self._index >= self.batches.steps_per_epoch:
                self._epoch, self._index = self._epoch + 1, 0
        if left < 0:
            raise RuntimeError(f"bench: expected {self.n} steps to be a whole number of calls, got {-left} too many")


def examples_of(model: Model) -> Tensor:
    """Returns random examples of a model's shape, on the CPU."""
    return _noise(model.shape, model.levels, STEPS_PER_EPOCH * model.recipe.optimiser.batch_size)


@lru_cache(maxsize=1)  # shared by the models of a family
def _noise(shape: tuple[int, ...], levels: int | None, n: int) -> Tensor:
    """Returns n random examples: bytes below `levels`, or normal numbers if it is None."""
    generator = torch.Generator().manual_seed(0)
    if levels is None:
        return torch.randn(n, *shape, generator=generator, dtype=torch.float32)
    return torch.randint(levels, (n, *shape), generator=generator, dtype=torch.uint8)

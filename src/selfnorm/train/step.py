"""Optimiser steps, one at a time: `EagerStep` here, and CUDA graphs of several steps in `captured`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from selfnorm.bijection import Chain
from selfnorm.data.batches import TrainingBatches
from selfnorm.objective import Loss, Metrics
from selfnorm.train.adam import check_eagerly, metrics_unless_frozen, update_eagerly


def no_mark(begins: str, kind: str = "", backward: bool = False) -> None:
    """Does nothing: a step calls it where its parts begin, unless it is being profiled."""


class Step(Protocol):
    """Takes training steps. A step never waits for the device, except in `after_step` of layers and loss.

    `after_step` may raise a `ValueError` that names a layer. Everything else that can go wrong raises a flag, which the loop
    reads later; `train.adam` explains them.

    failed, lost:  flags on the device.
    losses:        those of the last call's steps.
    """

    failed: Tensor
    lost: Tensor
    losses: Tensor

    def steps_per_call(self, index: int) -> int:
        """Returns the number of steps that a call at this step of an epoch takes."""
        ...

    def __call__(self, epoch: int, index: int, *rates: float) -> Metrics:
        """Takes the steps from `index` on, one for each learning rate; returns their metrics, one row per step."""
        ...

    def unfreeze(self) -> None:
        """Lets weights change again, after lost inverses were recomputed; the steps that changed nothing are repeated."""
        ...


class EagerStep:
    """One step at a time, one operation after another: the reference, for a CPU and for a GPU without graphs."""

    def __init__(self, loss: Loss, optimizer: torch.optim.Adam, batches: TrainingBatches, clip: float | None) -> None:
        self.loss, self.optimizer, self.batches, self.clip = loss, optimizer, batches, clip
        self._parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
        self._draws = loss.draws
        self.mark: Callable[..., None] = no_mark
        self.preprocessing = Chain()  # the leading layers that are not part of a step; here none
        device = self._parameters[0].device
        self.failed = torch.zeros((), device=device, dtype=torch.float32)  # as Adam's switch requires
        self.lost = torch.zeros_like(self.failed)  # never raised: `after_step` recomputes lost inverses at once
        self.losses = torch.zeros(0, device=device)

    def steps_per_call(self, index: int) -> int:
        return 1

    def unfreeze(self) -> None:
        pass

    def __call__(self, epoch: int, index: int, *rates: float) -> Metrics:
        (learning_rate,) = rates
        self.mark("the batch")
        x = self.batches.batch(epoch, index)
        self.optimizer.zero_grad(set_to_none=True)
        generator = self.batches.generator("probes", epoch, index) if self._draws else None
        self.mark("the rest of the loss")
        value, metrics = self.loss(x, generator=generator)
        self.mark("the rest of the loss", backward=True)
        value.backward()
        self.mark("norm of the gradient")
        self.failed = check_eagerly(self._parameters, value, self.clip, self.failed)
        self.mark("Adam")
        update_eagerly(self.optimizer, learning_rate, self.failed)
        self.mark("trackers, multipliers")
        self.loss.after_step(metrics_unless_frozen(self.loss, metrics, self.failed), generator=generator)
        self.mark("end")
        self.losses = value.detach()[None]
        return Metrics(metrics.surrogate[None], metrics.reconstruction[None])


def learning_rate_at(step: int, steps_per_epoch: int, epochs: int, peak: float, warmup_epochs: float, decay: float) -> float:
    """Returns a step's learning rate: linear from 0 in the warm-up, then the peak, then linear to 0 over the last `decay`."""
    total = steps_per_epoch * epochs
    warmup = warmup_epochs * steps_per_epoch
    rising = (step + 1) / warmup if warmup else 1.0
    falling = (total - step) / (decay * total) if decay else 1.0
    return peak * min(1.0, rising, falling)

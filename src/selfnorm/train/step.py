"""Optimiser steps, as an object that the loop calls: eager here, and as CUDA graphs in `captured`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from selfnorm.bijection import Chain
from selfnorm.data.batches import TrainingBatches
from selfnorm.objective import Loss, Metrics

BETAS, EPS = (0.9, 0.999), 1e-8  # the paper's Adam, which is everybody's


def unmarked(begins: str, kind: str = "", backward: bool = False) -> None:
    """What a step calls as its parts begin, unless somebody measures them."""


class Step(Protocol):
    """Takes step after step. What went wrong is told by flags, which the loop reads when it likes: a step itself never reads the
    device, but for what layers and loss do in `after_step`, which may also raise a `ValueError` that names a layer.

    failed:  a float tensor, 0, or 1 from the first step on that had a non-finite loss or gradient. That step and those after it
             change no weight, so that the weights are still those that failed. Only where a weight's gradient is multiplied
             while it is applied, and is found wanting there alone, have the other weights taken that step; it is not counted.
    lost:    likewise, raised by a step after which a tracker has lost its inverse. The steps after that one change no weight,
             until the trackers are settled and `go_on` is called; then they are to be taken again.
    losses:  of the last call's steps.
    """

    failed: Tensor
    lost: Tensor
    losses: Tensor

    def reach(self, index: int) -> int:
        """How many steps a call at this step of an epoch takes."""
        ...

    def __call__(self, epoch: int, index: int, *rates: float) -> Metrics:
        """Take the steps from `index` on, each with its learning rate; their metrics, a row for each."""
        ...

    def go_on(self) -> None:
        """Take `lost` down."""
        ...


class EagerStep:
    """Batch, loss, backward, clipping, Adam, one operation after another: the reference, and what a CPU runs."""

    def __init__(self, loss: Loss, optimizer: torch.optim.Adam, batches: TrainingBatches, clip: float | None) -> None:
        self.loss, self.optimizer, self.batches, self.clip = loss, optimizer, batches, clip
        self._parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
        self._draws = loss.draws
        self.mark: Callable[..., None] = unmarked
        self.front = Chain()  # of the flow, the layers that are not in a step; here none
        device = self._parameters[0].device
        self.failed = torch.zeros((), device=device, dtype=torch.float32)  # what Adam's switch wants
        self._raised = torch.ones_like(self.failed)
        self.lost = torch.zeros_like(self.failed)  # never: trackers are settled after each step
        self.losses = torch.zeros(0, device=device)

    def reach(self, index: int) -> int:
        return 1

    def go_on(self) -> None:
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
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        # What nn.utils.get_total_norm does, without its sorting by device and dtype, which cost as much as the norm.
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self.clip, norm)
        self.failed = torch.where(norm + value.abs() < torch.inf, self.failed, self._raised)  # a NaN is below nothing
        self.mark("Adam")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # The switch that gradient scaling uses: a fused step with found_inf = 1 leaves weights and moments alone.
        self.optimizer.found_inf = self.failed  # type: ignore[attr-defined]
        self.optimizer.step()
        self.mark("trackers, multipliers")
        self.loss.after_step(metrics, generator=generator)
        self.mark("end")
        self.losses = value.detach()[None]
        return Metrics(metrics.surrogate[None], metrics.reconstruction[None])


def adam(loss: Loss) -> torch.optim.Adam:
    """Adam as the paper has it, β = (0.9, 0.999), in its fused form."""
    capturable = next(loss.parameters()).is_cuda
    return torch.optim.Adam(loss.parameters(), lr=0.0, betas=BETAS, eps=EPS, fused=True, capturable=capturable)


def adam_state(optimizer: torch.optim.Adam, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter's moments and count of steps; at first those that Adam itself begins with."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    return state


def adam_tensors(optimizer: torch.optim.Adam, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same as a `factored.Record` wants it: the two moments, then the count."""
    state = adam_state(optimizer, parameter)
    return state["exp_avg"], state["exp_avg_sq"], state["step"]


def steps_taken(optimizer: torch.optim.Adam) -> int:
    """How many steps changed the weights, by Adam's own count."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def learning_rate_at(step: int, steps_per_epoch: int, epochs: int, peak: float, warmup_epochs: float, decay: float) -> float:
    """Linear from 0 over the warm-up, batch by batch, then the peak, then linear to 0 over the last part `decay` of training."""
    total = steps_per_epoch * epochs
    warmup = warmup_epochs * steps_per_epoch
    rising = (step + 1) / warmup if warmup else 1.0
    falling = (total - step) / (decay * total) if decay else 1.0
    return peak * min(1.0, rising, falling)


def diagnosis(loss: Loss, batches: TrainingBatches, epoch: int, index: int) -> str:
    """Which layer was the first to leave the finite numbers, at the weights as they are and the batch of a step."""
    x = batches.batch(epoch, index)
    try:
        with torch.no_grad():
            loss.flow.log_prob(x)
    except ValueError as error:
        return str(error)
    value, metrics = loss(x, generator=batches.generator("probes", epoch, index))
    for name, error_ in zip(loss.flow.reconstruction_names, metrics.reconstruction.tolist(), strict=True):
        if not abs(error_) < float("inf"):
            return f"layer {name}: its reconstruction error is {error_}"
    loss.zero_grad(set_to_none=True)
    value.backward()
    sizes = {name: p.grad.abs().max().item() for name, p in loss.named_parameters() if p.grad is not None}
    loss.zero_grad(set_to_none=True)
    # The backward pass goes from the last layer to the first and carries a NaN along: the last one named is where it began.
    bad = [name for name, size in sizes.items() if not size < float("inf")]
    if bad:
        return f"{bad[-1]} is the first to get a non-finite gradient"
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"the loss is {value.item():.3g}, and the largest gradient, {sizes[largest]:.3g}, that of {largest}: its square overflows"
    )

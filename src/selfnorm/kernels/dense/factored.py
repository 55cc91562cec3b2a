"""Weight gradients that are handed to the optimiser as factors instead of being multiplied in the backward pass.

The gradient of a dense layer's weight is aᵀb + s·M with a and b (N, D): multiplying it out writes D² numbers that the optimiser
reads again, more bytes than all else of a small batch's backward pass. Inside of

    with factored_gradients() as collected:
        loss(x).backward()
    for record in collected.take():
        record.apply_adam(...)

a layer whose kernels are usable leaves a record here and its weights' `.grad` at None. Biases and all other parameters get their
ordinary gradients. Records belong to the collector that was active in the forward pass; autograd's threads only append to it.
They read the weights as these are when applied, so apply them before anything else changes the weights. Outside of the context
all is as ever; inside of it, `torch.autograd.grad` for such a weight finds none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from selfnorm.kernels.dispatch import usable
from selfnorm.linalg.iterations import transposed

# Of a parameter: Adam's two moments, and the number of the step to be taken, from 1, as a float tensor.
AdamState = Callable[[nn.Parameter], tuple[Tensor, Tensor, Tensor]]


class Record(Protocol):
    """The gradients of one or two parameters, unmultiplied."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]: ...

    def gradients(self) -> list[Tensor]:
        """One for each parameter, multiplied out, at the weights as they are now."""
        ...

    def apply_adam(
        self, state: AdamState, lr: Tensor, frozen: Tensor, failed: Tensor, betas: tuple[float, float], eps: float
    ) -> None:
        """Adam's step for the parameters, in place, without waiting on the device.

        lr:      a float32 tensor of one element.
        frozen:  likewise; if it is not 0, nothing is changed.
        failed:  likewise; set to 1 if a gradient or its square is not finite. Such elements keep what they have. A tensor other
                 than `frozen`, or else what becomes of the other elements depends on timing.
        """
        ...


class Collector:
    """What the backward passes of one `factored_gradients()` have left."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def append(self, record: Record) -> None:
        self._records.append(record)

    def take(self, *, wait: Callable[[], None] | None = None) -> list[Record]:
        """The records, which are then forgotten here; none of them shares a parameter with another, or with a `.grad`.

        Where a layer was used twice, or something else gave one of its weights a gradient, its records go into `.grad`.
        wait:  called before any is multiplied out, for which all that it is made of has to be there.
        """
        records, self._records = self._records, []
        while True:
            count = Counter(id(parameter) for record in records for parameter in record.parameters)
            shared = [
                record
                for record in records
                if any(count[id(parameter)] > 1 or parameter.grad is not None for parameter in record.parameters)
            ]
            if not shared:
                return records
            if wait is not None:
                wait()
            add_to_grad(shared)
            records = [record for record in records if not any(record is other for other in shared)]


def add_to_grad(records: list[Record]) -> None:
    for record in records:
        for parameter, gradient in zip(record.parameters, record.gradients(), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


# No thread-local: backward passes run on threads of their own, and what they need was taken from here in the forward pass.
_active: Collector | None = None


@contextmanager
def factored_gradients() -> Iterator[Collector]:
    """Collect the gradients of the layers that run inside of this, unmultiplied."""
    global _active
    before, _active = _active, Collector()
    try:
        yield _active
    finally:
        _active = before


def collector_for(*weights: Tensor) -> Collector | None:
    """Where a layer is to leave its gradients for these weights; None if it is to return them as ever."""
    if _active is None or not all(isinstance(weight, nn.Parameter) and weight.requires_grad for weight in weights):
        return None
    return _active


@dataclass(frozen=True)
class PairRecord:
    """∂W = towards_wᵀ x + ½Σscale·Rᵀ and ∂R = towards_rᵀ z − ½Σscale·Wᵀ, those of a self-normalizing layer."""

    W: nn.Parameter
    R: nn.Parameter
    towards_w: Tensor
    x: Tensor
    towards_r: Tensor
    z: Tensor
    scale: Tensor

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self.W, self.R

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        return [
            _multiplied(self.towards_w, self.x, self.R, True, self.scale, 0.5),
            _multiplied(self.towards_r, self.z, self.W, True, self.scale, -0.5),
        ]

    @torch.no_grad()
    def apply_adam(
        self, state: AdamState, lr: Tensor, frozen: Tensor, failed: Tensor, betas: tuple[float, float], eps: float
    ) -> None:
        first, second = state(self.W), state(self.R)
        matrices = (self.W, self.R, *first, *second)
        factors = (self.towards_w, self.x, self.towards_r, self.z, self.scale)
        if not _can_update(*matrices) or not usable(*matrices, *factors, lr, frozen, failed):
            _plain_adam(self, state, lr, frozen, failed, betas, eps)
            return
        from selfnorm.kernels.dense.update import State, adam_pair

        adam_pair(
            self.W, self.R, (State(*first), State(*second)), *factors, 0.5,
            lr=lr, frozen=frozen, failed=failed, betas=betas, eps=eps,
        )  # fmt: skip


@dataclass(frozen=True)
class SingleRecord:
    """∂W = aᵀb + Σscale·M, or Σscale·Mᵀ: M = W by the relative gradient, Mᵀ = Rᵀ if R is tracked."""

    W: nn.Parameter
    a: Tensor
    b: Tensor
    addend: Tensor
    addend_transposed: bool
    scale: Tensor

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.W,)

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        return [_multiplied(self.a, self.b, self.addend, self.addend_transposed, self.scale, 1.0)]

    @torch.no_grad()
    def apply_adam(
        self, state: AdamState, lr: Tensor, frozen: Tensor, failed: Tensor, betas: tuple[float, float], eps: float
    ) -> None:
        kept = state(self.W)
        tensors = (self.W, *kept, self.a, self.b, self.addend, self.scale, lr, frozen, failed)
        if not _can_update(self.W, *kept) or not usable(*tensors):
            _plain_adam(self, state, lr, frozen, failed, betas, eps)
            return
        from selfnorm.kernels.dense.update import State, adam_single

        adam_single(
            self.W, State(*kept), self.a, self.b, self.addend, self.addend_transposed, self.scale, 1.0,
            lr=lr, frozen=frozen, failed=failed, betas=betas, eps=eps,
        )  # fmt: skip


def _multiplied(a: Tensor, b: Tensor, addend: Tensor, addend_transposed: bool, scale: Tensor, factor: float) -> Tensor:
    """aᵀb + factor·Σscale·M with M the addend, transposed or not."""
    if usable(a, b, addend, scale):
        from selfnorm.kernels.dense.gradient import gradient_of

        return gradient_of(a, b, addend, addend_transposed, scale, factor)
    term = transposed(addend) if addend_transposed else addend.clone()
    return term.mul_(factor * scale.sum()).addmm_(a.mT, b)


def _can_update(*matrices: Tensor) -> bool:
    return all(matrix.is_contiguous() for matrix in matrices)


@torch.no_grad()
def _plain_adam(
    record: Record, state: AdamState, lr: Tensor, frozen: Tensor, failed: Tensor, betas: tuple[float, float], eps: float
) -> None:
    """`apply_adam` in plain PyTorch, with a gradient that is multiplied out."""
    for parameter, gradient in zip(record.parameters, record.gradients(), strict=True):
        average, square, step = state(parameter)
        squared = gradient.square()
        fine = squared + (parameter - parameter) < torch.inf  # a NaN is not
        live = frozen == 0
        changed = fine & live
        corrections = [1 - beta ** step.double() for beta in betas]
        new_average = betas[0] * average + (1 - betas[0]) * gradient
        new_square = betas[1] * square + (1 - betas[1]) * squared
        denominator = new_square.sqrt() / corrections[1].sqrt() + eps
        moved = parameter - (lr / corrections[0]) * new_average / denominator
        for old, new in ((average, new_average), (square, new_square), (parameter, moved)):
            old.copy_(torch.where(changed, new, old))
        # Whoever raises it raises it at once, whatever runs beside: to read it and write it back could take down another's.
        here = torch.zeros(1, dtype=torch.int64, device=failed.device)
        failed.view(1).scatter_reduce_(0, here, (~fine & live).any().to(failed).view(1), "amax")

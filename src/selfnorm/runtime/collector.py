"""`GradientCollector`: holds weight gradients as factors until the optimiser multiplies and applies them in one pass.

The gradient of a dense layer's weight is aᵀb + s·M with a and b (N, D). Multiplying it out writes D² numbers that the optimiser
reads again: more bytes than the rest of a small batch's backward pass. While the current step has a collector, a fused layer
appends its factors to it and leaves its weights' `.grad` at None:

    with collected_gradients() as collector:
        loss(x).backward()
    for gradient in collector.take():
        update_from_factors(gradient, …)        # train.adam

Biases and all other parameters get ordinary gradients. A gradient goes to the collector that was current in the forward pass;
autograd's threads only append to it. Factors use the weights at the time when they are applied, so apply them before anything
else changes the weights. Inside the block, `torch.autograd.grad` finds no gradient for these weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from selfnorm.runtime.context import step_context


class Moments(NamedTuple):
    """Adam's state of a matrix: its moments (D, D), and the number of the step to take, from 1, as a float tensor."""

    average: Tensor
    square: Tensor
    step: Tensor


class AdamArguments(NamedTuple):
    """Arguments of an Adam update besides gradient and moments. The tensors are float32 scalars on the device.

    rate:          the learning rate.
    frozen:        the update changes nothing unless this is 0.
    late_failure:  set to 1 if a gradient or its square is not finite; these elements keep their value. It must not be the
                   same tensor as `frozen`: otherwise the other elements would depend on timing.
    """

    rate: Tensor
    frozen: Tensor
    late_failure: Tensor
    betas: tuple[float, float]
    eps: float


class FactoredGradient(Protocol):
    """The gradients of one or two parameters, not yet multiplied."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]: ...

    @property
    def factors(self) -> tuple[Tensor, ...]: ...

    def multiplied(self) -> list[Tensor]:
        """Returns the gradient of each parameter, at the weights as they are now."""
        ...

    def update_by_kernel(self, moments: Sequence[Moments], adam: AdamArguments) -> None:
        """Takes one step of Adam for the parameters, in place, by one kernel that multiplies the factors itself."""
        ...


class GradientCollector:
    """The factored gradients that backward passes have left."""

    def __init__(self) -> None:
        self._gradients: list[FactoredGradient] = []

    def append(self, gradient: FactoredGradient) -> None:
        self._gradients.append(gradient)

    def take(self, *, wait: Callable[[], None] | None = None) -> list[FactoredGradient]:
        """Removes and returns the gradients. No two of them share a parameter, and none of their parameters has a `.grad`.

        Where a layer was used twice, or something else gave one of its weights a gradient, its gradients are added to `.grad`.
        wait:  called before any is multiplied out, to wait for work that produces its factors.
        """
        gradients, self._gradients = self._gradients, []
        while True:
            count = Counter(id(parameter) for gradient in gradients for parameter in gradient.parameters)
            shared = [
                gradient
                for gradient in gradients
                if any(count[id(parameter)] > 1 or parameter.grad is not None for parameter in gradient.parameters)
            ]
            if not shared:
                return gradients
            if wait is not None:
                wait()
            add_to_grad(shared)
            gradients = [gradient for gradient in gradients if not any(gradient is other for other in shared)]


def add_to_grad(gradients: Iterable[FactoredGradient]) -> None:
    """Multiplies factored gradients and adds them to their parameters' `.grad`."""
    for factored in gradients:
        for parameter, gradient in zip(factored.parameters, factored.multiplied(), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


@contextmanager
def collected_gradients() -> Iterator[GradientCollector]:
    """Context manager that gives the current step a new collector, and yields it."""
    collector = GradientCollector()
    with step_context(collector=collector):
        yield collector

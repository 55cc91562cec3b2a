"""`Rounding`: what layers tell, during an exact evaluation, of how much rounding errors may grow."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from selfnorm.runtime.context import current_step


class Rounding:
    """Collects what bounds the rounding error of a flow's likelihood.

    conditions:  linear layers, in order, with estimates of their condition numbers.
    others:      the product of what other layers note: elementwise layers behind a linear one magnify errors of small components,
                 just as an ill-conditioned matrix does.
    """

    def __init__(self) -> None:
        self.conditions: list[tuple[nn.Module, float]] = []
        self.others = 1.0
        self._sizes: list[Tensor] = []

    def note(self, layer: nn.Module, condition: float, x: Tensor) -> None:
        """Notes the condition number of a linear layer and its input; NaN, from an overflow, counts as infinite."""
        self.conditions.append((layer, math.inf if math.isnan(condition) else condition))
        self._sizes.append(_norms(x))
        bias = getattr(layer, "bias", None)
        if isinstance(bias, Tensor):  # what a large bias cancels has left its rounding error
            self.others *= max(1.0, float(bias.detach().abs().max()))

    def growth(self) -> float:
        """Returns a bound, up to a moderate factor, for how much relative rounding errors grow; for a chain a pessimistic one."""
        return math.prod(condition for _, condition in self.conditions) * self.others

    def sizes(self, *others: Tensor) -> Tensor:
        """Returns the norms of the inputs of the linear layers and of other batches, for each row: (layers + others, N)."""
        return torch.stack([*self._sizes, *map(_norms, others)])


def note_condition(layer: nn.Module, condition: float, x: Tensor) -> None:
    """Notes the condition number of a linear layer and its input, if an exact evaluation asks for them."""
    if (rounding := current_step().rounding) is not None:
        rounding.note(layer, condition, x)


def note_slopes(log_slopes: Tensor) -> None:
    """Notes the logarithms of the slopes of an elementwise layer: errors grow by the largest slope relative to the smallest."""
    rounding = current_step().rounding
    if rounding is not None and rounding.conditions and log_slopes.numel():  # before the first product nothing is rounded
        least, largest = torch.stack(torch.aminmax(log_slopes.detach())).tolist()
        note_growth(math.exp(min(largest - least, 700.0)))


def note_growth(factor: float) -> None:
    """Notes by how much another layer lets relative errors grow: infinity, if it does not know."""
    if (rounding := current_step().rounding) is not None:
        rounding.others *= factor


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach().flatten(1), dim=1)

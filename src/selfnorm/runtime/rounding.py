"""`Rounding`: bounds on the growth of rounding errors, which layers report during an exact evaluation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from selfnorm.runtime.context import current_step


class Rounding:
    """Collects what bounds the rounding error of a flow's likelihood.

    conditions:  linear layers, in order, with estimates of their condition numbers.
    is_bounded:  whether all layers report how much they amplify errors (`notes_rounding`).
    """

    def __init__(self, is_bounded: bool = True) -> None:
        self.conditions: list[tuple[nn.Module, float]] = []
        self._sizes: list[Tensor] = []
        self._logs: list[Tensor] = []  # of factors by which other things magnify errors; read together, at the end
        self._is_bounded = is_bounded

    def note(self, layer: nn.Module, condition: float, x: Tensor) -> None:
        """Notes the condition number of a linear layer and its input; NaN, from an overflow, counts as infinite."""
        self.conditions.append((layer, math.inf if math.isnan(condition) else condition))
        self._sizes.append(_norms(x))
        bias = getattr(layer, "bias", None)
        if isinstance(bias, Tensor) and self._is_bounded:  # what a large bias cancels has left its rounding error
            self._logs.append(bias.detach().abs().max().clamp_min(1.0).log())

    def note_slopes(self, log_slopes: Tensor) -> None:
        """Notes the slopes of an elementwise layer: it magnifies errors as an ill-conditioned matrix does."""
        if self.conditions and self._is_bounded and log_slopes.numel():  # before the first product nothing is rounded
            least, largest = torch.aminmax(log_slopes.detach())
            self._logs.append(largest - least)

    def growth(self) -> float:
        """Returns a bound, up to a moderate factor, for how much relative rounding errors grow; for a chain a pessimistic one."""
        if not self._is_bounded:
            return math.inf
        others = float(torch.stack(self._logs).sum()) if self._logs else 0.0
        return math.prod(condition for _, condition in self.conditions) * math.exp(min(others, 700.0))

    def sizes(self, *others: Tensor) -> Tensor:
        """Returns the norms of the inputs of the linear layers and of other batches, for each row: (layers + others, N)."""
        return torch.stack([*self._sizes, *map(_norms, others)])


def note_condition(layer: nn.Module, condition: float, x: Tensor) -> None:
    """Notes the condition number of a linear layer and its input, if an exact evaluation asks for them."""
    if (rounding := current_step().rounding) is not None:
        rounding.note(layer, condition, x)


def note_slopes(log_slopes: Tensor) -> None:
    """Notes the logarithms of the slopes of an elementwise layer, if an exact evaluation asks for them."""
    if (rounding := current_step().rounding) is not None:
        rounding.note_slopes(log_slopes)


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach().flatten(1), dim=1)

"""`Rounding`: bounds on the growth of rounding errors, which layers report during an exact evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from selfnorm.runtime.context import current_step

SMOOTH = 100.0  # up to which rises of log-slopes, times the size of the knots, do not count; 15 for the identity


class Rounding:
    """Collects what bounds the rounding error of a flow's likelihood.

    conditions:  linear layers, in order, with estimates of their condition numbers.
    is_bounded:  whether all layers report how much they amplify errors (`notes_rounding`).
    """

    def __init__(self, is_bounded: bool = True) -> None:
        self.conditions: list[tuple[nn.Module, float]] = []
        self._sizes: list[Tensor] = []
        self._steepest: list[Tensor] = []  # of each elementwise layer, the largest log-slope in each row
        self._bends: list[Tensor] = []  # of each elementwise layer, how much rounding changes log-slopes in each row
        self._logs: list[Tensor] = []  # of factors by which other things than matrices amplify errors; read together, at the end
        self._is_bounded = is_bounded
        self._has_rounded: Tensor | bool = False  # a layer so far; known to the device alone if it is a tensor

    def note(self, layer: nn.Module, condition: float, x: Tensor) -> None:
        """Notes the condition number of a linear layer and its input; NaN, from an overflow, counts as infinite."""
        self.conditions.append((layer, math.inf if math.isnan(condition) else condition))
        self._sizes.append(norms(x))
        self._has_rounded = True

    def note_slopes(self, log_slopes: Tensor) -> None:
        """Notes an elementwise layer by the logarithms of its slopes, (N, …): it amplifies errors as a matrix does."""
        if self._is_bounded and log_slopes.numel():
            steepest = log_slopes.detach().flatten(1).amax(1)
            self._steepest.append(steepest)
            self._note_factor(steepest.max() - log_slopes.detach().min())
        self._has_rounded = True

    def note_bends(self, bends: Callable[[], Tensor], *, is_rounded: bool = False) -> None:
        """Notes how log-slopes change with relative changes of the input, (N, …): rounding changes the log-density as much.

        is_rounded:  whether the layer rounds its own numbers, so that it matters in the first layer, too.
        """
        if self._is_bounded and (is_rounded or self._has_rounded is not False) and (found := bends().detach()).numel():
            rows = found.abs().flatten(1).mean(1).nan_to_num(math.inf, math.inf)
            matters = True if is_rounded else self._has_rounded
            self._bends.append(torch.where(matters, rows, 0.0) if isinstance(matters, Tensor) else rows)

    def note_scales(self, log_scales: Tensor, rounds: Tensor | bool = True) -> None:
        """Notes a layer that multiplies by fixed numbers, given their logarithms, and whether it rounds at all."""
        if self._is_bounded and log_scales.numel():
            least, largest = torch.aminmax(log_scales.detach())
            self._note_factor(largest - least)
        self._has_rounded = rounds if self._has_rounded is False else self._has_rounded | rounds

    def note_offset(self, size: Tensor | float, z: Tensor, *, is_rounded: bool = False) -> None:
        """Notes that numbers of a size were added to rounded ones to give z: if z is smaller, it keeps their rounding errors.

        is_rounded:  whether they were rounded themselves, so that it matters in the first layer, too.
        """
        if self._is_bounded and z.numel():
            usual = torch.linalg.vector_norm(z.detach()) / math.sqrt(z.numel())
            factor = (torch.as_tensor(size, device=z.device).detach() / usual).nan_to_num(0.0).clamp_min(1.0)
            self._note_factor(factor.log(), always=is_rounded)

    def growth(self) -> float:
        """Returns a bound, up to a moderate factor, for how much relative rounding errors grow; for a chain a pessimistic one."""
        if not self._is_bounded:
            return math.inf
        others = float(torch.stack(self._logs).sum()) if self._logs else 0.0
        bends = float(torch.stack(self._bends).max()) if self._bends else 0.0  # these do not amplify each other
        return math.prod(condition for _, condition in self.conditions) * math.exp(min(others, 700.0)) * max(1.0, bends)

    def sizes(self, x: Tensor, z: Tensor, context: Tensor | None) -> Tensor:
        """Returns what the rounding errors of rows grow with, (K, N): norms at both ends and at linear layers, slopes, bends."""
        sizes = [*self._sizes, norms(x), norms(z)]
        if context is None or not context.is_floating_point():
            sizes.append(torch.zeros_like(sizes[0]))
        elif context.shape[:1] == x.shape[:1]:
            sizes.append(norms(context.reshape(len(x), -1)))
        else:  # one for all rows
            sizes.append(norms(context.reshape(1, -1)).expand(len(x)))
        if self._steepest:
            steepness = torch.stack(self._steepest).sum(0).clamp(-80.0, 80.0).exp()
            sizes += [steepness, *(steepness * size for size in (*self._sizes, norms(z)))]
        if self._bends:
            sizes.append(torch.stack(self._bends).amax(0))
        return torch.stack([size.to(sizes[0]) for size in sizes])

    def _note_factor(self, log: Tensor, always: bool = False) -> None:
        """Notes by how much a layer amplifies the errors of the layers before it; `always` if its own errors as well."""
        if always or self._has_rounded is True:
            self._logs.append(log)
        elif isinstance(self._has_rounded, Tensor):
            self._logs.append(torch.where(self._has_rounded, log, 0.0))


def note_condition(layer: nn.Module, condition: float, x: Tensor) -> None:
    """Notes the condition number of a linear layer and its input, if an exact evaluation asks for them."""
    if (rounding := current_step().rounding) is not None:
        rounding.note(layer, condition, x)


def note_bias(bias: Tensor | None, z: Tensor) -> None:
    """Notes the bias of a linear layer and its output, if an exact evaluation asks for them."""
    if bias is not None and (rounding := current_step().rounding) is not None:
        rounding.note_offset(bias.abs().max(), z)


def note_slopes(log_slopes: Tensor) -> None:
    """Notes the logarithms of the slopes of an elementwise layer, (N, …), if an exact evaluation asks for them."""
    if (rounding := current_step().rounding) is not None:
        rounding.note_slopes(log_slopes)


def note_knots(size: float, z: Tensor, rises: Callable[[], Tensor], steepest_rise: Callable[[], Tensor]) -> None:
    """Notes that an elementwise layer computes z from knots of a size, which are rounded, if an exact evaluation asks for it.

    rises:          returns the derivatives of the log-slopes with respect to the input, (N, …).
    steepest_rise:  returns a bound for them; if it is small, they are not computed, which would take long.
    """
    if (rounding := current_step().rounding) is not None:
        rounding.note_offset(size, z, is_rounded=True)
        if size * float(steepest_rise().detach()) > SMOOTH:
            rounding.note_bends(lambda: size * rises(), is_rounded=True)


def note_bends(bends: Callable[[], Tensor]) -> None:
    """Notes what `bends` returns, (N, …), if an exact evaluation asks for it; see `Rounding.note_bends`."""
    if (rounding := current_step().rounding) is not None:
        rounding.note_bends(bends)


def note_affine(shift: Tensor, log_scale: Tensor, z: Tensor) -> None:
    """Notes a layer z = ±(x + shift)·exp(log_scale), if an exact evaluation asks for it."""
    if (rounding := current_step().rounding) is not None:
        scale = log_scale.exp()
        rounding.note_offset((shift * scale).abs().max(), z)
        powers = log_scale / math.log(2.0)
        rounds = (shift != 0).any() | ((powers - powers.round()).abs() > 1e-5).any()  # scaling by a power of two rounds nothing
        rounding.note_scales(log_scale, rounds)


def norms(x: Tensor) -> Tensor:
    """Returns the norms of the rows of x, (N, …), in float64 if the device has it: in float32, squares of far rows overflow."""
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(x.detach().flatten(1), dim=1, dtype=dtype)

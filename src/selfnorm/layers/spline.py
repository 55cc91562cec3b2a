"""The monotone rational-quadratic spline as an activation with parameters for every element (Durkan et al., 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfnorm.bijection import Surrogate
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.events import sum_event
from selfnorm.layers.fusable import FusableLayer
from selfnorm.runtime.checks import event_shape, expect_shape, positive_int
from selfnorm.runtime.rounding import note_knots, note_slopes

# The smallest share of the interval that a bin can take in x or in z, and the smallest slope at a knot.
SPLINE_MINIMUM = 1e-3
# The fused kernel holds an element's knots in registers, which have no room for more.
MAX_FUSED_BINS = 16


class SplineActivation(FusableLayer):
    """A monotone rational-quadratic spline on [−bound, bound] for each element, the identity outside; analytic inverse.

    Parameters: widths, heights (*shape, bins) and slopes (*shape, bins − 1), raw and 0.01·N(0, 1) at first, which is close to the
    identity. Bins have a softmax of these as widths and heights, and inner knots a softplus as slopes; the end slopes are 1, so
    that the map is smooth where the tails begin.

    >>> layer = SplineActivation((2, 4, 4))
    >>> x = torch.randn(5, 2, 4, 4)
    >>> z, log_det = layer(x)
    >>> bool(torch.allclose(layer.inverse(z)[0], x, atol=1e-4))
    True
    """

    takes_context = False
    notes_rounding = True

    def __init__(self, shape: int | Sequence[int], bins: int = 5, bound: float = 10.0) -> None:
        super().__init__()
        self.shape = event_shape("SplineActivation", shape)
        self.bins = positive_int("SplineActivation", "bins", bins)
        if bins * SPLINE_MINIMUM >= 1:
            raise ValueError(f"SplineActivation: expected fewer than {1 / SPLINE_MINIMUM:g} bins, got {bins}")
        if not 0 < bound < math.inf:
            raise ValueError(f"SplineActivation: expected a finite bound above 0, got {bound}")
        self.bound = bound
        self.widths = nn.Parameter(0.01 * torch.randn(*self.shape, bins))
        self.heights = nn.Parameter(0.01 * torch.randn(*self.shape, bins))
        self.slopes = nn.Parameter(0.01 * torch.randn(*self.shape, bins - 1))

    def extra_repr(self) -> str:
        return f"{self.shape}, bins={self.bins}, bound={self.bound}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        expect_shape(self, x, *self.shape)
        inside = x.abs() < self.bound
        at = torch.where(inside, x, 0)  # results outside are not used, but must not turn a gradient into NaN
        knots_x, knots_z, slopes = self._knots()
        left, bottom, width, height, slope, next_slope = self._bin(at, knots_x, knots_x, knots_z, slopes)
        t = (at - left) / width
        mean_slope = height / width
        bend = slope + next_slope - 2 * mean_slope
        denominator = mean_slope + bend * t * (1 - t)
        z = bottom + height * (mean_slope * t * t + slope * t * (1 - t)) / denominator
        log_slope = _log_slope(t, mean_slope, slope, next_slope, denominator)
        log_slope = torch.where(inside, log_slope, 0)
        z = torch.where(inside, z, x)
        note_knots(
            self.bound,
            z,
            lambda: torch.where(inside, _log_slope_rise(t, mean_slope, slope, next_slope, denominator) / width, 0),
            lambda: _steepest_rise(knots_x, knots_z, slopes),
        )
        note_slopes(log_slope)
        return z, sum_event(log_slope)

    def _fused(self, x: Tensor, *, context: Tensor | None) -> Surrogate | None:
        expect_shape(self, x, *self.shape)
        if not self._kernels_fit(x):
            return None
        from selfnorm.kernels.elementwise.spline import FusedSpline

        return Surrogate.exact(*FusedSpline.apply(x, self.widths, self.heights, self.slopes, self.bound, SPLINE_MINIMUM))

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        expect_shape(self, z, *self.shape)
        inside = z.abs() < self.bound
        at = torch.where(inside, z, 0)
        knots_x, knots_z, slopes = self._knots()
        left, bottom, width, height, slope, next_slope = self._bin(at, knots_z, knots_x, knots_z, slopes)
        mean_slope = height / width
        bend = slope + next_slope - 2 * mean_slope
        rise = at - bottom
        # z as a function of t is a ratio of quadratics, so t solves a·t² + b·t + c = 0; this root avoids cancellation.
        a = height * (mean_slope - slope) + rise * bend
        b = height * slope - rise * bend
        c = -mean_slope * rise
        t = (2 * c / (-b - (b * b - 4 * a * c).clamp_min(0).sqrt())).clamp(0, 1)
        denominator = mean_slope + bend * t * (1 - t)
        log_slope = _log_slope(t, mean_slope, slope, next_slope, denominator)
        return torch.where(inside, left + width * t, z), -sum_event(torch.where(inside, log_slope, 0))

    def _fused_inverse(self, z: Tensor, *, context: Tensor | None) -> Tensor | None:
        expect_shape(self, z, *self.shape)
        if not self._kernels_fit(z):
            return None
        from selfnorm.kernels.elementwise.spline import spline_inverse

        return spline_inverse(z, self.widths, self.heights, self.slopes, self.bound, SPLINE_MINIMUM)

    def _kernels_fit(self, x: Tensor) -> bool:
        slopes = self.slopes if self.bins > 1 else None
        return self.bins <= MAX_FUSED_BINS and usable(x, self.widths, self.heights, slopes)

    def _knots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the knots in x and in z and the slopes there, each (*shape, bins + 1)."""
        # softplus(raw + offset) is about 1 − SPLINE_MINIMUM for a raw slope near 0
        offset = math.log(math.expm1(1 - SPLINE_MINIMUM))
        slopes = F.pad(SPLINE_MINIMUM + F.softplus(self.slopes + offset), (1, 1), value=1.0)
        return self._edges(self.widths), self._edges(self.heights), slopes

    def _edges(self, raw: Tensor) -> Tensor:
        shares = SPLINE_MINIMUM + (1 - SPLINE_MINIMUM * self.bins) * torch.softmax(raw, dim=-1)
        inner = 2 * self.bound * shares[..., :-1].cumsum(-1) - self.bound
        # The last edge is exact, while the sum of the shares is 1 only up to rounding.
        return F.pad(F.pad(inner, (1, 0), value=-self.bound), (0, 1), value=self.bound)

    def _bin(self, value: Tensor, edges: Tensor, knots_x: Tensor, knots_z: Tensor, slopes: Tensor) -> tuple[Tensor, ...]:
        """Returns the bin that each element falls into: left, bottom, width, height, slopes at both ends; each like `value`."""
        index = (value[..., None] >= edges[..., 1:-1]).sum(-1, keepdim=True)
        table = torch.stack(
            [knots_x[..., :-1], knots_z[..., :-1], knots_x.diff(), knots_z.diff(), slopes[..., :-1], slopes[..., 1:]]
        )
        shape = (len(table), *value.shape, self.bins)
        return torch.gather(table.unsqueeze(1).expand(shape), -1, index.expand(len(table), *index.shape)).squeeze(-1).unbind(0)


def _log_slope(t: Tensor, mean_slope: Tensor, slope: Tensor, next_slope: Tensor, denominator: Tensor) -> Tensor:
    """Returns log dz/dx at the position t in [0, 1] within a bin."""
    numerator = next_slope * t * t + 2 * mean_slope * t * (1 - t) + slope * (1 - t) * (1 - t)
    return 2 * mean_slope.log() + numerator.log() - 2 * denominator.log()


def _log_slope_rise(t: Tensor, mean_slope: Tensor, slope: Tensor, next_slope: Tensor, denominator: Tensor) -> Tensor:
    """Returns the derivative of `_log_slope` with respect to t."""
    numerator = next_slope * t * t + 2 * mean_slope * t * (1 - t) + slope * (1 - t) * (1 - t)
    rise = 2 * (next_slope * t + mean_slope * (1 - 2 * t) - slope * (1 - t))
    return rise / numerator - 2 * (slope + next_slope - 2 * mean_slope) * (1 - 2 * t) / denominator


def _steepest_rise(knots_x: Tensor, knots_z: Tensor, slopes: Tensor) -> Tensor:
    """Returns a bound, up to a few per cent, for the derivative of log dz/dx with respect to x, over all bins."""
    widths, left, right = knots_x.diff(), slopes[..., :-1], slopes[..., 1:]
    mean = knots_z.diff() / widths
    return ((2 * mean / torch.minimum(left, right) + 2 * (left + right) / mean) / widths).max()

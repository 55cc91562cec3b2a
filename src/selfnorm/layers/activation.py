"""Fixed nonlinear maps of each element: the smooth leaky ReLU, and the logit."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from selfnorm.bijection import Bijection, Surrogate
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.events import sum_event
from selfnorm.layers.fusable import FusableLayer
from selfnorm.runtime.autograd import is_differentiated, is_vectorised
from selfnorm.runtime.checks import describe, expect_batch
from selfnorm.runtime.rounding import note_bends, note_slopes


class SmoothLeakyReLU(FusableLayer):
    """z = αx + (1 − α)·softplus(x), slope α on the far left and 1 on the far right (Gresele et al., 2020).

    The inverse is Newton's method. The map is convex and lies above both of its asymptotes, so that from x₀ = min(z, z/α), which
    is right of the root, the iterates decrease towards the root without overshooting, for any z.

    >>> layer = SmoothLeakyReLU(alpha=0.3)
    >>> z, log_det = layer(torch.tensor([[-1.0, 0.0, 1.0]]))
    >>> layer.inverse(z)[0].round(decimals=4) + 0.0
    tensor([[-1.,  0.,  1.]])
    """

    takes_context = False
    notes_rounding = True

    def __init__(self, alpha: float = 0.3) -> None:
        super().__init__()
        if not 1e-6 <= alpha <= 1:
            raise ValueError(f"SmoothLeakyReLU: expected alpha in [1e-6, 1], got {alpha}")
        self.alpha = alpha
        # Left of the bend each step gains about one unit of x until the exponential is small compared with α, that is for about
        # log(1/α) steps; from there on convergence is quadratic.
        self._iterations = 3 + math.ceil(math.log(1 / alpha))

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        expect_batch(self, x)
        log_slope = self._slope(x).log()
        note_slopes(log_slope)
        return self._value(x), sum_event(log_slope)

    def _fused(self, x: Tensor, *, context: Tensor | None) -> Surrogate | None:
        expect_batch(self, x)
        if not usable(x):
            return None
        from selfnorm.kernels.elementwise.leaky_relu import FusedSmoothLeakyReLU

        return Surrogate.exact(*FusedSmoothLeakyReLU.apply(x, self.alpha))

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        expect_batch(self, z)
        with torch.no_grad():
            x = torch.minimum(z, z / self.alpha)
            for _ in range(self._iterations):
                x = x - (self._value(x) - z) / self._slope(x)
        # From a constant x, one step has the first derivative of the root, dx/dz = 1/f'(x), and two have the first three.
        for _ in range(2 if is_differentiated(z) else 1):
            x = x - (self._value(x) - z) / self._slope(x)
        return x, -sum_event(self._slope(x).log())

    def _fused_inverse(self, z: Tensor, *, context: Tensor | None) -> Tensor | None:
        expect_batch(self, z)
        if not usable(z):
            return None
        from selfnorm.kernels.elementwise.leaky_relu import leaky_inverse

        return leaky_inverse(z, self.alpha, self._iterations + 1)

    def _value(self, x: Tensor) -> Tensor:
        # softplus switches to the identity above its threshold; the default of 20 would cost 2e-9.
        return self.alpha * x + (1 - self.alpha) * F.softplus(x, threshold=40)

    def _slope(self, x: Tensor) -> Tensor:
        return self.alpha + (1 - self.alpha) * torch.sigmoid(x)


class Logit(Bijection):
    """z = logit(α + (1 − 2α)x): maps the unit interval, squashed a little so that its ends stay finite, to the real line.

    Takes x with α + (1 − 2α)x in (0, 1), so [0, 1] whenever α > 0. `forward` checks that; `surrogate`, which must not wait for
    the device, does not. The inverse stops a few roundings short of the ends of that interval, so `forward` accepts its result.

    >>> Logit(alpha=0.05)(torch.tensor([[0.5, 1.0]]))[0].round(decimals=3)
    tensor([[0.0000, 2.9440]])
    """

    takes_context = False
    notes_rounding = True

    def __init__(self, alpha: float = 1e-6) -> None:
        super().__init__()
        if not 0 <= alpha < 0.5:
            raise ValueError(f"Logit: expected alpha in [0, 0.5), got {alpha}")
        self.alpha = alpha

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        left, right = self._sides(x)
        outside = ~((left > 0) & (right > 0))  # catches NaN too
        if not is_vectorised() and outside.any():
            worst = x[outside]
            raise ValueError(
                f"{describe(self)}: expected values in {'[0, 1]' if self.alpha else '(0, 1)'}, got {worst.numel()} outside it, "
                f"from {worst.min().item():g} to {worst.max().item():g}; scale the data to the unit interval first "
                "(a model built with levels=256 does that for values in [0, 256))"
            )
        note_bends(lambda: x * (1 - 2 * self.alpha) * (1 / right - 1 / left))
        return self._map(left, right)

    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        return Surrogate.exact(*self._map(*self._sides(x)))

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        expect_batch(self, z)
        stretch, eps = 1 - 2 * self.alpha, torch.finfo(z.dtype).eps
        lowest = -self.alpha / stretch * (1 - 4 * eps) if self.alpha else torch.finfo(z.dtype).tiny
        highest = (1 + self.alpha / stretch) * (1 - 4 * eps)
        x = ((torch.sigmoid(z) - self.alpha) / stretch).clamp(lowest, highest)
        # d sigmoid = sigmoid(z)·sigmoid(−z), in logs, where neither factor can vanish
        return x, sum_event(F.logsigmoid(z) + F.logsigmoid(-z) - math.log(stretch))

    def _sides(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the squashed value and one minus it, both without cancellation: near x = 1, 1 − squashed is not exact."""
        expect_batch(self, x)
        stretch = 1 - 2 * self.alpha
        return self.alpha + stretch * x, self.alpha + stretch * (1 - x)

    def _map(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        log_left, log_right = left.log(), right.log()
        log_slope = math.log(1 - 2 * self.alpha) - log_left - log_right
        note_slopes(log_slope)
        return log_left - log_right, sum_event(log_slope)

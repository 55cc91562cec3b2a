"""Bijections of each element by itself: activation, fixed affine map, logit, and per-channel normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfnorm.bijection import Bijection, Surrogate
from selfnorm.kernels.dispatch import usable
from selfnorm.runtime.autograd import refuse_second_derivative
from selfnorm.runtime.checks import count, describe, event_shape, expect_batch, expect_shape


def sum_event(x: Tensor) -> Tensor:
    """The sum over everything but the batch: (N, …) -> (N,)."""
    return x.flatten(1).sum(1)


class SmoothLeakyReLU(Bijection):
    """z = αx + (1 − α)·softplus(x), slope α on the far left and 1 on the far right (Gresele et al., 2020).

    The inverse is Newton's method. The map is convex and lies above both of its asymptotes, so that from x₀ = min(z, z/α), which
    is right of the root, the iterates fall towards it without overshooting, from any z.

    >>> layer = SmoothLeakyReLU(alpha=0.3)
    >>> z, log_det = layer(torch.tensor([[-1.0, 0.0, 1.0]]))
    >>> layer.inverse(z)[0].round(decimals=4) + 0.0
    tensor([[-1.,  0.,  1.]])
    """

    def __init__(self, alpha: float = 0.3) -> None:
        super().__init__()
        if not 1e-6 <= alpha <= 1:
            raise ValueError(f"SmoothLeakyReLU: expected alpha in [1e-6, 1], got {alpha}")
        self.alpha = alpha
        # Left of the bend each step gains about one unit of x until the exponential is small beside α, that is for about
        # log(1/α) steps; from there on convergence is quadratic.
        self._iterations = 3 + math.ceil(math.log(1 / alpha))

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        expect_batch(self, x)
        return self._value(x), sum_event(self._slope(x).log())

    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        expect_batch(self, x)
        if not usable(x):
            return super().surrogate(x, context=context)
        z, log_det = _FusedSmoothLeakyReLU.apply(x, self.alpha)
        return Surrogate.exact(z, log_det)

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        expect_batch(self, z)
        with torch.no_grad():
            x = torch.minimum(z, z / self.alpha)
            for _ in range(self._iterations):
                x = x - (self._value(x) - z) / self._slope(x)
        # One more step, through which the gradient of z flows: dx/dz = 1/f'(x) at the root.
        x = x - (self._value(x) - z) / self._slope(x)
        return x, -sum_event(self._slope(x).log())

    def approx_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        expect_batch(self, z)
        if torch.is_grad_enabled() or not usable(z):
            return super().approx_inverse(z, context=context)
        from selfnorm.kernels.elementwise.activation import leaky_inverse

        return leaky_inverse(_dense(z), self.alpha, self._iterations + 1)

    def _value(self, x: Tensor) -> Tensor:
        # softplus switches to the identity above its threshold; the default of 20 would cost 2e-9.
        return self.alpha * x + (1 - self.alpha) * F.softplus(x, threshold=40)

    def _slope(self, x: Tensor) -> Tensor:
        return self.alpha + (1 - self.alpha) * torch.sigmoid(x)


class Affine(Bijection):
    """z = (x + shift)·scale, fixed. shift, scale: numbers, or tensors that broadcast against one example."""

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: float | Tensor, scale: float | Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", torch.as_tensor(shift, dtype=torch.get_default_dtype()).detach().clone())
        self.register_buffer("scale", torch.as_tensor(scale, dtype=torch.get_default_dtype()).detach().clone())
        if not (torch.isfinite(self.scale) & (self.scale != 0)).all() or not torch.isfinite(self.shift).all():
            raise ValueError(f"Affine: expected a finite shift and a finite scale other than 0, got {shift} and {scale}")

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={value.item():g}" if value.dim() == 0 else f"{name} of shape {tuple(value.shape)}"
            for name, value in (("shift", self.shift), ("scale", self.scale))
        )

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(x)
        return (x + self.shift) * self.scale, self._log_det(x)

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(z)
        return z / self.scale - self.shift, -self._log_det(z)

    def _check(self, x: Tensor) -> None:
        expect_batch(self, x)
        event = x.shape[1:]
        for name, value in (("shift", self.shift), ("scale", self.scale)):
            sides = zip(reversed(value.shape), reversed(event), strict=False)
            if value.dim() > len(event) or any(want not in (1, got) for want, got in sides):
                raise ValueError(
                    f"{describe(self)}: expected examples that a {name} of shape {tuple(value.shape)} broadcasts to, "
                    f"got {tuple(event)}"
                )

    def _log_det(self, x: Tensor) -> Tensor:
        return self.scale.abs().log().expand(x.shape[1:]).sum().repeat(x.shape[0])


class Standardize(Affine):
    """z = (x − mean) / standard deviation of each entry by itself, as `initialize` found them; then fixed, never trained.

    shape: one example's. Buffers: shift = −mean and scale = 1 / standard deviation, the identity until `initialize`.
    """

    initialized: Tensor

    def __init__(self, shape: int | Sequence[int]) -> None:
        shape = event_shape("Standardize", shape)
        super().__init__(torch.zeros(shape), torch.ones(shape))
        self.register_buffer("initialized", torch.tensor(False))

    @torch.no_grad()
    def initialize(self, x: Tensor, *, context: Tensor | None = None) -> None:
        expect_shape(self, x, *self.shift.shape)
        if self.initialized:
            return
        deviation, mean = torch.std_mean(x, 0, correction=0)
        constant = (~(deviation > 0)).flatten().nonzero().flatten().tolist()  # catches NaN too
        if constant:
            raise ValueError(
                f"{describe(self)}: expected entries that vary over the {x.shape[0]} examples to standardise by, got constant "
                f"ones at {constant[:10]}{' …' if len(constant) > 10 else ''} of the flattened example; a constant has no "
                "density, so leave it out"
            )
        self.shift.copy_(-mean)
        self.scale.copy_(1 / deviation)
        self.initialized.fill_(True)


class Logit(Bijection):
    """z = logit(α + (1 − 2α)x): the unit interval, squashed a little so that its ends stay finite, to the real line.

    Takes x with α + (1 − 2α)x in (0, 1), so [0, 1] whenever α > 0. `forward` checks that; `surrogate`, which must not wait on the
    device, does not. The inverse stops a few roundings short of the ends of that interval, so that its result can be scored.

    >>> Logit(alpha=0.05)(torch.tensor([[0.5, 1.0]]))[0].round(decimals=3)
    tensor([[0.0000, 2.9440]])
    """

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
        if outside.any():
            worst = x[outside]
            raise ValueError(
                f"{describe(self)}: expected values in {'[0, 1]' if self.alpha else '(0, 1)'}, got {worst.numel()} outside it, "
                f"from {worst.min().item():g} to {worst.max().item():g}; scale the data to the unit interval first "
                "(a model built with levels=256 does that for values in [0, 256))"
            )
        return self._map(left, right)

    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        z, log_det = self._map(*self._sides(x))
        return Surrogate.exact(z, log_det)

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        expect_batch(self, z)
        stretch, eps = 1 - 2 * self.alpha, torch.finfo(z.dtype).eps
        lowest = -self.alpha / stretch * (1 - 4 * eps) if self.alpha else torch.finfo(z.dtype).tiny
        highest = (1 + self.alpha / stretch) * (1 - 4 * eps)
        x = ((torch.sigmoid(z) - self.alpha) / stretch).clamp(lowest, highest)
        # d sigmoid = sigmoid(z)·sigmoid(−z), in logs, where neither factor can vanish
        return x, sum_event(F.logsigmoid(z) + F.logsigmoid(-z) - math.log(stretch))

    def _sides(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The squashed value and one minus it, each without cancellation: near x = 1, 1 − x is exact but 1 − squashed is not."""
        expect_batch(self, x)
        stretch = 1 - 2 * self.alpha
        return self.alpha + stretch * x, self.alpha + stretch * (1 - x)

    def _map(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        log_left, log_right = left.log(), right.log()
        return log_left - log_right, sum_event(math.log(1 - 2 * self.alpha) - log_left - log_right)


class ActNorm(Bijection):
    """z = (x + shift)·exp(log_scale) for each channel; `initialize` makes a first batch zero-mean and unit-variance.

    Parameters: shift (C,), log_scale (C,), both 0, the identity, until then (Kingma & Dhariwal, 2018). Takes (N, C) or (N, C, …).
    """

    initialized: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = count("ActNorm", "channels", channels)
        self.shift = nn.Parameter(torch.zeros(channels))
        self.log_scale = nn.Parameter(torch.zeros(channels))
        self.register_buffer("initialized", torch.tensor(False))

    def extra_repr(self) -> str:
        return f"{self.channels}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shift, log_scale = self._parameters_for(x)
        return (x + shift) * log_scale.exp(), self._log_det(x)

    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        self._parameters_for(x)  # refuses a wrong shape
        if not usable(x, self.shift, self.log_scale):
            return super().surrogate(x, context=context)
        z, log_det = _FusedActNorm.apply(x, self.shift, self.log_scale)
        return Surrogate.exact(z, log_det)

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._undo(z), -self._log_det(z)

    def approx_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        return self._undo(z)

    def _undo(self, z: Tensor) -> Tensor:
        shift, log_scale = self._parameters_for(z)
        return z * (-log_scale).exp() - shift

    @torch.no_grad()
    def initialize(self, x: Tensor, *, context: Tensor | None = None) -> None:
        self._parameters_for(x)  # refuses a wrong shape
        if self.initialized:
            return
        values = x.transpose(0, 1).flatten(1)
        if not torch.isfinite(values).all():
            raise ValueError(f"{describe(self)}: expected finite values to initialise from, got non-finite ones")
        if values.shape[1] < 2:
            raise ValueError(f"{describe(self)}: expected at least 2 values a channel to initialise from, got {values.shape[1]}")
        self.shift.copy_(-values.mean(1))
        self.log_scale.copy_(-(values.std(1, correction=0) + 1e-6).log())
        self.initialized.fill_(True)

    def _parameters_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dim() < 2 or x.shape[1] != self.channels:
            raise ValueError(f"{describe(self)}: expected an input of shape (N, {self.channels}, …), got {tuple(x.shape)}")
        shape = (self.channels, *[1] * (x.dim() - 2))
        return self.shift.view(shape), self.log_scale.view(shape)

    def _log_det(self, x: Tensor) -> Tensor:
        return (math.prod(x.shape[2:]) * self.log_scale.sum()).repeat(x.shape[0])


class _FusedSmoothLeakyReLU(torch.autograd.Function):
    """x (N, …), α -> z, log_det (N,), one kernel each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        from selfnorm.kernels.elementwise.activation import leaky

        x = _dense(x)
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return leaky(x, alpha)

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        from selfnorm.kernels.elementwise.activation import leaky_backward

        (x,) = ctx.saved_tensors
        return leaky_backward(x, ctx.alpha, _in_order_of(x, grad_z), grad_log_det), None


class _FusedActNorm(torch.autograd.Function):
    """x (N, C, …), shift, log_scale (C,) -> z, log_det (N,): one kernel forward, two backward, in the memory order of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        from selfnorm.kernels.elementwise.activation import actnorm

        x, shift, log_scale = _dense(x), shift.contiguous(), log_scale.contiguous()
        ctx.save_for_backward(x, shift, log_scale)
        return actnorm(x, shift, log_scale)

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        refuse_second_derivative()
        from selfnorm.kernels.elementwise.activation import actnorm_backward

        x, shift, log_scale = ctx.saved_tensors
        return actnorm_backward(x, shift, log_scale, _in_order_of(x, grad_z), grad_log_det)


def _dense(x: Tensor) -> Tensor:
    """x itself if it is contiguous with its channels first or last, else a contiguous copy."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x if last else x.contiguous()


def _in_order_of(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the memory order of the dense x; a copy only if it has another."""
    return grad.contiguous() if x.is_contiguous() else grad.contiguous(memory_format=torch.channels_last)

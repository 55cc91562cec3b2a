"""Unconstrained linear and convolutional maps: the exact path that self-normalizing layers and their exact twins share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfnorm.bijection import Bijection
from selfnorm.kernels.dispatch import usable
from selfnorm.linalg.blocks import BlockForm, Circular, Dense, PerPixel, ZeroPadded
from selfnorm.linalg.convmatrix import Geometry, PaddingMode, convolve, dirac
from selfnorm.linalg.factors import AmortisedLogDet, ExactFactors, FactoredSolve, widen
from selfnorm.runtime.checks import count, describe, expect_like, expect_shape, pair
from selfnorm.runtime.streams import beside

SMALL_BLOCK = 64  # rows of a matrix that a kernel can factorise
PLAIN = Geometry()
Volume = Literal["triangular", "mixing"]

Method = TypeVar("Method", bound=Callable[..., Any])


def in_full_precision(method: Method) -> Method:
    """Keep a method out of autocast: half precision would leave neither a determinant nor a reconstruction to speak of."""

    @wraps(method)
    def run(self: Bijection, x: Tensor, **options: Any) -> Any:
        if not torch.is_autocast_enabled(x.device.type):
            return method(self, x, **options)
        with torch.autocast(x.device.type, enabled=False):
            return method(self, x.to(next(self.parameters()).dtype), **options)

    return cast(Method, run)


def backward_in_full_precision(backward: Method) -> Method:
    """The same for the backward pass of a function, which a loss may be sent through inside of autocast."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> Any:
        if not torch.is_autocast_enabled(gradients[0].device.type):
            return backward(ctx, *gradients)
        with torch.autocast(gradients[0].device.type, enabled=False):
            return backward(ctx, *gradients)

    return cast(Method, run)


def refuse_second_derivative() -> None:
    """Call in the backward pass of a surrogate."""
    if torch.is_grad_enabled():  # only so in a backward pass with create_graph=True
        raise RuntimeError(
            "surrogate: the gradient that training takes has no derivative of its own; differentiate log_prob twice instead"
        )


def drop_kept_inverse(state_dict: dict[str, Any], prefix: str) -> None:
    """Take out of a twin's state what only a layer with a kept inverse has; the rest is the same for all."""
    for name in ("weight_inv", "fallbacks"):
        state_dict.pop(prefix + name, None)


class LinearMap(Bijection):
    """z = Wx + b, W square and unconstrained: the exact map, its inverse and its log-determinant. Abstract.

    The first exact call after a change of the weight factorises W in float64, O(m³) for each block of m rows; each later one
    costs a comparison with a copy of the weight. The factors for `inverse` are kept in eval mode only.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self._factors = ExactFactors()

    def check_shape(self, x: Tensor) -> None:
        """Refuse a batch of the wrong shape."""
        raise NotImplementedError

    def form(self, x: Tensor) -> BlockForm:
        """How W falls into blocks for examples of x's shape."""
        raise NotImplementedError

    def apply_weight(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Wx, without the bias; or another weight's in W's place."""
        raise NotImplementedError

    def broadcast_bias(self) -> Tensor | float:
        """The bias, shaped to be added to a batch; 0 without one."""
        raise NotImplementedError

    def training_weight(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Wx + b for training, by a kernel where one fits, so that it may have no second derivative."""
        return self.apply_weight(x, weight) + self.broadcast_bias()

    def check_input(self, x: Tensor) -> None:
        self.check_shape(x)
        expect_like(self, x, self.weight)

    @in_full_precision
    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.check_input(x)
        return self.apply_weight(x) + self.broadcast_bias(), self._log_abs_det(x)

    @in_full_precision
    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.check_input(z)
        form = self.form(z)
        lu, pivots = self._factors.lu(describe(self), self.weight, form, keep=not self.training)
        log_det = -self._log_abs_det(z)
        if z.shape[0] == 0:
            return z, log_det  # there is nothing to solve, and FFT libraries refuse an empty batch
        # W's blocks are built again only where their gradient is wanted; else the factors stand in for them.
        wants_gradient = torch.is_grad_enabled() and self.weight.requires_grad
        blocks = form.blocks(widen(self.weight)) if wants_gradient else lu
        columns = form.split(widen(z - self.broadcast_bias()))
        x = form.join(FactoredSolve.apply(blocks, columns, lu, pivots))
        return x.to(z), log_det

    def _log_abs_det(self, x: Tensor) -> Tensor:
        """log|det W| for each example of x: exact, and factorised again for its gradient only in a backward pass."""
        form = self.form(x)
        value = self._factors.log_abs_det(describe(self), self.weight, form)
        log_det = AmortisedLogDet.apply(self.weight, value, lambda weight: log_abs_det(widen(weight), form))
        return log_det.to(x).repeat(x.shape[0])


def log_abs_det(weight: Tensor, form: BlockForm) -> Tensor:
    """log|det W| in the weight's own precision, differentiable, unchecked and without waiting on the device."""
    return form.copies * torch.linalg.slogdet(form.blocks(weight)).logabsdet.sum()


def training_log_det(weight: Tensor, form: BlockForm) -> Tensor:
    """The same for training, where small blocks go through a kernel instead of a library that factorises large ones."""
    blocks = form.blocks(weight)
    if blocks.shape[-1] > SMALL_BLOCK or not usable(blocks):
        return log_abs_det(weight, form)
    return form.copies * _SmallLogDet.apply(blocks).sum()


class _SmallLogDet(torch.autograd.Function):
    """log|det| of small matrices (…, m, m), (…)."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor) -> Tensor:
        from selfnorm.kernels.dense.smalldet import small_slogdet

        log_det, inverse_transposed = small_slogdet(blocks)
        ctx.save_for_backward(inverse_transposed)
        return log_det

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        refuse_second_derivative()
        (inverse_transposed,) = ctx.saved_tensors
        return grad[..., None, None] * inverse_transposed


class DenseMap(LinearMap):
    """A D × D matrix W acting on (N, D), started as the paper does: I + Xavier-normal noise of gain 0.01. Abstract."""

    def __init__(self, features: int, bias: bool = True) -> None:
        super().__init__()
        self.features = features = count(type(self).__name__, "features", features)
        self.weight = nn.Parameter(torch.eye(features) + nn.init.xavier_normal_(torch.empty(features, features), gain=0.01))
        self.bias = nn.Parameter(torch.zeros(features)) if bias else None

    def extra_repr(self) -> str:
        return f"{self.features}, bias={self.bias is not None}"

    def check_shape(self, x: Tensor) -> None:
        expect_shape(self, x, self.features)

    def form(self, x: Tensor) -> BlockForm:
        return Dense()

    def apply_weight(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight if weight is None else weight)

    def broadcast_bias(self) -> Tensor | float:
        return 0.0 if self.bias is None else self.bias


class ConvMap(LinearMap):
    """A same-size convolution acting on (N, C, H, W), for any H and W. Abstract.

    Started as the paper does: k×k as the identity's kernel + Xavier-normal noise of gain 0.01, 1×1 as a random rotation.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: PaddingMode = "zeros",
        bias: bool = True,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.channels = count(who, "channels", channels)
        self.kernel_size = odd_kernel(who, "kernel_size", kernel_size)
        if pair(who, "stride", stride) != (1, 1):
            raise ValueError(f"{who}: expected stride 1, got {stride}; a strided convolution is not invertible")
        groups = count(who, "groups", groups)
        if self.channels % groups:
            raise ValueError(f"{who}: expected groups that divide the {channels} channels, got {groups}")
        if padding_mode not in ("zeros", "circular"):
            raise ValueError(f"{who}: expected padding_mode 'zeros' or 'circular', got {padding_mode!r}")
        self.geometry = Geometry(pair(who, "dilation", dilation), groups, padding_mode)
        self.weight = nn.Parameter(_initial_kernel(self.channels, self.kernel_size, groups))
        self.bias = nn.Parameter(torch.zeros(self.channels)) if bias else None

    def extra_repr(self) -> str:
        dilation, groups, padding_mode = self.geometry
        return (
            f"{self.channels}, kernel_size={self.kernel_size}, dilation={dilation}, groups={groups}, "
            f"padding_mode={padding_mode!r}, bias={self.bias is not None}"
        )

    def check_shape(self, x: Tensor) -> None:
        expect_shape(self, x, self.channels, "H", "W")
        self.check_fit("kernel_size", self.kernel_size, x)

    def check_fit(self, name: str, kernel_size: tuple[int, int], x: Tensor) -> None:
        """Refuse a circular kernel that would wrap onto itself."""
        if self.geometry.padding_mode != "circular":
            return
        spans = [step * (taps - 1) + 1 for taps, step in zip(kernel_size, self.geometry.dilation, strict=True)]
        if spans[0] > x.shape[2] or spans[1] > x.shape[3]:
            raise ValueError(
                f"{describe(self)}: expected images of at least {spans[0]}×{spans[1]} for a circular {name} of {kernel_size} "
                f"with dilation {self.geometry.dilation}, got {x.shape[2]}×{x.shape[3]}"
            )

    def form(self, x: Tensor) -> BlockForm:
        size = (x.shape[1], x.shape[2], x.shape[3])
        if self.kernel_size == (1, 1):
            return PerPixel(size, self.geometry.groups)
        return (Circular if self.geometry.padding_mode == "circular" else ZeroPadded)(size, self.geometry)

    def apply_weight(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return convolve(x, self.weight if weight is None else weight, self.geometry)

    def training_weight(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        if FusedConv.takes(x, self.weight, self.bias, self.geometry):
            return FusedConv.apply(x, self.weight if weight is None else weight, self.bias)[0]
        return super().training_weight(x, weight)

    def broadcast_bias(self) -> Tensor | float:
        return 0.0 if self.bias is None else self.bias[:, None, None]


class FusedConv(torch.autograd.Function):
    """x (N, C, H, W), w, b or None -> w ⋆ x + b, and log|det T(w)| (N,) or None, by kernels: one there, two back.

    volume:  what to know of the log-determinant: None, nothing; "triangular", that T(w) is so; "mixing", that w is a 1×1 kernel.
             The last takes one kernel more, beside the others.
    taps:    which entries of w count (bool, like w), or None for all.
    """

    @staticmethod
    def takes(x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry = PLAIN) -> bool:
        """Whether kernels can and should do it: small images, and the plain kind of convolution."""
        if not (geometry == PLAIN or (geometry.groups == 1 and w.shape[2:] == (1, 1))) or not usable(x, w, b):
            return False
        from selfnorm.kernels.conv.plain import fits

        return fits(x, w)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, volume: Volume | None = None, taps: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        from selfnorm.kernels.conv.plain import plain_forward

        log_det: Tensor | None
        inverse_transposed: Tensor | None = None
        if volume == "mixing":
            from selfnorm.kernels.dense.smalldet import repeated_slogdet

            with beside(w):  # nobody needs it before the end
                log_det, inverse_transposed = repeated_slogdet(w.flatten(1), x.shape[2] * x.shape[3], x.shape[0])
            z, _ = plain_forward(x, w, b, taps)
        else:
            z, log_det = plain_forward(x, w, b, taps, volume == "triangular")
        ctx.save_for_backward(x, w, taps, inverse_transposed)
        ctx.has_bias, ctx.has_volume = b is not None, volume is not None
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(
        ctx: Any, grad_z: Tensor, grad_log_det: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor | None, None, None]:
        refuse_second_derivative()
        from selfnorm.kernels.conv.plain import plain_backward

        x, w, taps, inverse_transposed = ctx.saved_tensors
        grad_x, grad_w, grad_b = plain_backward(
            x, w, grad_z, taps, grad_log_det if ctx.has_volume else None, inverse_transposed, ctx.needs_input_grad[0]
        )
        return grad_x, grad_w, grad_b if ctx.has_bias else None, None, None


def convolve_quickly(x: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
    """`convolve`; by a kernel where one fits and nobody asks for a gradient."""
    if torch.is_grad_enabled() or not FusedConv.takes(x, kernel, None, geometry):
        return convolve(x, kernel, geometry)
    from selfnorm.kernels.conv.plain import plain_forward

    return plain_forward(x, kernel, None)[0]


def odd_kernel(who: str, name: str, kernel_size: int | Sequence[int]) -> tuple[int, int]:
    sides = pair(who, name, kernel_size)
    if not all(side % 2 for side in sides):
        raise ValueError(f"{who}: expected odd sides for {name}, got {kernel_size}; an even kernel has no centre")
    return sides


def _initial_kernel(channels: int, kernel_size: tuple[int, int], groups: int) -> Tensor:
    width = channels // groups
    if kernel_size == (1, 1):
        return torch.cat([nn.init.orthogonal_(torch.empty(width, width)) for _ in range(groups)])[:, :, None, None]
    noise = nn.init.xavier_normal_(torch.empty(channels, width, *kernel_size), gain=0.01)
    return dirac(channels, kernel_size, groups) + noise

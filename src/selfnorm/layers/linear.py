"""Unconstrained linear maps, dense and convolutional: the exact methods, and the base class of all training methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfnorm.bijection import Bijection, Surrogate
from selfnorm.kernels.conv.choice import conv_kernels_fit
from selfnorm.linalg.blocks import BlockForm, Circular, Dense, PerPixel, ZeroPadded
from selfnorm.linalg.convmatrix import Geometry, PaddingMode, convolve, dirac
from selfnorm.linalg.factors import AmortisedLogDet, ExactFactors, FactoredSolve, Factorisation, log_abs_det, to_float64
from selfnorm.runtime.autograd import in_full_precision, is_differentiated, is_vectorised
from selfnorm.runtime.checks import describe, expect_like, expect_shape, pair, positive_int
from selfnorm.runtime.rounding import note_bias, note_condition


class LinearMap(Bijection):
    """z = Wx + b, W square and unconstrained: the exact map, its inverse and its log-determinant. Abstract.

    The first exact call after a change of the weight factorises W in float64, O(m³) for each block of m rows; each later one
    costs a comparison with a copy of the weight. The factors for `inverse` are kept in eval mode only.

    The subclass decides how W is trained. `surrogate` is the same for all of them: it returns `_fused(x)`, the surrogate by
    the layer's own kernels, or if that is None `_plain(x)`, the same in separate operations.
    """

    takes_context = False
    notes_rounding = True
    # One example's shape in the last batch, in either direction. Not state: a convolution takes images of any size.
    example_shape: tuple[int, ...] = ()

    weight: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self._factors = ExactFactors()

    def _plain(self, x: Tensor) -> Surrogate:
        """Returns the surrogate computed in separate operations."""
        raise NotImplementedError

    def _fused(self, x: Tensor) -> Surrogate | None:
        """Returns the surrogate by the layer's own kernels, or None where they do not apply."""
        return None

    def check_shape(self, x: Tensor) -> None:
        """Raises ValueError for a batch of the wrong shape."""
        raise NotImplementedError

    def block_form(self, x: Tensor) -> BlockForm:
        """Returns the block form of W for examples of x's shape."""
        raise NotImplementedError

    def apply_weight(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Returns Wx, without the bias, or the same for another weight."""
        raise NotImplementedError

    def broadcast_bias(self) -> Tensor | float:
        """Returns the bias, shaped to be added to a batch; 0 without one."""
        raise NotImplementedError

    def check_input(self, x: Tensor) -> None:
        """Raises ValueError for a batch of the wrong shape, dtype or device; remembers the shape of a right one's examples."""
        self.check_shape(x)
        expect_like(self, x, self.weight)
        if self.example_shape != x.shape[1:]:  # a module takes long to set an attribute
            self.example_shape = tuple(x.shape[1:])

    @final
    @in_full_precision
    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        self.check_input(x)
        fused = self._fused(x)
        return self._plain(x) if fused is None else fused

    @in_full_precision
    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.check_input(x)
        z, log_det = self.apply_weight(x) + self.broadcast_bias(), self._log_abs_det(x)
        note_bias(self.bias, z)
        return z, log_det

    @in_full_precision
    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.check_input(z)
        form = self.block_form(z)
        if is_vectorised():
            x = form.join(
                torch.linalg.solve(form.blocks(to_float64(self.weight)), form.split(to_float64(z - self.broadcast_bias())))
            )
            return x.to(z), -self._log_abs_det(z)
        keep = not self.training
        found = self._factors.factorise(describe(self), self.weight, form, with_lu=True, keep_lu=keep)
        log_det = -self._log_abs_det(z, found)
        if z.shape[0] == 0:
            return z, log_det  # FFT libraries refuse an empty batch
        assert found.lu is not None
        lu, pivots = found.lu
        # W's blocks are rebuilt only if their derivatives are needed; otherwise the factors are enough.
        blocks = form.blocks(to_float64(self.weight)) if is_differentiated(self.weight) else lu
        columns = form.split(to_float64(z - self.broadcast_bias()))
        x = form.join(FactoredSolve.apply(blocks, columns, lu, pivots))
        return x.to(z), log_det

    def _log_abs_det(self, x: Tensor, found: Factorisation | None = None) -> Tensor:
        """Returns log|det W| for each example of x: exact; W is factorised again only in a backward pass, for the gradient.

        found: the factorisation of W; by default the cached one, or a new one. Under vmap there is none, and no check of W.
        """
        form = self.block_form(x)

        def log_det_of(weight: Tensor) -> Tensor:
            return log_abs_det(to_float64(weight), form)

        if is_vectorised():
            return log_det_of(self.weight).to(x).repeat(x.shape[0])
        if found is None:
            found = self._factors.factorise(describe(self), self.weight, form)
        note_condition(self, found.condition, x)
        return AmortisedLogDet.apply(self.weight, found.log_det, log_det_of).to(x).repeat(x.shape[0])


class DenseMap(LinearMap):
    """A D × D matrix W acting on (N, D), initialised as in the paper: I + Xavier-normal noise of gain 0.01. Abstract."""

    def __init__(self, features: int, bias: bool = True) -> None:
        super().__init__()
        self.features = features = positive_int(type(self).__name__, "features", features)
        self.weight = nn.Parameter(torch.eye(features) + nn.init.xavier_normal_(torch.empty(features, features), gain=0.01))
        self.bias = nn.Parameter(torch.zeros(features)) if bias else None

    def extra_repr(self) -> str:
        return f"{self.features}, bias={self.bias is not None}"

    def check_shape(self, x: Tensor) -> None:
        expect_shape(self, x, self.features)

    def block_form(self, x: Tensor) -> BlockForm:
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
        self.channels = positive_int(who, "channels", channels)
        self.kernel_size = odd_kernel(who, "kernel_size", kernel_size)
        if pair(who, "stride", stride) != (1, 1):
            raise ValueError(f"{who}: expected stride 1, got {stride}; a strided convolution is not invertible")
        groups = positive_int(who, "groups", groups)
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
        """Raises ValueError for a circular kernel that would wrap onto itself."""
        if self.geometry.padding_mode != "circular":
            return
        spans = [dilation * (taps - 1) + 1 for taps, dilation in zip(kernel_size, self.geometry.dilation, strict=True)]
        if spans[0] > x.shape[2] or spans[1] > x.shape[3]:
            raise ValueError(
                f"{describe(self)}: expected images of at least {spans[0]}×{spans[1]} for a circular {name} of {kernel_size} "
                f"with dilation {self.geometry.dilation}, got {x.shape[2]}×{x.shape[3]}"
            )

    def block_form(self, x: Tensor) -> BlockForm:
        size = (x.shape[1], x.shape[2], x.shape[3])
        if self.kernel_size == (1, 1):
            return PerPixel(size, self.geometry.groups)
        return (Circular if self.geometry.padding_mode == "circular" else ZeroPadded)(size, self.geometry)

    def apply_weight(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return convolve(x, self.weight if weight is None else weight, self.geometry)

    def broadcast_bias(self) -> Tensor | float:
        return 0.0 if self.bias is None else self.bias[:, None, None]


def convolve_without_gradient(x: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
    """Computes `convolve`, by a kernel where one fits and no gradient is needed."""
    if torch.is_grad_enabled() or not conv_kernels_fit(x, kernel, None, geometry):
        return convolve(x, kernel, geometry)
    from selfnorm.kernels.conv.convolution import conv_forward

    return conv_forward(x, kernel, None)[0]


def drop_stored_inverse(state_dict: dict[str, Any], prefix: str) -> None:
    """Removes from a twin's state what only layers that store an inverse have; the rest is the same for all twins."""
    for name in ("weight_inv", "fallbacks"):
        state_dict.pop(prefix + name, None)


def odd_kernel(who: str, name: str, kernel_size: int | Sequence[int]) -> tuple[int, int]:
    """Returns the two sides of a kernel; raises ValueError unless both are odd."""
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

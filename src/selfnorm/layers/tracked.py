"""Layers whose inverse R ≈ W⁻¹ is updated by linear algebra instead of being learned.

After each optimiser step, which changes W a little, R is updated: by one step of Newton–Schulz, R ← (2I − RW)R, which squares the
error I − RW, or by sketch-and-project, the smallest change that makes R right on a few random vectors. Training then uses the
exact gradient with R in place of W⁻¹: no λ, no reconstruction, no halved gradient. If the error leaves the region in which the
tracker converges, W is factorised again; `fallbacks` counts how often.

R(2I − WR) is the same matrix, and I − WR has the same eigenvalues, if not the same norm. RW is more convenient: its rows are R's,
and if W is a convolution, each row is an image in its usual memory layout.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from selfnorm.bijection import InverseTracker, Surrogate
from selfnorm.kernels.conv.choice import conv_kernels_fit, small_images
from selfnorm.kernels.dispatch import allows_tf32, usable
from selfnorm.layers.linear import ConvMap, DenseMap, convolve_without_gradient
from selfnorm.layers.stored_inverse import StoredInverse
from selfnorm.linalg.blocks import Dense
from selfnorm.linalg.convmatrix import Geometry, convolve, flip, tap_sums
from selfnorm.linalg.factors import invert, to_float64
from selfnorm.linalg.iterations import sketch_and_project, transposed
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.checks import describe, expect_shape, pair, positive_int
from selfnorm.runtime.context import current_step
from selfnorm.runtime.precision import full_float32

Tracker = Literal["newton-schulz", "sketch"]
MAX_DENSE_INVERSE = 4096  # rows of T(w)⁻¹: 64 MiB in float32


class _Tracked(StoredInverse):
    """Tracking for any shape of W: R is the dense inverse (m, m) of the one block that W consists of. Abstract.

    Buffers: weight_inv (m, m); fallbacks, how often W had to be factorised again; residual, ‖I − RW‖_F as
    measured by the last `after_step` before it updated R (an estimate for sketching), and 0 after a factorisation.
    """

    surrogate_is_exact = False
    tracker: Tracker
    rank: int
    fallbacks: Tensor
    residual: Tensor

    def _start_tracking(self, tracker: Tracker, rank: int | None) -> None:
        if tracker not in get_args(Tracker):
            kinds = ", ".join(get_args(Tracker))
            raise ValueError(f"{type(self).__name__}: expected tracker to be one of {kinds}, got {tracker!r}")
        self.tracker = tracker
        inverse = self.inverse_of(to_float64(self.weight.detach())).to(self.weight)
        rows = inverse.shape[0]
        self.rank = min(rows, math.ceil(rows / 8) if rank is None else positive_int(type(self).__name__, "rank", rank))
        self.register_buffer("weight_inv", inverse.contiguous())  # a solver's result is stored column by column
        self.register_buffer("fallbacks", torch.zeros((), dtype=torch.int64))
        self.register_buffer("residual", torch.zeros(()), persistent=False)

    @property
    def inverse_tracker(self) -> InverseTracker:
        return self

    @property
    def draws_after_step(self) -> bool:  # type: ignore[override]
        return self.tracker == "sketch"

    @property
    def reads_inverse_late(self) -> bool:
        """Whether a training step reads R only in its update."""
        raise NotImplementedError

    @property
    def largest_residual(self) -> float:
        """The ‖I − RW‖_F at which W is factorised again.

        Newton–Schulz converges below 1. Sketching converges from anywhere, but an R that is off by a tenth in every direction
        gives no useful gradient.
        """
        return 1.0 if self.tracker == "newton-schulz" else 0.1 * math.sqrt(self.weight_inv.shape[0])

    def multiply(self, columns: Tensor) -> Tensor:
        """Returns W times columns (m, n)."""
        raise NotImplementedError

    def multiply_rows(self, rows: Tensor) -> Tensor:
        """Rows (n, m) times W."""
        raise NotImplementedError

    def log_det_gradient(self, R: Tensor, scale: Tensor) -> Tensor:
        """Returns the weight's gradient of scale·log|det W| for R = W⁻¹: scale·Rᵀ, summed over entries that share a weight."""
        raise NotImplementedError

    def _fused_error(self) -> tuple[Tensor, Tensor] | None:
        """Returns I − RW and partial sums of its squares by one kernel, or None if there is none for this layer."""
        raise NotImplementedError

    def _plain(self, x: Tensor) -> Surrogate:
        z = self.apply_weight(x) + self.broadcast_bias()
        return Surrogate.exact(z, _TrackedLogDet.apply(self.weight, self.weight_inv, self.log_det_gradient, x.shape[0]))

    def write_residual_to(self, entry: Tensor) -> None:
        self.residual = entry

    def after_step(self, *, generator: torch.Generator | None = None) -> None:
        """Updates R for the new W, and factorises W if R is lost. Waits for the device: a lost R gives a wrong gradient.

        While a graph is captured, it neither waits nor checks: `join` the step before you read R or residual, and call
        `recompute_if_lost` after replays.
        """
        step = current_step()
        with torch.autocast(self.weight.device.type, enabled=False):  # which would round R to half precision
            with step.on_side_stream():  # layers need not wait for each other
                self.track(generator=generator)
            if not (self.weight.is_cuda and torch.cuda.is_current_stream_capturing()):
                step.join()
                self.recompute_if_lost()

    @torch.no_grad()
    def track(self, *, generator: torch.Generator | None = None) -> None:
        """Updates R for the new W, without waiting for the device. A lost R stays unchanged until `recompute_if_lost`."""
        R = self.weight_inv
        if self.tracker == "newton-schulz":
            if usable(self.weight, R, self.residual) and R.is_contiguous() and R.numel() < 2**30:
                from selfnorm.kernels.dense.tracking import newton_schulz_update

                newton_schulz_update(R, *self.error(), self.residual, self.largest_residual)
                return
            with full_float32():
                excess = self.multiply_rows(R)
            excess.diagonal().sub_(1)
            residual = torch.linalg.vector_norm(excess)
            updated = torch.addmm(R, excess, R, alpha=-1)  # (2I − RW)R, given RW − I
        else:
            Q = torch.randn(R.shape[0], self.rank, generator=generator, dtype=R.dtype, device=R.device)
            with full_float32():
                WQ = self.multiply(Q)
                missing = Q - R @ WQ
            # ‖(I − RW)Q‖² is on average τ·‖I − RW‖² for white Q.
            residual = torch.linalg.vector_norm(missing) / math.sqrt(self.rank)
            updated = sketch_and_project(R, missing, WQ)
            # A small estimate must not hide an R that was lost before and has not been replaced.
            residual = torch.where(self.residual < self.largest_residual, residual, self.residual)
        self.residual.copy_(residual)
        torch.where(residual < self.largest_residual, updated, R, out=self.weight_inv)

    def error(self) -> tuple[Tensor, Tensor]:
        """Returns I − RW and partial sums of its squares, by kernels."""
        fused = self._fused_error()
        if fused is not None:
            return fused
        from selfnorm.kernels.dense.tracking import error_of

        with full_float32():
            product = self.multiply_rows(self.weight_inv)
        return error_of(product)

    @torch.no_grad()
    def recompute_if_lost(self) -> None:
        """Factorises W if `residual` says that R is lost; waits for the device."""
        residual = float(self.residual)
        if residual < self.largest_residual:  # false for NaN
            return
        self.weight_inv.copy_(self.inverse_of(to_float64(self.weight)))
        self.residual.zero_()
        self.fallbacks += 1
        if int(self.fallbacks) == 1:
            warnings.warn(
                f"{describe(self)}: ‖I − RW‖ was {residual:.2g} after a step, above {self.largest_residual:.2g}, where "
                f"{self.tracker} cannot keep up; W was factorised again. Further cases are only counted, in .fallbacks. If there "
                "are many, the learning rate is too large, or W too ill-conditioned for its precision",
                RuntimeWarning,
                stacklevel=3,
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if prefix + "weight" in state_dict and prefix + "fallbacks" not in state_dict:
            # A twin's state: drop its learned inverse, so that the exact one is computed.
            state_dict.pop(prefix + "weight_inv", None)
            state_dict[prefix + "fallbacks"] = torch.zeros_like(self.fallbacks)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        # The residual was measured at other weights. A layer built on the meta device has no memory for it yet.
        reset = torch.zeros_like(self.residual, device=self.weight.device)
        self.residual = reset if self.residual.is_meta else self.residual.copy_(reset)


class TrackedLinear(_Tracked, DenseMap):
    """z = Wx + b, W any D × D matrix, whose inverse R is tracked: the exact gradient up to ‖I − RW‖, without a factorisation.

    tracker:  "newton-schulz", 4D³ operations per step in two matrix products, or "sketch", 6τD² with τ = `rank`, D/8 by default.
    Parameters: weight (D, D), bias (D,), those of `ExactLinear`. Buffers: weight_inv (D, D), fallbacks. Call `after_step()` after
    each optimiser step, and after any other change of the weight, such as by averaging. `forward` and `inverse` are exact.

    >>> layer = TrackedLinear(3)
    >>> with torch.no_grad():
    ...     _ = layer.weight.add_(0.01 * torch.randn(3, 3))
    >>> layer.after_step()
    >>> bool((layer.weight_inv @ layer.weight - torch.eye(3)).norm() < 0.01)
    True
    """

    def __init__(self, features: int, bias: bool = True, tracker: Tracker = "newton-schulz", *, rank: int | None = None) -> None:
        super().__init__(features, bias)
        self._start_tracking(tracker, rank)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tracker={self.tracker!r}"

    @property
    def reads_inverse_late(self) -> bool:
        return True  # the product with Rᵀ is part of the update

    def _fused(self, x: Tensor) -> Surrogate | None:
        if not usable(x, self.weight, self.weight_inv, self.bias):
            return None
        from selfnorm.kernels.dense.tracking import FusedTrackedLinear

        return Surrogate.exact(*FusedTrackedLinear.apply(x, self.weight, self.bias, self.weight_inv, current_step()))

    def multiply(self, columns: Tensor) -> Tensor:
        return self.weight @ columns

    def multiply_rows(self, rows: Tensor) -> Tensor:
        return rows @ self.weight

    def _fused_error(self) -> tuple[Tensor, Tensor] | None:
        if not allows_tf32():  # then cuBLAS is as fast as the hardware allows
            return None
        from selfnorm.kernels.dense.tracking import error_of_matrix

        return error_of_matrix(self.weight_inv, self.weight)

    def log_det_gradient(self, R: Tensor, scale: Tensor) -> Tensor:
        return transposed(R).mul_(scale)

    def multiply_inverse(self, R: Tensor, z: Tensor) -> Tensor:
        return z @ R.mT

    def inverse_of(self, weight: Tensor) -> Tensor:
        return invert(describe(self), weight, Dense())


class TrackedConv2d(_Tracked, ConvMap):
    """z = w ⋆ x + b, a same-size convolution with zero padding on images of a fixed size, whose inverse is tracked.

    size:     (H, W) of the images.
    tracker:  as in `TrackedLinear`.
    For a 1×1 kernel R is the inverse of its C × C matrix. For a k×k kernel it is all of T(w)⁻¹, dense, with D = C·H·W ≤ 4096
    rows: under zero padding no kernel of any size is the exact inverse, but a dense matrix is. T(w) itself is never built: its
    products are convolutions, so that Newton–Schulz takes one product of D³. Parameters: weight (C, C, kh, kw), bias (C,), those
    of `ExactConv2d`. Buffers: weight_inv, (C, C) or (D, D), fallbacks. Call `after_step()` after each optimiser step.

    >>> layer = TrackedConv2d(2, 3, size=(4, 4))
    >>> layer.weight_inv.shape
    torch.Size([32, 32])
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int | Sequence[int],
        size: int | Sequence[int],
        tracker: Tracker = "newton-schulz",
        *,
        bias: bool = True,
        rank: int | None = None,
    ) -> None:
        super().__init__(channels, kernel_size, bias=bias)
        self.size = pair("TrackedConv2d", "size", size)
        dimensions = self.channels * math.prod(self.size)
        if self.kernel_size != (1, 1) and dimensions > MAX_DENSE_INVERSE:
            raise ValueError(
                f"TrackedConv2d: expected at most {MAX_DENSE_INVERSE} dimensions, since T(w)⁻¹ is a dense matrix, got "
                f"{dimensions} ({self.channels}×{self.size[0]}×{self.size[1]}); use SelfNormConv2d there"
            )
        self._start_tracking(tracker, rank)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.channels}, kernel_size={self.kernel_size}, size={self.size}, bias={bias}, tracker={self.tracker!r}"

    def check_shape(self, x: Tensor) -> None:
        expect_shape(self, x, self.channels, *self.size)

    @property
    def reads_inverse_late(self) -> bool:
        return False  # the forward pass sums R's entries tap by tap

    def _fused(self, x: Tensor) -> Surrogate | None:
        if not usable(x, self.weight, self.weight_inv, self.bias) or not conv_kernels_fit(x, self.weight, self.bias):
            return None
        from selfnorm.kernels.conv.tracked import FusedTrackedConv2d

        return Surrogate.exact(*FusedTrackedConv2d.apply(x, self.weight, self.bias, self.weight_inv))

    def multiply(self, columns: Tensor) -> Tensor:
        if self.kernel_size == (1, 1):
            return self.weight.flatten(1) @ columns
        images = columns.mT.unflatten(1, (self.channels, *self.size))
        return self.apply_weight(images).flatten(1).mT

    def multiply_rows(self, rows: Tensor) -> Tensor:
        if self.kernel_size == (1, 1):
            return rows @ self.weight.flatten(1)
        images = rows.unflatten(1, (self.channels, *self.size))
        return convolve(images, flip(self.weight), self.geometry).flatten(1)

    def _fused_error(self) -> tuple[Tensor, Tensor] | None:
        if self.kernel_size == (1, 1) or not small_images(self.weight_inv.view(-1, self.channels, *self.size), self.weight):
            return None
        from selfnorm.kernels.conv.tracked import error_of_convolution

        return error_of_convolution(self.weight_inv, self.weight, self.size)

    def log_det_gradient(self, R: Tensor, scale: Tensor) -> Tensor:
        if self.kernel_size == (1, 1):
            return (math.prod(self.size) * scale * R.mT)[:, :, None, None]
        return scale * tap_sums(R.mT[None], self.kernel_size, self.size, self.geometry)

    def multiply_inverse(self, R: Tensor, z: Tensor) -> Tensor:
        if self.kernel_size == (1, 1):
            return convolve_without_gradient(z, R[:, :, None, None], Geometry())
        return (z.flatten(1) @ R.mT).view_as(z)

    def inverse_of(self, weight: Tensor) -> Tensor:
        example = weight.new_empty(1, self.channels, *self.size)
        return invert(describe(self), weight, self.block_form(example))[0]


class _TrackedLogDet(torch.autograd.Function):
    """weight, R, log_det_gradient, N -> zeros (N,) whose gradient for the weight is that of log|det W|, with R for W⁻¹."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, R: Tensor, log_det_gradient: Callable[..., Tensor], examples: int) -> Tensor:
        ctx.save_for_backward(R)
        ctx.log_det_gradient = log_det_gradient
        return R.new_zeros(examples)

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        (R,) = ctx.saved_tensors
        return ctx.log_det_gradient(R, grad.sum()), None, None, None

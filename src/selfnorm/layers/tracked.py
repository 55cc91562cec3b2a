"""Layers whose inverse R is kept up with W by linear algebra instead of being learned.

After each optimiser step W has moved a little, and R follows: by one step of Newton–Schulz, R ← R(2I − WR), which squares the
error I − WR, or by sketch-and-project, the least change that makes R right on a few random vectors. Training then uses the exact
gradient with R in place of W⁻¹: no λ, no reconstruction, no half of the gradient. An error that has left the region in which its
tracker converges is met by a fresh factorisation, and counted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from selfnorm.bijection import Surrogate
from selfnorm.blocks import Dense
from selfnorm.checks import count, describe, expect_shape, pair
from selfnorm.convmatrix import tap_sums
from selfnorm.factored import Collector, SingleRecord, collector_for
from selfnorm.inverses import invert, sketch_and_project, transposed, widen
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.kept import KeptInverse
from selfnorm.layers.linear import ConvMap, DenseMap, backward_in_full_precision, in_full_precision, refuse_second_derivative

Tracker = Literal["newton-schulz", "sketch"]
LARGEST = 4096  # rows of a T(w) whose inverse is kept dense: 64 MiB in float32


class _Tracked(KeptInverse):
    """What tracking is, whatever the shape of W: R is the dense inverse (m, m) of the one block that W is made of. Abstract.

    Buffers: weight_inv (m, m); fallbacks, how often R had to be factorised anew; residual, ‖I − WR‖_F as the last
    `after_step` found it, before R followed (for sketching an estimate), and 0 after a factorisation.
    """

    surrogate_is_exact = False
    tracker: Tracker
    rank: int
    fallbacks: Tensor
    residual: Tensor

    def _start_tracking(self, tracker: Tracker, rank: int | None) -> None:
        if tracker not in get_args(Tracker):
            raise ValueError(
                f"{type(self).__name__}: expected tracker to be one of {', '.join(get_args(Tracker))}, got {tracker!r}"
            )
        self.tracker = tracker
        inverse = self.inverse_of(widen(self.weight.detach())).to(self.weight)
        rows = inverse.shape[0]
        self.rank = min(rows, math.ceil(rows / 8) if rank is None else count(type(self).__name__, "rank", rank))
        self.register_buffer("weight_inv", inverse)
        self.register_buffer("fallbacks", torch.zeros((), dtype=torch.int64))
        self.register_buffer("residual", torch.zeros(()), persistent=False)

    @property
    def draws(self) -> bool:
        """Whether `after_step` draws random numbers."""
        return self.tracker == "sketch"

    @property
    def largest_residual(self) -> float:
        """The ‖I − WR‖_F from which on R is factorised anew.

        Newton–Schulz converges below 1. Sketching converges from anywhere, but an R that is off by a tenth in every direction is
        of no use for a gradient.
        """
        return 1.0 if self.tracker == "newton-schulz" else 0.1 * math.sqrt(self.weight_inv.shape[0])

    def multiply(self, columns: Tensor) -> Tensor:
        """W times columns (m, n)."""
        raise NotImplementedError

    def pull_back(self, matrix: Tensor) -> Tensor:
        """The weight's gradient, given that of W as a matrix (m, m), summed over all its copies."""
        raise NotImplementedError

    @in_full_precision
    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        self.check_input(x)
        z = self.apply_weight(x) + self.broadcast_bias()
        log_det = _LogDetOfTracked.apply(self.weight, self.weight_inv, self.pull_back, x.shape[0])
        return Surrogate(z, log_det, x.new_zeros(x.shape[0], 0))

    def after_step(self, *, generator: torch.Generator | None = None) -> None:
        """Let R follow W, and where it cannot, factorise. Reads the device, at each step: an R that is lost is no gradient."""
        with torch.autocast(self.weight.device.type, enabled=False):  # which would round R to half precision
            self.track(generator=generator)
            if not (self.weight.is_cuda and torch.cuda.is_current_stream_capturing()):  # who replays the graph has to look
                self.settle()

    @torch.no_grad()
    def track(self, *, generator: torch.Generator | None = None) -> None:
        """Let R follow W, without waiting on the device. Where R is too far off it stays as it is, for `settle` to replace."""
        R = self.weight_inv
        if self.tracker == "newton-schulz":
            excess = self.multiply(R)
            excess.diagonal().sub_(1)
            residual = torch.linalg.vector_norm(excess)
            followed = torch.addmm(R, R, excess, alpha=-1)  # R(2I − WR), given WR − I
        else:
            Q = torch.randn(R.shape[0], self.rank, generator=generator, dtype=R.dtype, device=R.device)
            WQ = self.multiply(Q)
            missing = Q - R @ WQ
            # ‖(I − RW)Q‖² is on average τ·‖I − RW‖² for white Q.
            residual = torch.linalg.vector_norm(missing) / math.sqrt(self.rank)
            followed = sketch_and_project(R, missing, WQ)
        self.residual.copy_(residual)
        torch.where(residual < self.largest_residual, followed, R, out=self.weight_inv)

    @torch.no_grad()
    def settle(self) -> None:
        """Factorise W if its R was found too far off; reads the device."""
        residual = float(self.residual)
        if residual < self.largest_residual:  # a NaN is not
            return
        self.weight_inv.copy_(self.inverse_of(widen(self.weight)))
        self.residual.zero_()
        self.fallbacks += 1
        if int(self.fallbacks) == 1:
            warnings.warn(
                f"{describe(self)}: ‖I − WR‖ was {residual:.2g} after a step, above {self.largest_residual:.2g}, where "
                f"{self.tracker} does not keep up; R was factorised anew. From now on only counted, in .fallbacks. If it is "
                "often, the learning rate is too large, or W too ill-conditioned for its precision",
                RuntimeWarning,
                stacklevel=3,
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if prefix + "weight" in state_dict and prefix + "fallbacks" not in state_dict:
            # A twin's state. Whatever inverse it brings was learned: compute our own.
            state_dict.pop(prefix + "weight_inv", None)
            state_dict[prefix + "fallbacks"] = torch.zeros_like(self.fallbacks)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class TrackedLinear(_Tracked, DenseMap):
    """z = Wx + b, W any D × D matrix, whose inverse R is tracked: the exact gradient up to ‖I − WR‖, without a factorisation.

    tracker:  "newton-schulz", 4D³ operations a step in two matrix products, or "sketch", 6τD² with τ = `rank`, D/8 by default.
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

    @in_full_precision
    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        if not usable(x, self.weight, self.weight_inv, self.bias):
            return super().surrogate(x, context=context)
        self.check_input(x)
        z, log_det = _FusedTrackedLinear.apply(x, self.weight, self.bias, self.weight_inv, collector_for(self.weight))
        return Surrogate(z, log_det, x.new_zeros(x.shape[0], 0))

    def multiply(self, columns: Tensor) -> Tensor:
        return self.weight @ columns

    def pull_back(self, matrix: Tensor) -> Tensor:
        return matrix

    def apply_inverse(self, z: Tensor) -> Tensor:
        return z @ self.weight_inv.mT

    def inverse_of(self, weight: Tensor) -> Tensor:
        return invert(describe(self), weight, Dense())


class TrackedConv2d(_Tracked, ConvMap):
    """z = w ⋆ x + b, a same-size convolution with zero padding on images of a fixed size, whose inverse is tracked.

    size:     (H, W) of the images.
    tracker:  as in `TrackedLinear`.
    For a 1×1 kernel R is the inverse of its C × C matrix. For a k×k kernel it is all of T(w)⁻¹, dense, with D = C·H·W ≤ 4096
    rows: no kernel of any size can be the inverse under zero padding, the matrix can. T(w) itself is never built: its products
    are convolutions, so that Newton–Schulz takes one product of D³. Parameters: weight (C, C, kh, kw), bias (C,), those of
    `ExactConv2d`. Buffers: weight_inv, (C, C) or (D, D), fallbacks. Call `after_step()` after each optimiser step.

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
        if self.kernel_size != (1, 1) and dimensions > LARGEST:
            raise ValueError(
                f"TrackedConv2d: expected at most {LARGEST} dimensions, since T(w)⁻¹ is kept as a dense matrix, got {dimensions} "
                f"({self.channels}×{self.size[0]}×{self.size[1]}); use SelfNormConv2d there"
            )
        self._start_tracking(tracker, rank)

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}, size={self.size}, bias={self.bias is not None}" + (
            f", tracker={self.tracker!r}"
        )

    def check_shape(self, x: Tensor) -> None:
        expect_shape(self, x, self.channels, *self.size)

    def multiply(self, columns: Tensor) -> Tensor:
        if self.kernel_size == (1, 1):
            return self.weight.flatten(1) @ columns
        images = columns.mT.unflatten(1, (self.channels, *self.size))
        return self.apply_weight(images).flatten(1).mT

    def pull_back(self, matrix: Tensor) -> Tensor:
        if self.kernel_size == (1, 1):
            return math.prod(self.size) * matrix[:, :, None, None]
        return tap_sums(matrix[None], self.kernel_size, self.size, self.geometry)

    def apply_inverse(self, z: Tensor) -> Tensor:
        if self.kernel_size == (1, 1):
            return F.conv2d(z, self.weight_inv[:, :, None, None])
        return (z.flatten(1) @ self.weight_inv.mT).view_as(z)

    def inverse_of(self, weight: Tensor) -> Tensor:
        example = weight.new_empty(1, self.channels, *self.size)
        return invert(describe(self), weight, self.form(example))[0]


class _LogDetOfTracked(torch.autograd.Function):
    """weight, R, pull_back, N -> zeros (N,) whose gradient for the weight is that of log|det W|, with R for W⁻¹."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, R: Tensor, pull_back: Callable[[Tensor], Tensor], examples: int) -> Tensor:
        ctx.save_for_backward(R)
        ctx.pull_back = pull_back
        return R.new_zeros(examples)

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        (R,) = ctx.saved_tensors
        return ctx.pull_back(transposed(R).mul_(grad.sum())), None, None, None


class _FusedTrackedLinear(torch.autograd.Function):
    """x (N, D), W, b (D,) or None, R -> Wx + b and the zeros above, by kernels: 2 products in 2 launches.

    The third, W's gradient, goes to a collector as factors, if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, b: Tensor | None, R: Tensor, collector: Collector | None
    ) -> tuple[Tensor, Tensor]:
        from selfnorm.kernels.products import affine

        log_det = x.new_empty(x.shape[0])
        _, z = affine(x, W, b, zeros=log_det)
        ctx.save_for_backward(x, W, R)
        ctx.collector, ctx.weight = collector, W
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(
        ctx: Any, grad_z: Tensor, grad_log_det: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        refuse_second_derivative()
        from selfnorm.kernels.products import times

        x, W, R = ctx.saved_tensors
        grad_x = times(grad_z, W)[0] if ctx.needs_input_grad[0] else None
        grad_b = grad_z.sum(0) if ctx.needs_input_grad[2] else None
        record = SingleRecord(ctx.weight, grad_z, x, R, True, grad_log_det)
        if ctx.collector is not None and ctx.needs_input_grad[1]:
            ctx.collector.append(record)
            return grad_x, None, grad_b, None, None
        return grad_x, record.gradients()[0], grad_b, None, None

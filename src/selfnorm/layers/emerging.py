"""Convolutions with a triangular T(w), and the emerging convolution that two of them make (Hoogeboom et al., 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfnorm.bijection import Chain, Surrogate, located
from selfnorm.kernels.conv.choice import DEFAULT_GEOMETRY, conv_kernels_fit
from selfnorm.layers.exact import Conv1x1
from selfnorm.layers.fusable import FusableLayer
from selfnorm.layers.linear import odd_kernel
from selfnorm.linalg.condition import KnownCondition, estimate_norm, norm_probes
from selfnorm.linalg.convmatrix import Geometry, conv_matrix, convolve, dirac, flip, kernel_gradient
from selfnorm.linalg.factors import SingularWeightError, to_float64
from selfnorm.runtime.autograd import in_full_precision, is_vectorised
from selfnorm.runtime.checks import describe, expect_like, expect_shape, positive_int
from selfnorm.runtime.context import current_step
from selfnorm.runtime.rounding import note_condition

Mask = Literal["quadrant", "raster"]
# Images are solved by rows if a row has at most this many values, C·W, and by fronts otherwise. Time by rows divided by time by
# fronts, on one CPU core: 0.35 to 1 for rows up to this length, except 1.3 for 1×64×64 at batch 100; 1.1 to 1.6 for rows of 96
# values or more at batch 100.
MAX_ROW_LENGTH = 64


class AutoregressiveConv2d(FusableLayer):
    """z = w ⋆ x + b with T(w) triangular: each output reads its own input and later ones, ordered by pixel, then by channel.

    With mask "quadrant", later pixels are those neither above nor to the left; with "raster", all that follow in reading order.
    `mirrored` reverses the order, in space and in channels. log|det| = H·W·Σ_c log|w[c, c, centre]|.
    Parameters: weight (C, C, kh, kw), the identity's kernel + Xavier-normal noise of gain 0.01 at first, of which only the
    entries in the mask count; bias (C,). `inverse` is a substitution in float64 at the cost of a convolution. It takes H + W − 1
    sequential rounds, (kw//2 + 1)·(H − 1) + W with "raster", or H if rows are short. Its error can grow exponentially with the
    image's sides if the other taps outweigh the centre.

    >>> layer = AutoregressiveConv2d(2, 3)
    >>> x = torch.randn(5, 2, 6, 4)
    >>> z, log_det = layer(x)
    >>> bool(torch.allclose(layer.inverse(z)[0], x, atol=1e-5))
    True
    """

    takes_context = False
    notes_rounding = True
    tap_mask: Tensor

    def __init__(
        self,
        channels: int,
        kernel_size: int | Sequence[int] = 3,
        mirrored: bool = False,
        bias: bool = True,
        *,
        mask: Mask = "quadrant",
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.channels = positive_int(who, "channels", channels)
        self.kernel_size = odd_kernel(who, "kernel_size", kernel_size)
        if mask not in ("quadrant", "raster"):
            raise ValueError(f"{who}: expected mask 'quadrant' or 'raster', got {mask!r}")
        self.mirrored = mirrored
        self.mask: Mask = mask
        noise = nn.init.xavier_normal_(torch.empty(self.channels, self.channels, *self.kernel_size), gain=0.01)
        self.weight = nn.Parameter(dirac(self.channels, self.kernel_size) + noise)
        self.bias = nn.Parameter(torch.zeros(self.channels)) if bias else None
        self.register_buffer("tap_mask", self._make_mask(), persistent=False)
        self._condition = KnownCondition()

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, kernel_size={self.kernel_size}, mirrored={self.mirrored}, bias={self.bias is not None}, "
            f"mask={self.mask!r}"
        )

    @in_full_precision
    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_input(x)
        return self._apply_weight(x), self._exact_log_det(x)

    @in_full_precision
    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_input(z)
        log_det = -self._exact_log_det(z)
        if z.shape[0] == 0:
            return z, log_det  # nothing to solve
        x = AutoregressiveSolve.apply(
            to_float64(z - self._broadcast_bias()), to_float64(self._kernel()), self.mirrored, self.mask
        ).to(z)
        if not is_vectorised() and not torch.isfinite(x.sum()) and torch.isfinite(z.sum()) and torch.isfinite(self.weight.sum()):
            raise ValueError(
                f"{describe(self)}: expected an inverse that {z.dtype} can hold, got non-finite values from finite ones: the "
                "other taps outweigh the centre, and errors grow exponentially along the image"
            )
        return x, log_det

    @in_full_precision
    def _fused(self, x: Tensor, *, context: Tensor | None) -> Surrogate | None:
        self._check_input(x)
        if not conv_kernels_fit(x, self.weight, self.bias):
            return None
        from selfnorm.kernels.conv.convolution import FusedConv

        return Surrogate.exact(*FusedConv.apply(x, self.weight, self.bias, "triangular", self.tap_mask))

    @in_full_precision
    def _plain(self, x: Tensor, *, context: Tensor | None) -> Surrogate:
        return Surrogate.exact(self._apply_weight(x), _triangular_log_det(self._diagonal(), x))

    def _make_mask(self) -> Tensor:
        tap_mask = autoregressive_mask(self.channels, self.kernel_size, self.mask)
        return tap_mask.flip(0, 1, 2, 3) if self.mirrored else tap_mask

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # A layer built on the meta device has no mask yet; with assign=True even its memory is missing.
        if self.tap_mask.is_meta:
            with torch.device("cpu"):  # the default device may still be meta
                mask = self._make_mask()
            self.tap_mask = mask.to(self.weight.device)
        else:
            self.tap_mask.copy_(self._make_mask())

    def _check_input(self, x: Tensor) -> None:
        expect_shape(self, x, self.channels, "H", "W")
        expect_like(self, x, self.weight)

    def _kernel(self) -> Tensor:
        return torch.where(self.tap_mask, self.weight, 0.0)

    def _broadcast_bias(self) -> Tensor | float:
        return 0.0 if self.bias is None else self.bias[:, None, None]

    def _apply_weight(self, x: Tensor) -> Tensor:
        return convolve(x, self._kernel(), DEFAULT_GEOMETRY) + self._broadcast_bias()

    def _diagonal(self) -> Tensor:
        """Returns T(w)'s diagonal at one pixel (C,); it is the same at every pixel."""
        return self.weight[:, :, self.kernel_size[0] // 2, self.kernel_size[1] // 2].diagonal()

    def _exact_log_det(self, x: Tensor) -> Tensor:
        diagonal = self._diagonal()
        zeros = 0 if is_vectorised() else int((diagonal == 0).sum())
        if zeros:
            raise SingularWeightError(
                f"{describe(self)}: expected an invertible weight, got a singular one ({zeros} of {diagonal.numel()} entries "
                "on the diagonal of its centre are 0); it has no exact inverse and no finite log-determinant"
            )
        if current_step().rounding is not None:
            shape = tuple(x.shape[1:])
            estimate = partial(self._estimate_condition, shape)
            note_condition(self, self._condition.of(self._kernel(), shape, estimate), x)
        return _triangular_log_det(to_float64(diagonal), x)

    def _estimate_condition(self, shape: tuple[int, ...], kernel: Tensor) -> Tensor:
        """Returns an estimate of the condition number of T(w) for examples of a shape (C, H, W)."""
        w, mirrored, mask = to_float64(kernel), self.mirrored, self.mask

        def of_columns(operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda v: operation(v.mT.unflatten(1, shape)).flatten(1).mT

        probes = norm_probes(math.prod(shape), w)
        largest = estimate_norm(
            of_columns(lambda x: convolve(x, w, DEFAULT_GEOMETRY)),
            of_columns(lambda x: convolve(x, flip(w), DEFAULT_GEOMETRY)),
            probes,
        )
        smallest = estimate_norm(
            of_columns(lambda z: AutoregressiveSolve.apply(z, w, mirrored, mask)),
            of_columns(lambda z: AutoregressiveSolve.apply(z, flip(w), not mirrored, mask)),
            probes,
        )
        return largest * smallest


class EmergingConv2d(Chain):
    """A k×k convolution made of triangular parts: two autoregressive ones with opposite masks, after a 1×1 if `mix`.

    With mask "quadrant" the two together read the k×k pixels around each pixel, in all channels; with "raster" also some next to
    them. The parts are a `Conv1x1` and two `AutoregressiveConv2d`, the last of which has a bias. Log-determinants are exact and
    cost O(C³), and `inverse` inverts one part after another. Hoogeboom et al. (2019), "Emerging convolutions for generative
    normalizing flows".

    >>> layer = EmergingConv2d(2)
    >>> z, log_det = layer(torch.randn(5, 2, 8, 6))
    >>> z.shape, log_det.shape
    (torch.Size([5, 2, 8, 6]), torch.Size([5]))
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int | Sequence[int] = 3,
        mix: bool = True,
        *,
        mask: Mask = "quadrant",
    ) -> None:
        with located(type(self).__name__):
            super().__init__(
                *([Conv1x1(channels)] if mix else []),
                AutoregressiveConv2d(channels, kernel_size, bias=False, mask=mask),
                AutoregressiveConv2d(channels, kernel_size, mirrored=True, mask=mask),
            )


class AutoregressiveSolve(torch.autograd.Function):
    """T(w)⁻¹z for a masked kernel, z (N, C, H, W): differentiable in z and w, any number of times.

    The gradient for z is one more solve, since T(w)ᵀ = T(flip w) is autoregressive too, in the opposite order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, w: Tensor, mirrored: bool, mask: Mask) -> Tensor:
        if mirrored:
            z, w = z.flip(1, 2, 3), w.flip(0, 1, 2, 3)
        x = solve_by_rows(z, w) if z.shape[1] * z.shape[3] <= MAX_ROW_LENGTH else solve_by_fronts(z, w, mask)
        return x.flip(1, 2, 3) if mirrored else x.contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, w, ctx.mirrored, ctx.mask = inputs
        ctx.save_for_backward(w, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        w, x = ctx.saved_tensors
        grad_z = AutoregressiveSolve.apply(grad, flip(w), not ctx.mirrored, ctx.mask)
        grad_w = -kernel_gradient(x, grad_z, (w.shape[2], w.shape[3]), DEFAULT_GEOMETRY) if ctx.needs_input_grad[1] else None
        return grad_z, grad_w, None, None


def solve_by_rows(z: Tensor, w: Tensor) -> Tensor:
    """Returns T(w)⁻¹z for either mask, not mirrored: one row of the images at a time, from the last to the first.

    If T_k maps the row k further down, row i is T_0⁻¹(z_i − Σ_k T_k x_{i+k}): one product and one triangular solve for each
    row. Cost: O(N·H·(CW)²·kh).
    """
    n, channels, height, width = z.shape
    below, row = w.shape[2] // 2, channels * width
    # All T_k at once, as the groups of one convolution of rows, then from (C, W) to (W, C) order, in which T_0 is triangular.
    kernels = w[:, :, below:].permute(2, 0, 1, 3).reshape(-1, channels, 1, w.shape[3])
    matrices = conv_matrix(kernels, (1, width), Geometry(groups=below + 1))
    matrices = matrices.reshape(below + 1, channels, width, channels, width).permute(2, 1, 0, 4, 3).reshape(row, below + 1, row)
    own, after = matrices[:, 0], matrices[:, 1:].reshape(row, below * row)
    x = torch.cat([z.permute(2, 3, 1, 0).reshape(height, row, n), z.new_zeros(below, row, n)])
    for i in reversed(range(height)):
        rest = torch.addmm(x[i], after, x[i + 1 : i + 1 + below].reshape(below * row, n), alpha=-1)
        x[i] = torch.linalg.solve_triangular(own, rest, upper=True)
    return x[:height].reshape(height, width, channels, n).permute(3, 2, 0, 1)


def solve_by_fronts(z: Tensor, w: Tensor, mask: Mask) -> Tensor:
    """Returns T(w)⁻¹z, not mirrored: one front of pixels that do not read each other at a time, from the last to the first.

    Pixels (i, j) with equal i + j form a front, or with equal (kw//2 + 1)·i + j for mask "raster". With the centre's inverse
    folded into z and the other taps, a front is one gather, one product and one sum. Cost: O(N·HW·C²·kh·kw).
    """
    n, channels, height, width = z.shape
    rows, columns = w.shape[2] // 2, w.shape[3] // 2
    order, sizes, reads, (k, m) = _fronts((height, width), (w.shape[2], w.shape[3]), mask)
    order, reads = order.to(z.device), reads.to(z.device)
    centre = w[:, :, rows, columns]
    pull = torch.linalg.solve_triangular(centre, w[:, :, k, m].flatten(1), upper=True)  # (C, C·taps)
    alone = torch.linalg.solve_triangular(centre, z.permute(1, 2, 3, 0).reshape(channels, -1), upper=True)
    # (C, pixels, N) ordered by front, so that each is a slice; the zeros at the end stand for pixels beyond the border.
    x = torch.cat([alone.reshape(channels, height * width, n)[:, order], alone.new_zeros(channels, 1, n)], dim=1)
    start = 0
    for size in sizes:
        front = slice(start, start + size)
        gathered = x.index_select(1, reads[:, front].flatten()).reshape(pull.shape[1], size * n)
        x[:, front] -= (pull @ gathered).reshape(channels, size, n)
        start += size
    return x[:, order.argsort()].reshape(channels, height, width, n).permute(3, 0, 1, 2)


def _fronts(
    size: tuple[int, int], kernel_size: tuple[int, int], mask: Mask
) -> tuple[Tensor, list[int], Tensor, tuple[Tensor, Tensor]]:
    """Returns the pixels in order of solution, the sizes of the fronts, the positions that each pixel reads, and the taps."""
    rows, columns = kernel_size[0] // 2, kernel_size[1] // 2
    after = autoregressive_mask(1, kernel_size, mask)[0, 0]
    after[rows, columns] = False
    k, m = after.nonzero(as_tuple=True)
    down = columns + 1 if mask == "raster" else 1
    front = (down * torch.arange(size[0])[:, None] + torch.arange(size[1])).flatten()
    order = front.argsort(descending=True, stable=True)
    place = F.pad(order.argsort().reshape(size), (columns, columns, rows, rows), value=order.numel())
    reads = place[order // size[1] + k[:, None], order % size[1] + m[:, None]]
    return order, front.unique(return_counts=True)[1].flip(0).tolist(), reads, (k, m)


def autoregressive_mask(channels: int, kernel_size: tuple[int, int], mask: Mask) -> Tensor:
    """Returns a mask (C, C, kh, kw) of the entries for which T(w) is upper triangular, ordered by pixel, then by channel."""
    down = torch.arange(kernel_size[0])[:, None] - kernel_size[0] // 2
    right = torch.arange(kernel_size[1]) - kernel_size[1] // 2
    after = (down >= 0) & (right >= 0) if mask == "quadrant" else (down > 0) | ((down == 0) & (right > 0))
    tap_mask = after.repeat(channels, channels, 1, 1)
    tap_mask[:, :, kernel_size[0] // 2, kernel_size[1] // 2] = torch.ones(channels, channels, dtype=torch.bool).triu()
    return tap_mask


def _triangular_log_det(diagonal: Tensor, x: Tensor) -> Tensor:
    """Returns log|det T(w)| for each example of x (N,), given T(w)'s diagonal at one pixel."""
    return (x.shape[2] * x.shape[3] * diagonal.abs().log().sum()).to(x).repeat(x.shape[0])

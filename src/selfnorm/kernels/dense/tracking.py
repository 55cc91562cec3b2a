"""An inverse R that follows W by Newton–Schulz, and the convolution whose inverse it is, in as few passes as they need.

Newton–Schulz, R ← R + (I − RW)R, is two products with a pass after each:

    error, squares   E = I − RW over the product's own memory, and its squares' sums, a partial one for each program
    follow           residual = ‖E‖_F, R ← R + ER where residual < limit, else R as it is; a NaN is not below

Each program of the second pass adds up all partial sums by itself, in a fixed order: there are a few hundred. If W = T(w) is a
convolution, a row of RW is flip(w) ⋆ (that row of R, seen as an image), so product and first pass are one kernel.

E is a small difference of large numbers, for which TF32 is too coarse. Where products may be rounded to it, each is made of
three: of TF32 for convolutions; of bfloat16 for fully connected layers, RW ≈ R₁W₁ + R₁W₂ + R₂W₁ with R = R₁ + R₂ and
W = W₁ + W₂ to 16 bits, as a single product [R₁ R₁ R₂][W₁; W₂; W₁].

The gradient of log|det T(w)|, with R for T(w)⁻¹, is for each tap (o, i, k, l) the sum of Rᵀ's entries that stand where T(w)
holds it, those at R[(i, p + offset of (k, l)), (o, p)] over the pixels p that read a pixel through it: `tap_means`. It reads
these H·W·C²·kh·kw numbers alone, and asks nothing of the way back. Float32; images and kernels as `conv.fits` says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.conv.selfnorm import convolved, reach, shape_of, tiling
from selfnorm.kernels.dense.factored import SingleGradient
from selfnorm.kernels.dense.products import affine, times
from selfnorm.kernels.dense.relative import bias_gradient
from selfnorm.kernels.dispatch import allows_tf32
from selfnorm.kernels.division import quotient_and_rest
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.precision import summed_in_float32
from selfnorm.runtime.step import StepContext

PROGRAMS = 256  # for a pass over a matrix: enough to keep a large card busy, few enough to add up what each has found


class FusedTrackedLinear(torch.autograd.Function):
    """x (N, D), W (D, D), b (D,) or None, R (D, D) -> Wx + b, and zeros (N,) with the gradient of log|det W|, R for W⁻¹.

    2 products in 2 launches. The third, W's gradient, goes to the step's collector as factors, if it has one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor | None, R: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        log_det = x.new_empty(x.shape[0])
        _, z = affine(x, W, b, zeros=log_det)
        ctx.save_for_backward(x, W, R)
        ctx.collector, ctx.weight = step.collector_for(W), W
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(
        ctx: Any, grad_z: Tensor, grad_log_det: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        refuse_second_derivative()
        x, W, R = ctx.saved_tensors
        grad_x = times(grad_z, W)[0] if ctx.needs_input_grad[0] else None
        grad_b = bias_gradient(grad_z) if ctx.needs_input_grad[2] else None
        gradient = SingleGradient(ctx.weight, grad_z, x, R, True, grad_log_det)
        if ctx.collector is not None and ctx.needs_input_grad[1]:
            ctx.collector.append(gradient)
            return grad_x, None, grad_b, None, None
        return grad_x, gradient.multiplied()[0], grad_b, None, None


def error_of(product: Tensor) -> tuple[Tensor, Tensor]:
    """RW (m, m) -> E = I − RW in its memory, and partial sums of E² (programs,). Reads and writes m² numbers."""
    if not product.is_contiguous():
        raise ValueError(f"error_of: expected a contiguous matrix, to be changed in place, got strides {product.stride()}")
    programs, tiles = _pass_options(product.numel())
    squares = product.new_empty(programs)
    _error_kernel[(programs,)](product, squares, product.numel(), product.shape[0], **tiles)
    return product, squares


def error_of_matrix(R: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """R, W (m, m) -> E = I − RW, to about 1e-5 of |R||W|, and partial sums of E²: a product, with a pass before and after it."""
    R, W, rows = R.contiguous(), W.contiguous(), R.shape[0]
    left, right = R.new_empty(rows, 3 * rows, dtype=torch.bfloat16), R.new_empty(3 * rows, rows, dtype=torch.bfloat16)
    _split_kernel[(triton.cdiv(R.numel(), 1024),)](R, W, left, right, R.numel(), rows, BLOCK=1024, num_warps=4)
    return error_of(summed_in_float32(left, right))


def error_of_convolution(R: Tensor, w: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """R (D, D), kernel w -> E = I − R T(w) for images of this size, and partial sums of E² (D,): one kernel."""
    images = R.contiguous().view(-1, w.shape[1], *size)
    error, squares = torch.empty_like(images), R.new_empty(R.shape[0])
    shape = shape_of(images) | {"PRECISION": "tf32x3" if allows_tf32() else "ieee"}
    _convolution_error_kernel[(R.shape[0],)](
        images, w.contiguous(), error, squares, KH=w.shape[2], KW=w.shape[3], **shape, **tiling(images)
    )  # fmt: skip
    return error.view_as(R), squares


def follow(R: Tensor, error: Tensor, squares: Tensor, residual: Tensor, limit: float) -> None:
    """R ← R + ER in place if √Σsquares, written to `residual` (), is below the limit: a product, and a pass of 12m² bytes."""
    if not R.is_contiguous():
        raise ValueError(f"follow: expected a contiguous R, to be changed in place, got strides {R.stride()}")
    change = torch.mm(error, R)
    programs, tiles = _pass_options(R.numel())
    sums = squares.numel()
    _follow_kernel[(programs,)](R, change, squares, residual, limit, R.numel(), sums, SUMS=triton.next_power_of_2(sums), **tiles)


def tap_means(R: Tensor, w: Tensor, size: tuple[int, int], out: Tensor, zeros: Tensor) -> None:
    """∂log|det T(w)|/∂w / HW into `out` (like w), for images of this size, and 0 into all of `zeros` (N,): one kernel.

    R: the inverse of T(w) (D, D), or of a 1×1 kernel's matrix (C, C), whose HW copies T(w) then is.
    """
    channels, pixels = w.shape[1], size[0] * size[1]
    # With few taps there are but a few programs, each with long sums; with many, a program takes some beside each other.
    columns = 1 if w.numel() <= 512 else 8
    _tap_means_kernel[(triton.cdiv(w.numel(), columns),)](
        R.contiguous(), out, zeros, zeros.numel(), C=channels, H=size[0], W=size[1], KH=w.shape[2], KW=w.shape[3],
        PIXELS=min(triton.next_power_of_2(pixels), 1024 // columns), COLUMNS=columns, INDEX=_index_type(R.numel()), num_warps=4,
    )  # fmt: skip


def _pass_options(numel: int) -> tuple[int, dict[str, Any]]:
    """How many programs are to pass over so many numbers, and how many of them each takes, and in how many steps."""
    block = max(256, min(4096, triton.next_power_of_2(triton.cdiv(numel, PROGRAMS))))
    steps = triton.cdiv(numel, block * PROGRAMS)
    tiles = {"BLOCK": block, "STEPS": steps, "INDEX": _index_type(numel), "num_warps": max(1, block // 512)}
    return triton.cdiv(numel, block * steps), tiles


def _index_type(numel: int) -> tl.dtype:
    """To count so many numbers with, and a tile more: 64 bits only where it takes them, since divisions of those are slow."""
    return tl.int64 if numel > 2**30 else tl.int32


@triton.jit
def _error_kernel(matrix, squares, numel, rows, BLOCK: tl.constexpr, STEPS: tl.constexpr, INDEX: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        at = (tl.program_id(0).to(INDEX) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        identity = tl.where(at % (rows + 1) == 0, 1.0, 0.0)
        error = tl.where(inside, identity - tl.load(matrix + at, mask=inside, other=0.0), 0.0)
        tl.store(matrix + at, error, mask=inside)
        total += error * error
    tl.store(squares + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _split_kernel(R, W, left, right, numel, rows, BLOCK: tl.constexpr):
    """[R₁ R₁ R₂] and [W₁; W₂; W₁]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    high, low = _halves(tl.load(R + at, mask=inside, other=0.0))
    place = left + at + at // rows * (2 * rows)
    tl.store(place, high, mask=inside)
    tl.store(place + rows, high, mask=inside)
    tl.store(place + 2 * rows, low, mask=inside)
    high, low = _halves(tl.load(W + at, mask=inside, other=0.0))
    tl.store(right + at, high, mask=inside)
    tl.store(right + numel + at, low, mask=inside)
    tl.store(right + 2 * tl.cast(numel, tl.int64) + at, high, mask=inside)


@triton.jit
def _halves(x):
    """Two numbers of bfloat16 whose sum is x to 16 bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _follow_kernel(
    R, change, squares, residual, limit, numel, sums,
    SUMS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(INDEX) * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    # Asked for before the sum is known, so as not to wait for the one after the other.
    moved = tl.load(R + at, mask=at < numel, other=0.0) + tl.load(change + at, mask=at < numel, other=0.0)
    places = tl.arange(0, SUMS)
    norm = tl.sqrt_rn(tl.sum(tl.load(squares + places, mask=places < sums, other=0.0), axis=0))
    if tl.program_id(0) == 0:
        tl.store(residual, norm)
    if norm < limit:
        tl.store(R + at, moved, mask=at < numel)
        for _ in range(1, STEPS):
            at += BLOCK
            moved = tl.load(R + at, mask=at < numel, other=0.0) + tl.load(change + at, mask=at < numel, other=0.0)
            tl.store(R + at, moved, mask=at < numel)


@triton.jit
def _convolution_error_kernel(
    images, kernel, error, squares,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A row of R for each program."""
    n = tl.program_id(0)
    image = n.to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    total = tl.zeros((OUT, PIXELS), tl.float32)
    for start in range(0, H * W, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        there = (out < C)[:, None] & (pixel < H * W)[None, :]
        places = (out * (H * W))[:, None] + pixel[None, :]
        product = convolved(images + image, kernel, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION)
        off = tl.where(there, tl.where(places == n, 1.0, 0.0) - product, 0.0)
        tl.store(error + image + places, off, mask=there)
        total += off * off
    tl.store(squares + n, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def _tap_means_kernel(
    R, means, zeros, examples, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Some of w's entries for each program."""
    TAPS: tl.constexpr = KH * KW
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < C * C * TAPS
    o, i, tap = column // (C * TAPS), column // TAPS % C, column % TAPS
    if TAPS > 1:
        down, right = reach(tap, KH, KW, TAPS)
        # From row (i, p + offset), column (o, p); with p both move by one.
        first = (i * (H * W) + down * W + right).to(INDEX) * (C * H * W) + o * (H * W)
        found = tl.zeros((PIXELS, COLUMNS), tl.float32)
        for start in range(0, H * W, PIXELS):
            pixel = start + tl.arange(0, PIXELS)
            row, place = quotient_and_rest(pixel, W, H * W + PIXELS)
            row, place = row[:, None] + down[None, :], place[:, None] + right[None, :]
            inside = (pixel < H * W)[:, None] & there[None, :] & (row >= 0) & (row < H) & (place >= 0) & (place < W)
            found += tl.load(R + first[None, :] + (pixel.to(INDEX) * (C * H * W + 1))[:, None], mask=inside, other=0.0)
        mean = tl.sum(found, axis=0) / (H * W)
    else:
        mean = tl.load(R + i * C + o, mask=there, other=0.0)
    tl.store(means + column, mean, mask=there)
    if tl.program_id(0) == 0:
        for start in range(0, examples, 128):
            n = start + tl.arange(0, 128)
            tl.store(zeros + n, tl.zeros((128,), tl.float32), mask=n < examples)

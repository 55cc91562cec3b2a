"""An inverse R that follows W by Newton–Schulz, and the convolution whose inverse it is, in as few passes as they need.

Newton–Schulz, R ← R + (I − RW)R, is two products with a pass after each:

    error, squares   E = I − RW over the product's own memory, and its squares' sums, a partial one for each program
    follow           residual = ‖E‖_F, R ← R + ER where residual < limit, else R as it is; a NaN is not below

Each program of the second pass adds up all partial sums by itself, in a fixed order: there are a few hundred. If W = T(w) is a
convolution, a row of RW is flip(w) ⋆ (that row of R, seen as an image), so product and first pass are one kernel.

The convolution itself, z = w ⋆ x + b, has log|det T(w)|'s gradient with R for T(w)⁻¹: for each tap (o, i, k, l) the sum of Rᵀ's
entries that stand where T(w) holds this tap,

    ∂w[o, i, k, l] = Σ_n corr(x, g_z)[o, i, k, l] + Σ g_log_det · Σ_p R[(i, p + offset of (k, l)), (o, p)]

over the pixels p that read a pixel through it. One kernel there and two back; what programs know of sums over images they write
down side by side, to be added in their order. Float32; images and kernels as `conv.fits` says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.conv import column_sums, convolved, correlate, shape_of, tiling, total_of
from selfnorm.kernels.dispatch import allows_tf32

PROGRAMS = 256  # for a pass over a matrix: enough to keep a large card busy, few enough to add up what each has found


def error_of(product: Tensor) -> tuple[Tensor, Tensor]:
    """RW (m, m) -> E = I − RW in its memory, and partial sums of E² (programs,). Reads and writes m² numbers."""
    if not product.is_contiguous():
        raise ValueError(f"error_of: expected a contiguous matrix, to be changed in place, got strides {product.stride()}")
    programs, tiles = _passes(product.numel())
    squares = product.new_empty(programs)
    _error_kernel[(programs,)](product, squares, product.numel(), product.shape[0], **tiles)
    return product, squares


def error_of_convolution(R: Tensor, w: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """R (D, D), kernel w -> E = I − R T(w) for images of this size, and partial sums of E² (D,): one kernel, reads R, writes E.

    E is a small difference of large numbers, so where products may be rounded to TF32 each is made of three, which is nearly
    exact.
    """
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
    programs, tiles = _passes(R.numel())
    sums = squares.numel()
    _follow_kernel[(programs,)](R, change, squares, residual, limit, R.numel(), sums, SUMS=triton.next_power_of_2(sums), **tiles)


def convolution(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """w ⋆ x + b (N, C, H, W), and zeros (N,): one kernel."""
    x, w = x.contiguous(), w.contiguous()
    z, zeros = torch.empty_like(x), x.new_empty(x.shape[0])
    _convolution_kernel[(x.shape[0],)](x, w, bias, z, zeros, KH=w.shape[2], KW=w.shape[3], **shape_of(x), **tiling(x))
    return z, zeros


def convolution_backward(
    x: Tensor, w: Tensor, R: Tensor, grad_z: Tensor, grad_log_det: Tensor, towards_x: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients for x, if it is wanted, w, and the bias (C,), by the formulas above, in two kernels.

    R: the inverse of T(w) (D, D), or of a 1×1 kernel's matrix (C, C), whose H·W copies T(w) then is.
    """
    x, w, R, grad_z = x.contiguous(), w.contiguous(), R.contiguous(), grad_z.contiguous()
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    tiles, shape = tiling(x, pixels=64), shape_of(x)
    rows = x.shape[0] * triton.cdiv(pixels, tiles["PIXELS"])
    partial = x.new_empty(rows, w.numel() + channels)
    grad_x = torch.empty_like(x) if towards_x else None
    grad_w, grad_b = torch.empty_like(w), x.new_empty(channels)
    sides: dict[str, Any] = {"KH": w.shape[2], "KW": w.shape[3]}
    _convolution_backward_kernel[(rows, 2 if towards_x else 1)](x, w, grad_z, grad_x, partial, **sides, **shape, **tiles)
    del shape["PRECISION"]
    # With few taps there are but a few programs, each with long sums; with many, a program takes some beside each other.
    columns = 1 if partial.shape[1] <= 512 else 8
    block, reach = (min(triton.next_power_of_2(n), 1024 // columns) for n in (rows, pixels))
    _convolution_finish_kernel[(triton.cdiv(partial.shape[1], columns),)](
        partial, R, grad_log_det.contiguous(), grad_w, grad_b, x.shape[0], rows, sides != {"KH": 1, "KW": 1}, **sides, **shape,
        ROWS=block, STEPS=triton.next_power_of_2(triton.cdiv(rows, block)), PIXELS=reach, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return grad_x, grad_w, grad_b


def _passes(numel: int) -> tuple[int, dict[str, int]]:
    """How many programs are to pass over so many numbers, and how many of them each takes, and in how many steps."""
    block = max(256, min(4096, triton.next_power_of_2(triton.cdiv(numel, PROGRAMS))))
    steps = triton.cdiv(numel, block * PROGRAMS)
    return triton.cdiv(numel, block * steps), {"BLOCK": block, "STEPS": steps, "num_warps": max(1, block // 512)}


@triton.jit
def _error_kernel(matrix, squares, numel, rows, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        at = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        identity = tl.where(at % (rows + 1) == 0, 1.0, 0.0)
        error = tl.where(inside, identity - tl.load(matrix + at, mask=inside, other=0.0), 0.0)
        tl.store(matrix + at, error, mask=inside)
        total += error * error
    tl.store(squares + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _follow_kernel(
    R, change, squares, residual, limit, numel, sums, SUMS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr
):
    places = tl.arange(0, SUMS)
    norm = tl.sqrt_rn(tl.sum(tl.load(squares + places, mask=places < sums, other=0.0), axis=0))
    if tl.program_id(0) == 0:
        tl.store(residual, norm)
    if norm < limit:
        for step in range(STEPS):
            at = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            inside = at < numel
            moved = tl.load(R + at, mask=inside, other=0.0) + tl.load(change + at, mask=inside, other=0.0)
            tl.store(R + at, moved, mask=inside)


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
def _convolution_kernel(
    x, kernel, bias, z, zeros,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An image for each program."""
    n = tl.program_id(0)
    image = n.to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    for start in range(0, H * W, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        there = (out < C)[:, None] & (pixel < H * W)[None, :]
        places = image + (out * (H * W))[:, None] + pixel[None, :]
        result = convolved(x + image, kernel, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, False, PRECISION)
        if bias is not None:
            result += tl.load(bias + out, mask=out < C, other=0.0)[:, None]
        tl.store(z + places, result, mask=there)
    tl.store(zeros + n, 0.0)


@triton.jit
def _convolution_backward_kernel(
    x, kernel, grad_z, grad_x, partial,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two programs for some pixels of an image: one for what they mean for w and the bias, one for what arrives at x there."""
    BLOCKS: tl.constexpr = (H * W + PIXELS - 1) // PIXELS
    image = (tl.program_id(0) // BLOCKS).to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    pixel = tl.program_id(0) % BLOCKS * PIXELS + tl.arange(0, PIXELS)
    there = (out < C)[:, None] & (pixel < H * W)[None, :]
    places = image + (out * (H * W))[:, None] + pixel[None, :]
    if tl.program_id(1) == 0:
        row = partial + tl.program_id(0).to(tl.int64) * (C * C * KH * KW + C)
        grad = tl.load(grad_z + places, mask=there, other=0.0)
        correlate(x + image, grad, row, pixel, out, C, H, W, KH, KW, WIDTH, DEPTH, PRECISION)
        tl.store(row + C * C * KH * KW + out, tl.sum(grad, axis=1), mask=out < C)
    elif grad_x is not None:
        result = convolved(grad_z + image, kernel, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION)
        tl.store(grad_x + places, result, mask=there)


@triton.jit
def _convolution_finish_kernel(
    partial, R, grad_log_det, grad_w, grad_b, examples, rows, WHOLE: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, PIXELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns: w's entries, then the bias's. The programs' sums, and for w those of R's entries, times Σ grad_log_det."""
    TAPS: tl.constexpr = KH * KW
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    of_w = column < C * C * TAPS
    total = column_sums(partial, column, C * C * TAPS + C, rows, ROWS, STEPS, COLUMNS)
    scale = total_of(grad_log_det, examples, ROWS, STEPS)
    o, i, tap = column // (C * TAPS), column // TAPS % C, column % TAPS
    if WHOLE:
        down, right = tap // KW - KH // 2, tap % KW - KW // 2
        # From row (i, p + offset), column (o, p); with p both move by one.
        first = (i * (H * W) + down * W + right) * (C * H * W) + o * (H * W)
        found = tl.zeros((PIXELS, COLUMNS), tl.float32)
        for start in range(0, H * W, PIXELS):
            pixel = start + tl.arange(0, PIXELS)
            row, place = (pixel // W)[:, None] + down[None, :], (pixel % W)[:, None] + right[None, :]
            inside = (pixel < H * W)[:, None] & of_w[None, :] & (row >= 0) & (row < H) & (place >= 0) & (place < W)
            found += tl.load(R + first[None, :] + (pixel * (C * H * W + 1))[:, None], mask=inside, other=0.0)
        term = tl.sum(found, axis=0)
    else:
        term = H * W * tl.load(R + i * C + o, mask=of_w, other=0.0)
    tl.store(grad_w + column, total + scale * term, mask=of_w)
    tl.store(grad_b + column - C * C * TAPS, total, mask=(column >= C * C * TAPS) & (column < C * C * TAPS + C))

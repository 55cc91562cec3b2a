"""Same-size convolutions of small images as tiles, and the self-normalizing convolution made of them.

A program takes `PIXELS` pixels of one image, all channels at once. In the order k = (tap, in-channel) a convolution is a product
of the kernel (C, kh·kw·C) and the patches A (kh·kw·C, pixels), gathered from an image that lies in the cache; the kernel's
gradient is the gradient (C, pixels) times Aᵀ. It is taken `DEPTH` of k at a time, some taps with all their channels, padded to
`WIDTH`. A single channel needs no product: there a tile has one row, and taps are added up one by one. Zero padding, no
dilation, no groups. Tiles lie as the images do, pixels last, and have too few rows for the matrix units that work on a group of
warps: those would wait for all memory at each product.

What programs know of a sum over images they write down side by side, a row each, and `_finish` adds the rows in their order:
no result depends on which program came first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.dispatch import input_precision
from selfnorm.kernels.division import quotient_and_rest
from selfnorm.kernels.rounding import uncut


def fits(x: Tensor, *kernels: Tensor) -> bool:
    """Whether images (N, C, H, W) and kernels are small enough for a program to take a whole image, and for rows of partial sums.

    Beyond these sizes there is enough to do in a convolution for a library's to be the faster one.
    """
    most = 64 if all(kernel.shape[2] * kernel.shape[3] == 1 for kernel in kernels) else 32
    small = x.shape[1] <= most and x.shape[1] * x.shape[2] * x.shape[3] <= 4096
    return small and all(kernel.numel() <= 16384 and kernel.shape[2] * kernel.shape[3] <= 49 for kernel in kernels)


def tiling(x: Tensor, pixels: int = 256, taps: int = 9) -> dict[str, Any]:
    """Tile sizes for images like x and kernels of so many taps; at most so many pixels, if there are several channels."""
    channels, size = x.shape[1], x.shape[2] * x.shape[3]
    if channels == 1:
        block = min(triton.next_power_of_2(size), 1024)
        return {"PIXELS": block, "OUT": 1, "WIDTH": 1, "DEPTH": 1, "num_warps": max(1, min(8, block // 128)), "num_stages": 1}
    block = min(max(triton.next_power_of_2(size), 16), pixels)
    width = triton.next_power_of_2(channels)
    depth = depth_for(width, taps)
    warps = 8 if block * depth >= 4096 or width >= 16 else 4
    return {"PIXELS": block, "OUT": max(16, width), "WIDTH": width, "DEPTH": depth, "num_warps": warps, "num_stages": 1}


def depth_for(width: int, taps: int) -> int:
    """How much of k a product takes: what is beyond the last tap costs less than another round through shared memory."""
    return max(16, width, min(64, triton.next_power_of_2(width * taps)))


def shape_of(x: Tensor) -> dict[str, Any]:
    """What every kernel has to know of images like x, and of the precision of products."""
    return {"C": x.shape[1], "H": x.shape[2], "W": x.shape[3], "PRECISION": input_precision()}


def summing(rows: int) -> dict[str, Any]:
    """Tile sizes for sums over so many rows. Few distinct ones, so that hardly any batch size needs kernels of its own."""
    return {"ROWS": 64, "STEPS": triton.next_power_of_2(triton.cdiv(rows, 64)), "COLUMNS": 32}


def selfnorm_conv_forward(x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """w ⋆ x + b, z = w ⋆ x, e = r ⋆ z − x, zeros (N,), ‖e‖² (N, 1), for x (N, C, H, W): one kernel, reads x, writes three of it.

    Without a bias the first two are one tensor.
    """
    x, w, r = x.contiguous(), w.contiguous(), r.contiguous()
    z, error = torch.empty_like(x), torch.empty_like(x)
    out = z if bias is None else torch.empty_like(x)
    log_det, squares = x.new_empty(x.shape[0]), x.new_empty(x.shape[0], 1)
    _selfnorm_forward[(x.shape[0],)](
        x, w, r, bias, out, z, error, log_det, squares,
        KH=w.shape[2], KW=w.shape[3], RH=r.shape[2], RW=r.shape[3],
        **shape_of(x), **tiling(x, taps=_most_taps(w, r)),
    )  # fmt: skip
    return out, z, error, log_det, squares


def selfnorm_conv_backward(
    x: Tensor,
    z: Tensor,
    error: Tensor,
    w: Tensor,
    r: Tensor,
    grad_z: Tensor,
    grad_log_det: Tensor,
    grad_squares: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients for x, w, r and the bias (C,), by the formulas of the self-normalizing convolution, in two kernels.

        g_x = flip(w) ⋆ g_z,    g_w = ½g_z + 2g_s·flip(r) ⋆ e,    g_r = 2g_s·e − ½g_x
        ∂w = Σ_n corr(x, g_w) + h·flip(r)·m,    ∂r = Σ_n corr(z, g_r) − h·flip(w)·m,    ∂b = Σ_n Σ_pixels g_z,    h = ½Σ g_log_det

    The first has two programs for a tile of pixels, one for w's gradient and one for r's, and keeps g_w and g_r to itself.
    """
    x, w, r, grad_z = x.contiguous(), w.contiguous(), r.contiguous(), grad_z.contiguous()
    tiles = tiling(x, 64, _most_taps(w, r))
    rows = x.shape[0] * triton.cdiv(x.shape[2] * x.shape[3], tiles["PIXELS"])
    partial = x.new_empty(rows, w.numel() + r.numel() + x.shape[1])
    grad_x, grad_w, grad_r, grad_b = torch.empty_like(x), torch.empty_like(w), torch.empty_like(r), x.new_empty(x.shape[1])
    sides: dict[str, Any] = {"KH": w.shape[2], "KW": w.shape[3], "RH": r.shape[2], "RW": r.shape[3]}
    shape = shape_of(x)
    _selfnorm_backward[(rows, 2)](
        x, z, error, w, r, grad_z, grad_squares.contiguous(), grad_x, partial, **sides, **shape, **tiles
    )  # fmt: skip
    del shape["PRECISION"]
    _selfnorm_finish[(triton.cdiv(partial.shape[1], 32),)](
        partial, w, r, grad_log_det.contiguous(), grad_w, grad_r, grad_b, x.shape[0], rows, **sides, **shape, **summing(rows)
    )  # fmt: skip
    return grad_x, grad_w, grad_r, grad_b


def _most_taps(*kernels: Tensor) -> int:
    return max(kernel.shape[2] * kernel.shape[3] for kernel in kernels)


@triton.constexpr_function
def unrolled(number: int, at_once: int, channels: int, products: str) -> int:
    """How many rounds of a loop over so many taps or terms to unroll, `at_once` of them in each: all or none.

    Unrolled loops are faster, but long ones take a compiler minutes. Products in more than TF32 have so many operations that a
    single one is long, and unrolled keeps in memory what should stay in registers: on an H200 that took 287 µs instead of 18.
    """
    rounds = -(-number // at_once)
    most = 25 if channels == 1 else 9 if products == "tf32" else 1
    return rounds if rounds <= most else 1


@triton.jit
def reach(tap, KH: tl.constexpr, KW: tl.constexpr, BELOW: tl.constexpr = 8192):
    """How far below and to the right of its pixel a tap < BELOW reads."""
    down, right = quotient_and_rest(tap, KW, BELOW)
    return down - KH // 2, right - KW // 2


@triton.jit
def patches(
    image, pixel, k, first,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A (k, pixels): for each pixel what tap first + k // WIDTH reads of channel k % WIDTH; 0 where there is none.

    Columns of pixels beyond the image hold values of no meaning.
    """
    tl.static_assert(H * W <= 4096 and KH * KW <= 4096, "pixels and taps, padded ones included, have to be below 8192")
    channel, tap = k % WIDTH, first + k // WIDTH
    down, right = reach(tap, KH, KW)
    row, column = quotient_and_rest(pixel, W)
    row, column = row[None, :] + down[:, None], column[None, :] + right[:, None]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W) & ((channel < C) & (tap < KH * KW))[:, None]
    return tl.load(image + pixel[None, :] + (channel * (H * W) + down * W + right)[:, None], mask=inside, other=0.0)


@triton.jit
def places_in_kernel(k, first, out, C: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, FLIP: tl.constexpr):
    """Where the kernel (C, C, kh, kw), or its flip, has the entries (out, k), and which of these there are."""
    channel, tap = k % WIDTH, first + k // WIDTH
    if FLIP:
        offsets = (channel * (C * TAPS) + TAPS - 1 - tap)[None, :] + (out * TAPS)[:, None]
    else:
        offsets = (channel * TAPS + tap)[None, :] + (out * (C * TAPS))[:, None]
    return offsets, ((channel < C) & (tap < TAPS))[None, :] & (out < C)[:, None]


@triton.jit
def convolved(
    image, kernel, counted, pixel, out,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    FLIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """kernel ⋆ image, or flip(kernel) ⋆ image, at some pixels: (out, pixels).

    counted: bytes like the kernel, or None; where one is 0, so is the kernel's entry.
    """
    total = tl.zeros((OUT, PIXELS), tl.float32)
    k = tl.arange(0, DEPTH)
    for first in tl.range(0, KH * KW, DEPTH // WIDTH, loop_unroll_factor=unrolled(KH * KW, DEPTH // WIDTH, C, PRECISION)):
        offsets, there = places_in_kernel(k, first, out, C, KH * KW, WIDTH, FLIP)
        if counted is not None:
            there = there & (tl.load(counted + offsets, mask=there, other=0) != 0)
        taps = tl.load(kernel + offsets, mask=there, other=0.0)
        taken = patches(image, pixel, k, first, C, H, W, KH, KW, WIDTH)
        if C == 1:
            total += taps * taken
        else:
            total = tl.dot(taps, taken, total, input_precision=PRECISION)
    return total if C == 1 else uncut(total, PRECISION)


@triton.jit
def correlate(
    image, grad, partial, pixel, out,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what a tile's gradient (out, pixels) means for the kernel (C, C, kh, kw) that read the image: grad·Aᵀ."""
    k = tl.arange(0, DEPTH)
    for first in tl.range(0, KH * KW, DEPTH // WIDTH, loop_unroll_factor=unrolled(KH * KW, DEPTH // WIDTH, C, PRECISION)):
        taken = patches(image, pixel, k, first, C, H, W, KH, KW, WIDTH)
        if C == 1:
            part = tl.sum(taken * grad, axis=1)[:, None]
        else:
            part = uncut(tl.dot(grad, tl.trans(taken), input_precision=PRECISION), PRECISION)
        offsets, there = places_in_kernel(k, first, out, C, KH * KW, WIDTH, False)
        tl.store(partial + offsets, part, mask=there)


@triton.jit
def _selfnorm_forward(
    x_ptr, w_ptr, r_ptr, bias_ptr, out_ptr, z_ptr, error_ptr, log_det_ptr, squares_ptr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An image for each program. What r reads of z was written by all threads of a program, so these meet in between."""
    n = tl.program_id(0)
    image = n.to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    for start in range(0, H * W, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        there = (out < C)[:, None] & (pixel < H * W)[None, :]
        places = image + (out * (H * W))[:, None] + pixel[None, :]
        z = convolved(x_ptr + image, w_ptr, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, False, PRECISION)
        tl.store(z_ptr + places, z, mask=there)
        if bias_ptr is not None:
            tl.store(out_ptr + places, z + tl.load(bias_ptr + out, mask=out < C, other=0.0)[:, None], mask=there)
    tl.debug_barrier()
    squares = tl.zeros((OUT, PIXELS), tl.float32)
    for start in range(0, H * W, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        there = (out < C)[:, None] & (pixel < H * W)[None, :]
        places = image + (out * (H * W))[:, None] + pixel[None, :]
        back = convolved(z_ptr + image, r_ptr, None, pixel, out, C, H, W, RH, RW, PIXELS, OUT, WIDTH, DEPTH, False, PRECISION)
        error = tl.where(there, back - tl.load(x_ptr + places, mask=there, other=0.0), 0.0)
        tl.store(error_ptr + places, error, mask=there)
        squares += error * error
    tl.store(squares_ptr + n, tl.sum(tl.sum(squares, axis=1), axis=0))
    tl.store(log_det_ptr + n, 0.0)


@triton.jit
def _selfnorm_backward(
    x_ptr, z_ptr, error_ptr, w_ptr, r_ptr, grad_z_ptr, grad_squares_ptr, grad_x_ptr, partial_ptr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (H * W + PIXELS - 1) // PIXELS
    W_NUMEL: tl.constexpr = C * C * KH * KW
    R_NUMEL: tl.constexpr = C * C * RH * RW
    n = tl.program_id(0) // BLOCKS
    image = n.to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    pixel = tl.program_id(0) % BLOCKS * PIXELS + tl.arange(0, PIXELS)
    there = (out < C)[:, None] & (pixel < H * W)[None, :]
    places = image + (out * (H * W))[:, None] + pixel[None, :]
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * (W_NUMEL + R_NUMEL + C)
    twice = 2 * tl.load(grad_squares_ptr + n)
    if tl.program_id(1) == 0:
        grad_z = tl.load(grad_z_ptr + places, mask=there, other=0.0)
        back = convolved(error_ptr + image, r_ptr, None, pixel, out, C, H, W, RH, RW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION)
        grad = tl.where(there, grad_z / 2 + twice * back, 0.0)
        correlate(x_ptr + image, grad, partial, pixel, out, C, H, W, KH, KW, WIDTH, DEPTH, PRECISION)
        tl.store(partial + W_NUMEL + R_NUMEL + out, tl.sum(grad_z, axis=1), mask=out < C)
    else:
        grad_x = convolved(
            grad_z_ptr + image, w_ptr, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION
        )
        tl.store(grad_x_ptr + places, grad_x, mask=there)
        grad = tl.where(there, twice * tl.load(error_ptr + places, mask=there, other=0.0) - grad_x / 2, 0.0)
        correlate(z_ptr + image, grad, partial + W_NUMEL, pixel, out, C, H, W, RH, RW, WIDTH, DEPTH, PRECISION)


@triton.jit
def column_sums(partial, columns, width, rows, ROWS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns' sums of (rows, width), with rows ≤ ROWS·STEPS."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        row = step * ROWS + tl.arange(0, ROWS)
        offsets = row.to(tl.int64)[:, None] * width + columns[None, :]
        total += tl.load(partial + offsets, mask=(row < rows)[:, None] & (columns < width)[None, :], other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def total_of(values, n, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """The sum of n ≤ ROWS·STEPS values."""
    total = tl.zeros((ROWS,), tl.float32)
    for step in range(STEPS):
        at = step * ROWS + tl.arange(0, ROWS)
        total += tl.load(values + at, mask=at < n, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _counted_flip(
    other, at, there,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
):  # fmt: skip
    """flip(other)·m at places of a kernel (C, C, KH, KW), the other (C, C, OH, OW) cut or padded to that size.

    Where it is not there, a place may be any number, and what comes of it has no meaning.
    """
    TAPS: tl.constexpr = KH * KW
    tap = at % TAPS
    down, right = reach(tap, KH, KW)
    row, column = OH // 2 - down, OW // 2 - right
    there = there & (row >= 0) & (row < OH) & (column >= 0) & (column < OW)
    turned = ((at // TAPS % C) * C + at // (TAPS * C)) * (OH * OW) + row * OW + column
    count = tl.maximum(H - tl.abs(down), 0) * tl.maximum(W - tl.abs(right), 0)
    return tl.load(other + turned, mask=there, other=0.0) * count


@triton.jit
def _selfnorm_finish(
    partial_ptr, w_ptr, r_ptr, grad_log_det_ptr, grad_w_ptr, grad_r_ptr, grad_b_ptr, n, rows,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rows' sums, with the log-determinant's terms: the columns are w's entries, then r's, then the bias's."""
    W_NUMEL: tl.constexpr = C * C * KH * KW
    R_NUMEL: tl.constexpr = C * C * RH * RW
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = column_sums(partial_ptr, column, W_NUMEL + R_NUMEL + C, rows, ROWS, STEPS, COLUMNS)
    half = total_of(grad_log_det_ptr, n, ROWS, STEPS) / 2
    of_w = column < W_NUMEL
    tl.store(grad_w_ptr + column, total + half * _counted_flip(r_ptr, column, of_w, C, H, W, KH, KW, RH, RW), mask=of_w)
    at = column - W_NUMEL
    of_r = (at >= 0) & (at < R_NUMEL)
    tl.store(grad_r_ptr + at, total - half * _counted_flip(w_ptr, at, of_r, C, H, W, RH, RW, KH, KW), mask=of_r)
    at = at - R_NUMEL
    tl.store(grad_b_ptr + at, total, mask=(at >= 0) & (at < C))

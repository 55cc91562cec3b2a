"""One convolution of small images, z = w ⋆ x + b, from `conv.py`'s tiles: one kernel there, two back.

    g_x = flip(w) ⋆ g,    ∂w = Σ_n corr(x, g) + HW·h·s,    ∂b = Σ_n Σ_pixels g,    h = Σ g_log_det

for g arriving at z. Of a log-determinant, s is the gradient at one pixel: 1 / w[c, c, centre] on the diagonal if T(w) is
triangular, W⁻ᵀ if w is a 1×1 kernel W, and whatever the caller says if not. Nothing here needs a whole image, so all pixels of a
batch are one long row, and a program takes a tile or a few of it. Back, there is one program for g_x and one for the rest, which
reads g once more than a program for both would; what it knows of ∂w and ∂b it writes down as a row of its own, and a second
kernel adds these rows in their order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.conv.selfnorm import (
    column_sums,
    convolved,
    depth_for,
    patches,
    places_in_kernel,
    shape_of,
    total_of,
    unrolled,
)
from selfnorm.kernels.rounding import uncut

MOST_ROWS = 512  # of partial sums: more would take longer to add than the tiles take


def fits(x: Tensor, kernel: Tensor) -> bool:
    """Whether a kernel (C, C, kh, kw) and images (N, C, H, W) are so small that a library's convolution is the slower one."""
    channels, taps = x.shape[1], kernel.shape[2] * kernel.shape[3]
    return channels <= (64 if taps == 1 else 32) and taps <= 49 and kernel.numel() <= 16384 and math.prod(x.shape[1:]) <= 4096


def plain_forward(
    x: Tensor, kernel: Tensor, bias: Tensor | None, taps: Tensor | None = None, triangular: bool = False
) -> tuple[Tensor, Tensor | None]:
    """w ⋆ x + b for x (N, C, H, W), and HW·Σ_c log|w[c, c, centre]| (N,) if T(w) is triangular. Reads x once, writes z once.

    `taps` (bool, like the kernel) says which entries count; the others are 0.
    """
    x, kernel, taps = x.contiguous(), kernel.contiguous(), _bytes(taps)
    bias = None if bias is None else bias.contiguous()
    z, log_det = torch.empty_like(x), x.new_empty(x.shape[0]) if triangular else None
    tiles = tiling(x, kernel)
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    _forward[(triton.cdiv(pixels, tiles["PIXELS"]),)](
        x, kernel, taps, bias, z, log_det, pixels, x.shape[0],
        KH=kernel.shape[2], KW=kernel.shape[3], **shape_of(x), **tiles,
    )  # fmt: skip
    return z, log_det


def plain_backward(
    x: Tensor,
    kernel: Tensor,
    grad_z: Tensor,
    taps: Tensor | None = None,
    grad_log_det: Tensor | None = None,
    inverse_transposed: Tensor | None = None,
    wants_x: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients for x, the kernel and the bias (C,), in two kernels: the first reads g twice and x once, and writes g_x.

    grad_log_det (N,) is what arrives at the log-determinant, if there is one. inverse_transposed, as many values as the kernel
    has and in its order, is s; without it T(w) is triangular.
    """
    x, kernel, grad_z, taps = x.contiguous(), kernel.contiguous(), grad_z.contiguous(), _bytes(taps)
    grad_x = torch.empty_like(x) if wants_x else None
    grad_k, grad_b = torch.empty_like(kernel), x.new_empty(x.shape[1])
    tiles = tiling(x, kernel)
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    each, rows = shared_out(pixels, tiles)
    partial = x.new_empty(rows, kernel.numel() + x.shape[1])
    sides: dict[str, Any] = {"KH": kernel.shape[2], "KW": kernel.shape[3]}
    shape = shape_of(x)
    _backward[(rows, 2 if wants_x else 1)](
        x, kernel, taps, grad_z, grad_x, partial, pixels, EACH=each, **sides, **shape, **tiles
    )  # fmt: skip
    del shape["PRECISION"]
    grad_log_det = None if grad_log_det is None else grad_log_det.contiguous()
    _finish[(triton.cdiv(partial.shape[1], 32),)](
        partial, kernel, taps, grad_log_det, inverse_transposed, grad_k, grad_b, rows, x.shape[0],
        **sides, **shape, **summing(rows, x.shape[0]),
    )  # fmt: skip
    return grad_x, grad_k, grad_b


def tiling(x: Tensor, kernel: Tensor) -> dict[str, Any]:
    """Tile sizes for images like x and kernels like this one, so small that all of the card has something to do."""
    channels, pixels = x.shape[1], x.shape[0] * x.shape[2] * x.shape[3]
    if channels == 1:
        block = min(triton.next_power_of_2(pixels), 512)
        return {"PIXELS": block, "OUT": 1, "WIDTH": 1, "DEPTH": 1, "num_warps": max(1, block // 128), "num_stages": 1}
    width = triton.next_power_of_2(channels)
    depth = depth_for(width, kernel.shape[2] * kernel.shape[3])
    block = 64 if pixels >= 8192 else 32
    return {"PIXELS": block, "OUT": max(16, width), "WIDTH": width, "DEPTH": depth, "num_warps": 4, "num_stages": 1}


def summing(rows: int, examples: int) -> dict[str, Any]:
    """Tile sizes for the sums over rows and over examples; few distinct ones."""
    steps = [triton.next_power_of_2(triton.cdiv(count, 128)) for count in (rows, examples)]
    return {"ROWS": 128, "STEPS": steps[0], "EXAMPLE_STEPS": steps[1], "COLUMNS": 32}


def shared_out(pixels: int, tiles: dict[str, Any]) -> tuple[int, int]:
    """How many tiles a program takes, and how many programs that makes."""
    each = triton.next_power_of_2(triton.cdiv(pixels, tiles["PIXELS"] * MOST_ROWS))
    return each, triton.cdiv(pixels, tiles["PIXELS"] * each)


def _bytes(taps: Tensor | None) -> Tensor | None:
    return None if taps is None else taps.contiguous().view(torch.uint8)


@triton.jit
def _forward(
    x_ptr, kernel_ptr, taps_ptr, bias_ptr, z_ptr, log_det_ptr, pixels, examples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    out = tl.arange(0, OUT)
    image, pixel, places, there = tile_of(tl.program_id(0), pixels, out, C, H, W, PIXELS)
    z = convolved(x_ptr + image, kernel_ptr, taps_ptr, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, False, PRECISION)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + out, mask=out < C, other=0.0)[:, None]
    tl.store(z_ptr + places, z, mask=there)
    if log_det_ptr is not None:
        if tl.program_id(0) == 0:
            diagonal = tl.load(kernel_ptr + out * ((C + 1) * KH * KW) + KH * KW // 2, mask=out < C, other=1.0)
            log_det = H * W * tl.sum(tl.log(tl.abs(diagonal)), axis=0)
            for start in range(0, examples, 128):
                n = start + tl.arange(0, 128)
                tl.store(log_det_ptr + n, tl.zeros((128,), tl.float32) + log_det, mask=n < examples)


@triton.jit
def tile_of(tile, pixels, out, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PIXELS: tl.constexpr):
    """Where the images of a tile's pixels start (1, PIXELS), which of its image's each is, and the places of all its channels."""
    at = tile * PIXELS + tl.arange(0, PIXELS)
    there = (out < C)[:, None] & (at < pixels)[None, :]
    at = tl.minimum(at, pixels - 1)
    pixel = at % (H * W)
    image = ((at // (H * W)).to(tl.int64) * (C * H * W))[None, :]
    return image, pixel, image + (out * (H * W))[:, None] + pixel[None, :], there


@triton.jit
def _backward(
    x_ptr, kernel_ptr, taps_ptr, grad_z_ptr, grad_x_ptr, partial_ptr, pixels, EACH: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TAPS: tl.constexpr = KH * KW
    out, k = tl.arange(0, OUT), tl.arange(0, DEPTH)
    row = tl.program_id(0)
    if tl.program_id(1) == 1:
        for step in range(EACH):
            image, pixel, places, there = tile_of(row * EACH + step, pixels, out, C, H, W, PIXELS)
            grad_x = convolved(
                grad_z_ptr + image, kernel_ptr, taps_ptr, pixel, out,
                C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION,
            )  # fmt: skip
            if grad_x_ptr is not None:
                tl.store(grad_x_ptr + places, grad_x, mask=there)
    else:
        partial = partial_ptr + row.to(tl.int64) * (C * C * TAPS + C)
        arriving = tl.zeros((OUT, PIXELS), tl.float32)
        for first in tl.range(0, TAPS, DEPTH // WIDTH, loop_unroll_factor=unrolled(TAPS, DEPTH // WIDTH, C, PRECISION)):
            total = tl.zeros((OUT, DEPTH), tl.float32)
            products = tl.zeros((OUT, PIXELS), tl.float32)  # of a single channel
            for step in range(EACH):
                image, pixel, places, there = tile_of(row * EACH + step, pixels, out, C, H, W, PIXELS)
                grad = tl.load(grad_z_ptr + places, mask=there, other=0.0)
                if first == 0:
                    arriving += grad
                taken = patches(x_ptr + image, pixel, k, first, C, H, W, KH, KW, WIDTH)
                if C == 1:
                    products += taken * grad
                else:
                    total = tl.dot(grad, tl.trans(taken), total, input_precision=PRECISION)
            if C == 1:
                total = tl.sum(products, axis=1)[:, None]
            else:
                total = uncut(total, PRECISION)
            offsets, of_kernel = places_in_kernel(k, first, out, C, TAPS, WIDTH, False)
            tl.store(partial + offsets, total, mask=of_kernel)
        tl.store(partial + C * C * TAPS + out, tl.sum(arriving, axis=1), mask=out < C)


@triton.jit
def _finish(
    partial_ptr, kernel_ptr, taps_ptr, grad_log_det_ptr, inverse_ptr, grad_k_ptr, grad_b_ptr, rows, examples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, EXAMPLE_STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rows' sums, with the log-determinant's term; the columns are the kernel's entries, then the bias's."""
    TAPS: tl.constexpr = KH * KW
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = column_sums(partial_ptr, column, C * C * TAPS + C, rows, ROWS, STEPS, COLUMNS)
    of_kernel = column < C * C * TAPS
    tl.store(grad_b_ptr + column - C * C * TAPS, total, mask=(column >= C * C * TAPS) & (column < C * C * TAPS + C))
    if grad_log_det_ptr is not None:
        weight = H * W * total_of(grad_log_det_ptr, examples, ROWS, EXAMPLE_STEPS)
        if inverse_ptr is not None:
            total += weight * tl.load(inverse_ptr + column, mask=of_kernel, other=0.0)
        else:
            diagonal = of_kernel & (column % TAPS == TAPS // 2) & (column // (C * TAPS) == column // TAPS % C)
            total += tl.where(diagonal, weight / tl.load(kernel_ptr + column, mask=diagonal, other=1.0), 0.0)
    if taps_ptr is not None:
        total = tl.where(tl.load(taps_ptr + column, mask=of_kernel, other=0) != 0, total, 0.0)
    tl.store(grad_k_ptr + column, total, mask=of_kernel)

"""Building blocks of the convolution kernels: tile sizes, products of a tile, and sums of partial results.

In the order k = (tap, input channel) a same-size convolution is a product of the kernel (C, kh·kw·C) and the patches
A (kh·kw·C, pixels), gathered from an image in the cache; the kernel's gradient is the gradient (C, pixels) times Aᵀ. A
program computes a tile of `PIXELS` pixels and all channels, `DEPTH` of k at a time: some taps with all their channels, padded to
`WIDTH`. With a single channel there is no product: a tile has one row, and taps are added up one by one. Zero padding, no
dilation, no groups. Tiles have the images' layout, pixels last, and too few rows for the matrix units that work on a group of
warps, which would wait for all memory at each product.

There are two ways to share out the work. `image_tiles`: a program processes one image, tile by tile. `batch_tiles`: all pixels of
the batch form one long row, and a program takes one tile of it or a few.

Each program stores its part of a sum over images as a separate row, and a second kernel adds the rows in a fixed order, so that
results do not depend on timing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.dispatch import input_precision
from selfnorm.kernels.numerics import correct_truncation, quotient_and_remainder

MAX_PARTIAL_ROWS = 512  # rows of partial sums: adding more would take longer than computing the tiles


def image_tiles(x: Tensor, pixels: int = 256, taps: int = 9) -> dict[str, Any]:
    """Returns tile sizes for a program that processes one image like x, with kernels of `taps` taps.

    A tile has at most `pixels` pixels if there are several channels.
    """
    channels, size = x.shape[1], x.shape[2] * x.shape[3]
    if channels == 1:
        block = min(triton.next_power_of_2(size), 1024)
        return {"PIXELS": block, "OUT": 1, "WIDTH": 1, "DEPTH": 1, "num_warps": max(1, min(8, block // 128)), "num_stages": 1}
    block = min(max(triton.next_power_of_2(size), 16), pixels)
    width = triton.next_power_of_2(channels)
    depth = depth_for(width, taps)
    warps = 8 if block * depth >= 4096 or width >= 16 else 4
    return {"PIXELS": block, "OUT": max(16, width), "WIDTH": width, "DEPTH": depth, "num_warps": warps, "num_stages": 1}


def batch_tiles(x: Tensor, kernel: Tensor) -> dict[str, Any]:
    """Returns tile sizes for programs that take tiles of all the batch's pixels, small enough to keep the whole card busy."""
    channels, pixels = x.shape[1], x.shape[0] * x.shape[2] * x.shape[3]
    if channels == 1:
        block = min(triton.next_power_of_2(pixels), 512)
        return {"PIXELS": block, "OUT": 1, "WIDTH": 1, "DEPTH": 1, "num_warps": max(1, block // 128), "num_stages": 1}
    width = triton.next_power_of_2(channels)
    depth = depth_for(width, kernel.shape[2] * kernel.shape[3])
    block = 64 if pixels >= 8192 else 32
    return {"PIXELS": block, "OUT": max(16, width), "WIDTH": width, "DEPTH": depth, "num_warps": 4, "num_stages": 1}


def depth_for(width: int, taps: int) -> int:
    """Returns how much of k one product takes.

    Padding beyond the last tap costs less than another round through shared memory.
    """
    return max(16, width, min(64, triton.next_power_of_2(width * taps)))


def share_tiles(pixels: int, tiles: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of tiles that each program takes, and the number of programs."""
    each = triton.next_power_of_2(triton.cdiv(pixels, tiles["PIXELS"] * MAX_PARTIAL_ROWS))
    return each, triton.cdiv(pixels, tiles["PIXELS"] * each)


def image_sum_tiles(rows: int) -> dict[str, Any]:
    """Returns tile sizes for sums over rows, of few distinct values, so that most batch sizes share a compiled kernel."""
    return {"ROWS": 64, "STEPS": triton.next_power_of_2(triton.cdiv(rows, 64)), "COLUMNS": 32}


def batch_sum_tiles(rows: int, examples: int) -> dict[str, Any]:
    """Returns tile sizes for sums over rows and over examples, of few distinct values, as in `image_sum_tiles`."""
    steps = [triton.next_power_of_2(triton.cdiv(count, 128)) for count in (rows, examples)]
    return {"ROWS": 128, "STEPS": steps[0], "EXAMPLE_STEPS": steps[1], "COLUMNS": 32}


def image_constants(x: Tensor) -> dict[str, Any]:
    """Returns compile-time arguments that every kernel takes: the shape of images like x, and the precision of products."""
    return {"C": x.shape[1], "H": x.shape[2], "W": x.shape[3], "PRECISION": input_precision()}


def kernel_sides(kernel: Tensor) -> dict[str, Any]:
    """Returns compile-time arguments for the sides of a kernel (C, C, kh, kw)."""
    return {"KH": kernel.shape[2], "KW": kernel.shape[3]}


@triton.constexpr_function
def unrolled(number: int, at_once: int, channels: int, products: str) -> int:
    """Returns the unroll factor of a loop over `number` taps or terms, `at_once` of them per round: all rounds or 1.

    Unrolled loops are faster, but long ones take the compiler minutes. A product in more than TF32 has many operations, so even a
    short loop over them spills registers to memory when unrolled: on an H200 that took 287 µs instead of 18.
    """
    rounds = -(-number // at_once)
    most = 25 if channels == 1 else 9 if products == "tf32" else 1
    return rounds if rounds <= most else 1


@triton.jit
def batch_tile(tile, pixels, out, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PIXELS: tl.constexpr):
    """For each pixel of a tile: where its image starts (1, PIXELS), its number within the image, and the offsets of all channels.

    Also a mask (OUT, PIXELS) of the offsets that exist.
    """
    at = tile * PIXELS + tl.arange(0, PIXELS)
    valid = (out < C)[:, None] & (at < pixels)[None, :]
    at = tl.minimum(at, pixels - 1)
    pixel = at % (H * W)
    image = ((at // (H * W)).to(tl.int64) * (C * H * W))[None, :]
    return image, pixel, image + (out * (H * W))[:, None] + pixel[None, :], valid


@triton.jit
def image_tile(image, start, out, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PIXELS: tl.constexpr):
    """The pixels of an image from `start` on, and the offsets of all their channels if the image begins at the offset `image`.

    Also a mask (OUT, PIXELS) of the offsets that exist.
    """
    pixel = start + tl.arange(0, PIXELS)
    valid = (out < C)[:, None] & (pixel < H * W)[None, :]
    return pixel, image + (out * (H * W))[:, None] + pixel[None, :], valid


@triton.jit
def tap_offset(tap, KH: tl.constexpr, KW: tl.constexpr, BELOW: tl.constexpr = 8192):
    """How many rows below and columns to the right of its pixel a tap < BELOW reads."""
    down, right = quotient_and_remainder(tap, KW, BELOW)
    return down - KH // 2, right - KW // 2


@triton.jit
def patches(
    image, pixel, k, first,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A (k, pixels): for each pixel the value that tap first + k // WIDTH reads from channel k % WIDTH; 0 outside the image.

    Columns of pixels beyond the image hold arbitrary values.
    """
    tl.static_assert(H * W <= 4096 and KH * KW <= 4096, "pixels and taps, padded ones included, have to be below 8192")
    channel, tap = k % WIDTH, first + k // WIDTH
    down, right = tap_offset(tap, KH, KW)
    row, column = quotient_and_remainder(pixel, W)
    row, column = row[None, :] + down[:, None], column[None, :] + right[:, None]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W) & ((channel < C) & (tap < KH * KW))[:, None]
    return tl.load(image + pixel[None, :] + (channel * (H * W) + down * W + right)[:, None], mask=inside, other=0.0)


@triton.jit
def kernel_entries(k, first, out, C: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, FLIP: tl.constexpr):
    """The offsets of entries (out, k) in the kernel (C, C, kh, kw) or in its flip, and a mask of those that exist."""
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
    """kernel ⋆ image, or flip(kernel) ⋆ image, at the given pixels: (out, pixels).

    counted: bytes like the kernel, or None; the kernel counts as 0 where its byte is 0.
    """
    total = tl.zeros((OUT, PIXELS), tl.float32)
    k = tl.arange(0, DEPTH)
    for first in tl.range(0, KH * KW, DEPTH // WIDTH, loop_unroll_factor=unrolled(KH * KW, DEPTH // WIDTH, C, PRECISION)):
        offsets, valid = kernel_entries(k, first, out, C, KH * KW, WIDTH, FLIP)
        if counted is not None:
            valid = valid & (tl.load(counted + offsets, mask=valid, other=0) != 0)
        taps = tl.load(kernel + offsets, mask=valid, other=0.0)
        taken = patches(image, pixel, k, first, C, H, W, KH, KW, WIDTH)
        if C == 1:
            total += taps * taken
        else:
            total = tl.dot(taps, taken, total, input_precision=PRECISION)
    return total if C == 1 else correct_truncation(total, PRECISION)


@triton.jit
def correlate(
    image, grad, partial, pixel, out,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores a tile's part of the gradient for the kernel (C, C, kh, kw) that was applied to the image: grad (out, pixels)·Aᵀ."""
    k = tl.arange(0, DEPTH)
    for first in tl.range(0, KH * KW, DEPTH // WIDTH, loop_unroll_factor=unrolled(KH * KW, DEPTH // WIDTH, C, PRECISION)):
        taken = patches(image, pixel, k, first, C, H, W, KH, KW, WIDTH)
        if C == 1:
            part = tl.sum(taken * grad, axis=1)[:, None]
        else:
            part = correct_truncation(tl.dot(grad, tl.trans(taken), input_precision=PRECISION), PRECISION)
        offsets, valid = kernel_entries(k, first, out, C, KH * KW, WIDTH, False)
        tl.store(partial + offsets, part, mask=valid)


@triton.jit
def store_taps(
    partial, total, products, k, first, out, C: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Stores the part of a kernel's gradient that `total` (out, k) holds; for a single channel `products` (out, pixels) do."""
    if C == 1:
        total = tl.sum(products, axis=1)[:, None]
    else:
        total = correct_truncation(total, PRECISION)
    offsets, of_kernel = kernel_entries(k, first, out, C, TAPS, WIDTH, False)
    tl.store(partial + offsets, total, mask=of_kernel)


@triton.jit
def column_sums(partial, columns, width, rows, ROWS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of the given columns of a matrix (rows, width), with rows ≤ ROWS·STEPS."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        row = step * ROWS + tl.arange(0, ROWS)
        offsets = row.to(tl.int64)[:, None] * width + columns[None, :]
        total += tl.load(partial + offsets, mask=(row < rows)[:, None] & (columns < width)[None, :], other=0.0)
    return tl.sum(total, axis=0)

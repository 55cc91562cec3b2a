"""Fused kernels for the smooth leaky ReLU and for ActNorm: value and log-determinant in one pass, gradients in another; and the
leaky ReLU's inverse.

No autograd here: each map comes as a pair of plain functions, the second of which is its hand-written gradient. All tensors are
float32. Sums are taken in a fixed order, so that a result never changes from one run to the next.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

# Fewer programs than this leave multiprocessors of a big GPU idle.
ENOUGH_PROGRAMS = 132
MOST_PARTS = 256


class RowTiles(NamedTuple):
    """How a map of (N, E) is shared out: each program takes `rows` examples and `steps` times `columns` of the elements."""

    rows: int
    columns: int
    steps: int
    warps: int

    def grid(self, examples: int, elements: int) -> tuple[int, int]:
        return cdiv(examples, self.rows), cdiv(elements, self.columns * self.steps)


def row_tiles(examples: int, elements: int) -> RowTiles:
    """One program for each example, or for a few, that sums over its elements; several for each of few long examples."""
    rows = min(next_power_of_2(cdiv(examples, 2 * ENOUGH_PROGRAMS)), 8)
    columns = min(next_power_of_2(elements), 1024 // rows)
    programs, blocks = cdiv(examples, rows), cdiv(elements, columns)
    # More than one program an example needs a second pass that adds up: only where most of the GPU would idle else.
    splits = min(blocks, cdiv(ENOUGH_PROGRAMS, programs)) if 2 * programs < ENOUGH_PROGRAMS else 1
    return RowTiles(rows, columns, cdiv(blocks, splits), min(max(rows * columns // 128, 1), 8))


@triton.jit
def exp(x):
    """eˣ to x·1e-7: one instruction after a product, where Triton's own also cares for results below 1e-38."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def log1p(e):
    """log(1 + e) for e in [0, 1] to a few roundings, as 2·artanh(s) = 2(s + s³/3 + … + s¹³/13) of s = e/(2 + e) ≤ 1/3."""
    s = e / (2.0 + e)
    r = s * s
    series = 1.0 / 9.0 + r * (1.0 / 11.0 + r * (1.0 / 13.0))
    return 2.0 * s * (1.0 + r * (1.0 / 3.0 + r * (1.0 / 5.0 + r * (1.0 / 7.0 + r * series))))


@triton.jit(do_not_specialize=["N"])
def _leaky(x_ptr, z_ptr, log_det_ptr, N, E, alpha, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = rows.to(tl.int64)[:, None] * E
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        columns = ((tl.program_id(1) * STEPS + step) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        mask = (rows[:, None] < N) & (columns < E)
        x = tl.load(x_ptr + start + columns, mask=mask, other=0.0)
        e = exp(-tl.abs(x))
        sigmoid = tl.where(x >= 0, 1.0, e) / (1.0 + e)
        z = alpha * x + (1.0 - alpha) * (tl.maximum(x, 0.0) + log1p(e))
        tl.store(z_ptr + start + columns, z, mask=mask)
        total += tl.where(mask, tl.log(alpha + (1.0 - alpha) * sigmoid), 0.0)
    tl.store(log_det_ptr + tl.program_id(1).to(tl.int64) * N + rows, tl.sum(total, 1), mask=rows < N)


@triton.jit(do_not_specialize=["N", "stride"])
def _leaky_backward(
    x_ptr, grad_z_ptr, grad_log_det_ptr, grad_x_ptr, N, E, stride, alpha, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (rows[:, None] < N) & (columns < E)
    at = rows.to(tl.int64)[:, None] * E + columns
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    grad_z = tl.load(grad_z_ptr + at, mask=mask, other=0.0)
    grad_log_det = tl.load(grad_log_det_ptr + rows.to(tl.int64) * stride, mask=rows < N, other=0.0)[:, None]
    e = exp(-tl.abs(x))
    share = 1.0 / (1.0 + e)
    slope = alpha + (1.0 - alpha) * tl.where(x >= 0, 1.0, e) * share
    bend = (1.0 - alpha) * (e * share) * share  # σ(x)·σ(−x), from factors of which neither cancels
    tl.store(grad_x_ptr + at, grad_z * slope + grad_log_det * (bend / slope), mask=mask)


@triton.jit(do_not_specialize=["size"])
def _leaky_inverse(z_ptr, x_ptr, size, alpha, NEWTON: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + at, mask=at < size, other=0.0)
    x = tl.minimum(z, z / alpha)
    for _ in tl.static_range(NEWTON):
        e = exp(-tl.abs(x))
        slope = alpha + (1.0 - alpha) * tl.where(x >= 0, 1.0, e) / (1.0 + e)
        x -= (alpha * x + (1.0 - alpha) * (tl.maximum(x, 0.0) + log1p(e)) - z) / slope
    tl.store(x_ptr + at, x, mask=at < size)


def leaky(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """z = αx + (1 − α)·softplus(x) like x, and Σ log(α + (1 − α)·σ(x)) over each example's elements (N,). Reads x, writes z.

    x: (N, …), every example's elements together in memory, in whatever order.
    """
    examples, elements = x.shape[0], x[0].numel()
    tiles = row_tiles(examples, elements)
    grid = tiles.grid(examples, elements)
    z, parts = torch.empty_like(x), x.new_empty(grid[1], examples)
    _leaky[grid](x, z, parts, examples, elements, alpha, tiles.rows, tiles.columns, tiles.steps, num_warps=tiles.warps)
    return z, parts[0] if grid[1] == 1 else parts.sum(0)


def leaky_backward(x: Tensor, alpha: float, grad_z: Tensor, grad_log_det: Tensor) -> Tensor:
    """∂/∂x of Σ grad_z·z + Σ grad_log_det·log_det, like x. Reads x and grad_z, writes the result.

    With s the slope: grad_z·s + grad_log_det·(1 − α)·σ(x)·σ(−x) / s. x, grad_z: as `leaky` has them, both in one order.
    grad_log_det: (N,) of any stride.
    """
    examples, elements = x.shape[0], x[0].numel()
    columns = min(next_power_of_2(elements), 512)
    rows = min(next_power_of_2(cdiv(examples, 2 * ENOUGH_PROGRAMS)), 512 // columns)
    grad_x = torch.empty_like(x)
    _leaky_backward[cdiv(examples, rows), cdiv(elements, columns)](
        *(x, grad_z, grad_log_det, grad_x, examples, elements, grad_log_det.stride(0), alpha, rows, columns),
        num_warps=min(max(rows * columns // 128, 1), 4),
    )
    return grad_x


def leaky_inverse(z: Tensor, alpha: float, steps: int) -> Tensor:
    """x of which `leaky` makes z, by so many of Newton's steps from min(z, z/α). Reads z, writes x, both in one order.

    z: of any shape, without gaps in memory.
    """
    x = torch.empty_like(z)
    block = min(next_power_of_2(z.numel()), 128 if z.numel() < 128 * ENOUGH_PROGRAMS else 512)
    _leaky_inverse[(cdiv(z.numel(), block),)](z, x, z.numel(), alpha, steps, block, num_warps=max(block // 128, 1))
    return x


class ChannelTiles(NamedTuple):
    """How (N, C, P), in memory (N, P, C) if `last`, is shared out among programs: (rows, columns) tiles of a matrix.

    last:  the matrix is N·P × C. A program takes `columns` of the channels and `steps` times `rows`.
    else:  each channel has its matrix N × P. A program takes one channel and `steps` times `rows`, each in `across` tiles.
    """

    height: int
    rows: int
    columns: int
    steps: int
    across: int
    grid: tuple[int, int]
    warps: int


def channel_tiles(examples: int, channels: int, pixels: int, last: bool) -> ChannelTiles:
    height, width = (examples * pixels, channels) if last else (examples, pixels)
    tile = 1024 if height * width * (1 if last else channels) >= 1024 * MOST_PARTS else 512
    columns = min(next_power_of_2(width), tile)
    rows = min(tile // columns, next_power_of_2(height))
    groups = cdiv(channels, columns) if last else channels
    # A second pass adds up what the programs of a channel found, so there are no more of them than fill the GPU.
    blocks = cdiv(height, rows)
    steps = cdiv(blocks, min(blocks, cdiv(MOST_PARTS, groups)))
    across = 1 if last else cdiv(pixels, columns)
    warps = min(max(rows * columns // 128, 1), 8)
    return ChannelTiles(height, rows, columns, steps, across, (cdiv(blocks, steps), groups), warps)


@triton.jit
def _tile(
    step,
    height,
    C,
    P,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """One of a program's tiles: the channel of each column or of all, where the tile lies in memory, and what of it exists."""
    group = tl.program_id(1)
    rows = (tl.program_id(0).to(tl.int64) * STEPS + step // ACROSS) * ROWS + tl.arange(0, ROWS)[:, None]
    if LAST:
        columns = group * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        channel = tl.minimum(columns, C - 1)
        at = rows * C + columns
        mask = (rows < height) & (columns < C)
    else:
        columns = step % ACROSS * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        channel = group
        at = (rows * C + group) * P + columns
        mask = (rows < height) & (columns < P)
    return channel, at, mask


@triton.jit(do_not_specialize=["N", "height", "share"])
def _actnorm(
    x_ptr,
    shift_ptr,
    log_scale_ptr,
    z_ptr,
    log_det_ptr,
    N,
    C,
    P,
    height,
    share,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    ACROSS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SHARE: tl.constexpr,
):
    for step in range(STEPS * ACROSS):
        channel, at, mask = _tile(step, height, C, P, LAST, ROWS, COLUMNS, STEPS, ACROSS)
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        z = (x + tl.load(shift_ptr + channel)) * tl.exp(tl.load(log_scale_ptr + channel))
        tl.store(z_ptr + at, z, mask=mask)
    if tl.program_id(1) == 0:  # the examples' log-determinants are all the same, and dealt out among the programs
        channels = tl.arange(0, CHANNELS)
        log_det = P * tl.sum(tl.load(log_scale_ptr + channels, mask=channels < C, other=0.0))
        ours = tl.arange(0, SHARE)
        examples = tl.program_id(0) * share + ours
        tl.store(log_det_ptr + examples, tl.zeros([SHARE], tl.float32) + log_det, mask=(ours < share) & (examples < N))


@triton.jit(do_not_specialize=["height"])
def _actnorm_backward(
    x_ptr,
    shift_ptr,
    log_scale_ptr,
    grad_z_ptr,
    grad_x_ptr,
    parts_ptr,
    C,
    P,
    height,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    ACROSS: tl.constexpr,
):
    of_shift = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_scale = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS * ACROSS):
        channel, at, mask = _tile(step, height, C, P, LAST, ROWS, COLUMNS, STEPS, ACROSS)
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        grad_z = tl.load(grad_z_ptr + at, mask=mask, other=0.0)
        grad_x = grad_z * tl.exp(tl.load(log_scale_ptr + channel))
        tl.store(grad_x_ptr + at, grad_x, mask=mask)
        of_shift += grad_x
        of_scale += grad_x * (x + tl.load(shift_ptr + channel))
    group = tl.program_id(1)
    out = parts_ptr + tl.program_id(0) * 2 * C
    if LAST:
        channels = group * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(out + channels, tl.sum(of_shift, 0), mask=channels < C)
        tl.store(out + C + channels, tl.sum(of_scale, 0), mask=channels < C)
    else:
        tl.store(out + group, tl.sum(of_shift))
        tl.store(out + C + group, tl.sum(of_scale))


@triton.jit(do_not_specialize=["parts", "N", "P", "stride"])
def _actnorm_parameters(
    parts_ptr,
    grad_log_det_ptr,
    grad_ptr,
    parts,
    N,
    C,
    P,
    stride,
    PARTS: tl.constexpr,
    EXAMPLES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channels = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    part = tl.arange(0, PARTS)[:, None]
    mask = (part < parts) & (channels < C)
    of_shift = tl.load(parts_ptr + part * 2 * C + channels, mask=mask, other=0.0)
    of_scale = tl.load(parts_ptr + part * 2 * C + C + channels, mask=mask, other=0.0)
    of_log_det = tl.zeros([256], tl.float32)
    for step in range(EXAMPLES // 256):
        examples = step * 256 + tl.arange(0, 256)
        of_log_det += tl.load(grad_log_det_ptr + examples.to(tl.int64) * stride, mask=examples < N, other=0.0)
    out = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    tl.store(grad_ptr + out, tl.sum(of_shift, 0), mask=out < C)
    tl.store(grad_ptr + C + out, tl.sum(of_scale, 0) + P * tl.sum(of_log_det), mask=out < C)


def actnorm(x: Tensor, shift: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """z = (x + shift)·exp(log_scale) like x, and the log-determinant P·Σ log_scale (N,). Reads x, writes z.

    x: (N, C, …) with P values a channel, dense in memory, channels first or last. shift, log_scale: (C,).
    """
    examples, channels, pixels, last = _dimensions(x)
    tiles = channel_tiles(examples, channels, pixels, last)
    share = cdiv(examples, tiles.grid[0])
    z, log_det = torch.empty_like(x), x.new_empty(examples)
    _actnorm[tiles.grid](
        *(x, shift, log_scale, z, log_det, examples, channels, pixels, tiles.height, share),
        *(last, tiles.rows, tiles.columns, tiles.steps, tiles.across, next_power_of_2(channels), next_power_of_2(share)),
        num_warps=tiles.warps,
    )
    return z, log_det


def actnorm_backward(
    x: Tensor, shift: Tensor, log_scale: Tensor, grad_z: Tensor, grad_log_det: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Σ grad_z·z + Σ grad_log_det·log_det by x (like x), shift and log_scale (C,).

    With s = exp(log_scale): grad_z·s, Σ grad_z·s, and Σ grad_z·s·(x + shift) + P·Σ grad_log_det, the sums over all but the
    channel: each program's first, then a second, small kernel's over those. Reads x and grad_z, writes the first result.
    x, grad_z: as `actnorm` has x, both in one order. grad_log_det: (N,) of any stride.
    """
    examples, channels, pixels, last = _dimensions(x)
    tiles = channel_tiles(examples, channels, pixels, last)
    grad_x, parts, grad = torch.empty_like(x), x.new_empty(tiles.grid[0], 2, channels), x.new_empty(2, channels)
    _actnorm_backward[tiles.grid](
        *(x, shift, log_scale, grad_z, grad_x, parts, channels, pixels, tiles.height),
        *(last, tiles.rows, tiles.columns, tiles.steps, tiles.across),
        num_warps=tiles.warps,
    )
    block = min(next_power_of_2(channels), 16)
    _actnorm_parameters[(cdiv(channels, block),)](
        *(parts, grad_log_det, grad, len(parts), examples, channels, pixels, grad_log_det.stride(0)),
        *(next_power_of_2(len(parts)), cdiv(examples, 256) * 256, block),
        num_warps=4,
    )
    return grad_x, grad[0], grad[1]


def _dimensions(x: Tensor) -> tuple[int, int, int, bool]:
    """N, C, P, and whether channels come last in memory."""
    examples, channels = x.shape[:2]
    pixels = x[0, 0].numel()
    return examples, channels, pixels, pixels == 1 or not x.is_contiguous()

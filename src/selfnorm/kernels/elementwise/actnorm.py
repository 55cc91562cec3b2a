"""ActNorm: value and log-determinant in one kernel, gradients in two."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from selfnorm.kernels.elementwise.shared import as_dense, in_order_of
from selfnorm.runtime.autograd import refuse_second_derivative

MAX_ACTNORM_PROGRAMS = 256  # enough to fill a GPU; a second pass adds up the results of a channel's programs


class FusedActNorm(torch.autograd.Function):
    """x (N, C, …), shift, log_scale (C,) -> z, log_det (N,): one kernel forward, two backward, in the memory order of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        x, shift, log_scale = as_dense(x), shift.contiguous(), log_scale.contiguous()
        ctx.save_for_backward(x, shift, log_scale)
        return actnorm(x, shift, log_scale)

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        refuse_second_derivative()
        x, shift, log_scale = ctx.saved_tensors
        return actnorm_backward(x, shift, log_scale, in_order_of(x, grad_z), grad_log_det)


def actnorm(x: Tensor, shift: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns z = (x + shift)·exp(log_scale) like x, and the log-determinant P·Σ log_scale (N,). Reads x, writes z.

    x: (N, C, …) with P values per channel, dense in memory, channels first or last. shift, log_scale: (C,).
    """
    examples, channels, pixels, last = _channel_dimensions(x)
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
    """Returns the gradients of Σ grad_z·z + Σ grad_log_det·log_det by x (like x), shift and log_scale (C,).

    With s = exp(log_scale): grad_z·s, Σ grad_z·s, and Σ grad_z·s·(x + shift) + P·Σ grad_log_det, summed over all but the
    channel: first by each program, then over programs by a second, small kernel. Reads x and grad_z, writes the first result.
    x, grad_z: as x in `actnorm`, both in the same order. grad_log_det: (N,), with any stride.
    """
    examples, channels, pixels, last = _channel_dimensions(x)
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


def _channel_dimensions(x: Tensor) -> tuple[int, int, int, bool]:
    """Returns N, C, P, and whether channels come last in memory."""
    examples, channels = x.shape[:2]
    pixels = x[0, 0].numel()
    return examples, channels, pixels, pixels == 1 or not x.is_contiguous()


class ChannelTiles(NamedTuple):
    """How (N, C, P), in memory (N, P, C) if `last`, is divided among programs: (rows, columns) tiles of a matrix.

    last:  the matrix is N·P × C. A program takes `columns` of the channels and `steps` times `rows`.
    else:  each channel has a matrix N × P. A program takes one channel and `steps` times `rows`, each in `across` tiles.
    """

    height: int
    rows: int
    columns: int
    steps: int
    across: int
    grid: tuple[int, int]
    warps: int


def channel_tiles(examples: int, channels: int, pixels: int, last: bool) -> ChannelTiles:
    """Returns the tiles for N examples of C channels with P values each."""
    height, width = (examples * pixels, channels) if last else (examples, pixels)
    tile = 1024 if height * width * (1 if last else channels) >= 1024 * MAX_ACTNORM_PROGRAMS else 512
    columns = min(next_power_of_2(width), tile)
    rows = min(tile // columns, next_power_of_2(height))
    groups = cdiv(channels, columns) if last else channels
    # A second pass adds up the results of a channel's programs, so there are no more of them than fill the GPU.
    blocks = cdiv(height, rows)
    steps = cdiv(blocks, min(blocks, cdiv(MAX_ACTNORM_PROGRAMS, groups)))
    across = 1 if last else cdiv(pixels, columns)
    warps = min(max(rows * columns // 128, 1), 8)
    return ChannelTiles(height, rows, columns, steps, across, (cdiv(blocks, steps), groups), warps)


@triton.jit
def _channel_tile(
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
    """One of a program's tiles: the channel of each column or of all, its offsets in memory, and a mask of those that exist."""
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
        channel, at, mask = _channel_tile(step, height, C, P, LAST, ROWS, COLUMNS, STEPS, ACROSS)
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        z = (x + tl.load(shift_ptr + channel)) * tl.exp(tl.load(log_scale_ptr + channel))
        tl.store(z_ptr + at, z, mask=mask)
    if tl.program_id(1) == 0:  # all examples have the same log-determinant; the programs share the writing
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
        channel, at, mask = _channel_tile(step, height, C, P, LAST, ROWS, COLUMNS, STEPS, ACROSS)
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

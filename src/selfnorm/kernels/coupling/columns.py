"""3×3 convolutions as matrix products: neighbourhoods gathered into columns, and columns scattered back onto pixels.

Images are rows, one for each pixel, m = (n·H + y)·W + x. A zero-padded 3×3 convolution is a product with gathered or scattered
columns: with tap s = (s_y, s_x) ∈ {−1, 0, 1}² and k = s·C + i,

    gather:   A[m, s·C + i] = x[i, m + s]                         conv(x) = A · W₁ᵀ
    scatter:  y[i, m] = Σ_s B[m − s, s·C + i]                     conv(x) = scatter(X · W₃ᵀ), the taps of W₃ mirrored

Each is the other's transpose, so the backward pass uses the same two. Columns are zero-padded to a multiple of 16, so that rows
start where tensor cores and wide loads need them to. Each kernel reads and writes each of its tensors once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.numerics import quotient_and_remainder


def padded_columns(columns: int) -> int:
    """Returns the least multiple of 16 that is at least `columns`."""
    return -(-columns // 16) * 16


def gather_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the 3×3 neighbourhoods of x (N, C, H, W), of any strides, as columns in `dtype`: (NHW, 9C padded)."""
    n, channels, height, width = x.shape
    rows, columns = n * height * width, padded_columns(9 * channels)
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    wide = triton.next_power_of_2(columns)
    block = max(2048 // wide, 1)
    _gather_columns[(triton.cdiv(rows, block),)](
        x, out, *x.stride(), rows, C=channels, H=height, W=width, K=columns, ROWS=block, COLUMNS=wide
    )  # fmt: skip
    return out


def scatter_columns(columns: Tensor, out: Tensor, add: Tensor | None = None) -> None:
    """Writes to out (N, C, H, W) the columns (parts, NHW, ≥ 9C), float32, summed at the pixels they belong to, plus `add`.

    out may be some channels of a contiguous tensor; add may have any strides.
    """
    n, channels, height, width = out.shape
    rows, wide = n * height * width, triton.next_power_of_2(channels)
    block = max(512 // wide, 16)
    other = out if add is None else add
    _scatter_columns[(triton.cdiv(rows, block),)](
        columns, out, other, out.stride(0), *other.stride(), rows, C=channels, H=height, W=width, K=columns.shape[2],
        ADD=add is not None, PARTS=columns.shape[0], ROWS=block, CHANNELS=wide,
    )  # fmt: skip


@triton.jit
def _gather_columns(
    x, out, stride_n, stride_c, stride_y, stride_x, rows,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    tap, i = quotient_and_remainder(k, C, COLUMNS)
    down, right = quotient_and_remainder(tap, 3, COLUMNS)
    n, pixel = (row // (H * W)).to(tl.int64), row % (H * W)
    y, u = quotient_and_remainder(pixel, W, H * W)
    y, u = y[:, None] + (down - 1)[None, :], u[:, None] + (right - 1)[None, :]
    inside = (y >= 0) & (y < H) & (u >= 0) & (u < W) & (row < rows)[:, None] & (tap < 9)[None, :]
    source = (n * stride_n)[:, None] + (i.to(tl.int64) * stride_c)[None, :]
    value = tl.load(x + source + y.to(tl.int64) * stride_y + u.to(tl.int64) * stride_x, mask=inside, other=0.0)
    target = row.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out + target, value.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (k < K)[None, :])


@triton.jit
def _scatter_columns(
    columns, out, add, out_n, add_n, add_c, add_y, add_x, rows,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, CHANNELS)
    n, pixel = (row // (H * W)).to(tl.int64), row % (H * W)
    y, u = quotient_and_remainder(pixel, W, H * W)
    known = (row < rows)[:, None] & (i < C)[None, :]
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tap in tl.static_range(9):
        inside = (y >= tap // 3 - 1) & (y < H + tap // 3 - 1) & (u >= tap % 3 - 1) & (u < W + tap % 3 - 1)
        source = (row - (tap // 3 - 1) * W - (tap % 3 - 1)).to(tl.int64)[:, None] * K + tap * C + i[None, :]
        for part in tl.static_range(PARTS):
            total += tl.load(columns + tl.cast(rows, tl.int64) * (part * K) + source, mask=known & inside[:, None], other=0.0)
    if ADD:
        at = (n * add_n)[:, None] + (i.to(tl.int64) * add_c)[None, :] + (y.to(tl.int64) * add_y + u.to(tl.int64) * add_x)[:, None]
        total += tl.load(add + at, mask=known, other=0.0)
    target = (n * out_n + pixel)[:, None] + (i * (H * W))[None, :]
    tl.store(out + target, total, mask=known)

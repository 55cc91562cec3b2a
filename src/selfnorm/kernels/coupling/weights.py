"""A coupling network's weights as matrices for its products, and their gradients back: one kernel each, for layout and dtype."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.coupling.columns import padded_columns
from selfnorm.kernels.numerics import quotient_and_remainder


def pack_weights(
    first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor, last: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the three convolutions' weights as matrices in `dtype`, float32 or bfloat16, in one kernel.

    first (D, C₁, 3, 3), second (D, D, 1, 1), last (2C, D, 3, 3), all contiguous, become

        W₁ (D, 9C₁ padded), its bias, W₂ (D, D), its bias, W₃ (18C padded, D), and for the backward pass W₂ and W₃ again,

    the last two with neighbours along the inner axis next to each other in memory, which TF32's tensor cores need and those of
    bfloat16 do not. A tensor that needs neither a cast nor a new layout is returned unchanged.
    """
    width, channels = first.shape[:2]
    changing = last.shape[0] // 2
    k1, k3 = padded_columns(9 * channels), padded_columns(18 * changing)
    cast = dtype != torch.float32
    new = partial(torch.empty, dtype=dtype, device=first.device)
    to_first, to_last = new(width, k1), new(k3, width)
    to_second = new(width, width)
    second = second.view(width, width)
    to_first_bias = new(width) if cast else first_bias
    to_second_bias = new(width) if cast else second_bias
    to_last_across = to_last if cast else new(width, k3)
    rows = 8
    _pack_weights[(triton.cdiv(width, rows),)](
        first, first_bias, second, second_bias, last,
        to_first, to_first_bias, to_second, to_second_bias, to_last, to_last_across,
        D=width, C1=channels, K1=k1, C3=changing, K3=k3, CAST=cast, ROWS=rows,
        COLUMNS1=triton.next_power_of_2(k1), COLUMNS3=triton.next_power_of_2(k3), WIDTH=min(512, triton.next_power_of_2(width)),
    )  # fmt: skip
    if cast:
        return to_first, to_first_bias, to_second, to_second_bias, to_last, to_second, to_last
    return to_first, first_bias, second, second_bias, to_last, to_second.t(), to_last_across.t()


def unpack_gradients(
    first: Tensor, first_sums: Tensor, second_sums: Tensor, last: Tensor, head_sums: Tensor, channels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of the weights from those of the packed matrices, with all parts added up, in one kernel.

    first (parts, D, 9C₁ padded) and last (parts, 18C padded, D); sums for biases (parts, D); head_sums of `affine_head_backward`
    (N, 2, 2C); all float32 and contiguous. Numbers of parts may differ.
    They are those of W₁ (D, C₁, 3, 3), its bias, W₂'s bias, W₃ (2C, D, 3, 3), its bias, and of log_scale.
    """
    (_, width, k1), (_, k3, _), (n, _, outputs) = first.shape, last.shape, head_sums.shape
    new = partial(torch.empty, dtype=torch.float32, device=first.device)
    to_first, to_last = new(width, channels, 3, 3), new(outputs, width, 3, 3)
    to_bias, to_head = new(2, width), new(2, outputs)
    rows, wide1, wide3 = 4, triton.next_power_of_2(9 * channels), triton.next_power_of_2(9 * outputs)
    _unpack_gradients[(triton.cdiv(width, rows) + 1,)](
        first, first_sums, second_sums, last, head_sums, to_first, to_bias[0], to_bias[1], to_last, to_head,
        first.shape[0], first_sums.shape[0], second_sums.shape[0], last.shape[0], n,
        D=width, C1=channels, K1=k1, C3=outputs // 2, K3=k3, ROWS=rows,
        COLUMNS1=wide1, PARTS1=min(max(1024 // wide1, 1), 16), COLUMNS3=wide3, PARTS3=min(max(1024 // wide3, 1), 16),
        HEAD=triton.next_power_of_2(2 * outputs),
    )  # fmt: skip
    return to_first, to_bias[0], to_bias[1], to_last, to_head[0], to_head[1]


@triton.jit
def _pack_weights(
    first, first_bias, second, second_bias, last, to_first, to_first_bias, to_second, to_second_bias, to_last, to_last_across,
    D: tl.constexpr, C1: tl.constexpr, K1: tl.constexpr, C3: tl.constexpr, K3: tl.constexpr, CAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS1: tl.constexpr, COLUMNS3: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = (d < D)[:, None]
    kind = to_first.dtype.element_ty

    k = tl.arange(0, COLUMNS1)
    tap, channel = quotient_and_remainder(k, C1, COLUMNS1)
    source = d[:, None] * (9 * C1) + (channel * 9 + tap)[None, :]
    value = tl.load(first + source, mask=known & (k < 9 * C1)[None, :], other=0.0)
    tl.store(to_first + d[:, None] * K1 + k[None, :], value.to(kind), mask=known & (k < K1)[None, :])

    # Row k = tap·2C + r of the last convolution's matrix: the tap mirrored, r in the order of even and then odd outputs.
    k = tl.arange(0, COLUMNS3)
    tap, r = quotient_and_remainder(k, 2 * C3, COLUMNS3)
    output = tl.where(r < C3, 2 * r, 2 * (r - C3) + 1)
    source = output[None, :] * D * 9 + d[:, None] * 9 + (8 - tap)[None, :]
    value = tl.load(last + source, mask=known & (k < 18 * C3)[None, :], other=0.0).to(kind)
    tl.store(to_last + k[None, :] * D + d[:, None], value, mask=known & (k < K3)[None, :])
    if not CAST:
        tl.store(to_last_across + d[:, None] * K3 + k[None, :], value, mask=known & (k < K3)[None, :])

    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        square = known & (column < D)[None, :]
        entry = tl.load(second + d[:, None] * D + column[None, :], mask=square, other=0.0)
        if CAST:
            tl.store(to_second + d[:, None] * D + column[None, :], entry.to(kind), mask=square)
        else:
            tl.store(to_second + column[None, :] * D + d[:, None], entry, mask=square)
    if CAST:
        tl.store(to_first_bias + d, tl.load(first_bias + d, mask=d < D, other=0.0).to(kind), mask=d < D)
        tl.store(to_second_bias + d, tl.load(second_bias + d, mask=d < D, other=0.0).to(kind), mask=d < D)


@triton.jit
def _sum_of_parts(source, parts, size, place, mask, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Σ_p source[p·size + place], [ROWS, COLUMNS]."""
    part = tl.arange(0, PARTS)
    total = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    start = 0
    while start < parts:
        here = source + (start + part).to(tl.int64)[:, None, None] * size + place[None, :, :]
        total += tl.load(here, mask=(start + part < parts)[:, None, None] & mask[None, :, :], other=0.0)
        start += PARTS
    return tl.sum(total, axis=0)


@triton.jit
def _unpack_gradients(
    first, first_sums, second_sums, last, head_sums, to_first, to_first_bias, to_second_bias, to_last, to_head,
    first_parts, first_sum_parts, second_sum_parts, last_parts, examples,
    D: tl.constexpr, C1: tl.constexpr, K1: tl.constexpr, C3: tl.constexpr, K3: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS1: tl.constexpr, PARTS1: tl.constexpr, COLUMNS3: tl.constexpr, PARTS3: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == tl.num_programs(0) - 1:
        r = tl.arange(0, HEAD)[None, :]
        tl.store(to_head + r, _sum_of_parts(head_sums, examples, 4 * C3, r, r < 4 * C3, 16, 1, HEAD), mask=r < 4 * C3)
    else:
        d = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
        k = tl.arange(0, COLUMNS1)[None, :]
        square = (d < D) & (k < 9 * C1)
        channel, tap = quotient_and_remainder(k, 9, COLUMNS1)
        value = _sum_of_parts(first, first_parts, D * K1, d * K1 + tap * C1 + channel, square, PARTS1, ROWS, COLUMNS1)
        tl.store(to_first + d * (9 * C1) + k, value, mask=square)
        k = tl.arange(0, COLUMNS3)[None, :]
        square = (d < D) & (k < 18 * C3)
        output, tap = quotient_and_remainder(k, 9, COLUMNS3)
        source = ((8 - tap) * (2 * C3) + output % 2 * C3 + output // 2) * D + d
        value = _sum_of_parts(last, last_parts, D * K3, source, square, PARTS3, ROWS, COLUMNS3)
        tl.store(to_last + output * (9 * D) + d * 9 + tap, value, mask=square)
        tl.store(to_first_bias + d, _sum_of_parts(first_sums, first_sum_parts, D, d, d < D, 64, ROWS, 1), mask=d < D)
        tl.store(to_second_bias + d, _sum_of_parts(second_sums, second_sum_parts, D, d, d < D, 64, ROWS, 1), mask=d < D)

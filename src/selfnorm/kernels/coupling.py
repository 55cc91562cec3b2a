"""Kernels around the matrix products of a coupling network, whose images are rows: one row per pixel, m = (n·H + y)·W + x.

A 3×3 convolution, zero-padded, is a product with gathered or scattered columns: with tap s = (s_y, s_x) ∈ {−1, 0, 1}² and
k = s·C + i,

    gather:   A[m, s·C + i] = x[i, m + s]                         conv(x) = A · W₁ᵀ
    scatter:  y[i, m] = Σ_s B[m − s, s·C + i]                     conv(x) = scatter(X · W₃ᵀ), the taps of W₃ mirrored

which are each other's transpose, so that the backward pass uses the same two. Columns are padded with zeros to a multiple of 16,
that rows start where tensor cores and wide loads want them to. The 2C outputs of the last convolution are in the order
h₀, h₂, … (of the log-scales), h₁, h₃, … (of the shifts).

Every kernel reads and writes each of its tensors once, but a product's factors once per tile. WIDEN, set off CUDA, turns bfloat16
into float32 before a product, since Triton's interpreter would multiply it as if it were integers.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.dispatch import allows_tf32


def padded(columns: int) -> int:
    """The least multiple of 16 that holds so many columns."""
    return -(-columns // 16) * 16


@triton.jit
def _gather(
    x, out, stride_n, stride_c, stride_y, stride_x, rows,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    tap, i = k // C, k % C
    n, pixel = (row // (H * W)).to(tl.int64), row % (H * W)
    y = (pixel // W)[:, None] + (tap // 3 - 1)[None, :]
    u = (pixel % W)[:, None] + (tap % 3 - 1)[None, :]
    inside = (y >= 0) & (y < H) & (u >= 0) & (u < W) & (row < rows)[:, None] & (tap < 9)[None, :]
    source = (n * stride_n)[:, None] + (i.to(tl.int64) * stride_c)[None, :]
    value = tl.load(x + source + y.to(tl.int64) * stride_y + u.to(tl.int64) * stride_x, mask=inside, other=0.0)
    target = row.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out + target, value.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (k < K)[None, :])


def gather(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The 3×3 neighbourhoods of x (N, C, H, W), of any strides, as columns in `dtype`: (NHW, 9C padded)."""
    n, channels, height, width = x.shape
    rows, columns = n * height * width, padded(9 * channels)
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    wide = triton.next_power_of_2(columns)
    block = max(2048 // wide, 1)
    _gather[(triton.cdiv(rows, block),)](
        x, out, *x.stride(), rows, C=channels, H=height, W=width, K=columns, ROWS=block, COLUMNS=wide
    )  # fmt: skip
    return out


@triton.jit
def _scatter(
    columns, out, add, out_n, add_n, add_c, add_y, add_x, rows,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, CHANNELS)
    n, pixel = (row // (H * W)).to(tl.int64), row % (H * W)
    y, u = pixel // W, pixel % W
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


def scatter(columns: Tensor, out: Tensor, add: Tensor | None = None) -> None:
    """out (N, C, H, W) becomes the neighbourhoods' columns (parts, NHW, ≥ 9C), float32, summed where they lie, plus `add`.

    out may be some channels of a contiguous tensor; add is of any strides.
    """
    n, channels, height, width = out.shape
    rows, wide = n * height * width, triton.next_power_of_2(channels)
    block = max(512 // wide, 16)
    other = out if add is None else add
    _scatter[(triton.cdiv(rows, block),)](
        columns, out, other, out.stride(0), *other.stride(), rows, C=channels, H=height, W=width, K=columns.shape[2],
        ADD=add is not None, PARTS=columns.shape[0], ROWS=block, CHANNELS=wide,
    )  # fmt: skip


@triton.jit
def _tanh(u):
    # (1 − a)/(1 + a) loses digits near 0, where the series has them all.
    a = tl.exp(-2 * tl.abs(u))
    far = (1 - a) / (1 + a)
    v = u * u
    near = u * (1 - v * (1 / 3 - v * (2 / 15 - v * (17 / 315 - v * (62 / 2835)))))
    return tl.where(tl.abs(u) < 0.3, near, tl.where(u < 0, -far, far))


@triton.jit
def _head(
    columns, bias, log_scale, x, stride_n, stride_c, stride_y, stride_x, out, h, log_det,
    C: tl.constexpr, STAY: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, STAYING: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, CHANNELS)
    of = j < C
    bias_even = tl.load(bias + 2 * j, mask=of, other=0.0)
    bias_odd = tl.load(bias + 2 * j + 1, mask=of, other=0.0)
    scale_even = tl.exp(3 * tl.load(log_scale + 2 * j, mask=of, other=0.0))
    scale_odd = tl.exp(3 * tl.load(log_scale + 2 * j + 1, mask=of, other=0.0))
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for start in range(0, H * W, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        y, u = pixel // W, pixel % W
        known = (pixel < H * W)[:, None] & of[None, :]
        even = tl.zeros([PIXELS, CHANNELS], tl.float32)
        odd = tl.zeros([PIXELS, CHANNELS], tl.float32)
        for tap in tl.static_range(9):
            inside = (y >= tap // 3 - 1) & (y < H + tap // 3 - 1) & (u >= tap % 3 - 1) & (u < W + tap % 3 - 1)
            row = n * (H * W) + pixel - (tap // 3 - 1) * W - (tap % 3 - 1)
            source = columns + row[:, None] * K + tap * 2 * C + j[None, :]
            even += tl.load(source, mask=known & inside[:, None], other=0.0)
            odd += tl.load(source + C, mask=known & inside[:, None], other=0.0)
        even = (even + bias_even[None, :]) * scale_even[None, :]
        odd = (odd + bias_odd[None, :]) * scale_odd[None, :]
        kept = h + (n * (H * W) + pixel)[:, None] * (2 * C) + j[None, :]
        tl.store(kept, even, mask=known)
        tl.store(kept + C, odd, mask=known)
        log_s = 2 * _tanh(even / 2)
        total += tl.where(known, log_s, 0.0)
        place = (n * stride_n + y.to(tl.int64) * stride_y + u.to(tl.int64) * stride_x)[:, None]
        target = (n * ((STAY + C) * H * W) + pixel)[:, None]
        change = tl.load(x + place + ((STAY + j).to(tl.int64) * stride_c)[None, :], mask=known, other=0.0)
        tl.store(out + target + ((STAY + j) * (H * W))[None, :], change * tl.exp(log_s) + odd, mask=known)
        if STAY > 0:
            i = tl.arange(0, STAYING)
            copied = (pixel < H * W)[:, None] & (i < STAY)[None, :]
            stay = tl.load(x + place + (i.to(tl.int64) * stride_c)[None, :], mask=copied, other=0.0)
            tl.store(out + target + (i * (H * W))[None, :], stay, mask=copied)
    tl.store(log_det + n, tl.sum(tl.sum(total, axis=1), axis=0))


def _pixels(size: int, channels: int) -> int:
    """How many pixels of an example a program takes at once."""
    return min(max(1024 // triton.next_power_of_2(channels), 16), triton.next_power_of_2(size))


def head(columns: Tensor, bias: Tensor, log_scale: Tensor, x: Tensor, stay: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the last convolution's columns say, done to x: h = (scatter(columns) + bias)·exp(3·log_scale), and

        log s = 2·tanh(h_even/2),   z = x·exp(log s) + h_odd,   log_det = Σ log s.

    columns: (NHW, ≥ 18C) float32. x: (N, stay + C, H, W), of any strides; its first `stay` channels are copied.
    Gives z in x's shape, log_det (N,), and h (NHW, 2C) for the backward pass.
    """
    n, channels, height, width = x.shape
    changing = channels - stay
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty(n * height * width, 2 * changing, dtype=x.dtype, device=x.device)
    log_det = torch.empty(n, dtype=x.dtype, device=x.device)
    _head[(n,)](
        columns, bias, log_scale, x, *x.stride(), out, h, log_det, C=changing, STAY=stay, H=height, W=width, K=columns.shape[1],
        PIXELS=_pixels(height * width, changing), CHANNELS=triton.next_power_of_2(changing),
        STAYING=triton.next_power_of_2(max(stay, 1)), num_warps=8,
    )  # fmt: skip
    return out, log_det, h


@triton.jit
def _head_backward(
    grad_z, z_n, z_c, z_y, z_x, grad_log_det, det_n, x, stride_n, stride_c, stride_y, stride_x,
    h, log_scale, grad_x, grad_y, sums,
    C: tl.constexpr, STAY: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, CHANNELS)
    of = j < C
    scale_even = tl.exp(3 * tl.load(log_scale + 2 * j, mask=of, other=0.0))
    scale_odd = tl.exp(3 * tl.load(log_scale + 2 * j + 1, mask=of, other=0.0))
    grad_det = tl.load(grad_log_det + n * det_n)
    bias_even = tl.zeros([PIXELS, CHANNELS], tl.float32)
    bias_odd = tl.zeros([PIXELS, CHANNELS], tl.float32)
    logs_even = tl.zeros([PIXELS, CHANNELS], tl.float32)
    logs_odd = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for start in range(0, H * W, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        y, u = (pixel // W).to(tl.int64), (pixel % W).to(tl.int64)
        known = (pixel < H * W)[:, None] & of[None, :]
        channel = (STAY + j).to(tl.int64)
        place = (n * z_n + y * z_y + u * z_x)[:, None] + (channel * z_c)[None, :]
        dz = tl.load(grad_z + place, mask=known, other=0.0)
        place = (n * stride_n + y * stride_y + u * stride_x)[:, None] + (channel * stride_c)[None, :]
        value = tl.load(x + place, mask=known, other=0.0)
        rows = (n * (H * W) + pixel)[:, None] * (2 * C) + j[None, :]
        even = tl.load(h + rows, mask=known, other=0.0)
        odd = tl.load(h + rows + C, mask=known, other=0.0)
        half = _tanh(even / 2)
        dx = dz * tl.exp(2 * half)
        target = (n * ((STAY + C) * H * W) + pixel)[:, None] + ((STAY + j) * (H * W))[None, :]
        tl.store(grad_x + target, dx, mask=known)
        d_even = tl.where(known, (dx * value + grad_det) * (1 - half * half), 0.0)
        tl.store(grad_y + rows, d_even * scale_even[None, :], mask=known)
        tl.store(grad_y + rows + C, dz * scale_odd[None, :], mask=known)
        bias_even += d_even
        bias_odd += dz
        logs_even += d_even * even
        logs_odd += dz * odd
    to = sums + n * (4 * C) + 2 * j
    tl.store(to, tl.sum(bias_even, axis=0) * scale_even, mask=of)
    tl.store(to + 1, tl.sum(bias_odd, axis=0) * scale_odd, mask=of)
    tl.store(to + 2 * C, 3 * tl.sum(logs_even, axis=0), mask=of)
    tl.store(to + 2 * C + 1, 3 * tl.sum(logs_odd, axis=0), mask=of)


def head_backward(
    grad_z: Tensor, grad_log_det: Tensor, x: Tensor, h: Tensor, log_scale: Tensor, grad_x: Tensor, stay: int
) -> tuple[Tensor, Tensor]:
    """The gradient through `head`, of x's channels from `stay` on written into grad_x (N, stay + C, H, W), contiguous.

    Gives that of scatter(columns), (NHW, 2C), and those of bias and log_scale, each example's own: (N, 2, 2C).
    """
    n, channels, height, width = x.shape
    changing = channels - stay
    grad_y = torch.empty_like(h)
    sums = torch.empty(n, 2, 2 * changing, dtype=x.dtype, device=x.device)
    _head_backward[(n,)](
        grad_z, *grad_z.stride(), grad_log_det, *grad_log_det.stride(), x, *x.stride(), h, log_scale, grad_x, grad_y, sums,
        C=changing, STAY=stay, H=height, W=width, PIXELS=_pixels(height * width, changing),
        CHANNELS=triton.next_power_of_2(changing), num_warps=8,
    )  # fmt: skip
    return grad_y, sums


class Tile(NamedTuple):
    """Rows, columns and depth of what a program multiplies at a time, its warps, and the stages of its pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def _tile(rows: int, width: int, dtype: torch.dtype) -> Tile:
    """Tiles that were the fastest, or nearly so, of several on one H200 at the shapes of Glow for MNIST and CIFAR-10."""
    if dtype == torch.float32:
        return Tile(64, 128, 32, 4, 3)
    few = triton.cdiv(rows, 128) * triton.cdiv(width, 128) < 512
    return Tile(64, 128, 64, 4, 3) if few else Tile(128, 128, 64, 8, 3)


def _shares(rows: int, width: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Among how many programs to share out blocks of rows, and how many of them each takes, one program on each processor."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    blocks = triton.cdiv(rows, tile.rows)
    parts = max(min(processors * (8 // tile.warps) // triton.cdiv(width, tile.columns), blocks), 1)
    steps = triton.cdiv(blocks, parts)
    return triton.cdiv(blocks, steps), steps


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether products of such numbers are taken by tensor cores; full float32 is left to torch's products."""
    return dtype != torch.float32 or allows_tf32()


@triton.jit
def _masked_product(
    a, b, inner_stride, width_stride, activation, out, sums, rows,
    inner: tl.constexpr, width: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    # Tiles of one block of rows come one after the other, so that they find a's block in the cache.
    across = tl.cdiv(width, N)
    block = tl.program_id(0) // across
    row = block * M + tl.arange(0, M)
    column = (tl.program_id(0) % across) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    a_tile = a + row.to(tl.int64)[:, None] * inner + k[None, :]
    b_tile = b + k[:, None] * inner_stride + column[None, :] * width_stride
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, inner, K):
        left = tl.load(a_tile, mask=(row < rows)[:, None] & (k < inner - start)[None, :], other=0.0)
        right = tl.load(b_tile, mask=(k < inner - start)[:, None] & (column < width)[None, :], other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="tf32")
        a_tile += K
        b_tile += K * inner_stride
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    known = (row < rows)[:, None] & (column < width)[None, :]
    total = tl.where(tl.load(activation + place, mask=known, other=0.0).to(tl.float32) > 0, total, 0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=known)
    tl.store(sums + block.to(tl.int64) * width + column, tl.sum(total, axis=0), mask=column < width)


def masked_product(a: Tensor, b: Tensor, activation: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """g = (a·b) ⊙ [activation > 0] in a's dtype, and sums of g's columns over blocks of rows: the gradient through a ReLU.

    a (M, K), contiguous; b (K, D), of any strides; activation (M, D), contiguous. Sums: (blocks, D) float32, before rounding.
    Reads activation and writes g once, in the product's own kernel. In full float32, where tensor cores have no part, the
    product is torch's, and the mask a pass of its own.
    """
    (rows, inner), width = a.shape, b.shape[1]
    if not on_tensor_cores(a.dtype):
        g = torch.ops.aten.threshold_backward(a @ b, activation, 0)
        return g, g.sum(0, keepdim=True)
    tile = tile or _tile(rows, width, a.dtype)
    out = torch.empty_like(activation)
    blocks = triton.cdiv(rows, tile.rows)
    sums = torch.empty(blocks, width, dtype=torch.float32, device=a.device)
    _masked_product[(blocks * triton.cdiv(width, tile.columns),)](
        a, b, *b.stride(), activation, out, sums, rows, inner=inner, width=width, M=tile.rows, N=tile.columns, K=tile.depth,
        WIDEN=not a.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, sums


@triton.jit
def _last_backward(
    columns, w, w_k, w_d, activation, out, sums, products, rows,
    D: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (D + N - 1) // N
    part = tl.program_id(0) // across
    d = (tl.program_id(0) % across) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    of = (k < COLUMNS)[:, None] & (d < D)[None, :]
    right = tl.load(w + k[:, None] * w_k + d[None, :] * w_d, mask=of, other=0.0)
    if WIDEN:
        right = right.to(tl.float32)
    product = tl.zeros([K, N], tl.float32)
    bias = tl.zeros([N], tl.float32)
    for step in range(STEPS):
        row = (part * STEPS + step) * M + tl.arange(0, M)
        known = (row < rows)[:, None] & (d < D)[None, :]
        place = row.to(tl.int64)[:, None] * D + d[None, :]
        around = row.to(tl.int64)[:, None] * COLUMNS + k[None, :]
        left = tl.load(columns + around, mask=(row < rows)[:, None] & (k < COLUMNS)[None, :], other=0.0)
        active = tl.load(activation + place, mask=known, other=0.0)
        if WIDEN:
            left, active = left.to(tl.float32), active.to(tl.float32)
        g = tl.where(active.to(tl.float32) > 0, tl.dot(left, right, input_precision="tf32"), 0.0)
        tl.store(out + place, g.to(out.dtype.element_ty), mask=known)
        bias += tl.sum(g, axis=0)
        product = tl.dot(tl.trans(left), active, product, input_precision="tf32")
    tl.store(sums + part * D + d, bias, mask=d < D)
    tl.store(products + part.to(tl.int64) * (COLUMNS * D) + k[:, None] * D + d[None, :], product, mask=of)


def last_backward(columns: Tensor, w: Tensor, activation: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """G = (columns·w) ⊙ [activation > 0], and, each in parts to be summed, G's column sums and columnsᵀ·activation.

    columns (M, K), K ≤ 128, and activation (M, D), contiguous; w (K, D), of any strides. Sums (parts, D), products (parts, K, D),
    both float32. Reads activation and writes G once, and little else: K is small beside D.
    """
    (rows, inner), width = columns.shape, w.shape[1]
    tile = tile or Tile(64, 128, inner, 4 if inner <= 64 else 8, 1 if columns.dtype == torch.float32 else 2)
    parts, steps = _shares(rows, width, tile, columns.device)
    out = torch.empty_like(activation)
    sums = torch.empty(parts, width, dtype=torch.float32, device=w.device)
    products = torch.empty(parts, inner, width, dtype=torch.float32, device=w.device)
    _last_backward[(parts * triton.cdiv(width, tile.columns),)](
        columns, w, *w.stride(), activation, out, sums, products, rows, D=width, COLUMNS=inner, STEPS=steps,
        M=tile.rows, N=tile.columns, K=max(triton.next_power_of_2(inner), 16), WIDEN=not w.is_cuda,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, sums, products


@triton.jit
def _first_backward(
    g, w, w_k, w_d, activation, columns, first, sums, products, guides, rows,
    D: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (D + N - 1) // N
    part, which = tl.program_id(0) // across, tl.program_id(0) % across
    d = which * N + tl.arange(0, N)
    c = tl.arange(0, WIDE)
    of = (d < D)[:, None] & (c < COLUMNS)[None, :]
    first_tile = tl.load(first + d[:, None] * COLUMNS + c[None, :], mask=of, other=0.0)
    if WIDEN:
        first_tile = first_tile.to(tl.float32)
    product = tl.zeros([N, WIDE], tl.float32)
    bias = tl.zeros([N], tl.float32)
    for step in range(STEPS):
        row = (part * STEPS + step) * M + tl.arange(0, M)
        k = tl.arange(0, K)
        left_tile = g + row.to(tl.int64)[:, None] * D + k[None, :]
        right_tile = w + k[:, None] * w_k + d[None, :] * w_d
        total = tl.zeros([M, N], tl.float32)
        for start in range(0, D, K):
            left = tl.load(left_tile, mask=(row < rows)[:, None] & (k < D - start)[None, :], other=0.0)
            right = tl.load(right_tile, mask=(k < D - start)[:, None] & (d < D)[None, :], other=0.0)
            if WIDEN:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision="tf32")
            left_tile += K
            right_tile += K * w_k
        place = row.to(tl.int64)[:, None] * D + d[None, :]
        active = tl.load(activation + place, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)
        total = tl.where(active.to(tl.float32) > 0, total, 0.0)
        bias += tl.sum(total, axis=0)
        known = (row < rows)[:, None] & (c < COLUMNS)[None, :]
        place = row.to(tl.int64)[:, None] * COLUMNS + c[None, :]
        around = tl.load(columns + place, mask=known, other=0.0)
        low = total.to(g.dtype.element_ty)
        if WIDEN:
            low, around = low.to(tl.float32), around.to(tl.float32)
        guide = tl.dot(low, first_tile, input_precision="tf32")
        tl.store(guides + which.to(tl.int64) * rows * COLUMNS + place, guide, mask=known)
        product = tl.dot(tl.trans(low), around, product, input_precision="tf32")
    tl.store(sums + part * D + d, bias, mask=d < D)
    tl.store(products + part.to(tl.int64) * (D * COLUMNS) + d[:, None] * COLUMNS + c[None, :], product, mask=of)


def first_backward(
    g: Tensor, w: Tensor, activation: Tensor, columns: Tensor, first: Tensor, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """With G = (g·w) ⊙ [activation > 0]: its column sums, Gᵀ·columns and G·first, each in parts to be summed; G is not kept.

    g and activation (M, D), columns (M, K) and first (D, K), K ≤ 64, all contiguous; w (D, D), of any strides. Sums (parts, D),
    Gᵀ·columns (parts, D, K), G·first (blocks of D, M, K), all float32. Reads activation once, g once per tile's columns.
    """
    (rows, width), inner = g.shape, columns.shape[1]
    tile = tile or _tile(rows, width, g.dtype)
    parts, steps = _shares(rows, width, tile, g.device)
    across = triton.cdiv(width, tile.columns)
    sums = torch.empty(parts, width, dtype=torch.float32, device=g.device)
    products = torch.empty(parts, width, inner, dtype=torch.float32, device=g.device)
    guides = torch.empty(across, rows, inner, dtype=torch.float32, device=g.device)
    _first_backward[(parts * across,)](
        g, w, *w.stride(), activation, columns, first, sums, products, guides, rows, D=width, COLUMNS=inner, STEPS=steps,
        M=tile.rows, N=tile.columns, K=tile.depth, WIDE=triton.next_power_of_2(inner), WIDEN=not g.is_cuda,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return sums, products, guides


@triton.jit
def _pack(
    first, first_bias, second, second_bias, last, to_first, to_first_bias, to_second, to_second_bias, to_last, to_last_across,
    D: tl.constexpr, C1: tl.constexpr, K1: tl.constexpr, C3: tl.constexpr, K3: tl.constexpr, CAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS1: tl.constexpr, COLUMNS3: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = (d < D)[:, None]
    kind = to_first.dtype.element_ty

    k = tl.arange(0, COLUMNS1)
    source = d[:, None] * (9 * C1) + (k % C1 * 9 + k // C1)[None, :]
    value = tl.load(first + source, mask=known & (k < 9 * C1)[None, :], other=0.0)
    tl.store(to_first + d[:, None] * K1 + k[None, :], value.to(kind), mask=known & (k < K1)[None, :])

    # Row k = s·2C + r of the last convolution's matrix: tap s mirrored, r in the order of even and then odd outputs.
    k = tl.arange(0, COLUMNS3)
    r = k % (2 * C3)
    output = tl.where(r < C3, 2 * r, 2 * (r - C3) + 1)
    source = output[None, :] * D * 9 + d[:, None] * 9 + (8 - k // (2 * C3))[None, :]
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


def pack(
    first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor, last: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The three convolutions' weights as matrices in `dtype`, float32 or bfloat16, in one kernel.

    first (D, C₁, 3, 3), second (D, D, 1, 1), last (2C, D, 3, 3), all contiguous, give

        W₁ (D, 9C₁ padded), its bias, W₂ (D, D), its bias, W₃ (18C padded, D), and for the backward pass W₂ and W₃ again,

    the last two with inner neighbours next to each other in memory, which TF32's tensor cores need and those of bfloat16 do not.
    What has to be neither cast nor moved is given back as it is.
    """
    width, channels = first.shape[:2]
    changing = last.shape[0] // 2
    k1, k3 = padded(9 * channels), padded(18 * changing)
    cast = dtype != torch.float32
    new = partial(torch.empty, dtype=dtype, device=first.device)
    to_first, to_last = new(width, k1), new(k3, width)
    to_second = new(width, width)
    second = second.view(width, width)
    to_first_bias = new(width) if cast else first_bias
    to_second_bias = new(width) if cast else second_bias
    to_last_across = to_last if cast else new(width, k3)
    rows = 8
    _pack[(triton.cdiv(width, rows),)](
        first, first_bias, second, second_bias, last,
        to_first, to_first_bias, to_second, to_second_bias, to_last, to_last_across,
        D=width, C1=channels, K1=k1, C3=changing, K3=k3, CAST=cast, ROWS=rows,
        COLUMNS1=triton.next_power_of_2(k1), COLUMNS3=triton.next_power_of_2(k3), WIDTH=min(512, triton.next_power_of_2(width)),
    )  # fmt: skip
    if cast:
        return to_first, to_first_bias, to_second, to_second_bias, to_last, to_second, to_last
    return to_first, first_bias, second, second_bias, to_last, to_second.t(), to_last_across.t()


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
def _unpack(
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
        value = _sum_of_parts(first, first_parts, D * K1, d * K1 + k % 9 * C1 + k // 9, square, PARTS1, ROWS, COLUMNS1)
        tl.store(to_first + d * (9 * C1) + k, value, mask=square)
        k = tl.arange(0, COLUMNS3)[None, :]
        output, square = k // 9, (d < D) & (k < 18 * C3)
        source = ((8 - k % 9) * (2 * C3) + output % 2 * C3 + output // 2) * D + d
        value = _sum_of_parts(last, last_parts, D * K3, source, square, PARTS3, ROWS, COLUMNS3)
        tl.store(to_last + output * (9 * D) + d * 9 + k % 9, value, mask=square)
        tl.store(to_first_bias + d, _sum_of_parts(first_sums, first_sum_parts, D, d, d < D, 64, ROWS, 1), mask=d < D)
        tl.store(to_second_bias + d, _sum_of_parts(second_sums, second_sum_parts, D, d, d < D, 64, ROWS, 1), mask=d < D)


def unpack(
    first: Tensor, first_sums: Tensor, second_sums: Tensor, last: Tensor, head_sums: Tensor, channels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the packed matrices as those of the weights, with all parts added up, in one kernel.

    first (parts, D, 9C₁ padded) and last (parts, 18C padded, D); sums for biases (parts, D), of `head_backward` (N, 2, 2C); all
    float32, contiguous, each with as many parts as it has.
    Gives the gradients of W₁ (D, C₁, 3, 3), its bias, W₂'s bias, W₃ (2C, D, 3, 3), its bias, and of log_scale.
    """
    (_, width, k1), (_, k3, _), (n, _, outputs) = first.shape, last.shape, head_sums.shape
    new = partial(torch.empty, dtype=torch.float32, device=first.device)
    to_first, to_last = new(width, channels, 3, 3), new(outputs, width, 3, 3)
    to_bias, to_head = new(2, width), new(2, outputs)
    rows, wide1, wide3 = 4, triton.next_power_of_2(9 * channels), triton.next_power_of_2(9 * outputs)
    _unpack[(triton.cdiv(width, rows) + 1,)](
        first, first_sums, second_sums, last, head_sums, to_first, to_bias[0], to_bias[1], to_last, to_head,
        first.shape[0], first_sums.shape[0], second_sums.shape[0], last.shape[0], n,
        D=width, C1=channels, K1=k1, C3=outputs // 2, K3=k3, ROWS=rows,
        COLUMNS1=wide1, PARTS1=min(max(1024 // wide1, 1), 16), COLUMNS3=wide3, PARTS3=min(max(1024 // wide3, 1), 16),
        HEAD=triton.next_power_of_2(2 * outputs),
    )  # fmt: skip
    return to_first, to_bias[0], to_bias[1], to_last, to_head[0], to_head[1]

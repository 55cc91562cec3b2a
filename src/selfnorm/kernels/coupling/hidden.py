"""Matrix products of the backward pass through the hidden layers, each with the ReLU's mask and the sums for small gradients.

Each kernel reads and writes each of its tensors once, except for the factors of a product, which it reads once per tile. WIDEN,
set off CUDA, converts bfloat16 to float32 before a product, since Triton's interpreter would multiply bfloat16 as integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.dispatch import allows_tf32
from selfnorm.kernels.matrix_tiles import ProductTiles


def _hidden_tiles(rows: int, width: int, dtype: torch.dtype) -> ProductTiles:
    """Returns tiles for a product: the fastest, or nearly so, of several on one H200 at Glow's shapes for MNIST and CIFAR-10."""
    if dtype == torch.float32:
        return ProductTiles(64, 128, 32, 4, 3)
    few = triton.cdiv(rows, 128) * triton.cdiv(width, 128) < 512
    return ProductTiles(64, 128, 64, 4, 3) if few else ProductTiles(128, 128, 64, 8, 3)


def _share_row_blocks(rows: int, width: int, tiles: ProductTiles, device: torch.device) -> tuple[int, int]:
    """Returns the number of programs that share the blocks of rows, about one per processor, and the blocks that each takes."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    blocks = triton.cdiv(rows, tiles.rows)
    parts = max(min(processors * (8 // tiles.warps) // triton.cdiv(width, tiles.columns), blocks), 1)
    steps = triton.cdiv(blocks, parts)
    return triton.cdiv(blocks, steps), steps


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """Returns whether tensor cores compute products in this dtype; full float32 is left to torch."""
    return dtype != torch.float32 or allows_tf32()


@triton.jit
def _rows_times(
    a, b, inner_stride, width_stride, row, column, rows,
    INNER: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The tile (M, N) of a·b with these rows and columns; a (rows, INNER), contiguous, and b (INNER, WIDTH), with any strides."""
    k = tl.arange(0, K)
    left_tile = a + row.to(tl.int64)[:, None] * INNER + k[None, :]
    right_tile = b + k[:, None] * inner_stride + column[None, :] * width_stride
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, INNER, K):
        left = tl.load(left_tile, mask=(row < rows)[:, None] & (k < INNER - start)[None, :], other=0.0)
        right = tl.load(right_tile, mask=(k < INNER - start)[:, None] & (column < WIDTH)[None, :], other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="tf32")
        left_tile += K
        right_tile += K * inner_stride
    return total


@triton.jit
def _masked_product(
    a, b, inner_stride, width_stride, activation, out, sums, rows,
    inner: tl.constexpr, width: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    # Tiles of one block of rows run one after another, so that they find a's block in the cache.
    across = tl.cdiv(width, N)
    block = tl.program_id(0) // across
    row = block * M + tl.arange(0, M)
    column = (tl.program_id(0) % across) * N + tl.arange(0, N)
    total = _rows_times(a, b, inner_stride, width_stride, row, column, rows, inner, width, M, N, K, WIDEN)
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    known = (row < rows)[:, None] & (column < width)[None, :]
    total = tl.where(tl.load(activation + place, mask=known, other=0.0).to(tl.float32) > 0, total, 0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=known)
    tl.store(sums + block.to(tl.int64) * width + column, tl.sum(total, axis=0), mask=column < width)


def masked_product(a: Tensor, b: Tensor, activation: Tensor, tiles: ProductTiles | None = None) -> tuple[Tensor, Tensor]:
    """Returns g = (a·b) ⊙ [activation > 0] in a's dtype, the gradient through a ReLU, and its column sums over blocks of rows.

    a (M, K), contiguous; b (K, D), with any strides; activation (M, D), contiguous. Sums: (blocks, D) float32, before rounding.
    Reads activation and writes g once, in the product's own kernel. In full float32, which tensor cores do
    not compute, the product is torch's and the mask a separate pass.
    """
    (rows, inner), width = a.shape, b.shape[1]
    if not on_tensor_cores(a.dtype):
        g = torch.ops.aten.threshold_backward(a @ b, activation, 0)
        return g, g.sum(0, keepdim=True)
    tiles = tiles or _hidden_tiles(rows, width, a.dtype)
    out = torch.empty_like(activation)
    blocks = triton.cdiv(rows, tiles.rows)
    sums = torch.empty(blocks, width, dtype=torch.float32, device=a.device)
    _masked_product[(blocks * triton.cdiv(width, tiles.columns),)](
        a, b, *b.stride(), activation, out, sums, rows, inner=inner, width=width, M=tiles.rows, N=tiles.columns, K=tiles.depth,
        WIDEN=not a.is_cuda, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out, sums


@triton.jit
def _last_layer_backward(
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


def last_layer_backward(
    columns: Tensor, w: Tensor, activation: Tensor, tiles: ProductTiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns G = (columns·w) ⊙ [activation > 0], and in parts to be summed G's column sums and columnsᵀ·activation.

    columns (M, K), K ≤ 128, and activation (M, D), contiguous; w (K, D), with any strides. Sums (parts, D) and products
    (parts, K, D) are float32. Reads activation and writes G once, and little else: K is small compared with D.
    """
    (rows, inner), width = columns.shape, w.shape[1]
    tiles = tiles or ProductTiles(64, 128, inner, 4 if inner <= 64 else 8, 1 if columns.dtype == torch.float32 else 2)
    parts, steps = _share_row_blocks(rows, width, tiles, columns.device)
    out = torch.empty_like(activation)
    sums = torch.empty(parts, width, dtype=torch.float32, device=w.device)
    products = torch.empty(parts, inner, width, dtype=torch.float32, device=w.device)
    _last_layer_backward[(parts * triton.cdiv(width, tiles.columns),)](
        columns, w, *w.stride(), activation, out, sums, products, rows, D=width, COLUMNS=inner, STEPS=steps,
        M=tiles.rows, N=tiles.columns, K=max(triton.next_power_of_2(inner), 16), WIDEN=not w.is_cuda,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out, sums, products


@triton.jit
def _first_layer_backward(
    g, w, w_k, w_d, activation, columns, first, sums, products, input_parts, rows,
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
        total = _rows_times(g, w, w_k, w_d, row, d, rows, D, D, M, N, K, WIDEN)
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
        input_part = tl.dot(low, first_tile, input_precision="tf32")
        tl.store(input_parts + which.to(tl.int64) * rows * COLUMNS + place, input_part, mask=known)
        product = tl.dot(tl.trans(low), around, product, input_precision="tf32")
    tl.store(sums + part * D + d, bias, mask=d < D)
    tl.store(products + part.to(tl.int64) * (D * COLUMNS) + d[:, None] * COLUMNS + c[None, :], product, mask=of)


def first_layer_backward(
    g: Tensor, w: Tensor, activation: Tensor, columns: Tensor, first: Tensor, tiles: ProductTiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, in parts to be summed, the column sums of G = (g·w) ⊙ [activation > 0], Gᵀ·columns and G·first. G is not stored.

    g and activation (M, D), columns (M, K) and first (D, K), K ≤ 64, all contiguous; w (D, D), with any strides. Sums (parts, D),
    Gᵀ·columns (parts, D, K), G·first (blocks of D, M, K), all float32. Reads activation once, g once per tile's columns.
    """
    (rows, width), inner = g.shape, columns.shape[1]
    tiles = tiles or _hidden_tiles(rows, width, g.dtype)
    parts, steps = _share_row_blocks(rows, width, tiles, g.device)
    across = triton.cdiv(width, tiles.columns)
    sums = torch.empty(parts, width, dtype=torch.float32, device=g.device)
    products = torch.empty(parts, width, inner, dtype=torch.float32, device=g.device)
    input_parts = torch.empty(across, rows, inner, dtype=torch.float32, device=g.device)
    _first_layer_backward[(parts * across,)](
        g, w, *w.stride(), activation, columns, first, sums, products, input_parts, rows, D=width, COLUMNS=inner, STEPS=steps,
        M=tiles.rows, N=tiles.columns, K=tiles.depth, WIDE=triton.next_power_of_2(inner), WIDEN=not g.is_cuda,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return sums, products, input_parts

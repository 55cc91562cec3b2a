"""Multiplies a matrix's gradient from its factors in one pass: aᵀb + s·M, or s·Mᵀ, with s = factor·Σ scale.

a and b are (N, D), M (D, D), scale (N,) or a scalar; float32. It reads M and writes the gradient once, 8D² bytes; the factors
come from the cache, (1/rows + 1/columns)·4ND² bytes. Above `MAX_FACTORED_EXAMPLES` examples cuBLAS adds the product. The
kernels of `adam` are made of the same pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.dispatch import input_precision
from selfnorm.kernels.matrix_tiles import ProductTiles, matrix_tile, tile_offsets
from selfnorm.kernels.numerics import correct_truncation
from selfnorm.kernels.vectors import sum_blocks, vector_sum

MAX_FACTORED_EXAMPLES = 512


def gradient_tiles(features: int) -> ProductTiles:
    """Returns the fastest tiles, or nearly so, of several on one H200.

    With 64 rows Triton uses other units and takes three times as long.
    """
    if features <= 512:
        return ProductTiles(rows=32, columns=32, depth=64, warps=4, stages=3)
    return ProductTiles(rows=32, columns=128, depth=32, warps=4, stages=3)


def gradient_from_factors(
    a: Tensor,
    b: Tensor,
    addend: Tensor,
    addend_transposed: bool,
    scale: Tensor,
    factor: float,
    *,
    by: ProductTiles | None = None,
) -> Tensor:
    """Returns aᵀb + s·M with M the addend, transposed or not."""
    examples, features = a.shape
    fused = examples <= MAX_FACTORED_EXAMPLES or by is not None
    by = by or gradient_tiles(features)
    out = torch.empty(features, features, dtype=a.dtype, device=a.device)
    scale = scale.reshape(-1)
    _gradient_kernel[(triton.cdiv(features, by.columns), triton.cdiv(features, by.rows))](
        a.contiguous(), b.contiguous(), addend.contiguous(), scale, factor, out, examples, features, scale.numel(),
        scale.stride(0), addend_transposed, by.rows, by.columns, by.depth, triton.cdiv(examples, by.depth) if fused else 0,
        *sum_blocks(scale.numel()), input_precision(), num_warps=by.warps, num_stages=by.stages,
    )  # fmt: skip
    return out if fused else out.addmm_(a.mT, b)


@triton.jit
def factor_product(
    a, b, rows, columns, examples, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of aᵀb with these rows and columns."""
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        depth = step * DEPTH + tl.arange(0, DEPTH)
        lefts = a + depth[None, :].to(tl.int64) * features + rows[:, None]
        rights = b + depth[:, None].to(tl.int64) * features + columns[None, :]
        left = tl.load(lefts, mask=(depth[None, :] < examples) & (rows[:, None] < features), other=0.0)
        right = tl.load(rights, mask=(depth[:, None] < examples) & (columns[None, :] < features), other=0.0)
        result = tl.dot(left, right, result, input_precision=PRECISION)
    return correct_truncation(result, PRECISION)


@triton.jit
def with_free_layout(tile):
    """The same numbers in a layout that the compiler may choose: the layout of a product's result makes loads and stores slow."""
    same, _ = tl.split(tl.join(tile, tile))
    return same


@triton.jit
def addend_tile(addend, rows, columns, at, inside, features, TRANSPOSED: tl.constexpr):
    """The tile of M with these rows and columns, or of Mᵀ."""
    if TRANSPOSED:
        across, valid = tile_offsets(columns, rows, features, features)
        tile = tl.trans(tl.load(addend + across, mask=valid, other=0.0))
    else:
        tile = tl.load(addend + at, mask=inside, other=0.0)
    return tile


@triton.jit
def _gradient_kernel(
    a, b, addend, scale, factor, out, examples, features, count, stride, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, SUMS: tl.constexpr, ROUNDS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rows, columns, at, inside = matrix_tile(features, features, ROWS, COLUMNS)
    tile = addend_tile(addend, rows, columns, at, inside, features, TRANSPOSED)
    tile *= factor * vector_sum(scale, count, stride, SUMS, ROUNDS)
    if STEPS > 0:
        tile += with_free_layout(factor_product(a, b, rows, columns, examples, features, ROWS, COLUMNS, DEPTH, STEPS, PRECISION))
    tl.store(out + at, tile, mask=inside)

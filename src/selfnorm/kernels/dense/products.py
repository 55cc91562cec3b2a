"""Products of a small batch with square matrices, fused with what follows them.

    affine       z = xWᵀ, out = z + b                                              one launch
    reconstruct  error = zRᵀ − x, squares = Σ_d error²                             one, and a tiny one for the sums
    pull_back    grad_x = grad_z W, towards_w = grad_z/2 + grad_error R,
                 towards_r = grad_error − grad_x/2, grad_b = Σ_n grad_z            one
                 one-sided: towards_w = grad_z + grad_error R, towards_r = grad_error
    add_penalty  the same, one-sided and without grad_x, given error R             one, without a product
    times        aA, and bB in the same launch                                     one

x, z, error, grad_z (N, D), W, R (D, D), b (D,), grad_reconstruction (N, 1), grad_error = 2·grad_reconstruction·error; float32.

At N = 100 examples a product reads 4D² bytes of its matrix and does little arithmetic. Its speed depends on how many programs
read at the same time, and on how often a slab of the batch or the matrix is read again from the cache: (1/rows + 1/columns)·4ND²
bytes for tiles of rows × columns. `split_tiles` chooses the tiles, or cuBLAS where that is faster. With `split` > 1 the sum
over k is split among programs that write partial results, which a second launch adds up in a fixed order: no result depends on
timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.dispatch import input_precision
from selfnorm.kernels.matrix_tiles import matrix_tile
from selfnorm.kernels.numerics import correct_truncation
from selfnorm.linalg.learned import likelihood_shares

WHOLE, PART, REST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # which part of a product a launch computes


class SplitTiles(NamedTuple):
    """A program computes rows × columns of a result, `depth` terms of the sum at a time; `split` programs share a sum."""

    rows: int
    columns: int
    depth: int
    split: int
    warps: int
    stages: int


def split_tiles(examples: int, features: int, products: int = 1) -> SplitTiles | None:
    """Returns tiles for a launch of this many products, or None where cuBLAS is faster: with more to multiply than to read."""
    if examples > 256 or features > 1024:
        return None
    if products == 1:
        return SplitTiles(rows=64, columns=32, depth=64, split=1, warps=4, stages=4)
    return SplitTiles(rows=32, columns=64, depth=64, split=1, warps=4, stages=4)


def affine(
    x: Tensor, W: Tensor, b: Tensor | None, zeros: Tensor | None = None, *, by: SplitTiles | None = None
) -> tuple[Tensor, Tensor]:
    """Returns z = xWᵀ and z + b, which without b is z itself.

    zeros:  a vector (N,) that the same launch sets to 0: a layer's log-determinant.
    """
    by = by or split_tiles(*x.shape)
    if by is None:
        z = x @ W.mT
        if zeros is not None:
            zeros.zero_()
        return z, z if b is None else z + b
    x, W, b = x.contiguous(), W.contiguous(), None if b is None else b.contiguous()
    z = torch.empty_like(x)
    out = z if b is None else torch.empty_like(x)
    tensors = (x, W, z if b is None else b, z, out, z if zeros is None else zeros)
    _launch(_affine_kernel, 1, by, x, tensors, b is not None, zeros is not None)
    return z, out


def reconstruct(z: Tensor, R: Tensor, x: Tensor, *, by: SplitTiles | None = None) -> tuple[Tensor, Tensor]:
    """Returns error = zRᵀ − x (N, D) and its squares, summed over features (N, 1)."""
    by = by or split_tiles(*x.shape)
    if by is None:
        error = torch.addmm(x, z, R.mT, beta=-1)
        return error, error.square().sum(1, keepdim=True)
    examples, features = x.shape
    z, R, x = z.contiguous(), R.contiguous(), x.contiguous()
    error = torch.empty_like(x)
    sums = x.new_empty(examples, triton.cdiv(features, by.columns))
    _launch(_reconstruct_kernel, 1, by, x, (z, R, x, error, sums))
    squares = x.new_empty(examples, 1)
    _sum_kernel[(examples,)](sums, squares, sums.shape[1], BLOCK=triton.next_power_of_2(sums.shape[1]), num_warps=1)
    return error, squares


def pull_back(
    grad_z: Tensor,
    W: Tensor,
    R: Tensor,
    error: Tensor,
    grad_reconstruction: Tensor,
    bias: bool = False,
    inverse_likelihood: bool = True,
    *,
    by: SplitTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns grad_x, towards_w and towards_r (N, D), and grad_b (D,) if there is a bias.

    inverse_likelihood:  whether R takes half of the likelihood's gradient, or W all of it.
    """
    of_w, of_r = likelihood_shares(inverse_likelihood)
    by = by or split_tiles(grad_z.shape[0], grad_z.shape[1], products=2)
    if by is None:
        grad_error = 2 * grad_reconstruction * error
        grad_x = grad_z @ W
        towards_w = torch.addmm(grad_z, grad_error, R, beta=of_w)
        towards_r = torch.add(grad_error, grad_x, alpha=-of_r) if of_r else grad_error
        return grad_x, towards_w, towards_r, grad_z.sum(0) if bias else None
    grad_z, W, R, error = grad_z.contiguous(), W.contiguous(), R.contiguous(), error.contiguous()
    grad_x, towards_w, towards_r = (torch.empty_like(grad_z) for _ in range(3))
    grad_b = grad_z.new_empty(grad_z.shape[1]) if bias else None
    tensors = (grad_z, W, R, error, grad_reconstruction, grad_x, towards_w, towards_r, grad_z if grad_b is None else grad_b)
    batches = triton.cdiv(grad_z.shape[0], by.rows) if bias else 0
    _launch(_pull_back_kernel, 2, by, grad_z, (*tensors, grad_reconstruction.stride(0)), inverse_likelihood, batches)
    return grad_x, towards_w, towards_r, grad_b


def add_penalty(
    grad_z: Tensor, error: Tensor, back: Tensor, grad_reconstruction: Tensor, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns towards_w and towards_r (N, D) of the one-sided objective, and grad_b (D,) if there is a bias.

    back: error R (N, D).
    """
    examples, features = grad_z.shape
    grad_z, error, back = grad_z.contiguous(), error.contiguous(), back.contiguous()
    towards_w, towards_r = torch.empty_like(grad_z), torch.empty_like(grad_z)
    grad_b = grad_z.new_empty(features) if bias else None
    _add_penalty_kernel[(triton.cdiv(features, 32), triton.cdiv(examples, 32))](
        grad_z, error, back, grad_reconstruction, towards_w, towards_r, grad_b, grad_reconstruction.stride(0), examples, features,
        ROWS=32, COLUMNS=32, BATCHES=triton.cdiv(examples, 32), num_warps=4,
    )  # fmt: skip
    return towards_w, towards_r, grad_b


def times(
    a: Tensor, A: Tensor, b: Tensor | None = None, B: Tensor | None = None, *, by: SplitTiles | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns aA, and bB from the same launch; a and b (N, D), A and B (D, D)."""
    two = b is not None and B is not None
    by = by or split_tiles(a.shape[0], a.shape[1], products=1 + two)
    if by is None:
        return a @ A, b @ B if b is not None and B is not None else None
    a, A = a.contiguous(), A.contiguous()
    aA, bB = torch.empty_like(a), None
    if b is None or B is None:
        _launch(_times_kernel, 1, by, a, (a, A, a, A, aA, aA))
    else:
        bB = torch.empty_like(a)
        _launch(_times_kernel, 2, by, a, (a, A, b.contiguous(), B.contiguous(), aA, bB))
    return aA, bB


def _launch(kernel: Any, products: int, by: SplitTiles, like: Tensor, arguments: tuple[Any, ...], *flags: int) -> None:
    """Runs a kernel over all tiles of its results, of `like`'s shape: in one launch, or in two if sums are split."""
    examples, features = like.shape
    grid = (triton.cdiv(features, by.columns), triton.cdiv(examples, by.rows))
    precision = input_precision()
    steps = triton.cdiv(triton.cdiv(features, by.depth), by.split)
    shape = (by.rows, by.columns, by.depth, steps, by.split, precision)
    options = {"num_warps": by.warps, "num_stages": by.stages}
    if by.split == 1:
        kernel[(*grid, products)](*arguments, like, examples, features, *flags, WHOLE.value, *shape, **options)
        return
    partial = like.new_empty(products * by.split, examples, features)
    kernel[(*grid, products * by.split)](*arguments, partial, examples, features, *flags, PART.value, *shape, **options)
    kernel[(*grid, products)](*arguments, partial, examples, features, *flags, REST.value, *shape, **options)


@triton.jit
def _tile_of_product(
    a, matrix, partial, which, rows, columns, at, inside, examples, features, TRANSPOSED: tl.constexpr,
    STAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of aM or aMᵀ: the whole sum, this program's part of it (which it also writes), or the sum of all parts."""
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    slab = tl.full((), 1, tl.int64) * examples * features
    if STAGE == REST:
        for split in tl.static_range(SPLIT):
            result += tl.load(partial + (which * SPLIT + split) * slab + at, mask=inside, other=0.0)
    else:
        first = 0
        if STAGE == PART:
            first = (tl.program_id(2) % SPLIT) * (STEPS * DEPTH)
        lefts = a + rows[:, None].to(tl.int64) * features
        if TRANSPOSED:
            rights = matrix + columns[None, :].to(tl.int64) * features
        else:
            rights = matrix + columns[None, :]
        for step in range(STEPS):
            depth = first + step * DEPTH + tl.arange(0, DEPTH)
            left = tl.load(lefts + depth[None, :], mask=(rows[:, None] < examples) & (depth[None, :] < features), other=0.0)
            valid = (depth[:, None] < features) & (columns[None, :] < features)
            if TRANSPOSED:
                right = tl.load(rights + depth[:, None], mask=valid, other=0.0)
            else:
                right = tl.load(rights + depth[:, None].to(tl.int64) * features, mask=valid, other=0.0)
            result = tl.dot(left, right, result, input_precision=PRECISION)
        result = correct_truncation(result, PRECISION)
        if STAGE == PART:
            tl.store(partial + tl.program_id(2) * slab + at, result, mask=inside)
    return result


@triton.jit
def _affine_kernel(
    x, W, b, z, out, zeros, partial, examples, features, HAS_BIAS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    STAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rows, columns, at, inside = matrix_tile(examples, features, ROWS, COLUMNS)
    product = _tile_of_product(
        x, W, partial, 0, rows, columns, at, inside, examples, features, True,
        STAGE, ROWS, COLUMNS, DEPTH, STEPS, SPLIT, PRECISION,
    )  # fmt: skip
    if STAGE != PART:
        tl.store(z + at, product, mask=inside)
        if HAS_BIAS:
            shift = tl.load(b + columns, mask=columns < features, other=0.0)
            tl.store(out + at, product + shift[None, :], mask=inside)
        if HAS_ZEROS:
            tl.store(zeros + rows, tl.zeros((ROWS,), tl.float32), mask=(rows < examples) & (tl.program_id(0) == 0))


@triton.jit
def _reconstruct_kernel(
    z, R, x, error, sums, partial, examples, features, STAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, columns, at, inside = matrix_tile(examples, features, ROWS, COLUMNS)
    product = _tile_of_product(
        z, R, partial, 0, rows, columns, at, inside, examples, features, True,
        STAGE, ROWS, COLUMNS, DEPTH, STEPS, SPLIT, PRECISION,
    )  # fmt: skip
    if STAGE != PART:
        off = tl.where(inside, product - tl.load(x + at, mask=inside, other=0.0), 0.0)
        tl.store(error + at, off, mask=inside)
        place = sums + rows.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(place, tl.sum(off * off, axis=1), mask=rows < examples)


@triton.jit
def _sum_kernel(values, sums, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    tl.store(sums + row, tl.sum(tl.load(values + row * count + places, mask=places < count, other=0.0)))


@triton.jit
def _pull_back_kernel(
    grad_z, W, R, error, grad_reconstruction, grad_x, towards_w, towards_r, grad_b, stride, partial, examples, features,
    INVERSE_LIKELIHOOD: tl.constexpr, BATCHES: tl.constexpr, STAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, columns, at, inside = matrix_tile(examples, features, ROWS, COLUMNS)
    which = tl.program_id(2) // SPLIT if STAGE == PART else tl.program_id(2)
    if which == 0:
        product = _tile_of_product(
            grad_z, W, partial, 0, rows, columns, at, inside, examples, features, False,
            STAGE, ROWS, COLUMNS, DEPTH, STEPS, SPLIT, PRECISION,
        )  # fmt: skip
        if STAGE != PART:
            weights = 2 * tl.load(grad_reconstruction + rows.to(tl.int64) * stride, mask=rows < examples, other=0.0)
            towards = weights[:, None] * tl.load(error + at, mask=inside, other=0.0)
            if INVERSE_LIKELIHOOD:
                towards -= 0.5 * product
            tl.store(grad_x + at, product, mask=inside)
            tl.store(towards_r + at, towards, mask=inside)
    else:
        # A row's weight multiplies the whole row, so it can be applied after the product.
        product = _tile_of_product(
            error, R, partial, 1, rows, columns, at, inside, examples, features, False,
            STAGE, ROWS, COLUMNS, DEPTH, STEPS, SPLIT, PRECISION,
        )  # fmt: skip
        if STAGE != PART:
            weights = 2 * tl.load(grad_reconstruction + rows.to(tl.int64) * stride, mask=rows < examples, other=0.0)
            above = tl.load(grad_z + at, mask=inside, other=0.0)
            if BATCHES > 0:
                _sum_over_batch(grad_z, grad_b, above, columns, examples, features, ROWS, BATCHES)
            if INVERSE_LIKELIHOOD:
                above *= 0.5
            tl.store(towards_w + at, above + weights[:, None] * product, mask=inside)


@triton.jit
def _add_penalty_kernel(
    grad_z, error, back, grad_reconstruction, towards_w, towards_r, grad_b, stride, examples, features,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BATCHES: tl.constexpr,
):  # fmt: skip
    rows, columns, at, inside = matrix_tile(examples, features, ROWS, COLUMNS)
    weights = 2 * tl.load(grad_reconstruction + rows.to(tl.int64) * stride, mask=rows < examples, other=0.0)
    above = tl.load(grad_z + at, mask=inside, other=0.0)
    tl.store(towards_w + at, above + weights[:, None] * tl.load(back + at, mask=inside, other=0.0), mask=inside)
    tl.store(towards_r + at, weights[:, None] * tl.load(error + at, mask=inside, other=0.0), mask=inside)
    if grad_b is not None:
        _sum_over_batch(grad_z, grad_b, above, columns, examples, features, ROWS, BATCHES)


@triton.jit
def _sum_over_batch(grad_z, grad_b, first, columns, examples, features, ROWS: tl.constexpr, BATCHES: tl.constexpr):
    """Stores the bias's gradient of these columns, in the programs of the first rows, which have loaded theirs already."""
    if tl.program_id(1) == 0:
        total = tl.sum(first, axis=0)
        for batch in range(1, BATCHES):
            more = batch * ROWS + tl.arange(0, ROWS)
            valid = (more[:, None] < examples) & (columns[None, :] < features)
            places = grad_z + more[:, None].to(tl.int64) * features + columns[None, :]
            total += tl.sum(tl.load(places, mask=valid, other=0.0), axis=0)
        tl.store(grad_b + columns, total, mask=columns < features)


@triton.jit
def _times_kernel(
    a, A, b, B, aA, bB, partial, examples, features, STAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, columns, at, inside = matrix_tile(examples, features, ROWS, COLUMNS)
    which = tl.program_id(2) // SPLIT if STAGE == PART else tl.program_id(2)
    if which == 0:
        product = _tile_of_product(
            a, A, partial, 0, rows, columns, at, inside, examples, features, False,
            STAGE, ROWS, COLUMNS, DEPTH, STEPS, SPLIT, PRECISION,
        )  # fmt: skip
        if STAGE != PART:
            tl.store(aA + at, product, mask=inside)
    else:
        product = _tile_of_product(
            b, B, partial, 1, rows, columns, at, inside, examples, features, False,
            STAGE, ROWS, COLUMNS, DEPTH, STEPS, SPLIT, PRECISION,
        )  # fmt: skip
        if STAGE != PART:
            tl.store(bB + at, product, mask=inside)

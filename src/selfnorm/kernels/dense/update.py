"""Adam's step for matrices whose gradients come as factors, multiplied where they are used: no gradient goes through memory.

    adam_pair    ∂W = towards_wᵀ x + s·Rᵀ,  ∂R = towards_rᵀ z − s·Wᵀ       a self-normalizing layer
    adam_single  ∂W = aᵀ b + s·M, or s·Mᵀ                                  M = W by the relative gradient, Mᵀ = Rᵀ if R is tracked

with s = factor·Σ scale, scale the gradients (N,) that arrived at the log-determinant. Then, for the t-th step and each element,

    m ← β₁m + (1 − β₁)∂,  v ← β₂v + (1 − β₂)∂²,  W ← W − lr/(1 − β₁ᵗ) · m / (√(v/(1 − β₂ᵗ)) + ε)

in place: Adam as torch's fused form has it, without weight decay. Lr, t and `frozen` are tensors on the device: with frozen ≠ 0
nothing is written. An element whose gradient is not finite, or whose square is not, keeps what it has and sets `failed` to 1.

A program owns the tile (i, j) of W and the tile (j, i) of R, all that depends on either, so it may write both where they are.
Each matrix and moment is read and written once, 24D² bytes for a matrix, beside the factors, which come from the cache:
(1/rows + 1/columns)·4ND² bytes for a product. Above `MOST` examples the gradient is multiplied out first (`gradient`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.dense.gradient import MOST, Tiles, addend_tile, free, gradient_of, product, sum_of, sums
from selfnorm.kernels.dispatch import input_precision


class State(NamedTuple):
    """What Adam keeps of a matrix: its moments (D, D), and the number of the step to be taken, a float tensor of one element."""

    average: Tensor
    square: Tensor
    step: Tensor


TILES = Tiles(rows=32, columns=32, depth=64, warps=4, stages=3)  # of W that a program updates


def adam_pair(
    W: Tensor,
    R: Tensor,
    states: tuple[State, State],
    towards_w: Tensor,
    x: Tensor,
    towards_r: Tensor,
    z: Tensor,
    scale: Tensor,
    factor: float,
    *,
    lr: Tensor,
    frozen: Tensor,
    failed: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    by: Tiles | None = None,
) -> None:
    """One step of W and R (D, D), contiguous, in place; the factors are (N, D), scale (N,) or a scalar."""
    examples, features = x.shape
    if examples > MOST and by is None:
        grad_w = gradient_of(towards_w, x, R, True, scale, factor)
        grad_r = gradient_of(towards_r, z, W, True, scale, -factor)
        for matrix, state, grad in ((W, states[0], grad_w), (R, states[1], grad_r)):
            adam_dense(matrix, state, grad, lr=lr, frozen=frozen, failed=failed, betas=betas, eps=eps)
        return
    by = by or TILES
    _expect_contiguous(W, R, *states[0], *states[1])
    scale = scale.reshape(-1)
    _pair_kernel[(triton.cdiv(features, by.columns), triton.cdiv(features, by.rows))](
        W, *states[0], R, *states[1], towards_w.contiguous(), x.contiguous(), towards_r.contiguous(), z.contiguous(),
        scale, factor, lr, frozen, failed, examples, features, scale.numel(), scale.stride(0),
        *_constants(betas, eps), by.rows, by.columns, by.depth, triton.cdiv(examples, by.depth), *sums(scale.numel()),
        input_precision(), num_warps=by.warps, num_stages=by.stages,
    )  # fmt: skip


def adam_single(
    W: Tensor,
    state: State,
    a: Tensor,
    b: Tensor,
    addend: Tensor,
    addend_transposed: bool,
    scale: Tensor,
    factor: float,
    *,
    lr: Tensor,
    frozen: Tensor,
    failed: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    by: Tiles | None = None,
) -> None:
    """One step of W (D, D) for the gradient aᵀb + s·M, with a and b (N, D) and M the addend (D, D), transposed or not."""
    if len(a) > MOST and by is None:
        grad = gradient_of(a, b, addend, addend_transposed, scale, factor)
        adam_dense(W, state, grad, lr=lr, frozen=frozen, failed=failed, betas=betas, eps=eps)
        return
    _single(W, state, a, b, addend, addend_transposed, scale, factor, lr, frozen, failed, betas, eps, by or TILES)


def adam_dense(
    W: Tensor,
    state: State,
    grad: Tensor,
    *,
    lr: Tensor,
    frozen: Tensor,
    failed: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> None:
    """One step of W (D, D) for a gradient that has been multiplied already."""
    _single(W, state, grad[:0], grad[:0], grad, False, lr, 1.0, lr, frozen, failed, betas, eps, TILES)


def _single(
    W: Tensor, state: State, a: Tensor, b: Tensor, addend: Tensor, addend_transposed: bool, scale: Tensor, factor: float,
    lr: Tensor, frozen: Tensor, failed: Tensor, betas: tuple[float, float], eps: float, by: Tiles,
) -> None:  # fmt: skip
    examples, features = a.shape
    _expect_contiguous(W, *state)
    scale = scale.reshape(-1)
    _single_kernel[(triton.cdiv(features, by.columns), triton.cdiv(features, by.rows))](
        W, *state, a.contiguous(), b.contiguous(), addend.contiguous(), scale, factor, lr, frozen, failed,
        examples, features, scale.numel(), scale.stride(0), addend_transposed,
        *_constants(betas, eps), by.rows, by.columns, by.depth, triton.cdiv(examples, by.depth), *sums(scale.numel()),
        input_precision(), num_warps=by.warps, num_stages=by.stages,
    )  # fmt: skip


def _expect_contiguous(*matrices: Tensor) -> None:
    for matrix in matrices:
        if not matrix.is_contiguous():
            raise ValueError(f"adam: expected contiguous matrices, to be updated in place, got strides {matrix.stride()}")


def _constants(betas: tuple[float, float], eps: float) -> tuple[float, ...]:
    """β₁, β₂, their logarithms and ε."""
    return (*betas, *(math.log(beta) if beta else -math.inf for beta in betas), eps)


@triton.jit
def _corrections(step, rate, LOG1: tl.constexpr, LOG2: tl.constexpr):
    """lr/(1 − β₁ᵗ) and √(1 − β₂ᵗ)."""
    t = tl.load(step)
    return tl.load(rate) / _one_minus_exp(t * LOG1), tl.sqrt(_one_minus_exp(t * LOG2))


@triton.jit
def _one_minus_exp(y):
    """1 − eʸ for y ≤ 0. Near 0, where the difference would have few digits left, by its series."""
    series = 1 + y / 7
    series = 1 + y / 6 * series
    series = 1 + y / 5 * series
    series = 1 + y / 4 * series
    series = 1 + y / 3 * series
    series = 1 + y / 2 * series
    return tl.where(y > -0.25, -y * series, 1 - tl.exp(y))


@triton.jit
def _adam(
    matrix, average, square, at, inside, value, m, v, gradient, size, root, frozen, failed,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """One step of the tile with this value and moments, for this gradient."""
    # This adds nothing, unless m is not finite, but pins the gradient's layout to that of the loads: left to itself, the compiler
    # carries weights and moments over to the product's layout, and their new values back, through shared memory.
    gradient += m - m
    squared = gradient * gradient
    fine = squared < float("inf")  # a NaN is not
    live = inside & (tl.where(tl.load(frozen) == 0, 1, 0) > 0)
    # What must stay is written again: a mask that differs from element to element would keep stores from being wide.
    m = tl.where(fine, BETA1 * m + (1 - BETA1) * gradient, m)
    v = tl.where(fine, BETA2 * v + (1 - BETA2) * squared, v)
    tl.store(average + at, m, mask=live)
    tl.store(square + at, v, mask=live)
    tl.store(matrix + at, tl.where(fine, value - size * m / (tl.sqrt(v) / root + EPSILON), value), mask=live)
    wrong = tl.max(tl.max((live & (fine == 0)).to(tl.int32), axis=1), axis=0)
    tl.store(failed, 1, mask=wrong > 0)


@triton.jit
def _pair_kernel(
    W, W_average, W_square, W_step, R, R_average, R_square, R_step, towards_w, x, towards_r, z, scale, factor, rate, frozen,
    failed, examples, features, count, stride, BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr,
    EPSILON: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    SUMS: tl.constexpr, ROUNDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows[:, None].to(tl.int64) * features + columns[None, :]
    inside = (rows[:, None] < features) & (columns[None, :] < features)
    across = columns[:, None].to(tl.int64) * features + rows[None, :]
    reach = (columns[:, None] < features) & (rows[None, :] < features)
    gradient_w = product(towards_w, x, rows, columns, examples, features, ROWS, COLUMNS, DEPTH, STEPS, PRECISION)
    # R's as ∂Rᵀ = zᵀ towards_r − s·W, whose tile has the shape of W's.
    gradient_r = product(z, towards_r, rows, columns, examples, features, ROWS, COLUMNS, DEPTH, STEPS, PRECISION)
    half = factor * sum_of(scale, count, stride, SUMS, ROUNDS)
    value_r = tl.load(R + across, mask=reach, other=0.0)
    value_w = tl.load(W + at, mask=inside, other=0.0)
    m_w = tl.load(W_average + at, mask=inside, other=0.0)
    v_w = tl.load(W_square + at, mask=inside, other=0.0)
    m_r = tl.load(R_average + across, mask=reach, other=0.0)
    v_r = tl.load(R_square + across, mask=reach, other=0.0)
    gradient_w = free(gradient_w) + half * tl.trans(value_r)
    gradient_r = tl.trans(free(gradient_r) - half * value_w)
    size, root = _corrections(W_step, rate, LOG1, LOG2)
    _adam(W, W_average, W_square, at, inside, value_w, m_w, v_w, gradient_w, size, root, frozen, failed, BETA1, BETA2, EPSILON)
    size, root = _corrections(R_step, rate, LOG1, LOG2)
    _adam(R, R_average, R_square, across, reach, value_r, m_r, v_r, gradient_r, size, root, frozen, failed, BETA1, BETA2, EPSILON)


@triton.jit
def _single_kernel(
    W, average, square, number, a, b, addend, scale, factor, rate, frozen, failed, examples, features, count, stride,
    TRANSPOSED: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr,
    EPSILON: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    SUMS: tl.constexpr, ROUNDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows[:, None].to(tl.int64) * features + columns[None, :]
    inside = (rows[:, None] < features) & (columns[None, :] < features)
    value = tl.load(W + at, mask=inside, other=0.0)
    m = tl.load(average + at, mask=inside, other=0.0)
    v = tl.load(square + at, mask=inside, other=0.0)
    if STEPS > 0:
        gradient = product(a, b, rows, columns, examples, features, ROWS, COLUMNS, DEPTH, STEPS, PRECISION)
    term = addend_tile(addend, rows, columns, at, inside, features, TRANSPOSED)
    if STEPS > 0:
        gradient = free(gradient) + factor * sum_of(scale, count, stride, SUMS, ROUNDS) * term
    else:
        gradient = term
    size, root = _corrections(number, rate, LOG1, LOG2)
    _adam(W, average, square, at, inside, value, m, v, gradient, size, root, frozen, failed, BETA1, BETA2, EPSILON)

"""Adam's kernels: updates that multiply a gradient from its factors, and the check whether an update may happen.

No gradient goes through memory:

    adam_pair    ∂W = towards_wᵀ x + s·Rᵀ,  ∂R = towards_rᵀ z − s·Wᵀ       a self-normalizing layer; one-sided, ∂R = towards_rᵀ z
    adam_single  ∂W = aᵀ b + s·M, or s·Mᵀ                                  M = W by the relative gradient, Mᵀ = Rᵀ if R is tracked

with s = factor·Σ scale, scale the gradients (N,) that arrived at the log-determinant. Then, for the t-th step and each element,

    m ← β₁m + (1 − β₁)∂,  v ← β₂v + (1 − β₂)∂²,  W ← W − lr/(1 − β₁ᵗ) · m / (√(v/(1 − β₂ᵗ)) + ε)

in place: torch's fused Adam without weight decay. `AdamArguments` says what lr, `frozen` and `late_failure` mean; `train.adam`
explains the flags and calls all of this.

A program owns the tile (i, j) of W and the tile (j, i) of R. Nothing else depends on them, so the program may update both in
place. Each matrix and moment is read and written once, 24D² bytes for a matrix. The factors come from the cache, (1/rows +
1/columns)·4ND² bytes for a product. Above `MAX_FACTORED_EXAMPLES` examples the gradient is multiplied first (`gradient`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.dense.gradient import (
    MAX_FACTORED_EXAMPLES,
    addend_tile,
    factor_product,
    gradient_from_factors,
    with_free_layout,
)
from selfnorm.kernels.dispatch import input_precision
from selfnorm.kernels.matrix_tiles import ProductTiles, matrix_tile, tile_offsets
from selfnorm.kernels.vectors import sum_blocks, vector_sum
from selfnorm.linalg.learned import likelihood_shares
from selfnorm.runtime.collector import AdamArguments, Moments

# Up to this many gradients, with this many numbers in all, one program checks as fast as many would.
FEW_GRADIENTS, FEW_NUMBERS, BLOCK = 8, 2**16, 1024
TILES = ProductTiles(rows=32, columns=32, depth=64, warps=4, stages=3)  # of W that a program updates


def adam_pair(
    W: Tensor,
    R: Tensor,
    states: tuple[Moments, Moments],
    towards_w: Tensor,
    x: Tensor,
    towards_r: Tensor,
    z: Tensor,
    scale: Tensor,
    inverse_likelihood: bool,
    adam: AdamArguments,
    *,
    by: ProductTiles | None = None,
) -> None:
    """Updates W and R (D, D), contiguous, in place. The factors are (N, D), scale (N,) or a scalar.

    inverse_likelihood:  whether R takes half of the likelihood's gradient, or W all of it.
    """
    of_w, of_r = likelihood_shares(inverse_likelihood)
    examples, features = x.shape
    if examples > MAX_FACTORED_EXAMPLES and by is None:
        grad_w = gradient_from_factors(towards_w, x, R, True, scale, of_w)
        grad_r = gradient_from_factors(towards_r, z, W, True, scale, -of_r) if of_r else towards_r.mT @ z
        for matrix, state, grad in ((W, states[0], grad_w), (R, states[1], grad_r)):
            adam_dense(matrix, state, grad, adam)
        return
    by = by or TILES
    _expect_contiguous(W, R, *states[0], *states[1])
    scale = scale.reshape(-1)
    _pair_kernel[(triton.cdiv(features, by.columns), triton.cdiv(features, by.rows))](
        W, *states[0], R, *states[1], towards_w.contiguous(), x.contiguous(), towards_r.contiguous(), z.contiguous(),
        scale, of_w, adam.rate, adam.frozen, adam.late_failure, examples, features, scale.numel(), scale.stride(0),
        inverse_likelihood, *_constants(adam), by.rows, by.columns, by.depth, triton.cdiv(examples, by.depth),
        *sum_blocks(scale.numel()), input_precision(), num_warps=by.warps, num_stages=by.stages,
    )  # fmt: skip


def adam_single(
    W: Tensor,
    state: Moments,
    a: Tensor,
    b: Tensor,
    addend: Tensor,
    addend_transposed: bool,
    scale: Tensor,
    factor: float,
    adam: AdamArguments,
    *,
    by: ProductTiles | None = None,
) -> None:
    """Updates W (D, D) by the gradient aᵀb + s·M, with a and b (N, D) and M the addend (D, D), transposed or not."""
    if len(a) > MAX_FACTORED_EXAMPLES and by is None:
        grad = gradient_from_factors(a, b, addend, addend_transposed, scale, factor)
        adam_dense(W, state, grad, adam)
        return
    _single(W, state, a, b, addend, addend_transposed, scale, factor, adam, by or TILES)


def adam_dense(W: Tensor, state: Moments, grad: Tensor, adam: AdamArguments) -> None:
    """Updates W (D, D) by a gradient that has been multiplied already."""
    _single(W, state, grad[:0], grad[:0], grad, False, adam.rate, 1.0, adam, TILES)


def _single(
    W: Tensor, state: Moments, a: Tensor, b: Tensor, addend: Tensor, addend_transposed: bool, scale: Tensor, factor: float,
    adam: AdamArguments, by: ProductTiles,
) -> None:  # fmt: skip
    examples, features = a.shape
    _expect_contiguous(W, *state)
    scale = scale.reshape(-1)
    _single_kernel[(triton.cdiv(features, by.columns), triton.cdiv(features, by.rows))](
        W, *state, a.contiguous(), b.contiguous(), addend.contiguous(), scale, factor, adam.rate, adam.frozen, adam.late_failure,
        examples, features, scale.numel(), scale.stride(0), addend_transposed,
        *_constants(adam), by.rows, by.columns, by.depth, triton.cdiv(examples, by.depth), *sum_blocks(scale.numel()),
        input_precision(), num_warps=by.warps, num_stages=by.stages,
    )  # fmt: skip


def _expect_contiguous(*matrices: Tensor) -> None:
    for matrix in matrices:
        if not matrix.is_contiguous():
            raise ValueError(f"adam: expected contiguous matrices, to be updated in place, got strides {matrix.stride()}")


def _constants(adam: AdamArguments) -> tuple[float, ...]:
    """Returns β₁, β₂, their logarithms and ε."""
    return (*adam.betas, *(math.log(beta) if beta else -math.inf for beta in adam.betas), adam.eps)


def few_and_small(gradients: Sequence[Tensor]) -> bool:
    """Returns whether `begin_update` can check these gradients."""
    total = sum(gradient.numel() for gradient in gradients)
    return len(gradients) <= FEW_GRADIENTS and total <= FEW_NUMBERS and all(gradient.is_contiguous() for gradient in gradients)


def begin_update(
    failed: Tensor,
    late_failure: Tensor,
    lost: Tensor,
    frozen: Tensor,
    step: Tensor,
    *,
    advance: bool = True,
    loss: Tensor | None = None,
    gradients: Sequence[Tensor] = (),
) -> None:
    """Decides whether the next update may change anything, and counts it; the flags are those of `train.adam.UpdateFlags`.

    advance:    whether an update follows, so that step += 1 − frozen.
    loss:       if given, `failed` is raised unless it is finite.
    gradients:  `failed` is raised unless the sum of their squares is finite; they must be `few_and_small`.
    """
    _begin_update_kernel[(1,)](
        failed, late_failure, lost, frozen, step, failed if loss is None else loss, tuple(gradients),
        tuple(gradient.numel() for gradient in gradients), ADVANCE=advance, LOOK=loss is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def raise_lost(lost: Tensor, residuals: Tensor, limits: Tensor) -> None:
    """Raises `lost` unless each residual (K,) is below its limit; a NaN raises it, too."""
    _raise_lost_kernel[(1,)](lost, residuals, limits, len(limits), BLOCK=triton.next_power_of_2(len(limits)), num_warps=1)


@triton.jit
def _corrections(step, rate, LOG1: tl.constexpr, LOG2: tl.constexpr):
    """lr/(1 − β₁ᵗ) and √(1 − β₂ᵗ)."""
    t = tl.load(step)
    return tl.load(rate) / _one_minus_exp(t * LOG1), tl.sqrt(_one_minus_exp(t * LOG2))


@triton.jit
def _one_minus_exp(y):
    """1 − eʸ for y ≤ 0; near 0, where the difference would lose its digits, by its series."""
    series = 1 + y / 7
    series = 1 + y / 6 * series
    series = 1 + y / 5 * series
    series = 1 + y / 4 * series
    series = 1 + y / 3 * series
    series = 1 + y / 2 * series
    return tl.where(y > -0.25, -y * series, 1 - tl.exp(y))


@triton.jit
def _step(
    matrix, average, square, at, inside, value, m, v, gradient, size, root, frozen, late_failure,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """Updates the tile with this value and moments by this gradient."""
    # Adds 0 unless m is not finite. It pins the gradient's layout to that of the loads: otherwise the compiler converts weights
    # and moments to the product's layout, and their new values back, through shared memory.
    gradient += m - m
    squared = gradient * gradient
    fine = squared < float("inf")  # false for NaN, too
    live = inside & (tl.where(tl.load(frozen) == 0, 1, 0) > 0)
    # Unchanged elements are written again: a mask that differs from element to element would make stores narrow.
    m = tl.where(fine, BETA1 * m + (1 - BETA1) * gradient, m)
    v = tl.where(fine, BETA2 * v + (1 - BETA2) * squared, v)
    tl.store(average + at, m, mask=live)
    tl.store(square + at, v, mask=live)
    tl.store(matrix + at, tl.where(fine, value - size * m / (tl.sqrt(v) / root + EPSILON), value), mask=live)
    wrong = tl.max(tl.max((live & (fine == 0)).to(tl.int32), axis=1), axis=0)
    tl.store(late_failure, 1, mask=wrong > 0)


@triton.jit
def _pair_kernel(
    W, W_average, W_square, W_step, R, R_average, R_square, R_step, towards_w, x, towards_r, z, scale, factor, rate, frozen,
    late_failure, examples, features, count, stride, INVERSE_LIKELIHOOD: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr,
    LOG1: tl.constexpr, LOG2: tl.constexpr, EPSILON: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, SUMS: tl.constexpr, ROUNDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, columns, at, inside = matrix_tile(features, features, ROWS, COLUMNS)
    across, valid = tile_offsets(columns, rows, features, features)
    gradient_w = factor_product(towards_w, x, rows, columns, examples, features, ROWS, COLUMNS, DEPTH, STEPS, PRECISION)
    if INVERSE_LIKELIHOOD:  # as ∂Rᵀ = zᵀ towards_r − s·W, whose tile has the shape of W's
        gradient_r = factor_product(z, towards_r, rows, columns, examples, features, ROWS, COLUMNS, DEPTH, STEPS, PRECISION)
    else:
        gradient_r = factor_product(towards_r, z, columns, rows, examples, features, COLUMNS, ROWS, DEPTH, STEPS, PRECISION)
    share = factor * vector_sum(scale, count, stride, SUMS, ROUNDS)
    value_r = tl.load(R + across, mask=valid, other=0.0)
    value_w = tl.load(W + at, mask=inside, other=0.0)
    m_w = tl.load(W_average + at, mask=inside, other=0.0)
    v_w = tl.load(W_square + at, mask=inside, other=0.0)
    m_r = tl.load(R_average + across, mask=valid, other=0.0)
    v_r = tl.load(R_square + across, mask=valid, other=0.0)
    gradient_w = with_free_layout(gradient_w) + share * tl.trans(value_r)
    if INVERSE_LIKELIHOOD:
        gradient_r = tl.trans(with_free_layout(gradient_r) - share * value_w)
    else:
        gradient_r = with_free_layout(gradient_r)
    size, root = _corrections(W_step, rate, LOG1, LOG2)
    _step(
        W, W_average, W_square, at, inside, value_w, m_w, v_w, gradient_w, size, root, frozen, late_failure,
        BETA1, BETA2, EPSILON,
    )  # fmt: skip
    size, root = _corrections(R_step, rate, LOG1, LOG2)
    _step(
        R, R_average, R_square, across, valid, value_r, m_r, v_r, gradient_r, size, root, frozen, late_failure,
        BETA1, BETA2, EPSILON,
    )  # fmt: skip


@triton.jit
def _single_kernel(
    W, average, square, number, a, b, addend, scale, factor, rate, frozen, late_failure, examples, features, count, stride,
    TRANSPOSED: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr,
    EPSILON: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    SUMS: tl.constexpr, ROUNDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, columns, at, inside = matrix_tile(features, features, ROWS, COLUMNS)
    value = tl.load(W + at, mask=inside, other=0.0)
    m = tl.load(average + at, mask=inside, other=0.0)
    v = tl.load(square + at, mask=inside, other=0.0)
    if STEPS > 0:
        gradient = factor_product(a, b, rows, columns, examples, features, ROWS, COLUMNS, DEPTH, STEPS, PRECISION)
    term = addend_tile(addend, rows, columns, at, inside, features, TRANSPOSED)
    if STEPS > 0:
        gradient = with_free_layout(gradient) + factor * vector_sum(scale, count, stride, SUMS, ROUNDS) * term
    else:
        gradient = term
    size, root = _corrections(number, rate, LOG1, LOG2)
    _step(W, average, square, at, inside, value, m, v, gradient, size, root, frozen, late_failure, BETA1, BETA2, EPSILON)


@triton.jit
def _begin_update_kernel(
    failed, late_failure, lost, frozen, step, loss, gradients, sizes,
    ADVANCE: tl.constexpr, LOOK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    before, after = tl.load(failed), tl.load(late_failure)
    number = tl.load(step) - tl.where((after > 0) & (before == 0), 1.0, 0.0)
    failure = tl.maximum(before, after)
    if LOOK:
        value = tl.load(loss)
        failure = tl.where(value - value == 0, failure, 1.0)
        for which in tl.static_range(len(gradients)):
            squares = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, sizes[which], BLOCK):
                at = start + tl.arange(0, BLOCK)
                gradient = tl.load(gradients[which] + at, mask=at < sizes[which], other=0.0)
                squares += gradient * gradient
            failure = tl.where(tl.sum(squares, axis=0) < float("inf"), failure, 1.0)  # 1 for NaN, too
    stop = tl.maximum(failure, tl.load(lost))
    if ADVANCE:
        number += 1 - stop
    tl.store(failed, failure)
    tl.store(late_failure, 0.0)
    tl.store(frozen, stop)
    tl.store(step, number)


@triton.jit
def _raise_lost_kernel(lost, residuals, limits, count, BLOCK: tl.constexpr):
    layer = tl.arange(0, BLOCK)
    residual = tl.load(residuals + layer, mask=layer < count, other=0.0)
    fine = residual < tl.load(limits + layer, mask=layer < count, other=1.0)
    wrong = tl.max(tl.where(fine, 0.0, 1.0), axis=0)
    tl.store(lost, tl.maximum(tl.load(lost), wrong))

"""log|det A| and A⁻ᵀ, its gradient, of small matrices, by exchange steps with partial pivoting.

A step takes y = Mx, in which the pivot is M[p, j], and swaps the parts of y_p and x_j:

    M[p, j] ← 1 / pivot,    M[p, :] ← M[p, :] / pivot,    M[i, :] ← M[i, :] − M[i, j]·M[p, :],    M[i, j] ← −M[i, j] / pivot.

Column j's pivot is the largest entry of the rows that have not had a pivot yet. After C steps, M[p_j, j'] is A⁻¹[j, p_j'], no row
has moved, and log|det A| = Σ_j log|pivot_j|. Each matrix has one program, which keeps it in registers; a step takes O(C²). A
singular matrix gives −∞ and a meaningless inverse. For a matrix that acts on every pixel the same program writes HW·log|det A|
once for each example.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.vectors import fill_vector
from selfnorm.runtime.autograd import refuse_second_derivative

MAX_MATRIX_ROWS = 64


class SmallLogDet(torch.autograd.Function):
    """log|det| (…) of small matrices (…, m, m)."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor) -> Tensor:
        log_det, inverse_transposed = small_slogdet(blocks)
        ctx.save_for_backward(inverse_transposed)
        return log_det

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        refuse_second_derivative()
        (inverse_transposed,) = ctx.saved_tensors
        return grad[..., None, None] * inverse_transposed


def small_slogdet(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log|det A| (…) and A⁻ᵀ (…, C, C) of matrices (…, C, C), C ≤ 64, in float32: one kernel."""
    channels = matrix.shape[-1]
    if matrix.dim() < 2 or matrix.shape[-2] != channels or not 0 < channels <= MAX_MATRIX_ROWS:
        raise ValueError(f"small_slogdet: expected square matrices of at most {MAX_MATRIX_ROWS} rows, got {tuple(matrix.shape)}")
    matrix = matrix.contiguous()
    logabsdet = matrix.new_empty(matrix.shape[:-2])
    inverse_transposed = matrix.new_empty(matrix.shape)
    _exchange[(logabsdet.numel(),)](matrix, logabsdet, inverse_transposed, 1, 1, **_exchange_options(channels))
    return logabsdet, inverse_transposed


def repeated_slogdet(matrix: Tensor, copies: int, examples: int) -> tuple[Tensor, Tensor]:
    """Returns copies·log|det A| for each example (N,), and A⁻ᵀ (C, C), of one matrix (C, C), C ≤ 64: one kernel."""
    channels = matrix.shape[-1]
    if matrix.shape != (channels, channels) or not 0 < channels <= MAX_MATRIX_ROWS:
        raise ValueError(
            f"repeated_slogdet: expected a square matrix of at most {MAX_MATRIX_ROWS} rows, got {tuple(matrix.shape)}"
        )
    matrix = matrix.contiguous()
    logabsdet, inverse_transposed = matrix.new_empty(examples), matrix.new_empty(matrix.shape)
    _exchange[(1,)](matrix, logabsdet, inverse_transposed, copies, examples, **_exchange_options(channels))
    return logabsdet, inverse_transposed


def _exchange_options(channels: int) -> dict[str, Any]:
    block = max(2, triton.next_power_of_2(channels))
    return {"C": channels, "BLOCK": block, "num_warps": 1 if block <= 32 else 4}


@triton.jit
def _exchange(matrix_ptr, logabsdet_ptr, inverse_ptr, copies, examples, C: tl.constexpr, BLOCK: tl.constexpr):
    """A matrix for each program, whose log-determinant is multiplied by `copies` and written `examples` times."""
    n = tl.program_id(0)
    start = n.to(tl.int64) * (C * C)
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    valid = (row < C) & (column < C)
    m = tl.load(matrix_ptr + start + row * C + column, mask=valid, other=0.0)
    solved = tl.where(row < C, -1, C)  # for each row the column whose pivot it had; rows that are padding can have none
    pivoted = tl.zeros((1, BLOCK), tl.int32)  # for each column the row of its pivot
    total = 0.0
    for j in range(C):
        here = tl.sum(tl.where(column == j, m, 0.0), axis=1, keep_dims=True)  # (rows, 1)
        size = tl.where(here == here, tl.abs(here), float("inf"))  # so that each step has a separate row even with NaN
        p = tl.max(tl.argmax(tl.where(solved < 0, size, -1.0), axis=0), axis=0)
        pivot = tl.sum(tl.sum(tl.where(row == p, here, 0.0), axis=1), axis=0)
        taken = tl.sum(tl.where(row == p, m, 0.0), axis=0, keep_dims=True)  # (1, columns)
        taken = tl.where(column == j, 1.0, taken) / pivot
        m = tl.where(row == p, taken, tl.where(column == j, 0.0, m) - here * taken)
        solved = tl.where(row == p, j, solved)
        pivoted = tl.where(column == j, p, pivoted)
        total = tl.where(total > float("-inf"), total + tl.log(tl.abs(pivot)), total)  # −∞ stays
    tl.store(inverse_ptr + start + pivoted * C + solved, m, mask=valid)
    fill_vector(logabsdet_ptr + n * examples, examples, copies * total)

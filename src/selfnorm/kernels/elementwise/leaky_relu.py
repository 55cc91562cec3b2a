"""The smooth leaky ReLU: value and log-determinant in one kernel, the gradient in another, and the inverse in a third."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from selfnorm.kernels.elementwise.shared import ENOUGH_PROGRAMS, as_dense, fast_exp, in_order_of, row_tiles, series_log1p
from selfnorm.runtime.autograd import refuse_second_derivative


class FusedSmoothLeakyReLU(torch.autograd.Function):
    """x (N, …), α -> z, log_det (N,): one kernel forward, one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        x = as_dense(x)
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return leaky(x, alpha)

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        (x,) = ctx.saved_tensors
        return leaky_backward(x, ctx.alpha, in_order_of(x, grad_z), grad_log_det), None


def leaky(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Returns z = αx + (1 − α)·softplus(x) like x, and Σ log(α + (1 − α)·σ(x)) over each example's elements (N,).

    Reads x, writes z.
    x: (N, …), the elements of each example adjacent in memory, in any order.
    """
    examples, elements = x.shape[0], x[0].numel()
    tiles = row_tiles(examples, elements)
    grid = tiles.grid(examples, elements)
    z, parts = torch.empty_like(x), x.new_empty(grid[1], examples)
    _leaky[grid](x, z, parts, examples, elements, alpha, tiles.rows, tiles.columns, tiles.steps, num_warps=tiles.warps)
    return z, parts[0] if grid[1] == 1 else parts.sum(0)


def leaky_backward(x: Tensor, alpha: float, grad_z: Tensor, grad_log_det: Tensor) -> Tensor:
    """Returns ∂/∂x of Σ grad_z·z + Σ grad_log_det·log_det, like x. Reads x and grad_z, writes the result.

    With s the slope: grad_z·s + grad_log_det·(1 − α)·σ(x)·σ(−x) / s. x, grad_z: as in `leaky`, both in the same order.
    grad_log_det: (N,), with any stride.
    """
    examples, elements = x.shape[0], x[0].numel()
    columns = min(next_power_of_2(elements), 512)
    rows = min(next_power_of_2(cdiv(examples, 2 * ENOUGH_PROGRAMS)), 512 // columns)
    grad_x = torch.empty_like(x)
    _leaky_backward[cdiv(examples, rows), cdiv(elements, columns)](
        *(x, grad_z, grad_log_det, grad_x, examples, elements, grad_log_det.stride(0), alpha, rows, columns),
        num_warps=min(max(rows * columns // 128, 1), 4),
    )
    return grad_x


def leaky_inverse(z: Tensor, alpha: float, steps: int) -> Tensor:
    """Returns the inverse of `leaky`: x like z, by `steps` of Newton's method from min(z, z/α). Reads z, writes x."""
    z = as_dense(z)
    x = torch.empty_like(z)
    block = min(next_power_of_2(z.numel()), 128 if z.numel() < 128 * ENOUGH_PROGRAMS else 512)
    _leaky_inverse[(cdiv(z.numel(), block),)](z, x, z.numel(), alpha, steps, block, num_warps=max(block // 128, 1))
    return x


@triton.jit(do_not_specialize=["N"])
def _leaky(x_ptr, z_ptr, log_det_ptr, N, E, alpha, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = rows.to(tl.int64)[:, None] * E
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        columns = ((tl.program_id(1) * STEPS + step) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        mask = (rows[:, None] < N) & (columns < E)
        x = tl.load(x_ptr + start + columns, mask=mask, other=0.0)
        e = fast_exp(-tl.abs(x))
        sigmoid = tl.where(x >= 0, 1.0, e) / (1.0 + e)
        z = alpha * x + (1.0 - alpha) * (tl.maximum(x, 0.0) + series_log1p(e))
        tl.store(z_ptr + start + columns, z, mask=mask)
        total += tl.where(mask, tl.log(alpha + (1.0 - alpha) * sigmoid), 0.0)
    tl.store(log_det_ptr + tl.program_id(1).to(tl.int64) * N + rows, tl.sum(total, 1), mask=rows < N)


@triton.jit(do_not_specialize=["N", "stride"])
def _leaky_backward(
    x_ptr, grad_z_ptr, grad_log_det_ptr, grad_x_ptr, N, E, stride, alpha, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (rows[:, None] < N) & (columns < E)
    at = rows.to(tl.int64)[:, None] * E + columns
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    grad_z = tl.load(grad_z_ptr + at, mask=mask, other=0.0)
    grad_log_det = tl.load(grad_log_det_ptr + rows.to(tl.int64) * stride, mask=rows < N, other=0.0)[:, None]
    e = fast_exp(-tl.abs(x))
    share = 1.0 / (1.0 + e)
    slope = alpha + (1.0 - alpha) * tl.where(x >= 0, 1.0, e) * share
    bend = (1.0 - alpha) * (e * share) * share  # σ(x)·σ(−x), from factors without cancellation
    tl.store(grad_x_ptr + at, grad_z * slope + grad_log_det * (bend / slope), mask=mask)


@triton.jit(do_not_specialize=["size"])
def _leaky_inverse(z_ptr, x_ptr, size, alpha, NEWTON: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + at, mask=at < size, other=0.0)
    x = tl.minimum(z, z / alpha)
    for _ in tl.static_range(NEWTON):
        e = fast_exp(-tl.abs(x))
        slope = alpha + (1.0 - alpha) * tl.where(x >= 0, 1.0, e) / (1.0 + e)
        x -= (alpha * x + (1.0 - alpha) * (tl.maximum(x, 0.0) + series_log1p(e)) - z) / slope
    tl.store(x_ptr + at, x, mask=at < size)

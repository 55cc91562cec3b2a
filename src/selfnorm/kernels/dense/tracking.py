"""Kernels of a dense layer with a tracked inverse R: the layer's training step, and the Newton–Schulz update
of R for a new W.

Newton–Schulz, R ← R + (I − RW)R, takes two products, each followed by a pass over its result:

    error_of              E = I − RW, in the memory of the product, and partial sums of E², one per program
    newton_schulz_update  residual = ‖E‖_F, and R ← R + ER if residual < limit; otherwise, and for NaN, R stays unchanged

Each program of the second pass adds up all of the few hundred partial sums itself, in a fixed order.

E is a small difference of large numbers, for which TF32 is too coarse. Where products may be rounded to TF32, RW is computed from
bfloat16 numbers instead: RW ≈ R₁W₁ + R₁W₂ + R₂W₁ with R = R₁ + R₂ and W = W₁ + W₂ to 16 bits, as a single product
[R₁ R₁ R₂][W₁; W₂; W₁]. All arguments and results are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.dense.bias import bias_gradient
from selfnorm.kernels.dense.factored import SingleGradient, collected_or_multiplied
from selfnorm.kernels.dense.products import affine, times
from selfnorm.kernels.numerics import index_type
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.context import StepContext
from selfnorm.runtime.precision import summed_in_float32

PROGRAMS = 256  # for a pass over a matrix: enough to keep a large card busy, few enough to add up their partial sums


class FusedTrackedLinear(torch.autograd.Function):
    """x (N, D), W (D, D), b (D,) or None, R (D, D) -> Wx + b, and zeros (N,) with the gradient of log|det W|, R for W⁻¹.

    2 products in 2 launches. The third, W's gradient, goes to the step's collector as factors, if it has one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor | None, R: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        log_det = x.new_empty(x.shape[0])
        _, z = affine(x, W, b, zeros=log_det)
        ctx.save_for_backward(x, W, R)
        ctx.collector, ctx.weight = step.collector_for(W), W
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(
        ctx: Any, grad_z: Tensor, grad_log_det: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        refuse_second_derivative()
        x, W, R = ctx.saved_tensors
        grad_x = times(grad_z, W)[0] if ctx.needs_input_grad[0] else None
        grad_b = bias_gradient(grad_z) if ctx.needs_input_grad[2] else None
        gradient = SingleGradient(ctx.weight, grad_z, x, R, True, grad_log_det)
        (grad_W,) = collected_or_multiplied(gradient, ctx.collector if ctx.needs_input_grad[1] else None)
        return grad_x, grad_W, grad_b, None, None


def error_of(product: Tensor) -> tuple[Tensor, Tensor]:
    """Returns E = I − RW (m, m), in the memory of the product RW, and partial sums of E² (programs,). Reads and writes m²."""
    if not product.is_contiguous():
        raise ValueError(f"error_of: expected a contiguous matrix, to be changed in place, got strides {product.stride()}")
    programs, tiles = _pass_options(product.numel())
    squares = product.new_empty(programs)
    _error_kernel[(programs,)](product, squares, product.numel(), product.shape[0], **tiles)
    return product, squares


def error_of_matrix(R: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """Returns E = I − RW (m, m), to about 1e-5 of |R||W|, and partial sums of E²: a product, with a pass before and after it."""
    R, W, rows = R.contiguous(), W.contiguous(), R.shape[0]
    left, right = R.new_empty(rows, 3 * rows, dtype=torch.bfloat16), R.new_empty(3 * rows, rows, dtype=torch.bfloat16)
    _split_kernel[(triton.cdiv(R.numel(), 1024),)](R, W, left, right, R.numel(), rows, BLOCK=1024, num_warps=4)
    return error_of(summed_in_float32(left, right))


def newton_schulz_update(R: Tensor, error: Tensor, squares: Tensor, residual: Tensor, limit: float) -> None:
    """Adds ER to R in place if √Σsquares, written to `residual` (), is below the limit: a product, and a pass of 12m² bytes."""
    if not R.is_contiguous():
        raise ValueError(f"newton_schulz_update: expected a contiguous R, to be changed in place, got strides {R.stride()}")
    change = torch.mm(error, R)
    programs, tiles = _pass_options(R.numel())
    sums = squares.numel()
    _follow_kernel[(programs,)](R, change, squares, residual, limit, R.numel(), sums, SUMS=triton.next_power_of_2(sums), **tiles)


def _pass_options(numel: int) -> tuple[int, dict[str, Any]]:
    """Returns the number of programs for a pass over this many numbers, and the block and the steps of each."""
    block = max(256, min(4096, triton.next_power_of_2(triton.cdiv(numel, PROGRAMS))))
    steps = triton.cdiv(numel, block * PROGRAMS)
    tiles = {"BLOCK": block, "STEPS": steps, "INDEX": index_type(numel), "num_warps": max(1, block // 512)}
    return triton.cdiv(numel, block * steps), tiles


@triton.jit
def _error_kernel(matrix, squares, numel, rows, BLOCK: tl.constexpr, STEPS: tl.constexpr, INDEX: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        at = (tl.program_id(0).to(INDEX) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        identity = tl.where(at % (rows + 1) == 0, 1.0, 0.0)
        error = tl.where(inside, identity - tl.load(matrix + at, mask=inside, other=0.0), 0.0)
        tl.store(matrix + at, error, mask=inside)
        total += error * error
    tl.store(squares + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _split_kernel(R, W, left, right, numel, rows, BLOCK: tl.constexpr):
    """[R₁ R₁ R₂] and [W₁; W₂; W₁]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    high, low = _halves(tl.load(R + at, mask=inside, other=0.0))
    place = left + at + at // rows * (2 * rows)
    tl.store(place, high, mask=inside)
    tl.store(place + rows, high, mask=inside)
    tl.store(place + 2 * rows, low, mask=inside)
    high, low = _halves(tl.load(W + at, mask=inside, other=0.0))
    tl.store(right + at, high, mask=inside)
    tl.store(right + numel + at, low, mask=inside)
    tl.store(right + 2 * tl.cast(numel, tl.int64) + at, high, mask=inside)


@triton.jit
def _halves(x):
    """Two numbers of bfloat16 whose sum is x to 16 bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _follow_kernel(
    R, change, squares, residual, limit, numel, sums,
    SUMS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(INDEX) * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    # Loaded before the sum is known, so that the two loads overlap.
    moved = tl.load(R + at, mask=at < numel, other=0.0) + tl.load(change + at, mask=at < numel, other=0.0)
    places = tl.arange(0, SUMS)
    norm = tl.sqrt_rn(tl.sum(tl.load(squares + places, mask=places < sums, other=0.0), axis=0))
    if tl.program_id(0) == 0:
        tl.store(residual, norm)
    if norm < limit:
        tl.store(R + at, moved, mask=at < numel)
        for _ in range(1, STEPS):
            at += BLOCK
            moved = tl.load(R + at, mask=at < numel, other=0.0) + tl.load(change + at, mask=at < numel, other=0.0)
            tl.store(R + at, moved, mask=at < numel)

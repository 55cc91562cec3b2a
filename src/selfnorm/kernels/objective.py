"""The objective's arithmetic in three launches: row sums, the loss from them, and all of its gradients.

    nll = mean_n(½‖z_n‖² − Σ_l log_det_ln) + D/2·log 2π
    error_k = mean_n(reconstruction_nk) / D_k
    value = nll + Σ_k λ_k·D_k·error_k

Memory: z is read once forward, and read and written once backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.runtime.autograd import refuse_second_derivative


class FusedObjective(torch.autograd.Function):
    """z, log_dets (L, N), reconstruction (N, K), λ (K,), D (K,) -> the loss; nll and the K errors (1 + K,), without gradient."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, log_dets: Tensor, reconstruction: Tensor, weight: Tensor, dimensions: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(z, weight)
        ctx.layers = len(log_dets)
        ctx.set_materialize_grads(False)  # or torch makes zeros for the output without a gradient
        value, parts = objective(z, log_dets, reconstruction, weight, dimensions)
        ctx.mark_non_differentiable(parts)
        return value, parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None, None]:
        refuse_second_derivative()
        z, weight = ctx.saved_tensors
        grad_z, grad_log_det, grad_reconstruction = objective_gradients(z, weight, grad)
        return grad_z, grad_log_det.expand(ctx.layers, -1), grad_reconstruction, None, None


def objective(z: Tensor, log_dets: Tensor, reconstruction: Tensor, weight: Tensor, dimensions: Tensor) -> tuple[Tensor, Tensor]:
    """z (N, …), log_dets (L, N), reconstruction (N, K), λ and D_k (K,) -> value, and (1 + K,): nll and the K errors."""
    z, log_dets, reconstruction = z.contiguous(), log_dets.contiguous(), reconstruction.contiguous()
    examples, layers, columns = z.shape[0], log_dets.shape[0], reconstruction.shape[1]
    features = z[0].numel()
    energies, value, parts = z.new_empty(examples), z.new_empty(()), z.new_empty(1 + columns)
    _energies[(examples,)](
        z, log_dets, energies, features, layers, examples, BLOCK=_block(features, 1024), LAYERS=_block(layers, 2**20), num_warps=4
    )
    constant = features / 2 * math.log(2 * math.pi)
    width = _block(columns, 2**20)
    rows = max(1, min(_block(examples, 1024), 4096 // width))
    _result[(1,)](
        energies,
        reconstruction,
        weight,
        dimensions,
        value,
        parts,
        examples,
        columns,
        constant,
        ROWS=rows,
        COLUMNS=width,
        num_warps=8,
    )
    return value, parts


def objective_gradients(z: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Given the gradient of `value` (a scalar), those of z, each log_det (N,) and reconstruction."""
    z, examples, columns = z.contiguous(), z.shape[0], weight.shape[0]
    grad_z, grad_log_det, grad_reconstruction = torch.empty_like(z), z.new_empty(examples), z.new_empty(examples, columns)
    features = z[0].numel()
    _gradients[(examples,)](
        z,
        weight,
        grad,
        grad_z,
        grad_log_det,
        grad_reconstruction,
        features,
        columns,
        examples,
        BLOCK=_block(features, 1024),
        COLUMNS=triton.next_power_of_2(max(1, columns)),
        num_warps=4,
    )
    return grad_z, grad_log_det, grad_reconstruction


def _block(values: int, most: int) -> int:
    return min(most, triton.next_power_of_2(max(1, values)))


@triton.jit
def _energies(z, log_dets, energies, features, layers, examples, BLOCK: tl.constexpr, LAYERS: tl.constexpr):
    """½‖z_n‖² − Σ_l log_det_ln, a program a row."""
    row = tl.program_id(0).to(tl.int64)
    layer = tl.arange(0, LAYERS)
    log_det = tl.load(log_dets + layer.to(tl.int64) * examples + row, mask=layer < layers, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, features, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(z + row * features + column, mask=column < features, other=0.0)
        total += value * value
    tl.store(energies + row, 0.5 * tl.sum(total, 0) - tl.sum(log_det, 0))


@triton.jit
def _result(
    energies,
    reconstruction,
    weight,
    dimensions,
    value,
    parts,
    examples,
    columns,
    constant,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Means over the batch, in one program."""
    column = tl.arange(0, COLUMNS)
    known = column < columns
    energy, errors = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, examples, ROWS):
        row = start + tl.arange(0, ROWS)
        energy += tl.load(energies + row, mask=row < examples, other=0.0)
        places = row[:, None].to(tl.int64) * columns + column[None, :]
        errors += tl.load(reconstruction + places, mask=(row < examples)[:, None] & known[None, :], other=0.0)
    nll = tl.sum(energy, 0) / examples + constant
    means = tl.sum(errors, 0) / examples
    price = tl.load(weight + column, mask=known, other=0.0)
    tl.store(parts + 1 + column, means / tl.load(dimensions + column, mask=known, other=1.0), mask=known)
    tl.store(parts, nll)
    tl.store(value, nll + tl.sum(price * means, 0))


@triton.jit
def _gradients(
    z,
    weight,
    grad,
    grad_z,
    grad_log_det,
    grad_reconstruction,
    features,
    columns,
    examples,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """z/N, −1/N and λ/N, each times the gradient that arrives; a program a row."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(grad) / examples
    for start in range(0, features, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(z + row * features + column, mask=column < features)
        tl.store(grad_z + row * features + column, share * value, mask=column < features)
    tl.store(grad_log_det + row, -share)
    column = tl.arange(0, COLUMNS)
    price = tl.load(weight + column, mask=column < columns)
    tl.store(grad_reconstruction + row * columns + column, share * price, mask=column < columns)

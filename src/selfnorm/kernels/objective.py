"""The training objective in three launches: sums over rows, the loss from them, and all of its gradients.

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
        ctx: Any, z: Tensor, log_dets: Tensor, reconstruction: Tensor, reconstruction_weight: Tensor, dimensions: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(z, reconstruction_weight)
        ctx.layers = len(log_dets)
        ctx.set_materialize_grads(False)  # otherwise zeros are allocated for the parts, which have no gradient
        value, parts = objective(z, log_dets, reconstruction, reconstruction_weight, dimensions)
        ctx.mark_non_differentiable(parts)
        return value, parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None, None]:
        refuse_second_derivative()
        z, reconstruction_weight = ctx.saved_tensors
        grad_z, grad_log_det, grad_reconstruction = objective_gradients(z, reconstruction_weight, grad)
        return grad_z, grad_log_det.expand(ctx.layers, -1), grad_reconstruction, None, None


def objective(
    z: Tensor, log_dets: Tensor, reconstruction: Tensor, reconstruction_weight: Tensor, dimensions: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the value of the loss, and its parts (1 + K,): nll and the K errors.

    z (N, …), log_dets (L, N), reconstruction (N, K), reconstruction_weight λ and dimensions D_k (K,).
    """
    z, log_dets, reconstruction = z.contiguous(), log_dets.contiguous(), reconstruction.contiguous()
    examples, layers, columns = z.shape[0], log_dets.shape[0], reconstruction.shape[1]
    features = z[0].numel()
    energies, value, parts = z.new_empty(examples), z.new_empty(()), z.new_empty(1 + columns)
    _row_energies[(examples,)](
        z,
        log_dets,
        energies,
        features,
        layers,
        examples,
        BLOCK=_power_of_2_block(features, 1024),
        LAYERS=_power_of_2_block(layers, 2**20),
        num_warps=4,
    )
    constant = features / 2 * math.log(2 * math.pi)
    width = _power_of_2_block(columns, 2**20)
    rows = max(1, min(_power_of_2_block(examples, 1024), 4096 // width))
    _objective_value[(1,)](
        energies,
        reconstruction,
        reconstruction_weight,
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


def objective_gradients(z: Tensor, reconstruction_weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of z, of each log_det (N,) and of reconstruction, given that of the value (a scalar)."""
    z, examples, columns = z.contiguous(), z.shape[0], reconstruction_weight.shape[0]
    grad_z, grad_log_det, grad_reconstruction = torch.empty_like(z), z.new_empty(examples), z.new_empty(examples, columns)
    features = z[0].numel()
    _objective_gradients[(examples,)](
        z,
        reconstruction_weight,
        grad,
        grad_z,
        grad_log_det,
        grad_reconstruction,
        features,
        columns,
        examples,
        BLOCK=_power_of_2_block(features, 1024),
        COLUMNS=triton.next_power_of_2(max(1, columns)),
        num_warps=4,
    )
    return grad_z, grad_log_det, grad_reconstruction


def _power_of_2_block(values: int, most: int) -> int:
    """Returns the least power of 2 that holds `values`, or `most`, whichever is smaller."""
    return min(most, triton.next_power_of_2(max(1, values)))


@triton.jit
def _row_energies(z, log_dets, energies, features, layers, examples, BLOCK: tl.constexpr, LAYERS: tl.constexpr):
    """½‖z_n‖² − Σ_l log_det_ln, one row per program."""
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
def _objective_value(
    energies,
    reconstruction,
    reconstruction_weight,
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
    weights = tl.load(reconstruction_weight + column, mask=known, other=0.0)
    tl.store(parts + 1 + column, means / tl.load(dimensions + column, mask=known, other=1.0), mask=known)
    tl.store(parts, nll)
    tl.store(value, nll + tl.sum(weights * means, 0))


@triton.jit
def _objective_gradients(
    z,
    reconstruction_weight,
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
    """z/N, −1/N and λ/N, each times the gradient of the value; one row per program."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(grad) / examples
    for start in range(0, features, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(z + row * features + column, mask=column < features)
        tl.store(grad_z + row * features + column, share * value, mask=column < features)
    tl.store(grad_log_det + row, -share)
    column = tl.arange(0, COLUMNS)
    weights = tl.load(reconstruction_weight + column, mask=column < columns)
    tl.store(grad_reconstruction + row * columns + column, share * weights, mask=column < columns)

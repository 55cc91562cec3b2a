"""Iterations that use or improve an approximate inverse R of a matrix W, without factorising W."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def refine(
    forward: Callable[[Tensor], Tensor],
    approx_inverse: Callable[[Tensor], Tensor],
    z: Tensor,
    tolerance: float,
    patience: int = 10,
) -> tuple[Tensor, float]:
    """Solves forward(x) = z for a linear map by iterating x ← x + R(z − Wx); returns x and its relative residual.

    forward:         x ↦ Wx on batches (N, …).
    approx_inverse:  z ↦ Rz. The iteration converges from every z if and only if ρ(I − RW) < 1.
    tolerance:       where to stop, for the largest ‖z − Wx‖/‖z‖ over the batch, the residual that is returned.
    patience:        the iteration gives up, with a residual above the tolerance, after this many steps in a row without an
                     improvement of 10 %. The error of a contraction may grow at first, if I − RW is far from normal, but an
                     iteration slower than this costs more than a factorisation.
    """
    if z.numel() == 0:
        return approx_inverse(z), 0.0
    scale = z.detach().flatten(1).norm(dim=1).clamp_min(torch.finfo(z.dtype).tiny)

    def residual_of(x: Tensor) -> tuple[Tensor, float]:
        residual = z - forward(x)
        return residual, float((residual.detach().flatten(1).norm(dim=1) / scale).max())

    x = approx_inverse(z)
    residual, error = residual_of(x)
    smallest, stale = error, 0
    while error > tolerance and stale < patience:  # false for NaN, too
        x = x + approx_inverse(residual)
        residual, error = residual_of(x)
        smallest, stale = (error, 0) if error < 0.9 * smallest else (smallest, stale + 1)
    return x, error


def default_tolerance(dtype: torch.dtype) -> float:
    """Returns eps^¾, the tolerance with which layers call `refine` by default: 6e-6 in float32, 2e-12 in float64."""
    return float(torch.finfo(dtype).eps ** 0.75)


def newton_schulz(R: Tensor, error: Tensor) -> Tensor:
    """Returns R(2I − WR), given `error` = I − WR (m, m), which the step squares. Cost: 2m³ operations.

    Repeated steps converge to W⁻¹ if and only if ρ(I − WR) < 1.
    """
    return torch.addmm(R, R, error)


def sketch_and_project(R: Tensor, missing: Tensor, WQ: Tensor) -> Tensor:
    """Returns R + (Q − RWQ)(WQ)⁺, the matrix nearest to R that inverts W exactly on the columns of Q (m, τ). Cost: O(τm²).

    Takes `missing` = Q − RWQ (m, τ) and WQ (m, τ). ‖R − W⁻¹‖ never grows, and falls faster the better W is conditioned (Gower &
    Richtárik, 2017).
    """
    orthonormal, triangular = torch.linalg.qr(WQ)
    return torch.addmm(R, torch.linalg.solve_triangular(triangular, missing, upper=True, left=False), orthonormal.mT)


def transposed(matrix: Tensor) -> Tensor:
    """Returns a contiguous copy of the transpose: arithmetic on a strided view would cost more than a matrix product."""
    return matrix.mT.clone(memory_format=torch.contiguous_format)

"""Iterations that solve with, or improve, an approximate inverse R of a matrix W, without factorising W."""

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
    """Solve forward(x) = z for a linear map by x ← x + R(z − Wx): exact if and only if ρ(I − RW) < 1, with no factorisation.

    Returns x and its largest relative residual ‖z − Wx‖/‖z‖ over the batch. That is above the tolerance where `patience` steps
    in a row brought no gain of a tenth: a contraction may start by growing, if I − RW is far from normal, but one that is slower
    than that costs more products than a factorisation is worth.
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
    while error > tolerance and stale < patience:  # a NaN ends it too
        x = x + approx_inverse(residual)
        residual, error = residual_of(x)
        smallest, stale = (error, 0) if error < 0.9 * smallest else (smallest, stale + 1)
    return x, error


def default_tolerance(dtype: torch.dtype) -> float:
    """eps^¾: 6e-6 in float32, 2e-12 in float64."""
    return float(torch.finfo(dtype).eps ** 0.75)


def newton_schulz(R: Tensor, error: Tensor) -> Tensor:
    """R(2I − WR), given the error I − WR, which it squares: it converges if and only if ρ(I − WR) < 1. Cost: 2m³ for m rows."""
    return torch.addmm(R, R, error)


def sketch_and_project(R: Tensor, missing: Tensor, WQ: Tensor) -> Tensor:
    """The matrix nearest to R that undoes W on Q (m, τ), R + (Q − RWQ)(WQ)⁺, given `missing`, Q − RWQ. Cost: O(τm²).

    ‖R − W⁻¹‖ never grows by it, and falls the faster the better W is conditioned (Gower & Richtárik, 2017).
    """
    orthonormal, triangular = torch.linalg.qr(WQ)
    return torch.addmm(R, torch.linalg.solve_triangular(triangular, missing, upper=True, left=False), orthonormal.mT)


def transposed(matrix: Tensor) -> Tensor:
    """A transposed copy. Copying works in tiles; arithmetic across the grain of memory would cost more than a product."""
    return matrix.mT.clone(memory_format=torch.contiguous_format)

"""Iterations that use or improve an approximate inverse R of a matrix W, without factorising W."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# For Gaussian probes ω_1 … ω_m, ‖A‖ ≤ NORM_FACTOR·max ‖Aω_i‖ with a probability of at least 1 − 10^−m (Halko, Martinsson & Tropp,
# 2011, lemma 4.1).
NORM_FACTOR = 10 * math.sqrt(2 / math.pi)
NORM_PROBES = 16
MAX_REFINEMENTS = 32
# The error of a stored inverse is measured exactly up to ERROR_PROBES dimensions. In more, on ERROR_PROBES Gaussian vectors, or
# on as many as hold ERROR_NUMBERS numbers in all, but at least NORM_PROBES.
ERROR_PROBES, ERROR_NUMBERS = 256, 2**20
# Each read waits for the device. The powers of a good R need one.
POWERS_PER_READ = 8


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


def count_refinements(
    forward: Callable[[Tensor], Tensor], approx_inverse: Callable[[Tensor], Tensor], probes: Tensor, tolerance: float
) -> tuple[int | None, float]:
    """Returns the number of steps x ← x + R(z − Wx) that invert W to a tolerance, and an estimate of ‖RW − I‖_F/√D.

    Started at x = Rz, k steps leave the error E^(k+1)·W⁻¹z, where E = I − RW. The number is the smallest k ≤ MAX_REFINEMENTS with
    ‖E^(k+1)‖ ≤ tolerance, so that ‖x − W⁻¹z‖ ≤ tolerance·‖W⁻¹z‖ for every z. It is None if there is none, or if a lower power is
    so large that it amplifies rounding errors above the tolerance. Norms are bounded from above by the effect on the probes. For
    an E without a preferred direction the bound is about 8√D times too large, and k a few steps too large.

    probes: Gaussian vectors (NORM_PROBES, …). Cost: 2(k + 1) products with each of them, rounded up to whole reads.
    """
    power, norms, bounds = probes, [], []
    for count in range(1, MAX_REFINEMENTS + 2):
        power = power - approx_inverse(forward(power))  # E^count·ω
        norms.append(power.flatten(1).norm(dim=1))
        if count % POWERS_PER_READ == 0 or count > MAX_REFINEMENTS:
            largest = torch.stack([norm.max() for norm in norms])
            error, *bounds = torch.cat([norms[0].square().mean().sqrt()[None], NORM_FACTOR * largest]).tolist()
            if min(bounds) <= tolerance or not math.isfinite(bounds[-1]):
                break
    steps = next((steps for steps, bound in enumerate(bounds) if bound <= tolerance), None)
    if steps is not None and torch.finfo(probes.dtype).eps * max(bounds[: steps + 1]) > tolerance:
        steps = None
    return steps, error / math.sqrt(probes[0].numel())


def sampling_tolerance(dtype: torch.dtype) -> float:
    """Returns √eps, the relative error that each layer of `auto_inverse` may add: 3e-4 in float32, 1.5e-8 in float64."""
    return math.sqrt(torch.finfo(dtype).eps)


def white_noise(shape: tuple[int, ...], like: Tensor, count: int = NORM_PROBES) -> Tensor:
    """Returns Gaussian vectors of a shape, always the same ones, in the dtype and on the device of `like`."""
    generator = torch.Generator().manual_seed(0)  # its own, so that looking at a flow changes no other draw
    return torch.randn(count, *shape, generator=generator, dtype=torch.float32, device="cpu").to(like)


def error_probes(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns vectors x of a shape with D entries on which the mean square of (Ex)_i is ‖E‖_F²/D for any matrix E.

    Up to ERROR_PROBES dimensions these are the scaled unit vectors, and the mean is exact. In more dimensions they are Gaussian,
    and the square root of the mean has a relative standard error of at most 1/√(2·count): 4 % with 256 vectors.
    """
    dimensions = math.prod(shape)
    if dimensions <= ERROR_PROBES:
        axes = torch.eye(dimensions, dtype=like.dtype, device=like.device)
        return (math.sqrt(dimensions) * axes).reshape(dimensions, *shape)
    return white_noise(shape, like, max(NORM_PROBES, min(ERROR_PROBES, ERROR_NUMBERS // dimensions)))


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

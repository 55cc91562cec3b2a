"""Polishes: linear algebra that moves a learned inverse R towards W⁻¹ every few hundred steps.

Gradients correct R only where the data varies; in all other directions its error may grow unnoticed. A polish depends only on W.
It changes R, never W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor

from selfnorm.linalg.blocks import ZeroPadded
from selfnorm.linalg.convmatrix import tap_counts, tap_sums
from selfnorm.linalg.factors import invert, to_float64
from selfnorm.linalg.iterations import newton_schulz, sketch_and_project
from selfnorm.linalg.learned import LearnedInverse, LearnedKernel
from selfnorm.runtime.checks import describe

DIRECTIONS = 8  # corrected by the low-rank polish: measured errors lie in a handful of them
MAX_FACTORISED_ROWS = 4096  # rows of a T(w)


@torch.no_grad()
def polish_inverse(layer: LearnedInverse, method: str, generator: torch.Generator | None = None) -> None:
    """Moves a layer's R towards W⁻¹ by a method of `POLISHES`, in place."""
    with torch.autocast(layer.weight.device.type, enabled=False):  # which would round R to half precision
        layer.weight_inv.copy_(POLISHES[method](layer, generator))


def expect_polish(method: str, layers: Iterable[LearnedInverse]) -> None:
    """Raises ValueError for an unknown method, or one that does not suit one of the layers."""
    if method not in POLISHES:
        raise ValueError(f"polish: expected one of {', '.join(POLISHES)}, got {method!r}")
    kernels = [layer for layer in layers if layer.matrices() is None]
    if kernels and method in ("newton-schulz", "low-rank"):
        raise ValueError(
            f"polish: expected least-squares or tap-mean for {describe(kernels[0])}, whose learned inverse is a kernel and not a "
            f"matrix, got {method}"
        )


def expect_tap_mean(layer: LearnedInverse) -> None:
    """Raises ValueError for a tap-mean of a layer whose image size is unknown or too large."""
    kernel = _as_kernel(layer)
    if kernel is None:
        return
    if not layer.example_shape:
        raise ValueError(f"{describe(layer)}: expected a known image size for a tap-mean, got none; call surrogate(x) first")
    groups = kernel.geometry.groups
    if math.prod(layer.example_shape) // groups > MAX_FACTORISED_ROWS:
        size = "×".join(map(str, layer.example_shape))
        raise ValueError(
            f"{describe(layer)}: expected images of at most {MAX_FACTORISED_ROWS} dimensions per group for a tap-mean, which "
            f"factorises T(w), got {size} in {groups} group(s); use polish=least-squares"
        )


def _newton_schulz(layer: LearnedInverse, generator: torch.Generator | None) -> Tensor:
    """Returns R(2I − WR), which squares the error I − WR, or R if ‖I − WR‖ ≥ 1, which this would increase. 4D³ operations."""
    W, R = _matrices(layer)
    error = -(W @ R)
    error.diagonal(dim1=-2, dim2=-1).add_(1)
    near = torch.linalg.matrix_norm(error, keepdim=True) < 1
    polished = torch.stack([newton_schulz(*pair) for pair in zip(R, error, strict=True)])
    return torch.where(near, polished, R).reshape(layer.weight_inv.shape)


def _low_rank(layer: LearnedInverse, generator: torch.Generator | None) -> Tensor:
    """Returns R, corrected in the few directions in which WR − I is largest. O(D²)."""
    corrected = [_correct_largest(W, R, generator) for W, R in zip(*_matrices(layer), strict=True)]
    return torch.stack(corrected).reshape(layer.weight_inv.shape)


def _correct_largest(W: Tensor, R: Tensor, generator: torch.Generator | None) -> Tensor:
    # V, the right singular vectors of I − WR with the largest values, by two steps of subspace iteration.
    V = torch.randn(W.shape[0], min(DIRECTIONS, W.shape[0]), generator=generator, dtype=W.dtype, device=W.device)
    for _ in range(2):
        error = V - W @ (R @ V)
        V = _orthonormal(error - R.mT @ (W.mT @ error))
    # R is right on V if it undoes W on Q = W⁻¹V. The span of WᵀV, (WᵀW)WᵀV, (WᵀW)²WᵀV, as conjugate gradients would use, is
    # close enough to that. WᵀV alone corrected a tenth as much where W was ill-conditioned.
    krylov = [_orthonormal(W.mT @ V)]
    for _ in range(2):
        krylov.append(_orthonormal(W.mT @ (W @ krylov[-1])))
    Q = _orthonormal(torch.cat(krylov, 1))
    WQ = W @ Q
    return sketch_and_project(R, Q - R @ WQ, WQ)


def _orthonormal(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def _least_squares(layer: LearnedInverse, generator: torch.Generator | None) -> Tensor:
    """Returns the R of its size that minimises ‖RW − I‖, for k×k kernels away from the border; else W⁻¹. A factorisation."""
    return layer.inverse_of(to_float64(layer.weight))


def _tap_mean(layer: LearnedInverse, generator: torch.Generator | None) -> Tensor:
    """Returns a k×k kernel r whose taps are the means of T(w)⁻¹'s entries where T(r) holds them; else W⁻¹. Factorises T(w).

    The gradient that T(r)ᵀ gives w is then that of T(w)⁻ᵀ, border included: the exact gradient of the log-determinant. This
    does not make r a better inverse.
    """
    expect_tap_mean(layer)
    kernel = _as_kernel(layer)
    if kernel is None:
        return layer.inverse_of(to_float64(layer.weight))
    channels, height, width = layer.example_shape
    geometry, size, kernel_size = kernel.geometry, (height, width), kernel.inverse_kernel_size
    inverse = invert(describe(layer), to_float64(layer.weight), ZeroPadded((channels, height, width), geometry))
    counts = tap_counts(kernel_size, size, geometry, inverse.device).clamp(min=1)  # a tap that no pixel uses has a sum of 0
    return tap_sums(inverse, kernel_size, size, geometry) / counts


def _as_kernel(layer: LearnedInverse) -> LearnedKernel | None:
    return cast(LearnedKernel, layer) if layer.matrices() is None else None


def _matrices(layer: LearnedInverse) -> tuple[Tensor, Tensor]:
    matrices = layer.matrices()
    assert matrices is not None  # `expect_polish` has refused kernels
    return matrices


POLISHES: dict[str, Callable[[LearnedInverse, torch.Generator | None], Tensor]] = {
    "newton-schulz": _newton_schulz,
    "low-rank": _low_rank,
    "least-squares": _least_squares,
    "tap-mean": _tap_mean,
}

"""The log-determinant's gradient without the learned inverse's bias: Rᵀ plus a randomly truncated Neumann series.

With E = I − RW, the exact inverse is a series of products with W and R, W⁻¹ = Σ_{k≥0} EᵏR, if and only if ρ(E) < 1. A
self-normalizing layer already uses its first term. The others are estimated from white noise v, up to a random N with
P(N ≥ k) = qᵏ:

    u = Σ_{1≤k≤N} q⁻ᵏ EᵏRv,    mean of vuᵀ = Σ_{k≥1} (EᵏR)ᵀ = W⁻ᵀ − Rᵀ

since term k is included with probability qᵏ. That is the gradient of ⟨v, Wu⟩ for W, or for w if W is a convolution T(w) and R is
T(r): no transpose is needed, and no factorisation.

The estimate is unbiased if ρ(E) < 1, and its variance is finite if and only if ρ(E)² < q: a sum of n terms is of size (ρ/q)ⁿ
and occurs with probability (1 − q)qⁿ, so the squares add up like (ρ²/q)ⁿ. N is q/(1 − q) on average: a larger q costs more
and varies less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfnorm.linalg.learned import LearnedInverse
from selfnorm.runtime.autograd import in_full_precision
from selfnorm.runtime.checks import describe, event_shape, positive_int

# Vectors that `spectral_radius` iterates together: the growth of a single one oscillates with the phase of a complex pair.
POWER_ITERATION_STARTS = 8


class InfiniteVarianceError(ValueError):
    """Raised when a learned inverse is too far off for a debiased gradient of finite variance."""


def draw_terms(probes: int, keep: float, generator: torch.Generator | None = None) -> list[int]:
    """Returns N for each probe, with P(N ≥ k) = qᵏ and q = keep, from a CPU generator, since the host launches the N products.

    >>> draw_terms(8, keep=0.5, generator=torch.Generator().manual_seed(0))
    [5, 1, 0, 3, 1, 2, 0, 0]
    """
    keep = expect_probability("draw_terms", keep)
    uniform = torch.rand(positive_int("draw_terms", "probes", probes), generator=generator, dtype=torch.float64, device="cpu")
    # 1 − U lies in (0, 1], and is at most qᵏ with probability qᵏ.
    return [int(math.log1p(-u) / math.log(keep)) for u in uniform.tolist()]


@in_full_precision
def neumann_tail(layer: LearnedInverse, probes: Tensor, *, terms: Sequence[int], keep: float) -> Tensor:
    """Returns a zero whose gradient for W is the mean of vuᵀ over probes, an estimate of W⁻ᵀ − Rᵀ; nothing else gets a gradient.

    probes:  white noise v, a batch (P, …) of the layer's examples.
    terms:   N for each probe, from `draw_terms` with the same keep; the order does not matter.

    The layer's `surrogate` has ½Rᵀ for W, so a loss with −mean(log_det) adds −½ of this. Cost: 3 + 2N products per probe, one of
    them in the backward pass. Never waits for the device.

    >>> from selfnorm import SelfNormLinear
    >>> layer, probes = SelfNormLinear(3), torch.randn(8, 3)
    >>> tail = neumann_tail(layer, probes, terms=draw_terms(8, 0.5), keep=0.5)
    >>> tail.item(), torch.autograd.grad(tail, layer.weight)[0].shape
    (0.0, torch.Size([3, 3]))
    """
    layer.check_input(probes)
    keep = expect_probability("neumann_tail", keep)
    if len(terms) != len(probes) or not terms:
        raise ValueError(
            f"{describe(layer)}: expected as many terms as probes, and at least one, got {len(terms)} terms and {len(probes)} "
            "probes; draw_terms(len(probes), keep) makes them"
        )
    probes = probes.detach()
    with torch.no_grad():
        power = layer.apply_inverse(probes)
        total = torch.zeros_like(power)
        # The first probes get the longest sums, so that the remaining ones are a slice and no mask goes to the device.
        for k in range(1, max(terms) + 1):
            longer = sum(n >= k for n in terms)
            power = _error(layer, power[:longer])
            total[:longer].add_(power, alpha=keep**-k)
    value = (probes * layer.apply_weight(total)).sum() / len(probes)
    return value - value.detach()


@torch.no_grad()
def spectral_radius(
    layer: LearnedInverse,
    shape: int | Sequence[int],
    iterations: int = 200,
    generator: torch.Generator | None = None,
) -> float:
    """Returns ρ(I − RW) on examples of a shape, by power iteration: the geometric mean of the growth over the later half.

    A single step may grow by more or less than ρ, where the largest eigenvalues are a complex pair or the matrix is far from
    normal; the mean over n steps is right up to O(1/n), and a little high for Jordan blocks. Cost: two products per iteration
    with a batch of 8, and one wait for the device, on which `generator` draws the starts.
    """
    iterations = positive_int("spectral_radius", "iterations", iterations)
    shape = event_shape("spectral_radius", shape)
    x = torch.randn(POWER_ITERATION_STARTS, *shape, generator=generator, device=layer.weight.device, dtype=layer.weight.dtype)
    layer.check_input(x)
    growth = []
    for _ in range(iterations):
        x = x / x.norm().clamp_min(torch.finfo(x.dtype).tiny)  # all zeros stay zeros
        x = _error(layer, x)
        growth.append(x.norm())
    return float(torch.stack(growth[iterations // 2 :]).log().mean().exp())


def expect_finite_variance(layer: LearnedInverse, radius: float, keep: float) -> None:
    """Raises `InfiniteVarianceError` unless a layer with ρ(I − RW) = radius can be debiased with finite variance."""
    keep = expect_probability("expect_finite_variance", keep)
    if radius**2 < keep:
        return
    nearer = "bring R closer to the inverse first, by polishing it or by a larger reconstruction_weight"
    if radius < 1:
        what = "at which the debiased gradient has infinite variance"
        advice = f"{nearer}, or raise keep above {radius**2:.3g}"
    else:  # or NaN
        what = "at which the series does not converge, so no keep makes the gradient unbiased"
        advice = nearer
    raise InfiniteVarianceError(
        f"{describe(layer)}: expected ρ(I − RW)² below keep = {keep:.3g}, got ρ(I − RW) = {radius:.3g}, {what}; {advice}"
    )


@in_full_precision
def _error(layer: LearnedInverse, x: Tensor) -> Tensor:
    """Returns Ex = x − RWx."""
    return x - layer.apply_inverse(layer.apply_weight(x))


def expect_probability(who: str, keep: float) -> float:
    """Raises ValueError unless 0 < keep < 1."""
    if not 0 < keep < 1:
        raise ValueError(f"{who}: expected keep, the probability of one more term, between 0 and 1, got {keep}")
    return float(keep)

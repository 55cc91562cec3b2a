"""How far the paper's objective is from losing the learned inverses of a flow (docs/stability.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from selfnorm.evaluate.inputs import recorded_inputs
from selfnorm.evaluate.likelihood import evaluating
from selfnorm.layers.linear import ConvMap, LinearMap
from selfnorm.linalg.moments import largest_mu, moment_on_centre, patch_second_moment
from selfnorm.objective import Loss

MAX_MOMENT_SIZE = 4096  # most rows of a second moment to take eigenvalues of


def stability_ratios(loss: Loss, batches: Iterable[Tensor]) -> dict[str, float | None]:
    """Returns 1/(8λ·λ_min(E[hhᵀ])) of each self-normalizing layer: above 1, the paper's objective loses the layer's inverse.

    The one-sided objective has no such bound, so for it the result is empty. h is the layer's input. For a k×k convolution,
    patches of h and changes of a kernel take the place of h and of 1/λ_min: the bound is then exact at W = I and an estimate
    elsewhere; too high if w is larger than r. White noise (`Loss.probes`) adds I to E[hhᵀ]. None for a layer whose input, or
    patch, has more than 4096 entries.

    batches: of training data. With few examples, less than about 10 for each entry of h, λ_min comes out too small and the ratio
             too large.
    """
    if not loss.inverse_likelihood:
        return {}
    flow = loss.flow
    layers = {name: flow.bijection.get_submodule(name) for name in flow.reconstruction_names}
    known = {name: layer for name, layer in layers.items() if isinstance(layer, LinearMap)}
    moments: dict[str, Tensor] = {}
    dimensions: dict[str, int] = {}
    examples = 0
    with evaluating(flow):
        for x in filter(len, batches):
            with recorded_inputs("stability_ratios", known) as inputs:
                flow.encode(x)
            examples += len(x)
            for name, h in inputs.items():
                dimensions[name] = math.prod(h.shape[1:])
                if (moment := _second_moment(known[name], h)) is not None:
                    # A running mean over all examples so far.
                    before = moments.get(name, torch.zeros_like(moment))
                    moments[name] = before + (moment - before) * (len(x) / examples)
    weights = _effective_weights(loss, [dimensions.get(name, 1) for name in layers])
    noise = 1.0 if loss.probes else 0.0
    return {
        name: _ratio(known[name], moments[name], weight, noise) if name in moments else None
        for name, weight in zip(layers, weights, strict=True)
    }


def _kernel_sizes(layer: ConvMap) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the smallest size that contains both kernels of a layer, and the largest that both contain."""
    (height, width), other = layer.kernel_size, getattr(layer, "inverse_kernel_size", layer.kernel_size)
    return (max(height, other[0]), max(width, other[1])), (min(height, other[0]), min(width, other[1]))


def _second_moment(layer: LinearMap, h: Tensor) -> Tensor | None:
    """Returns E[hhᵀ] over a batch, (groups, m, m), for a convolution that of its patches; None if m is too large."""
    if not isinstance(layer, ConvMap):
        return (h.mT @ h / len(h))[None] if h.shape[1] <= MAX_MOMENT_SIZE else None
    size = _kernel_sizes(layer)[0]
    if layer.channels // layer.geometry.groups * math.prod(size) > MAX_MOMENT_SIZE:
        return None
    return patch_second_moment(h, size, layer.geometry)


def _ratio(layer: LinearMap, moment: Tensor, weight: float, noise: float) -> float:
    moment = moment + noise * torch.eye(moment.shape[-1]).to(moment)
    size = (1, 1)
    if isinstance(layer, ConvMap):
        outer, size = _kernel_sizes(layer)
        moment = moment_on_centre(moment, outer, size)
    mu = max(largest_mu(group, size) for group in moment)
    return math.inf if weight == 0 else mu / (8 * weight)


def _effective_weights(loss: Loss, dimensions: list[int]) -> list[float]:
    """Returns the λ of each layer for which λ·‖RWh − h‖² has the gradient of the loss's penalty at a small error."""
    penalty = loss.penalty
    error = torch.zeros_like(penalty.reconstruction_weight).requires_grad_()
    sizes = error.new_tensor(dimensions)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(penalty(error, sizes), error)
    weights: list[float] = (slope / sizes).tolist()
    return weights

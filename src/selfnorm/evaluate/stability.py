"""How far the paper's objective is from losing the learned inverses of a flow (docs/stability.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from selfnorm.evaluate.inputs import recorded_inputs
from selfnorm.evaluate.likelihood import evaluating
from selfnorm.layers.linear import ConvMap, LinearMap
from selfnorm.linalg.moments import patch_second_moment
from selfnorm.objective import Loss

MAX_MOMENT_SIZE = 4096  # most rows of a second moment to take eigenvalues of


def stability_ratios(loss: Loss, batches: Iterable[Tensor]) -> dict[str, float | None]:
    """Returns 1/(8λ·λ_min(E[hhᵀ])) of each self-normalizing layer: above 1, the paper's objective loses the layer's inverse.

    The one-sided objective has no such bound, so for it the result is empty. h is the layer's input. For a convolution it stands
    for the patches that the larger of its two kernels covers, with which the bound is exact at W = I and an estimate elsewhere.
    White noise (`Loss.probes`) adds I to E[hhᵀ]. None for a layer with more than 4096 entries, or in a patch.

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
        for x in batches:
            with recorded_inputs(known) as inputs:
                flow.encode(x)
            examples += len(x)
            for name, h in inputs.items():
                dimensions[name] = h[0].numel()
                if (moment := _second_moment(known[name], h)) is not None:
                    # A running mean over all examples so far.
                    before = moments.get(name, torch.zeros_like(moment))
                    moments[name] = before + (moment - before) * (len(x) / examples)
    weights = _weights_of_sums(loss, [dimensions.get(name, 1) for name in layers])
    return {
        name: _ratio(moments[name], weight, with_probes=loss.probes > 0) if name in moments else None
        for name, weight in zip(layers, weights, strict=True)
    }


def _second_moment(layer: LinearMap, h: Tensor) -> Tensor | None:
    """Returns E[hhᵀ] over a batch, (groups, m, m), for a convolution that of its patches; None if m is too large."""
    if not isinstance(layer, ConvMap):
        return (h.mT @ h / len(h))[None] if h.shape[1] <= MAX_MOMENT_SIZE else None
    other = getattr(layer, "inverse_kernel_size", layer.kernel_size)
    kernel_size = (max(layer.kernel_size[0], other[0]), max(layer.kernel_size[1], other[1]))
    if layer.channels // layer.geometry.groups * math.prod(kernel_size) > MAX_MOMENT_SIZE:
        return None
    return patch_second_moment(h, kernel_size, layer.geometry)


def _weights_of_sums(loss: Loss, dimensions: list[int]) -> list[float]:
    """Returns the λ of each layer for which λ·‖RWh − h‖² has the gradient of the loss's penalty at a small error."""
    penalty = loss.penalty
    error = torch.zeros_like(penalty.reconstruction_weight).requires_grad_()
    sizes = error.new_tensor(dimensions)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(penalty(error, sizes), error)
    weights: list[float] = (slope / sizes).tolist()
    return weights


def _ratio(moment: Tensor, weight: float, *, with_probes: bool) -> float:
    values = torch.linalg.eigvalsh(moment) + float(with_probes)
    # Rounding may make the smallest of very different eigenvalues negative.
    smallest = values.min().clamp_min(torch.finfo(values.dtype).eps * values.max())
    return math.inf if weight == 0 else 1 / (8 * weight * float(smallest))

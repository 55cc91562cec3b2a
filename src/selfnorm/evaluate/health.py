"""Measures and repairs the learned or tracked inverses of a flow, layer by layer and end to end.

Training constrains a learned R only through the reconstruction of the data. In directions where the data has no variance, R may
drift unnoticed. So each layer is also measured in all directions (`distance`, `noise_reconstruction`) and by its purpose, the
gradient that it provides (`angle`, `log_det_angle`).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import get_args

import torch
from torch import Tensor

from selfnorm.bijection import located
from selfnorm.evaluate.causes import cause_of_error
from selfnorm.evaluate.inputs import recorded_inputs
from selfnorm.flow import Flow, InaccurateInverseWarning, Inverse
from selfnorm.layers.linear import ConvMap
from selfnorm.layers.stored_inverse import StoredInverse
from selfnorm.linalg.factors import to_float64
from selfnorm.runtime.checks import describe

PROBES = 256  # white-noise vectors; ±9% in the worst case, an error in a single direction
SAMPLES = 64  # prior samples of a round trip z → x → z
MAX_EXACT_SIZE = 4096  # most rows of a block for singular values, and most columns of RW − I to compute


@dataclass(frozen=True)
class LayerHealth:
    """Figures for one layer z = Wh + b that stores an inverse R; for a convolution W is T(w), and a learned R is T(r)."""

    name: str  # as in `flow.bijection.get_submodule(name)`
    layer: str
    dimensions: int  # D
    distance: float  # ‖RW − I‖_F / √D
    condition: float | None  # σ_max/σ_min of W; None if its blocks have more than MAX_EXACT_SIZE rows
    data_reconstruction: float  # mean ‖RWh − h‖²/D over the inputs h that the data gives
    noise_reconstruction: float  # the same for white noise: an estimate of distance²
    angle: float  # degrees between the surrogate and the exact gradient of the mean NLL for W, without penalty
    log_det_angle: float  # degrees between their log-determinant terms, Rᵀ and W⁻ᵀ, as gradients of the weight
    # ‖exact gradient‖ as a fraction of ‖its data term‖ + ‖its log-determinant term‖. Near convergence the two terms cancel, the
    # fraction goes to 0 and `angle`, taken between small differences, says little; `log_det_angle` keeps its meaning.
    gradient_size: float
    stability_ratio: float | None = None  # `stability_ratios`; None unless the paper's objective trained the layer


@dataclass(frozen=True)
class FlowHealth:
    """All layers that store an inverse, first to last, and the round-trip errors of the flow.

    round_trip:  for each kind of inverse, the median over prior samples z of ‖f(g(z)) − z‖/‖z‖; inf where the flow raised an
                 error (a non-finite or out-of-range value, a singular weight).
    sample_error: for the inverses that are not exact, the median over prior samples z of ‖g(z) − f⁻¹(z)‖/‖f⁻¹(z)‖, with the
                 exact inverse f⁻¹ in float64; inf as above.
    auto:        what samples by the inverse "auto" use, in words.
    notes:       remarks on the figures, such as which are estimates, why a learned inverse is far off, and warnings that the
                 layers gave.
    """

    layers: tuple[LayerHealth, ...]
    round_trip: dict[str, float]
    sample_error: dict[str, float]
    auto: str
    notes: tuple[str, ...] = ()


@torch.inference_mode(False)
@torch.enable_grad()
def examine(
    flow: Flow,
    x: Tensor,
    generator: torch.Generator | None = None,
    *,
    ratios: Mapping[str, float | None] = MappingProxyType({}),
) -> FlowHealth:
    """Measures the stored inverses of a flow on a batch of data. Works on a copy in eval mode and leaves the flow unchanged.

    generator:  for the noise and the prior samples, on the device of x; by default one with a fixed seed.
    ratios:     the `stability_ratios` of the loss that trained the flow, to name the cause of an error.

    Cost: for each layer a factorisation and singular values, O(m³) for blocks of m rows, and up to MAX_EXACT_SIZE products with
    R and W.
    """
    if len(x) == 0:
        raise ValueError("examine: expected at least one example, got none")
    flow = copy.deepcopy(flow).eval()
    x = x.detach().clone()  # so that autograd can save it even if it was made in inference mode
    generator = torch.Generator(x.device).manual_seed(0) if generator is None else generator
    named = dict(_layers_with_inverse(flow))
    weights = [layer.weight.requires_grad_() for layer in named.values()]
    log_prob, inputs = _log_prob_and_inputs(flow, named, x)
    exact = _wide_gradients(-log_prob.mean(), weights)
    surrogate = _wide_gradients(-flow.surrogate(x).log_det.mean(), weights)

    layers, notes = [], []
    for (name, layer), exact_gradient, gradient in zip(named.items(), exact, surrogate, strict=True):
        health, remarks = _examine_layer(name, layer, inputs[name], exact_gradient, gradient, generator)
        health = replace(health, stability_ratio=ratios.get(name))
        layers.append(health)
        notes += remarks
        reconstruction = health.data_reconstruction, health.noise_reconstruction
        if name in flow.reconstruction_names and (
            cause := cause_of_error(name, health.distance, health.stability_ratio, bool(ratios), reconstruction)
        ):
            notes.append(cause.line)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", InaccurateInverseWarning)  # the figures say it
        z = flow.base.sample(SAMPLES, generator=generator)
        round_trips = {"auto": round_trip(flow, z, "auto")}
        auto = flow.inverse_used
        round_trips |= {inverse: round_trip(flow, z, inverse) for inverse in get_args(Inverse) if inverse != "auto"}
        sample_errors = _sample_errors(flow, z)
    notes += dict.fromkeys(str(warning.message) for warning in caught)
    return FlowHealth(tuple(layers), round_trips, sample_errors, auto, tuple(notes))


def repair(flow: Flow, x: Tensor | None = None) -> tuple[str, ...]:
    """Recomputes each stored inverse from its weight, in place: exact for linear layers and 1×1 kernels, else least-squares.

    Returns the names of the changed layers: all of them, or, given data x, only those whose new R reconstructs better, over
    the data and white noise together. (A trained k×k kernel may beat the least-squares one, which ignores the border.) If any
    weight is singular, no layer is changed. Start a new optimiser afterwards: the moments of the old one belong to the old R.
    """
    named = dict(_layers_with_inverse(flow))
    repaired = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, layer in named.items():
            with located(f"layer {name}" if name else "repair"):
                repaired[name] = layer.inverse_of(to_float64(layer.weight)).to(layer.weight)
        if x is not None:
            _, inputs = _log_prob_and_inputs(flow, named, x)
            repaired = {name: R for name, R in repaired.items() if _is_better(named[name], R, inputs[name])}
        for name, R in repaired.items():
            named[name].weight_inv.copy_(R)
    return tuple(repaired)


def _layers_with_inverse(flow: Flow) -> Iterator[tuple[str, StoredInverse]]:
    """Yields the layers that store an inverse, with their names; a layer that occurs twice only under its first name."""
    for name, layer in flow.bijection.named_modules():
        if isinstance(layer, StoredInverse):
            yield name, layer


def _log_prob_and_inputs(flow: Flow, named: dict[str, StoredInverse], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns log p(x), and for each layer the input h that it received, in float64."""
    with recorded_inputs("examine", named) as inputs:
        log_prob = flow.log_prob(x)
    return log_prob, inputs


def _examine_layer(
    name: str, layer: StoredInverse, h: Tensor, exact_gradient: Tensor, gradient: Tensor, generator: torch.Generator
) -> tuple[LayerHealth, list[str]]:
    """Returns the figures of one layer, and notes on them.

    h: the inputs of the layer. exact_gradient, gradient: of the mean NLL for its weight, exact and by the surrogate.
    """
    layer = copy.deepcopy(layer).to(to_float64(layer.weight))  # .to(tensor): to its dtype and device
    notes = []
    noise = torch.randn(PROBES, *h.shape[1:], generator=generator, device=generator.device)
    with torch.no_grad():
        noise_reconstruction = _reconstruction(layer, noise.to(h))
        distance, condition = _distance(layer, h), _condition_number(layer, h)
        data_reconstruction = _reconstruction(layer, h)
    if distance is None:
        distance = math.sqrt(noise_reconstruction)
        notes.append(
            f"layer {name}: distance is estimated from {PROBES} white-noise vectors, because D is too large for all columns"
        )
    if fallbacks := int(getattr(layer, "fallbacks", 0)):
        notes.append(f"layer {name}: its tracker lost R and was reset by a factorisation, {fallbacks} times so far")
    if condition is None:
        notes.append(f"layer {name}: no condition number, because its blocks have more than {MAX_EXACT_SIZE} rows")
    # The log-determinant terms of the gradient for one example, as the layer itself differentiates them.
    (exact_term,) = _wide_gradients(layer(h[:1])[1].sum(), [layer.weight])
    (learned_term,) = _wide_gradients(layer.surrogate(h[:1]).log_det.sum(), [layer.weight])
    data_term = exact_gradient + exact_term  # the loss is −log p: gradient = data term − log-determinant term
    health = LayerHealth(
        name=name,
        layer=describe(layer),
        dimensions=h[0].numel(),
        distance=distance,
        condition=condition,
        data_reconstruction=data_reconstruction,
        noise_reconstruction=noise_reconstruction,
        angle=_degrees_between(gradient, exact_gradient),
        log_det_angle=_degrees_between(learned_term, exact_term),
        gradient_size=float(exact_gradient.norm() / (data_term.norm() + exact_term.norm())),
    )
    return health, notes


def _wide_gradients(value: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of a scalar for the weights, in float64."""
    return [to_float64(gradient) for gradient in torch.autograd.grad(value, weights)] if weights else []


def _degrees_between(a: Tensor, b: Tensor) -> float:
    """Returns the angle between two tensors in degrees; 90 if one of them is zero, 0 if both are.

    Computed from chords, because acos resolves nothing below 1e-6 degrees.
    """
    if not a.any() or not b.any():
        return 90.0 if a.any() or b.any() else 0.0
    a, b = a / a.norm(), b / b.norm()
    return math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))


def _reconstruction(layer: StoredInverse, h: Tensor) -> float:
    """Returns the mean of ‖RWh − h‖²/D over the batch."""
    return float((layer.apply_inverse(layer.apply_weight(h)) - h).square().mean())


def _distance(layer: StoredInverse, h: Tensor) -> float | None:
    """Returns ‖RW − I‖_F/√D, the root mean square of ‖RWe − e‖ over unit vectors e; None if there are too many."""
    event, dimensions = h.shape[1:], h[0].numel()
    stride = 1
    if isinstance(layer, ConvMap):
        sizes = {layer.kernel_size, getattr(layer, "inverse_kernel_size", layer.kernel_size)}
        if layer.geometry.padding_mode == "circular" or sizes == {(1, 1)}:
            stride = dimensions // layer.channels  # all pixels are equivalent: one unit vector per channel is enough
    units = torch.arange(0, dimensions, stride, device=h.device)
    if len(units) > MAX_EXACT_SIZE:
        return None
    total = 0.0
    for chunk in units.split(256):
        e = torch.zeros(len(chunk), dimensions, dtype=h.dtype, device=h.device).scatter_(1, chunk[:, None], 1).unflatten(1, event)
        total += dimensions * len(chunk) * _reconstruction(layer, e)
    return math.sqrt(total / len(units))


def _condition_number(layer: StoredInverse, h: Tensor) -> float | None:
    """Returns σ_max/σ_min of W, from the singular values of its blocks; None if the blocks are too large."""
    form = layer.block_form(h)
    if form.split(h[:1]).shape[-2] > MAX_EXACT_SIZE:
        return None
    values = torch.linalg.svdvals(form.blocks(layer.weight))
    return float(values.max() / values.min())


def _is_better(layer: StoredInverse, R: Tensor, h: Tensor) -> bool:
    """Returns whether R reconstructs the inputs h and white noise better than the inverse that the layer stores."""
    noise = torch.randn(PROBES, *h.shape[1:], generator=torch.Generator().manual_seed(0)).to(h)
    old = copy.deepcopy(layer).to(h)
    new = copy.deepcopy(old)
    new.weight_inv.copy_(R)
    before, after = (_reconstruction(candidate, h) + _reconstruction(candidate, noise) for candidate in (old, new))
    return not before <= after  # also true if `before` is NaN


@torch.no_grad()
def _sample_errors(flow: Flow, z: Tensor) -> dict[str, float]:
    """Returns the median distance of samples from the exact ones, relative to their size."""
    kinds: tuple[Inverse, ...] = ("auto", "learned", "refined")
    wide = to_float64(z)
    try:
        exact = copy.deepcopy(flow).to(wide).decode(wide, "exact").flatten(1)
    except ValueError:
        return dict.fromkeys(kinds, math.inf)
    return {inverse: _sample_error(flow, z, inverse, exact) for inverse in kinds}


def _sample_error(flow: Flow, z: Tensor, inverse: Inverse, exact: Tensor) -> float:
    try:
        x = to_float64(flow.decode(z, inverse)).flatten(1)
    except ValueError:
        return math.inf
    return float(((x - exact).norm(dim=1) / exact.norm(dim=1)).median())


@torch.no_grad()
def round_trip(flow: Flow, z: Tensor, inverse: Inverse) -> float:
    """Returns the median over prior samples z of ‖f(g(z)) − z‖/‖z‖; inf if the flow raises ValueError."""
    wide = to_float64(z).flatten(1)
    try:
        back = to_float64(flow.encode(flow.decode(z, inverse))).flatten(1)
    except ValueError:
        return math.inf
    return float(((back - wide).norm(dim=1) / wide.norm(dim=1)).median())

"""How good the inverses are that a flow keeps, learned or tracked: layer by layer, and end to end; and how to mend them.

Training watches a learned R only through the reconstruction of the data. Where the data has no variance R may drift unseen, so
each layer is also measured in all directions (`distance`, `noise_reconstruction`), and by what it is for, the gradient it gives
(`angle`, `log_det_angle`).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from selfnorm.bijection import located
from selfnorm.flow import Flow, Inverse
from selfnorm.layers.kept_inverse import KeptInverse
from selfnorm.layers.linear import ConvMap
from selfnorm.linalg.factors import widen
from selfnorm.runtime.checks import describe

PROBES = 256  # white-noise vectors: ±9% for the worst case, an error in one direction only
SAMPLES = 64  # prior samples that go to x and back
LARGEST = 4096  # rows of a block to take singular values of, and columns of RW − I to go through


@dataclass(frozen=True)
class LayerHealth:
    """One layer z = Wh + b that keeps an inverse R; for a convolution W is T(w), and a learned R is T(r)."""

    name: str  # `flow.bijection.get_submodule(name)`
    layer: str
    dimensions: int  # D
    distance: float  # ‖RW − I‖_F / √D
    condition: float | None  # σ_max/σ_min of W; None where its blocks have more than LARGEST rows
    data_reconstruction: float  # mean ‖RWh − h‖²/D on the data's h
    noise_reconstruction: float  # the same on white noise: an estimate of distance²
    angle: float  # degrees between the surrogate's and the exact gradient of the mean NLL for W, without penalty
    log_det_angle: float  # degrees between the log-determinant's terms in those two, Rᵀ and W⁻ᵀ as the weight sees them
    # ‖exact gradient‖ as a fraction of ‖its data term‖ + ‖its log-determinant term‖. Near convergence the two terms cancel, the
    # fraction goes to 0 and `angle` is that of a difference which says little; `log_det_angle` keeps its meaning.
    gradient_size: float


@dataclass(frozen=True)
class FlowHealth:
    """All layers that keep an inverse, first to last, and how well the flow comes back to where it started.

    round_trip:  by inverse, the median over prior samples z of ‖f(g(z)) − z‖/‖z‖; inf where the flow refused (a non-finite or
                 out-of-range value on the way, a singular weight).
    notes:       what to know when reading the figures, such as which are estimates, and what the layers warned of.
    """

    layers: tuple[LayerHealth, ...]
    round_trip: dict[str, float]
    notes: tuple[str, ...] = ()


@torch.inference_mode(False)
@torch.enable_grad()
def examine(flow: Flow, x: Tensor, generator: torch.Generator | None = None) -> FlowHealth:
    """Measure the inverses that a flow keeps on a batch of data. Works on a copy in eval mode; the flow itself stays as it is.

    generator: for the noise and the prior samples, on x's device; without one, a fixed seed. Cost: for each layer a
    factorisation and singular values, O(m³) for blocks of m rows, and up to LARGEST products with R and W.
    """
    if len(x) == 0:
        raise ValueError("examine: expected at least one example, got none")
    flow = copy.deepcopy(flow).eval()
    x = x.detach().clone()  # of a tensor made in inference mode, too, so that autograd may keep it
    generator = torch.Generator(x.device).manual_seed(0) if generator is None else generator
    named = dict(_keeping(flow))
    weights = [layer.weight.requires_grad_() for layer in named.values()]
    log_prob, inputs = _score(flow, named, x)
    exact = _gradients(-log_prob.mean(), weights)
    surrogate = _gradients(-flow.surrogate(x).log_det.mean(), weights)

    layers, notes = [], []
    for (name, layer), exact_gradient, gradient in zip(named.items(), exact, surrogate, strict=True):
        health, remarks = _examine_layer(name, layer, inputs[name], exact_gradient, gradient, generator)
        layers.append(health)
        notes += remarks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        round_trip = _round_trips(flow, generator)
    notes += dict.fromkeys(str(warning.message) for warning in caught)
    return FlowHealth(tuple(layers), round_trip, tuple(notes))


def repair(flow: Flow, x: Tensor | None = None) -> tuple[str, ...]:
    """Set each kept inverse from its weight, in place: exact for linear layers and 1×1 kernels, least-squares for k×k ones.

    Returns the names of the layers that were changed: all of them, or, given data x, those that undo their W better for it, on
    x's h and on white noise taken together (a trained k×k kernel may beat the least-squares one, which knows no border). An
    optimiser's moments are of the old R: start a new one. Nothing is changed if any weight is singular.
    """
    named = dict(_keeping(flow))
    mended = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, layer in named.items():
            with located(f"layer {name}" if name else "repair"):
                mended[name] = layer.inverse_of(widen(layer.weight)).to(layer.weight)
        if x is not None:
            _, inputs = _score(flow, named, x)
            mended = {name: R for name, R in mended.items() if _is_better(named[name], R, inputs[name])}
        for name, R in mended.items():
            named[name].weight_inv.copy_(R)
    return tuple(mended)


def _keeping(flow: Flow) -> Iterator[tuple[str, KeptInverse]]:
    """The layers by name; one that the flow uses twice is named once, by its first place."""
    for name, layer in flow.bijection.named_modules():
        if isinstance(layer, KeptInverse):
            yield name, layer


def _score(flow: Flow, named: dict[str, KeptInverse], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """log p(x), and the h that each layer was given on the way, in float64."""
    inputs: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            inputs.setdefault(name, widen(args[0].detach()))

        return keep

    hooks = [layer.register_forward_hook(keeper(name)) for name, layer in named.items()]
    try:
        log_prob = flow.log_prob(x)
    finally:
        for hook in hooks:
            hook.remove()
    for name in named.keys() - inputs.keys():
        raise ValueError(
            f"examine: expected the flow to call its layer {name!r} as layer(x), got no call; a bijection of your own must call "
            "its parts so, rather than their forward()"
        )
    return log_prob, inputs


def _examine_layer(
    name: str, layer: KeptInverse, h: Tensor, exact_gradient: Tensor, gradient: Tensor, generator: torch.Generator
) -> tuple[LayerHealth, list[str]]:
    layer = copy.deepcopy(layer).to(widen(layer.weight))  # .to(tensor): to its dtype and device
    notes = []
    noise = torch.randn(PROBES, *h.shape[1:], generator=generator, device=generator.device)
    with torch.no_grad():
        noise_reconstruction = _reconstruction(layer, noise.to(h))
        distance, condition = _distance(layer, h), _condition(layer, h)
        data_reconstruction = _reconstruction(layer, h)
    if distance is None:
        distance = math.sqrt(noise_reconstruction)
        notes.append(f"layer {name}: distance is an estimate from {PROBES} white-noise vectors; D is too large for all columns")
    if fallbacks := int(getattr(layer, "fallbacks", 0)):
        notes.append(f"layer {name}: its tracker lost R and factorised anew, {fallbacks} times so far")
    if condition is None:
        notes.append(f"layer {name}: no condition number; its blocks have more than {LARGEST} rows")
    # The log-determinant's terms, as the layer itself differentiates them, for one example.
    (exact_term,) = _gradients(layer(h[:1])[1].sum(), [layer.weight])
    (learned_term,) = _gradients(layer.surrogate(h[:1]).log_det.sum(), [layer.weight])
    data_term = exact_gradient + exact_term  # the loss is −log p: gradient = data term − log-determinant's term
    health = LayerHealth(
        name=name,
        layer=describe(layer),
        dimensions=h[0].numel(),
        distance=distance,
        condition=condition,
        data_reconstruction=data_reconstruction,
        noise_reconstruction=noise_reconstruction,
        angle=_angle(gradient, exact_gradient),
        log_det_angle=_angle(learned_term, exact_term),
        gradient_size=float(exact_gradient.norm() / (data_term.norm() + exact_term.norm())),
    )
    return health, notes


def _gradients(value: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [widen(gradient) for gradient in torch.autograd.grad(value, weights)] if weights else []


def _angle(a: Tensor, b: Tensor) -> float:
    """Degrees between two tensors; 90 if one of them is zero. By chords, since acos resolves nothing below 1e-6 degrees."""
    if not a.any() or not b.any():
        return 90.0 if a.any() or b.any() else 0.0
    a, b = a / a.norm(), b / b.norm()
    return math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))


def _reconstruction(layer: KeptInverse, h: Tensor) -> float:
    """Mean ‖RWh − h‖²/D."""
    return float((layer.apply_inverse(layer.apply_weight(h)) - h).square().mean())


def _distance(layer: KeptInverse, h: Tensor) -> float | None:
    """‖RW − I‖_F/√D: the root of the mean of ‖RWe − e‖² over unit vectors e, in chunks; None if there are too many."""
    event, dimensions = h.shape[1:], h[0].numel()
    stride = 1
    if isinstance(layer, ConvMap):
        sizes = {layer.kernel_size, getattr(layer, "inverse_kernel_size", layer.kernel_size)}
        if layer.geometry.padding_mode == "circular" or sizes == {(1, 1)}:
            stride = dimensions // layer.channels  # every pixel is treated alike: one for each channel will do
    units = torch.arange(0, dimensions, stride, device=h.device)
    if len(units) > LARGEST:
        return None
    total = 0.0
    for chunk in units.split(256):
        e = torch.zeros(len(chunk), dimensions, dtype=h.dtype, device=h.device).scatter_(1, chunk[:, None], 1).unflatten(1, event)
        total += dimensions * len(chunk) * _reconstruction(layer, e)
    return math.sqrt(total / len(units))


def _condition(layer: KeptInverse, h: Tensor) -> float | None:
    form = layer.form(h)
    if form.split(h[:1]).shape[-2] > LARGEST:
        return None
    values = torch.linalg.svdvals(form.blocks(layer.weight))
    return float(values.max() / values.min())


def _is_better(layer: KeptInverse, R: Tensor, h: Tensor) -> bool:
    noise = torch.randn(PROBES, *h.shape[1:], generator=torch.Generator().manual_seed(0)).to(h)
    old = copy.deepcopy(layer).to(h)
    new = copy.deepcopy(old)
    new.weight_inv.copy_(R)
    before, after = (_reconstruction(candidate, h) + _reconstruction(candidate, noise) for candidate in (old, new))
    return not before <= after  # a NaN before is mended too


def _round_trips(flow: Flow, generator: torch.Generator) -> dict[str, float]:
    z: Tensor = flow.base.sample(SAMPLES, generator=generator)  # type: ignore[operator]
    return {inverse: round_trip(flow, z, inverse) for inverse in get_args(Inverse)}


@torch.no_grad()
def round_trip(flow: Flow, z: Tensor, inverse: Inverse = "learned") -> float:
    """The median over prior samples z of ‖f(g(z)) − z‖/‖z‖; inf where the flow refused."""
    wide = widen(z).flatten(1)
    try:
        back = widen(flow.encode(flow.decode(z, inverse))).flatten(1)
    except ValueError:
        return math.inf
    return float(((back - wide).norm(dim=1) / wide.norm(dim=1)).median())

"""The paper's architectures, each taking the kind of linear layer to be built of. Keller et al. (2021), appendix A.3."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from selfnorm.bijection import Bijection, Chain
from selfnorm.flow import Flow, StandardNormal
from selfnorm.layers.activation import Logit, SmoothLeakyReLU
from selfnorm.layers.actnorm import ActNorm
from selfnorm.layers.affine import Affine, Standardize
from selfnorm.layers.coupling import AffineCoupling, ConditionalAffine
from selfnorm.layers.emerging import EmergingConv2d
from selfnorm.layers.exact import ExactConv2d, ExactLinear
from selfnorm.layers.exponential import ExpConv2d
from selfnorm.layers.image import Flatten, Split, Squeeze
from selfnorm.layers.lu import LULinear
from selfnorm.layers.relative import RelativeLinear
from selfnorm.layers.selfnorm import SelfNormConv2d, SelfNormLinear
from selfnorm.layers.spline import SplineActivation
from selfnorm.layers.tracked import TrackedConv2d, TrackedLinear
from selfnorm.runtime.checks import count, event_shape

Size = int | Sequence[int]
Kind = TypeVar("Kind")

# Each kind of linear layer, by name; a new method joins here. The builders' options reach the kinds that have a use for them.
LINEAR: dict[str, Callable[[int], Bijection]] = {
    "selfnorm": SelfNormLinear,
    "exact": ExactLinear,
    "tracked": TrackedLinear,
    "sketch": lambda features: TrackedLinear(features, tracker="sketch"),
    "relative": RelativeLinear,
    "lu": LULinear,
}
# Of channels, kernel size, the learned inverse's kernel size, and the image's size.
CONV: dict[str, Callable[[int, Size, Size | None, tuple[int, int]], Bijection]] = {
    "selfnorm": lambda channels, kernel, inverse_kernel, size: SelfNormConv2d(channels, kernel, inverse_kernel),
    "exact": lambda channels, kernel, inverse_kernel, size: ExactConv2d(channels, kernel),
    "tracked": lambda channels, kernel, inverse_kernel, size: TrackedConv2d(channels, kernel, size),
    "emerging": lambda channels, kernel, inverse_kernel, size: EmergingConv2d(channels, kernel),
    "exp": lambda channels, kernel, inverse_kernel, size: ExpConv2d(channels, kernel),
}
MIX: dict[str, Callable[[int, Size, tuple[int, int]], Bijection]] = {
    "selfnorm": lambda channels, kernel, size: SelfNormConv2d(channels, kernel),
    "exact": lambda channels, kernel, size: ExactConv2d(channels, kernel),
    "tracked": lambda channels, kernel, size: TrackedConv2d(channels, kernel, size),
}


def fc_flow(
    shape: int | Sequence[int],
    layers: int = 2,
    linear: str = "selfnorm",
    alpha: float = 0.3,
    levels: int | None = None,
    *,
    activation: str = "leaky",
    bins: int = 5,
    rotate: bool = False,
    standardize: bool = False,
) -> Flow:
    """Linear layers with an activation between them, on the flattened example; the paper's has 2 of 784.

    shape:        one example's shape, such as 784 or (1, 28, 28); samples come back in it.
    linear:       which layer: selfnorm, exact, tracked, sketch, relative or lu; `docs/methods.md` says when to use which.
    levels:       with levels=256 the flow takes dequantised pixels in [0, 256), and its likelihood is in pixel units.
    activation:   leaky, the paper's `SmoothLeakyReLU(alpha)`, or spline, one learned curve of so many bins for each entry.
    rotate:       start the linear layers as random rotations instead of near the identity: better with few dimensions.
    standardize:  put a `Standardize` in front (behind the logit), which `flow.initialize(x)` sets.
    """
    shape = event_shape("fc_flow", shape)
    make = _kind("fc_flow", "linear", LINEAR, linear)
    features = math.prod(shape)
    between = _kind("fc_flow", "activation", _activations(features, alpha, bins), activation)
    body: list[Bijection] = [Flatten(shape)]
    for index in range(count("fc_flow", "layers", layers)):
        body += ([between()] if index else []) + [_rotated(make(features), features) if rotate else make(features)]
    return Flow(Chain(*_front_end("fc_flow", shape, levels, standardize), *body), StandardNormal((features,)))


def conv_flow(
    shape: Sequence[int],
    blocks: int = 3,
    layers_per_block: int = 3,
    kernel_size: Size = 3,
    inverse_kernel_size: Size | None = None,
    conv: str = "selfnorm",
    levels: int | None = None,
    *,
    standardize: bool = False,
) -> Flow:
    """Convolutions with spline activations between them, in blocks with a squeeze in between; the paper's is 3 × 3 layers.

    shape:                (C, H, W); H and W must divide by 2 once for each squeeze.
    inverse_kernel_size:  of the learned inverse, if other than kernel_size (self-normalizing layers only).
    conv:                 which layer: selfnorm, exact, tracked, emerging or exp.
    levels, standardize:  as in `fc_flow`.
    """
    make = _kind("conv_flow", "conv", CONV, conv)
    if inverse_kernel_size is not None and conv != "selfnorm":
        raise ValueError(f"conv_flow: expected no inverse_kernel_size with conv={conv!r}, which learns no inverse")
    channels, height, width = _image("conv_flow", shape, squeezes=count("conv_flow", "blocks", blocks) - 1)
    body: list[Bijection] = []
    for block in range(blocks):
        if block:
            body.append(Squeeze())
            channels, height, width = 4 * channels, height // 2, width // 2
        for _ in range(count("conv_flow", "layers_per_block", layers_per_block)):
            size = (height, width)
            body += [make(channels, kernel_size, inverse_kernel_size, size), SplineActivation((channels, *size))]
    body.pop()  # no activation after the last layer
    return Flow(Chain(*_front_end("conv_flow", shape, levels, standardize), *body), StandardNormal((channels, height, width)))


def glow(
    shape: Sequence[int],
    blocks: int = 2,
    steps: int = 16,
    hidden: int = 512,
    mix: str = "selfnorm",
    mix_kernel_size: Size = 1,
    levels: int | None = None,
    *,
    standardize: bool = False,
) -> Flow:
    """Glow (Kingma & Dhariwal, 2018): blocks of a squeeze and `steps` × (ActNorm, mixing convolution, coupling), split between.

    shape:            (C, H, W); H and W must divide by 2 once for each block.
    hidden:           width of the coupling networks.
    mix:              which mixing convolution: selfnorm, exact or tracked, of mix_kernel_size.
    levels, standardize:  as in `fc_flow`.
    The paper's models: MNIST blocks=2, steps=16; CIFAR-10 blocks=3, steps=32; ImageNet32 blocks=3, steps=48. Call
    `flow.initialize(x)` with a first batch before training. The latent is flat.
    """
    make = _kind("glow", "mix", MIX, mix)
    count("glow", "steps", steps)
    size = _image("glow", shape, squeezes=count("glow", "blocks", blocks))

    def block(remaining: int, channels: int, height: int, width: int) -> Chain:
        channels, height, width = 4 * channels, height // 2, width // 2
        body: list[Bijection] = [Squeeze()]
        for _ in range(steps):
            body += [ActNorm(channels), make(channels, mix_kernel_size, (height, width)), AffineCoupling(channels, hidden)]
        if remaining == 1:
            return Chain(*body, Flatten((channels, height, width)))
        half = channels // 2
        return Chain(*body, Split(block(remaining - 1, half, height, width), ConditionalAffine(half, half, hidden)))

    return Flow(Chain(*_front_end("glow", shape, levels, standardize), *block(blocks, *size)), StandardNormal((math.prod(size),)))


def _activations(features: int, alpha: float, bins: int) -> dict[str, Callable[[], Bijection]]:
    return {"leaky": lambda: SmoothLeakyReLU(alpha), "spline": lambda: SplineActivation((features,), bins)}


def _rotated(layer: Bijection, features: int) -> Bijection:
    """The layer with a random rotation for its weight; a learned inverse follows from that."""
    state = {"weight": nn.init.orthogonal_(torch.empty(features, features)), "bias": torch.zeros(features)}
    layer.load_state_dict(state)
    return layer


def _front_end(who: str, shape: Sequence[int], levels: int | None, standardize: bool) -> list[Bijection]:
    """Dequantised values in [0, levels) to the real line, and there to a common scale."""
    front: list[Bijection] = [] if levels is None else [Affine(0.0, 1 / count(who, "levels", levels)), Logit()]
    return [*front, Standardize(shape)] if standardize else front


def _kind(who: str, name: str, kinds: dict[str, Kind], kind: str) -> Kind:
    if kind not in kinds:
        raise ValueError(f"{who}: expected {name} to be one of {', '.join(kinds)}, got {kind!r}")
    return kinds[kind]


def _image(who: str, shape: Sequence[int], squeezes: int) -> tuple[int, int, int]:
    sides, factor = event_shape(who, shape), 2**squeezes
    if len(sides) != 3 or sides[1] % factor or sides[2] % factor:
        raise ValueError(f"{who}: expected a shape (C, H, W) with H and W divisible by {factor}, got {shape}")
    return sides[0], sides[1], sides[2]

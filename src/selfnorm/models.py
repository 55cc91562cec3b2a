"""Builds the flows of the paper from the kind of linear layer that you choose. Keller et al. (2021), appendix A.3."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from selfnorm.base import StandardNormal
from selfnorm.bijection import Bijection, Chain
from selfnorm.flow import Flow
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
from selfnorm.runtime.aliases import accepts_old_names
from selfnorm.runtime.checks import event_shape, positive_int

Size = int | Sequence[int]
Kind = TypeVar("Kind")

# Each kind of linear layer by name; add new kinds here. Options of the builders are passed to the kinds that use them.
LINEAR: dict[str, Callable[[int], Bijection]] = {
    "selfnorm": SelfNormLinear,
    "exact": ExactLinear,
    "tracked": TrackedLinear,
    "sketch": lambda features: TrackedLinear(features, tracker="sketch"),
    "relative": RelativeLinear,
    "lu": LULinear,
}
# Arguments: channels, kernel size, kernel size of the learned inverse, and size of the image.
CONV: dict[str, Callable[[int, Size, Size | None, tuple[int, int]], Bijection]] = {
    "selfnorm": lambda channels, kernel, inverse_kernel, size: SelfNormConv2d(channels, kernel, inverse_kernel),
    "exact": lambda channels, kernel, inverse_kernel, size: ExactConv2d(channels, kernel),
    "tracked": lambda channels, kernel, inverse_kernel, size: TrackedConv2d(channels, kernel, size),
    "emerging": lambda channels, kernel, inverse_kernel, size: EmergingConv2d(channels, kernel),
    "exp": lambda channels, kernel, inverse_kernel, size: ExpConv2d(channels, kernel),
}
# Arguments: channels, kernel size, and size of the image.
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
    """Returns a flow of linear layers with activations between them, on the flattened example. The paper uses 2 layers.

    shape:        the shape of one example, such as 784 or (1, 28, 28); samples have it, too.
    layers:       the number of linear layers.
    linear:       their kind: selfnorm, exact, tracked, sketch, relative or lu; `docs/choosing.md` says when to use which.
    levels:       with levels=256 the flow takes dequantised pixels in [0, 256), and its likelihood is in pixel units.
    activation:   leaky, the paper's `SmoothLeakyReLU(alpha)`, or spline, one learned curve with `bins` bins for each entry.
    rotate:       initialise the linear layers as random rotations instead of near the identity: better with few dimensions.
    standardize:  start with a `Standardize` layer (after the logit), which `flow.initialize(x)` fits.
    """
    shape = event_shape("fc_flow", shape)
    make = _choose_kind("fc_flow", "linear", LINEAR, linear)
    features = math.prod(shape)
    between = _choose_kind("fc_flow", "activation", _activations(features, alpha, bins), activation)
    body: list[Bijection] = [Flatten(shape)]
    for index in range(positive_int("fc_flow", "layers", layers)):
        body += ([between()] if index else []) + [_rotated(make(features), features) if rotate else make(features)]
    return Flow(Chain(*_preprocessing("fc_flow", shape, levels, standardize), *body), StandardNormal((features,)))


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
    """Returns a flow of convolutions with spline activations between them, in blocks separated by squeezes; the paper's has
    3 blocks of 3 layers.

    shape:                (C, H, W); H and W must be divisible by 2 once for each squeeze.
    inverse_kernel_size:  of the learned inverse, if it differs from kernel_size (self-normalizing layers only).
    conv:                 the kind of convolution: selfnorm, exact, tracked, emerging or exp.
    levels, standardize:  as in `fc_flow`.
    """
    make = _choose_kind("conv_flow", "conv", CONV, conv)
    if inverse_kernel_size is not None and conv != "selfnorm":
        raise ValueError(f"conv_flow: expected no inverse_kernel_size with conv={conv!r}, which learns no inverse; leave it out")
    channels, height, width = _image_shape("conv_flow", shape, squeezes=positive_int("conv_flow", "blocks", blocks) - 1)
    body: list[Bijection] = []
    for block in range(blocks):
        if block:
            body.append(Squeeze())
            channels, height, width = 4 * channels, height // 2, width // 2
        for _ in range(positive_int("conv_flow", "layers_per_block", layers_per_block)):
            size = (height, width)
            body += [make(channels, kernel_size, inverse_kernel_size, size), SplineActivation((channels, *size))]
    body.pop()  # no activation after the last layer
    return Flow(Chain(*_preprocessing("conv_flow", shape, levels, standardize), *body), StandardNormal((channels, height, width)))


@accepts_old_names(steps="steps_per_block")
def glow(
    shape: Sequence[int],
    blocks: int = 2,
    steps_per_block: int = 16,
    hidden: int = 512,
    mix: str = "selfnorm",
    mix_kernel_size: Size = 1,
    levels: int | None = None,
    *,
    standardize: bool = False,
) -> Flow:
    """Returns a Glow (Kingma & Dhariwal, 2018).

    Each block is a squeeze and `steps_per_block` steps of ActNorm, mixing convolution and affine coupling; splits separate the
    blocks.

    shape:                (C, H, W); H and W must be divisible by 2 once for each block.
    hidden:               width of the coupling networks.
    mix:                  the kind of mixing convolution: selfnorm, exact or tracked, with mix_kernel_size.
    levels, standardize:  as in `fc_flow`.

    The paper's blocks × steps_per_block: MNIST 2 × 16, CIFAR-10 3 × 32, ImageNet32 3 × 48. `steps` is an alias of
    `steps_per_block`. Call `flow.initialize(x)` with a first batch before training. The latent is flat.
    """
    make = _choose_kind("glow", "mix", MIX, mix)
    positive_int("glow", "steps_per_block", steps_per_block)
    size = _image_shape("glow", shape, squeezes=positive_int("glow", "blocks", blocks))

    def block(remaining: int, channels: int, height: int, width: int) -> Chain:
        channels, height, width = 4 * channels, height // 2, width // 2
        body: list[Bijection] = [Squeeze()]
        for _ in range(steps_per_block):
            body += [ActNorm(channels), make(channels, mix_kernel_size, (height, width)), AffineCoupling(channels, hidden)]
        if remaining == 1:
            return Chain(*body, Flatten((channels, height, width)))
        half = channels // 2
        return Chain(*body, Split(block(remaining - 1, half, height, width), ConditionalAffine(half, half, hidden)))

    return Flow(
        Chain(*_preprocessing("glow", shape, levels, standardize), *block(blocks, *size)), StandardNormal((math.prod(size),))
    )


def _activations(features: int, alpha: float, bins: int) -> dict[str, Callable[[], Bijection]]:
    return {"leaky": lambda: SmoothLeakyReLU(alpha), "spline": lambda: SplineActivation((features,), bins)}


def _rotated(layer: Bijection, features: int) -> Bijection:
    """Returns the layer with a random rotation as its weight, and its learned inverse, if any, set accordingly."""
    state = {"weight": nn.init.orthogonal_(torch.empty(features, features)), "bias": torch.zeros(features)}
    layer.load_state_dict(state)
    return layer


def _preprocessing(who: str, shape: Sequence[int], levels: int | None, standardize: bool) -> list[Bijection]:
    """Returns the layers that map values in [0, levels) to the real line, and those that standardize them, as requested."""
    preprocessing: list[Bijection] = [] if levels is None else [Affine(0.0, 1 / positive_int(who, "levels", levels)), Logit()]
    return [*preprocessing, Standardize(shape)] if standardize else preprocessing


def _choose_kind(who: str, name: str, kinds: dict[str, Kind], kind: str) -> Kind:
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{who}: expected {name} to be one of {', '.join(kinds)}, got {kind!r}")
    return kinds[kind]


def _image_shape(who: str, shape: Sequence[int], squeezes: int) -> tuple[int, int, int]:
    sides, factor = event_shape(who, shape), 2**squeezes
    if len(sides) != 3 or sides[1] % factor or sides[2] % factor:
        raise ValueError(f"{who}: expected a shape (C, H, W) with H and W divisible by {factor}, got {shape}")
    return sides[0], sides[1], sides[2]

"""Every bijection by name, with what the property tests need to know about it. Add a new layer here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfnorm import (
    ActNorm,
    Affine,
    AffineCoupling,
    Bijection,
    Chain,
    ConditionalAffine,
    Conv1x1,
    EmergingConv2d,
    ExactConv2d,
    ExactLinear,
    ExpConv2d,
    Flatten,
    Logit,
    LULinear,
    RelativeLinear,
    SelfNormConv2d,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    Split,
    Squeeze,
    Standardize,
    TrackedConv2d,
    TrackedLinear,
)
from selfnorm.layers.emerging import AutoregressiveConv2d
from selfnorm.models import conv_flow, fc_flow, glow


@dataclass(frozen=True)
class Case:
    """One bijection under test, and the inputs that it takes."""

    make: Callable[[], Bijection]
    shape: tuple[int, ...]
    bad_shape: tuple[int, ...] | None = None  # a shape (N, …) that must raise ValueError; None if every shape is valid
    draw: Callable[..., Tensor] = torch.randn
    context: tuple[int, ...] | None = None
    free_of_determinant: bool = False  # the surrogate's log_det has a gradient but no value, and no inverse is learned
    surrogate_tolerance: float = 1e-7  # of the surrogate's output, where it is a cheaper approximation

    def build(self) -> Bijection:
        """Returns the layer with perturbed parameters: many layers start as the identity, which would hide mistakes."""
        layer = self.make()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return layer.eval()

    def inputs(self, n: int) -> tuple[Tensor, Tensor | None]:
        """Returns a random batch of n examples, and its context if the layer takes one."""
        return self.draw(n, *self.shape), None if self.context is None else torch.randn(n, *self.context)


def wide(*shape: int) -> Tensor:
    """Returns inputs within and beyond the bound of a spline."""
    return 6 * torch.randn(*shape)


def pixels(*shape: int) -> Tensor:
    return 256 * torch.rand(*shape)


def initialized(layer: Standardize) -> Standardize:
    layer.initialize(2 * torch.randn(9, *layer.shift.shape) + 1)
    return layer


REGISTRY = {
    "SelfNormLinear": Case(lambda: SelfNormLinear(5), (5,), (2, 4)),
    "SelfNormLinear-1": Case(lambda: SelfNormLinear(1, bias=False), (1,), (2, 2)),
    "ExactLinear": Case(lambda: ExactLinear(5), (5,), (2, 5, 1)),
    "SelfNormConv2d-3x3": Case(lambda: SelfNormConv2d(2, 3), (2, 4, 3), (2, 3, 4, 3)),
    "SelfNormConv2d-1x1": Case(lambda: SelfNormConv2d(3, 1), (3, 2, 4), (2, 3, 2)),
    "SelfNormConv2d-1x1-groups": Case(lambda: SelfNormConv2d(4, 1, groups=2), (4, 2, 3), (2, 3, 2, 3)),
    "SelfNormConv2d-rectangular": Case(lambda: SelfNormConv2d(2, (1, 3), (5, 3), bias=False), (2, 4, 3), (2, 2)),
    "SelfNormConv2d-groups": Case(lambda: SelfNormConv2d(4, 3, groups=2, dilation=2), (4, 5, 3), (2, 3, 5, 3)),
    "SelfNormConv2d-circular": Case(lambda: SelfNormConv2d(2, 3, 5, padding_mode="circular"), (2, 5, 6), (2, 2, 4, 6)),
    "ExactConv2d": Case(lambda: ExactConv2d(2, 3), (2, 4, 3), (2, 1, 4, 3)),
    "ExactConv2d-wide": Case(lambda: ExactConv2d(1, (7, 5)), (1, 3, 4), (2, 2, 3, 4)),
    "ExactConv2d-circular": Case(
        lambda: ExactConv2d(4, (3, 1), dilation=(2, 1), groups=2, padding_mode="circular"), (4, 5, 2), (2, 4, 4, 2)
    ),
    "Conv1x1": Case(lambda: Conv1x1(3), (3, 2, 4), (2, 4, 2, 4)),
    "LULinear": Case(lambda: LULinear(5), (5,), (2, 4)),
    "LULinear-1": Case(lambda: LULinear(1, bias=False), (1,), (2, 2)),
    "RelativeLinear": Case(lambda: RelativeLinear(5), (5,), (2, 4), free_of_determinant=True),
    "RelativeLinear-1": Case(lambda: RelativeLinear(1, bias=False), (1,), (2, 2), free_of_determinant=True),
    "TrackedLinear": Case(lambda: TrackedLinear(5), (5,), (2, 4), free_of_determinant=True),
    "TrackedLinear-sketch": Case(
        lambda: TrackedLinear(5, bias=False, tracker="sketch", rank=2), (5,), (2, 6), free_of_determinant=True
    ),
    "TrackedConv2d-3x3": Case(lambda: TrackedConv2d(2, 3, (4, 3)), (2, 4, 3), (2, 2, 3, 4), free_of_determinant=True),
    "TrackedConv2d-1x1": Case(lambda: TrackedConv2d(3, 1, (2, 4)), (3, 2, 4), (2, 3, 2, 5), free_of_determinant=True),
    "TrackedConv2d-sketch": Case(
        lambda: TrackedConv2d(1, (3, 5), (3, 4), "sketch", bias=False), (1, 3, 4), (2, 1, 4, 4), free_of_determinant=True
    ),
    "AutoregressiveConv2d": Case(lambda: AutoregressiveConv2d(3, (3, 1)), (3, 4, 2), (2, 2, 4, 2)),
    "AutoregressiveConv2d-mirrored": Case(
        lambda: AutoregressiveConv2d(2, (1, 5), mirrored=True, bias=False, mask="raster"), (2, 2, 6), (2, 2, 6)
    ),
    "AutoregressiveConv2d-fronts": Case(lambda: AutoregressiveConv2d(24, (3, 3)), (24, 1, 3), (2, 23, 1, 3)),
    "EmergingConv2d": Case(lambda: EmergingConv2d(2), (2, 4, 3), (2, 3, 4, 3)),
    "EmergingConv2d-raster": Case(lambda: EmergingConv2d(2, (3, 5), mask="raster"), (2, 3, 4), (2, 3, 4)),
    "EmergingConv2d-plain": Case(lambda: EmergingConv2d(3, 5, mix=False), (3, 2, 4), (2, 1, 2, 4)),
    "ExpConv2d": Case(lambda: ExpConv2d(3), (3, 4, 3), (2, 2, 4, 3), surrogate_tolerance=1e-3),
    "ExpConv2d-plain": Case(lambda: ExpConv2d(2, 5, mix=False), (2, 4, 3), (2, 2, 4), surrogate_tolerance=1e-3),
    "ExpConv2d-rectangular": Case(lambda: ExpConv2d(2, (1, 3)), (2, 2, 5), (2, 3, 2, 5), surrogate_tolerance=1e-3),
    "SmoothLeakyReLU": Case(lambda: SmoothLeakyReLU(0.3), (7,), draw=wide),
    "SplineActivation": Case(lambda: SplineActivation((2, 3, 2)), (2, 3, 2), (2, 2, 2, 3), draw=wide),
    "SplineActivation-1-bin": Case(lambda: SplineActivation(4, bins=1, bound=3.0), (4,), (2, 5), draw=wide),
    "Affine": Case(lambda: Affine(0.5, -2.0), (2, 3)),
    "Standardize": Case(lambda: initialized(Standardize((3, 2))), (3, 2), (2, 3, 3)),
    "Affine-tensor": Case(lambda: Affine(torch.randn(3, 1), torch.rand(3, 2) + 0.5), (3, 2), (2, 4, 2)),
    "Logit": Case(lambda: Logit(), (6,), draw=torch.rand),
    "ActNorm": Case(lambda: ActNorm(3), (3, 2, 2), (2, 2, 2, 2)),
    "ActNorm-vector": Case(lambda: ActNorm(3), (3,), (3,)),
    "ConditionalAffine": Case(lambda: ConditionalAffine(2, 3, hidden=4), (2, 3, 2), (2, 3, 3, 2), context=(3, 3, 2)),
    "AffineCoupling": Case(lambda: AffineCoupling(4, hidden=4), (4, 3, 2), (2, 3, 3, 2)),
    "AffineCoupling-odd": Case(lambda: AffineCoupling(3, hidden=4), (3, 2, 2), (2, 2, 2, 2)),
    "AffineCoupling-context": Case(lambda: AffineCoupling(2, 4, context_channels=3), (2, 3, 2), (2, 2), context=(3, 3, 2)),
    "AffineCoupling-vector-context": Case(lambda: AffineCoupling(2, 4, 3), (2, 3, 2), (2, 3, 3, 2), context=(3,)),
    "Squeeze": Case(lambda: Squeeze(), (2, 4, 6), (2, 2, 3, 6)),
    "Flatten": Case(lambda: Flatten((2, 3)), (2, 3), (2, 3, 2)),
    "Split": Case(lambda: Split(Chain(SelfNormConv2d(2, 3), Squeeze())), (4, 2, 4), (2, 3, 2, 4)),
    "Split-prior": Case(
        lambda: Split(SelfNormConv2d(2, 1), Chain(SelfNormConv2d(2, 3), ConditionalAffine(2, 2, 4))), (4, 2, 2), (2, 5, 2, 2)
    ),
    "Split-context": Case(
        lambda: Split(AffineCoupling(2, 4, 3), Chain(SelfNormConv2d(2, 1), ConditionalAffine(2, 2, 4))),
        (4, 2, 2),
        (2, 5, 2, 2),
        context=(3,),
    ),
    "Chain": Case(lambda: Chain(SelfNormLinear(4), SmoothLeakyReLU(), Chain(ActNorm(4), ExactLinear(4))), (4,), (2, 3)),
    "Chain-empty": Case(lambda: Chain(), (3, 2)),
    **{
        f"{builder}-{kind}{suffix}": Case(make, shape, bad_shape, draw, free_of_determinant=kind == "tracked")
        for kind in ("selfnorm", "exact", "tracked")
        for builder, suffix, make, shape, bad_shape, draw in [
            ("fc_flow", "", lambda kind=kind: fc_flow(6, linear=kind).bijection, (6,), (2, 5), torch.randn),
            (
                "fc_flow",
                "-levels",
                lambda kind=kind: fc_flow((1, 2, 3), layers=3, linear=kind, levels=256).bijection,
                (1, 2, 3),
                (2, 1, 3, 2),
                pixels,
            ),
            (
                "conv_flow",
                "-levels",
                lambda kind=kind: conv_flow((1, 4, 8), conv=kind, levels=256).bijection,
                (1, 4, 8),
                (2, 2, 4, 8),
                pixels,
            ),
            (
                "glow",
                "-levels",
                lambda kind=kind: glow((1, 4, 4), steps=2, hidden=4, mix=kind, levels=256).bijection,
                (1, 4, 4),
                (2, 2, 4, 4),
                pixels,
            ),
            (
                "glow",
                "-3x3",
                lambda kind=kind: glow((2, 4, 4), steps=1, hidden=4, mix=kind, mix_kernel_size=3).bijection,
                (2, 4, 4),
                (2, 1, 4, 4),
                torch.randn,
            ),
        ]
    },
}

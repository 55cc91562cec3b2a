"""Layers by kernels at round sizes and uneven ones, against float64: compilers treat powers of 2 in ways of their own."""

import copy

import pytest
import torch

from selfnorm import (
    ActNorm,
    AffineCoupling,
    Conv1x1,
    EmergingConv2d,
    ExactConv2d,
    ExactLinear,
    ExpConv2d,
    LULinear,
    RelativeLinear,
    SelfNormConv2d,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    TrackedConv2d,
    TrackedLinear,
)
from selfnorm.kernels.dispatch import used_on
from selfnorm.precision import precision
from test_kernels_conv import agree, normal, random_layer, trained

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")

OF_IMAGES = {
    "SelfNormConv2d": lambda c, h, w: SelfNormConv2d(c, 3),
    "SelfNormConv2d-1x1": lambda c, h, w: SelfNormConv2d(c, 1),
    "TrackedConv2d": lambda c, h, w: TrackedConv2d(c, 3, (h, w)),
    "TrackedConv2d-1x1": lambda c, h, w: TrackedConv2d(c, 1, (h, w)),
    "ExactConv2d": lambda c, h, w: ExactConv2d(c, 3),
    "Conv1x1": lambda c, h, w: Conv1x1(c),
    "EmergingConv2d": lambda c, h, w: EmergingConv2d(c),
    "ExpConv2d": lambda c, h, w: ExpConv2d(c),
    "SplineActivation": lambda c, h, w: SplineActivation((c, h, w)),
    "ActNorm": lambda c, h, w: ActNorm(c),
    "SmoothLeakyReLU": lambda c, h, w: SmoothLeakyReLU(),
    "AffineCoupling": lambda c, h, w: AffineCoupling(c, 16),
}
OF_VECTORS = {
    "SelfNormLinear": SelfNormLinear,
    "TrackedLinear": TrackedLinear,
    "RelativeLinear": RelativeLinear,
    "LULinear": LULinear,
    "ExactLinear": ExactLinear,
    "SplineActivation-flat": SplineActivation,
}
IMAGES = [(3, 8, 2, 2), (2, 4, 2, 3)]
VECTORS = [(16, 16), (5, 7)]
PRODUCTS = ["float32"]
if torch.cuda.is_available():  # step by step in Python these would take minutes, and find nothing: there is no compiler
    IMAGES += [(3, 8, 4, 4), (2, 8, 8, 8), (2, 16, 4, 4), (2, 16, 2, 2), (2, 32, 4, 4), (2, 4, 16, 16), (2, 12, 7, 7)]
    VECTORS += [(16, 64), (128, 128), (1, 256), (64, 100)]
    PRODUCTS += ["tf32"]


def cases(makers, shapes):
    return [pytest.param(makers[name], shape, id=f"{name}-{shape}") for name in makers for shape in shapes]


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("make, shape", [*cases(OF_IMAGES, IMAGES), *cases(OF_VECTORS, VECTORS)])
def test_values_gradients_and_learned_inverses(make, shape, products, device):
    x = normal(*shape, device=device)
    layer = make(*shape[1:])
    if isinstance(layer, ActNorm):
        layer.initialize(x.cpu().double())
    layer = random_layer(layer, device)
    exact = copy.deepcopy(layer).double()
    with used_on():
        expected = trained(exact, x.double())
    with precision(products):
        found = trained(layer, x)
        with torch.no_grad():
            back = layer.approx_inverse(x)
    with torch.no_grad():
        expected.append(exact.approx_inverse(x.double()))
    # TF32 has errors of its own, of a part in a thousand; a tap in the wrong place would be seen in both.
    found, expected = ([value for value in values if value.numel()] for values in ([*found, back], expected))
    agree(found, expected, tolerance=5e-5 if products == "float32" else 5e-2)


@pytest.mark.parametrize(
    "make, shape",
    [
        *cases({name: OF_IMAGES[name] for name in ("TrackedConv2d", "TrackedConv2d-1x1")}, IMAGES),
        *cases({"TrackedLinear": TrackedLinear}, VECTORS),
    ],
)
def test_kept_inverses_follow(make, shape, device):
    layer = random_layer(make(*shape[1:]), device)
    exact = copy.deepcopy(layer).double()
    with used_on():
        exact.track()
    layer.track()
    agree([layer.weight_inv], [exact.weight_inv], tolerance=5e-5)

"""Layers by kernels at round sizes and at random ones, against float64: compilers treat powers of 2 specially."""

import copy
import random

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
    RelativeLinear,
    SelfNormConv2d,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    TrackedConv2d,
    TrackedLinear,
)
from selfnorm.layers.exact import SMALL_BLOCK
from selfnorm.runtime.precision import precision
from support.kernel_checks import agree, normal, random_layer, trained

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")

OF_IMAGES = {
    "SelfNormConv2d": lambda c, h, w: SelfNormConv2d(c, 3),
    "SelfNormConv2d-3x5": lambda c, h, w: SelfNormConv2d(c, 3, inverse_kernel_size=(3, 5)),
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
    "ExactLinear": ExactLinear,
    "SplineActivation-flat": SplineActivation,
}
ROUND_IMAGES = [(3, 8, 2, 2), (2, 3, 2, 3)]
ROUND_VECTORS = [(16, 16), (5, 7)]
OF_MANY_TAPS = {
    "SelfNormConv2d-7x7": lambda c, h, w: SelfNormConv2d(c, 7),
    "SelfNormConv2d-5x5": lambda c, h, w: SelfNormConv2d(c, 5, inverse_kernel_size=7),
    "TrackedConv2d-7x7": lambda c, h, w: TrackedConv2d(c, 7, (h, w)),
    "ExactConv2d-7x7": lambda c, h, w: ExactConv2d(c, 7),
    "EmergingConv2d-5x5": lambda c, h, w: EmergingConv2d(c, 5),
    "ExpConv2d-7x7": lambda c, h, w: ExpConv2d(c, 7),
}
MANY_TAPS_IMAGES = [(2, 5, 3, 4)]  # 7×7 taps of it are 7 rounds: not unrolled in float32
PRODUCTS, DRAWS, LARGE = ["float32"], 1, False
if torch.cuda.is_available():  # step by step in Python these would take minutes, and find nothing: there is no compiler
    ROUND_IMAGES += [(3, 8, 4, 4), (2, 8, 8, 8), (2, 16, 4, 4), (2, 16, 2, 2), (2, 32, 4, 4), (2, 4, 16, 16), (2, 12, 7, 7)]
    ROUND_VECTORS += [(16, 64), (128, 128), (1, 256), (64, 100)]
    MANY_TAPS_IMAGES += [(2, 1, 9, 9), (3, 3, 8, 8), (2, 8, 8, 8), (2, 12, 6, 10), (2, 18, 6, 7)]
    PRODUCTS, DRAWS, LARGE = ["float32", "tf32"], 6, True


def drawn_image(draw):
    """Any size; powers of 2 as often as others."""
    while True:
        channels, height, width = (draw.choice([draw.randint(1, most), 2 ** draw.randint(0, 5)]) for most in (32, 18, 18))
        if channels > 1 and channels * height * width <= (1024 if LARGE else 40):
            return draw.randint(1, 9 if LARGE else 3), channels, height, width


def drawn_vector(draw):
    return tuple(draw.choice([draw.randint(1, 150), 2 ** draw.randint(0, 7)]) if LARGE else draw.randint(1, 20) for _ in range(2))


def drawn(makers, draw_shape, number=DRAWS, seed=0):
    """A few shapes for each layer, the same in every run."""
    draw = random.Random(seed)
    return [case for name in makers for case in cases({name: makers[name]}, [draw_shape(draw) for _ in range(number)])]


def cases(makers, shapes):
    return [pytest.param(name, makers[name], shape, id=f"{name}-{shape}") for name in makers for shape in shapes]


ROUND = [*cases(OF_IMAGES, ROUND_IMAGES), *cases(OF_VECTORS, ROUND_VECTORS)]
RANDOM = [*drawn(OF_IMAGES, drawn_image), *drawn(OF_VECTORS, drawn_vector)]
MORE_RANDOM = [*drawn(OF_IMAGES, drawn_image, 8, seed=1), *drawn(OF_VECTORS, drawn_vector, 8, seed=1)]


@pytest.fixture
def launches(monkeypatch):
    """Every kernel that was asked for."""
    from triton.runtime.jit import KernelInterface

    found, original = [], KernelInterface.__getitem__
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: found.append(kernel) or original(kernel, grid))
    return found


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("name, make, shape", ROUND)
def test_round_sizes(name, make, shape, products, device, launches):
    expect_float64(name, make, shape, products, device, launches)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("name, make, shape", cases(OF_MANY_TAPS, MANY_TAPS_IMAGES))
def test_many_taps(name, make, shape, products, device, launches):
    expect_float64(name, make, shape, products, device, launches)


@pytest.mark.parametrize("name, make, shape", RANDOM)
def test_random_sizes(name, make, shape, device, launches):
    expect_float64(name, make, shape, "float32", device, launches)


@pytest.mark.slow
@pytest.mark.parametrize("name, make, shape", MORE_RANDOM)
def test_more_random_sizes(name, make, shape, device, launches):
    expect_float64(name, make, shape, "float32", device, launches)


def expect_float64(name, make, shape, products, device, launches):
    """Values, gradients and the learned inverse."""
    x = normal(*shape, device=device)
    layer = make(*shape[1:])
    if isinstance(layer, ActNorm):
        layer.initialize(x.cpu().double())
    layer = random_layer(layer, device)
    exact = copy.deepcopy(layer).double()
    expected = trained(exact, x.double())
    with torch.no_grad():
        expected.append(exact.approx_inverse(x.double()))
    assert not launches, "float64 has no kernels"
    with precision(products):
        found = trained(layer, x)
        with torch.no_grad():
            found.append(layer.approx_inverse(x))
    assert launches or (name == "ExactLinear" and shape[1] > SMALL_BLOCK)  # whose determinants are a library's
    found, expected = ([value for value in values if value.numel()] for values in (found, expected))
    # TF32 has errors of about 1e-3; a tap in the wrong place would be seen in both.
    agree(found, expected, tolerance=1e-4 if products == "float32" else 5e-2)


@pytest.mark.parametrize("name, make, shape", [case for case in [*ROUND, *RANDOM] if case.values[0].startswith("Tracked")])
def test_stored_inverses_follow(name, make, shape, device, launches):
    layer = random_layer(make(*shape[1:]), device)
    exact = copy.deepcopy(layer).double()
    exact.track()
    assert not launches
    layer.track()
    assert launches
    agree([layer.weight_inv], [exact.weight_inv], tolerance=1e-4)

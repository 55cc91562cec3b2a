"""Likelihoods of float32 flows with ill-conditioned weights, compared with float64 at the same weights and the same x."""

import copy
import math

import numpy as np
import pytest
import torch

from selfnorm import (
    ActNorm,
    Affine,
    Bijection,
    Chain,
    ExactConv2d,
    ExactLinear,
    Flow,
    Logit,
    LULinear,
    SelfNormConv2d,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    TrackedLinear,
)
from selfnorm.layers.emerging import AutoregressiveConv2d
from selfnorm.models import glow
from support.precision import FLOAT32, aligned, assert_exact, conditioned, oracle, shaken, typical, with_weights


@pytest.mark.parametrize("kind", [SelfNormLinear, ExactLinear, TrackedLinear])
@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e5, 1e6, 1e7, 0.9e8])
def test_the_likelihood_of_one_layer_is_exact_in_float32(kind, rows, condition, device):
    flow = with_weights(kind(rows), conditioned(rows, condition))
    x = torch.randn(200, rows, dtype=FLOAT32), typical(flow, rows)
    flow = flow.to(device)
    assert_exact(flow, x[0].to(device))
    assert_exact(flow, x[1].to(device))


def test_float64_is_exact_enough_to_compare_with():
    """Against the 64 bits of mantissa of a long double, in NumPy."""
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("long double is float64 here")
    flow = with_weights(SelfNormLinear(4), conditioned(4, 0.9e8))
    x = typical(flow, 4)
    weight, bias = (
        value.detach().double().numpy().astype(np.longdouble) for value in (flow.bijection.weight, flow.bijection.bias)
    )
    z = x.double().numpy().astype(np.longdouble) @ weight.T + bias
    reduced, log_det = weight.copy(), np.longdouble(0)
    for k in range(4):  # elimination with pivots
        pivot = k + np.abs(reduced[k:, k]).argmax()
        reduced[[k, pivot]] = reduced[[pivot, k]]
        log_det += np.log(np.abs(reduced[k, k]))
        reduced[k + 1 :] -= np.outer(reduced[k + 1 :, k] / reduced[k, k], reduced[k])
    expected = -0.5 * (z * z).sum(1) - 2 * np.log(2 * np.longdouble(np.pi)) + log_det
    found = oracle(flow).log_prob(x.double()).detach().numpy()
    assert np.abs(found - expected).max() < 1e-8


@pytest.mark.parametrize("between", [None, SmoothLeakyReLU, lambda: SplineActivation(6), lambda: ActNorm(6)])
@pytest.mark.parametrize("condition", [30, 500, 1e4])
def test_the_likelihood_of_a_chain_is_exact_in_float32(between, condition):
    """Both layers stretch the same directions, so that their condition numbers multiply: neither alone shows it at 500."""
    left, right = (torch.linalg.qr(torch.randn(6, 6))[0] for _ in range(2))
    stretch = torch.logspace(0.5, -0.5, 6, base=condition).diag()
    layers = (SelfNormLinear(6), *([between()] if between else []), SelfNormLinear(6))
    flow = with_weights(Chain(*layers), stretch @ left, right @ stretch)
    assert_exact(flow, torch.randn(200, 6, dtype=FLOAT32))


@pytest.mark.parametrize(("condition", "layers"), [(300, 3), (900, 2), (30, 2), (900, 1)])
def test_what_was_scored_before_does_not_matter(condition, layers, device):
    """Rows of zeros show no rounding error, whether they came in an earlier batch or come first in this one."""
    flow = aligned(condition, layers)
    fresh = copy.deepcopy(flow).to(device)
    zeros, x = torch.zeros(9, 4, dtype=FLOAT32, device=device), typical(flow, 4).to(device)
    flow = flow.to(device)
    flow.log_prob(zeros)
    assert_exact(flow, x)
    assert_exact(fresh, torch.cat([zeros, x]))


@pytest.mark.parametrize("scale", [5, 20, 1000])
@pytest.mark.parametrize("condition", [10, 900])
def test_outlying_rows_are_exact_too(condition, scale):
    flow = with_weights(SelfNormLinear(4), conditioned(4, condition))
    x = typical(flow, 4)
    flow.log_prob(x)
    assert_exact(flow, torch.cat([x, scale * x[:1]]))


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_an_elementwise_layer_may_magnify_errors(scale):
    """Rotations have a condition number of 1, but the map in between does not."""
    first, last = (torch.linalg.qr(torch.randn(4, 4))[0] for _ in range(2))
    flow = with_weights(Chain(SelfNormLinear(4), ActNorm(4), SelfNormLinear(4)), first, last)
    with torch.no_grad():
        flow.bijection[1].log_scale.copy_(torch.tensor([1.0, 1.0, -1.0, -1.0]) * math.log(scale))
        flow.bijection[0].bias.zero_()
    assert_exact(flow, typical(flow, 4))


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_a_bias_may_cancel_most_of_the_data(offset):
    """A rotation of data far from the origin, and a bias that takes it back."""
    flow = with_weights(SelfNormLinear(8), torch.linalg.qr(torch.randn(8, 8))[0])
    x = (offset + torch.randn(100, 8)).float()
    with torch.no_grad():
        flow.bijection.bias.copy_(-offset * flow.bijection.weight.sum(1))
    assert_exact(flow, x)


def test_one_row_does_not_stand_for_others():
    """Its errors may cancel by chance."""
    for seed in range(20):
        torch.manual_seed(seed)
        flow = aligned(100, 3)
        x = typical(flow, 4)
        flow.log_prob(x[:1])
        assert_exact(flow, x)


@pytest.mark.parametrize("seed", [2, 3, 20, 22, 25])
def test_sharp_bends_of_a_spline_count(seed):
    """Where its slope rises a thousandfold within a narrow interval, the last digit of x changes log p by up to 3 nats.

    The rows of a batch lie close together, so that their slopes hardly differ.
    """
    torch.manual_seed(seed)
    spline, linear = SplineActivation(1, bins=6, bound=50.0), ExactLinear(1)
    with torch.no_grad():
        for parameter in spline.parameters():
            parameter.copy_(9.0 * torch.randint(-1, 2, parameter.shape))
        linear.weight.fill_(1.7)
        linear.bias.fill_(40.0)
    flow = Flow(Chain(linear, spline)).float().eval()
    for knot in spline._knots()[0][0].tolist():
        for side in (-1e-5, 1e-5):
            x = (knot + side * (1 + 0.2 * torch.rand(20, 1)) - 40.0) / 1.7
            assert_exact(copy.deepcopy(flow), x.to(FLOAT32))


@pytest.mark.parametrize("top", [0.99, 0.9999, 0.99999])
def test_logits_close_to_one_count_where_their_input_is_rounded(top):
    """As pixels near white: 1 − x/255 has few digits left. The slopes of such a batch hardly differ."""
    flow = Flow(Chain(Affine(torch.zeros(4), torch.ones(4) / 255), Logit())).float().eval()
    assert_exact(flow, 255 * (top + (1 - top) * 0.9 * torch.rand(20, 4)).to(FLOAT32))


class Cancelling(Bijection):
    """Adds a context and subtracts it again, as two couplings may: the larger it is, the fewer digits are left."""

    def forward(self, x, *, context=None):
        return (x + context) - context, x.new_zeros(len(x))

    def inverse(self, z, *, context=None):
        return z, z.new_zeros(len(z))


def test_a_larger_context_is_compared_again():
    flow = Flow(Cancelling())
    for size in (1e-3, 1.0, 1e5, 1e6):
        x, context = torch.randn(2, 40, 2, dtype=FLOAT32)
        assert_exact(flow, x, size * context)


def test_contexts_of_any_shape_may_follow_each_other():
    """For each row, for all rows, one number a row, none: what was compared with one must not be confused with another."""
    flow = Flow(Cancelling())
    x = torch.randn(40, 2, dtype=FLOAT32)
    shapes = ((1, 2), (40, 2), (2,), (40, 1), ())
    for shape in (*shapes, *shapes[::-1]):
        for size in (1.0, 1e6):
            assert_exact(flow, x, size * torch.randn(shape, dtype=FLOAT32))
    square = torch.randn(2, 2, dtype=FLOAT32)
    assert_exact(flow, square, torch.randn(2, dtype=FLOAT32))  # as long as there are rows


def test_rows_that_are_extreme_in_one_way_do_not_hide_those_that_are_in_another():
    """Sixteen rows far in the tails took all places among those that are compared with float64."""
    spline, linear = SplineActivation(1, bins=3, bound=10.0), ExactLinear(1)
    with torch.no_grad():
        spline.widths.copy_(torch.tensor([[8.0, 8.0, -8.0]]))  # the last interval is narrow, and steep
        spline.heights.zero_()
        spline.slopes.zero_()
        linear.weight.fill_(30.0)
        linear.bias.copy_(-30 * spline(torch.full((1, 1), 9.99))[0][0])
    flow = Flow(Chain(spline, linear, SmoothLeakyReLU(0.01))).eval()
    dense = flow.decode(torch.randn(984, 1), "exact").detach().to(FLOAT32)
    tail = torch.linspace(-65, -50, 16, dtype=FLOAT32)[:, None]
    flow = flow.float()
    assert_exact(copy.deepcopy(flow), dense)
    assert_exact(copy.deepcopy(flow), torch.cat([dense, tail]))
    assert_exact(copy.deepcopy(flow), torch.cat([tail, dense[:100]]))


def test_a_preprocessing_of_any_scale_counts_for_nothing(evaluations):
    """Before the first product nothing is rounded."""
    flow = with_weights(Chain(Affine(torch.zeros(4), torch.tensor([1e-6, 1.0, 1e3, 1e6])), SelfNormLinear(4)), torch.eye(4))
    flow.log_prob(torch.randn(30, 4, dtype=FLOAT32) / flow.bijection[0].scale)
    assert evaluations == []


@pytest.mark.parametrize("weights", ["narrow", "wide"])
def test_a_multiscale_flow_with_one_bad_layer_is_exact_in_float32(weights, device):
    flow = glow((1, 8, 8), steps=2, hidden=8)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        mixing = [layer for layer in flow.modules() if isinstance(layer, SelfNormConv2d)]
        if weights == "wide":
            mixing[-1].weight.copy_(conditioned(8, 1e6)[:, :, None, None])
    assert_exact(flow.float().eval().to(device), torch.randn(20, 1, 8, 8, dtype=FLOAT32).to(device))


def test_a_product_of_triangles_is_exact_in_float32():
    layer = LULinear(5)
    layer.load_state_dict({"weight": conditioned(5, 1e6), "bias": torch.randn(5)})
    assert_exact(Flow(layer).float(), torch.randn(100, 5, dtype=FLOAT32))


def nearly_blind():
    """A circular convolution that all but loses the mean of an image."""
    layer = shaken(ExactConv2d(1, 3, padding_mode="circular"))
    with torch.no_grad():
        layer.weight.sub_(layer.weight.mean() - 1e-6)
    return layer


def growing():
    """A triangular convolution whose inverse grows along the image."""
    layer = AutoregressiveConv2d(1, 3, mask="raster")
    with torch.no_grad():
        layer.weight.sub_(0.6)
    return layer


@pytest.mark.parametrize("make", [nearly_blind, growing])
def test_an_ill_conditioned_convolution_is_exact_in_float32(make):
    flow = Flow(make()).float().eval()
    exact = oracle(flow).bijection
    matrix = torch.func.jacrev(lambda x: exact(x)[0])(torch.zeros(1, 1, 6, 6)).reshape(36, 36)
    assert 1e4 < torch.linalg.cond(matrix) < 1e8, "the test needs an ill-conditioned kernel"
    assert_exact(flow, 30 * torch.randn(20, 1, 6, 6, dtype=FLOAT32))

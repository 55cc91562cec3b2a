"""What else than ill-conditioned weights makes float32 lose digits: shifts that cancel, steep and large curves, odd parts."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from selfnorm import (
    ActNorm,
    Affine,
    Bijection,
    Chain,
    Flow,
    LULinear,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    StandardNormal,
)
from selfnorm.layers.activation import Logit
from selfnorm.layers.emerging import AutoregressiveConv2d
from selfnorm.models import fc_flow
from selfnorm.runtime.rounding import Rounding
from support.precision import FLOAT32, assert_exact, conditioned, with_weights


def rotation(rows):
    return torch.linalg.qr(torch.randn(rows, rows))[0]


@pytest.mark.parametrize("kind", [SelfNormLinear, LULinear])
@pytest.mark.parametrize("offset", [1e5, 1e6])
def test_a_shift_takes_back_what_a_bias_added(kind, offset):
    """The sum in between is rounded to offset·eps."""
    flow = Flow(Chain(kind(6), ActNorm(6))).float().eval()
    with torch.no_grad():
        flow.bijection[0].bias.fill_(offset)
        flow.bijection[1].shift.fill_(-offset)
    assert_exact(flow, torch.randn(200, 6, dtype=FLOAT32))


def test_an_affine_layer_takes_back_what_another_added():
    flow = Flow(
        Chain(Affine(torch.full((4,), 1e6), torch.ones(4)), SmoothLeakyReLU(1.0), Affine(-1e6 * torch.ones(4), torch.ones(4)))
    )
    assert_exact(flow.float(), torch.randn(200, 4, dtype=FLOAT32))


def test_a_bias_that_dwarfs_the_data_costs_digits():
    """A product of size 1e-6 plus a bias of 0.9 has an absolute error of 6e-8, which the next layer magnifies."""
    weight = rotation(4)
    flow = with_weights(Chain(SelfNormLinear(4), SelfNormLinear(4)), 1e-6 * weight, 1e6 * weight.mT)
    with torch.no_grad():
        flow.bijection[0].bias.fill_(0.9)
        flow.bijection[1].bias.copy_(-0.9e6 * flow.bijection[1].weight.sum(1) / 1e6)
    assert_exact(flow, torch.randn(200, 4, dtype=FLOAT32))


def test_a_spline_rounds_small_numbers_by_its_knots():
    """Its value is the knot below plus a part of a bin: off by eps·bound, however small it is."""
    flow = Flow(Chain(SplineActivation(4), ActNorm(4))).float().eval()
    with torch.no_grad():
        for parameter in flow.bijection[0].parameters():
            parameter.normal_()
    x = 1e-4 * torch.randn(200, 4, dtype=FLOAT32)
    with torch.no_grad():
        z = flow.bijection[0](x)[0]
        flow.bijection[1].shift.copy_(-z.mean(0))
        flow.bijection[1].log_scale.copy_(-z.std(0).log())
    assert_exact(flow, x)


@pytest.mark.parametrize("std", [1.0, 2.0])
def test_steep_splines_are_followed_in_each_row(std):
    """The largest rows are not those where the curves are steepest."""
    for seed in range(5):
        torch.manual_seed(seed)
        flow = Flow(Chain(*(SplineActivation(3) for _ in range(4)))).float().eval()
        with torch.no_grad():
            for parameter in flow.parameters():
                parameter.normal_(0, std)
        assert_exact(flow, torch.randn(2000, 3, dtype=FLOAT32))


def test_steep_splines_before_a_matrix():
    layers = SelfNormLinear(30), SplineActivation(30), SelfNormLinear(30)
    flow = with_weights(Chain(*layers), conditioned(30, 50), conditioned(30, 300))
    with torch.no_grad():
        for parameter in layers[1].parameters():
            parameter.normal_(0, 4)
    assert_exact(flow, torch.randn(500, 30, dtype=FLOAT32))


def test_a_logit_is_steep_at_its_ends():
    """A rotation rounds values near 1 to eps, which the logit magnifies by 1/(1 − x)."""
    turn = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
    flow = with_weights(Chain(SelfNormLinear(2), Logit(1e-7), SelfNormLinear(2)), turn, torch.eye(2))
    with torch.no_grad():
        flow.bijection[0].bias.zero_()
    inside = torch.stack([1 - torch.logspace(-6.5, -1, 100), torch.rand(100)], 1)
    assert_exact(flow, (inside @ turn).clamp(-0.79999, 1.39999).float())


def test_the_last_grey_level_is_exact():
    flow = fc_flow(4, levels=17).float().eval()
    top = torch.nextafter(torch.tensor(17.0, dtype=FLOAT32), torch.tensor(0.0, dtype=FLOAT32))
    x = 17 * torch.rand(200, 4, dtype=FLOAT32)
    x[:50] = top - torch.rand(50, 4, dtype=FLOAT32) * 1e-5
    x[:10] = top
    assert_exact(flow, x)


def test_powers_of_two_before_the_first_product_round_nothing(evaluations):
    """So the preprocessing of pixels does not make every image flow suspect."""
    flow = with_weights(Chain(Affine(torch.zeros(4), torch.full((4,), 1 / 256)), SelfNormLinear(4)), conditioned(4, 3))
    flow.log_prob(256 * torch.randn(30, 4, dtype=FLOAT32))
    assert evaluations == []


class ShiftBy(Bijection):
    """Shifts all rows by the one row of context."""

    def forward(self, x, *, context=None):
        return x + context, x.new_zeros(len(x))

    def inverse(self, z, *, context=None):
        return z - context, z.new_zeros(len(z))


def test_one_context_for_all_rows():
    flow = with_weights(Chain(ShiftBy(), SelfNormLinear(3), SelfNormLinear(3)), conditioned(3, 100), conditioned(3, 100))
    assert_exact(flow, torch.randn(40, 3, dtype=FLOAT32), context=torch.randn(1, 3, dtype=FLOAT32))


class OnlyFloat32(Bijection):
    """A layer of the user's own that refuses other dtypes with a ValueError."""

    def forward(self, x, *, context=None):
        if x.dtype != FLOAT32:
            raise ValueError("OnlyFloat32: expected float32")
        return x, x.new_zeros(len(x))

    def inverse(self, z, *, context=None):
        return z, z.new_zeros(len(z))


def test_a_layer_that_refuses_float64_is_told():
    flow = with_weights(Chain(SelfNormLinear(4), OnlyFloat32()), conditioned(4, 1e6))
    with pytest.warns(RuntimeWarning, match=r"expected a flow that can be evaluated in float64, .*OnlyFloat32: expected float32"):
        assert torch.isfinite(flow.log_prob(torch.randn(20, 4, dtype=FLOAT32))).all()


class Stretched(StandardNormal):
    """A standard normal of the user's own with a scale to learn."""

    def __init__(self, features):
        super().__init__((features,))
        self.log_scale = nn.Parameter(torch.full((features,), -12.0))

    def log_prob(self, z):
        return super().log_prob(z * (-self.log_scale).exp()) - self.log_scale.sum()


def test_a_base_that_inherits_from_the_standard_normal_counts():
    """Its scale magnifies errors by e¹², and its parameter needs float64 as those of other bases."""
    flow = with_weights(SelfNormLinear(3), rotation(3))
    flow.base = Stretched(3).float()
    weight, bias = flow.bijection.weight.detach().double(), flow.bijection.bias.detach().double()
    x = (6e-6 * torch.randn(50, 3) - bias) @ weight.inverse().mT
    assert_exact(flow, x.float())


class WithState(SelfNormLinear):
    """A layer that saves something that is no tensor."""

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize("assign", [False, True])
def test_states_may_hold_what_is_no_tensor(assign):
    flow, other = Flow(WithState(3)), Flow(WithState(3))
    other.load_state_dict(dict(reversed(flow.state_dict().items())), assign=assign)
    assert other.bijection.seen == 3
    assert_close(other.log_prob(torch.ones(2, 3)), flow.log_prob(torch.ones(2, 3)))


def test_weights_may_be_assigned_while_the_default_device_is_meta():
    expected = Flow(AutoregressiveConv2d(2, 3))
    with torch.device("meta"):
        flow = Flow(AutoregressiveConv2d(2, 3))
        flow.load_state_dict(expected.state_dict(), assign=True)
    x = torch.randn(3, 2, 4, 4)
    assert_close(flow.encode(x), expected.encode(x))


@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_a_bend_that_cannot_be_computed_counts_as_infinite(unknown):
    rounding = Rounding()
    rounding.note_bends(lambda: torch.tensor([[1.0, 2.0], [unknown, 0.0]]), is_rounded=True)
    assert rounding.growth() == math.inf

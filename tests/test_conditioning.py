"""Likelihoods of float32 flows with ill-conditioned weights, compared with float64 at the same weights and the same x."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from selfnorm import (
    ActNorm,
    Affine,
    AffineCoupling,
    Bijection,
    Chain,
    Conv1x1,
    EmergingConv2d,
    ExactConv2d,
    ExactLinear,
    Flatten,
    Flow,
    Logit,
    LULinear,
    SelfNormConv2d,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    StandardNormal,
    TrackedLinear,
    accurate,
)
from selfnorm.layers.emerging import AutoregressiveConv2d
from selfnorm.linalg.condition import KnownCondition
from selfnorm.linalg.wide import in_float64
from selfnorm.models import fc_flow, glow
from selfnorm.runtime.context import step_context
from selfnorm.runtime.rounding import Rounding
from support.precision import FLOAT32, assert_exact, conditioned, oracle, typical, with_weights


def shaken(layer, scale=1.0):
    with torch.no_grad():
        layer.weight.add_(scale * torch.randn_like(layer.weight))
    return layer


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


def aligned(condition, layers):
    """A flow whose layers stretch the same directions, so that their condition numbers multiply."""
    turned = torch.linalg.qr(torch.randn(4, 4))[0]
    weight = turned @ torch.logspace(0, 1, 4, base=condition).diag() @ turned.mT
    flow = with_weights(Chain(*(SelfNormLinear(4) for _ in range(layers))), *[weight] * layers)
    for layer in flow.bijection:
        torch.nn.init.zeros_(layer.bias)
    return flow


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


def test_a_steep_base_magnifies_errors():
    flow = with_weights(SelfNormLinear(2), conditioned(2, 500))
    flow.base = Scaled().float()
    with torch.no_grad():
        flow.base.factor.mul_(1000)
    x = oracle(flow).decode(torch.randn(50, 2) / 1000, "exact").detach().float()
    assert_exact(flow, x)


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


class Scaled(nn.Module):
    """A base distribution with a matrix of its own."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([[2.0, 1.0], [0.0, 0.5]]))

    def log_prob(self, z):
        return -0.5 * (z @ self.factor.mT).square().sum(1) + self.factor.diagonal().log().sum() - math.log(2 * math.pi)

    def sample(self, n, generator=None):
        return torch.linalg.solve_triangular(self.factor, torch.randn(2, n).to(self.factor), upper=True).mT


def test_a_base_of_the_users_own_takes_part_in_float64():
    flow = with_weights(SelfNormLinear(2), conditioned(2, 1e6))
    flow.base = Scaled().float()
    x = torch.randn(50, 2, dtype=FLOAT32)
    assert_exact(flow, x)
    flow.log_prob(x).sum().backward()
    assert flow.base.factor.grad.dtype == FLOAT32 and flow.base.factor.grad.abs().sum() > 0


class Elsewhere(Bijection):
    """Scales by a tensor that is neither a parameter nor a buffer."""

    notes_rounding = True

    def __init__(self):
        super().__init__()
        self.matrix = torch.eye(4, dtype=FLOAT32)

    def forward(self, x, *, context=None):
        return x @ self.matrix, x.new_zeros(len(x))

    def inverse(self, z, *, context=None):
        return z @ self.matrix, z.new_zeros(len(z))


class FixedScale(Scaled):
    """A base whose matrix is no parameter."""

    def __init__(self):
        nn.Module.__init__(self)
        self.factor = torch.eye(4, dtype=FLOAT32)


@pytest.mark.parametrize("base", [False, True], ids=["layer", "base"])
def test_what_cannot_be_copied_to_float64_is_told_where_it_matters(base):
    make = (lambda: SelfNormLinear(4)) if base else (lambda: Chain(SelfNormLinear(4), Elsewhere()))
    flow, x = with_weights(make(), conditioned(4, 1e6)), torch.randn(20, 4, dtype=FLOAT32)
    flow.base = FixedScale() if base else flow.base
    for _ in range(2):  # not only the first time: the second result is no better
        with pytest.warns(RuntimeWarning, match=r"Flow.log_prob: expected a flow that can be evaluated in float64, .*same dtype"):
            assert flow.log_prob(x).dtype == FLOAT32
    harmless = with_weights(make(), conditioned(4, 3))
    harmless.base = flow.base
    assert torch.isfinite(harmless.log_prob(x)).all()


def test_too_little_memory_for_float64_is_an_error(monkeypatch):
    """Fewer rows may do. A result in float32 would be off by nats, for this call and the next ones."""

    def in_too_little_memory(module):
        raise torch.OutOfMemoryError("no memory")

    flow, x = with_weights(SelfNormLinear(4), conditioned(4, 1e7)), torch.randn(20, 4, dtype=FLOAT32)
    with monkeypatch.context() as patched:
        patched.setattr(accurate, "in_float64", in_too_little_memory)
        for call in (flow.log_prob, lambda z: flow.decode(z, "exact")):
            with pytest.raises(torch.OutOfMemoryError):
                call(x)
    assert_exact(flow, x)


class OfScale(nn.Module):
    """N(0, scale²) in each dimension; the scale is a buffer, a parameter or a plain number."""

    def __init__(self, scale):
        super().__init__()
        if isinstance(scale, nn.Parameter):
            self.scale = scale
        elif isinstance(scale, torch.Tensor):
            self.register_buffer("scale", scale)
        else:
            self.scale = scale

    def log_prob(self, z):
        scale = torch.as_tensor(self.scale).to(z)
        return -(z / scale).square().sum(1) / 2 - z.shape[1] * (scale.log() + 0.5 * np.log(2 * np.pi))

    def sample(self, n, generator=None):
        return torch.randn(n, 4, generator=generator)


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda scale: nn.Parameter(torch.tensor(scale))])
def test_a_base_may_change(kind):
    """What was found for one base does not hold for a steeper one over the same weights."""
    flow = with_weights(SelfNormLinear(4), conditioned(4, 30))
    x = torch.randn(50, 4, dtype=FLOAT32)
    for scale in (1.0, 1e-5, 1e-6):
        flow.base = OfScale(kind(scale))
        assert_exact(flow, x * scale)


class Shift(Bijection):
    """Adds a number that may be large."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x, *, context=None):
        return x + self.shift, x.new_zeros(len(x))

    def inverse(self, z, *, context=None):
        return z - self.shift, z.new_zeros(len(z))


@pytest.mark.parametrize("write", [torch.Tensor.copy_, lambda value, new: setattr(value, "data", new)])
def test_other_parameters_may_change(write):
    """A large shift that the next layer takes back leaves rounding errors; linear layers and sizes stay the same."""
    flow = with_weights(Chain(SelfNormLinear(4), Shift(), Shift()), conditioned(4, 30))
    x = torch.randn(50, 4, dtype=FLOAT32)
    assert_exact(flow, x)
    with torch.no_grad():
        for layer, shift in zip(flow.bijection[1:], (1e6, -1e6), strict=True):
            write(layer.shift, torch.full((4,), shift, dtype=FLOAT32))
    assert_exact(flow, x)


class Matrix(Bijection):
    """A user's own linear layer, which says nothing of rounding errors."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.to(FLOAT32))

    def forward(self, x, *, context=None):
        return x @ self.weight.T, torch.linalg.slogdet(self.weight).logabsdet.expand(len(x))

    def inverse(self, z, *, context=None):
        return torch.linalg.solve(self.weight, z.T).T, -torch.linalg.slogdet(self.weight).logabsdet.expand(len(z))


def test_a_layer_that_neither_notes_nor_can_be_copied_is_told():
    layer = Elsewhere()
    layer.notes_rounding = False
    with pytest.warns(RuntimeWarning, match="to check or avoid rounding errors"):
        Flow(layer).log_prob(torch.randn(20, 4, dtype=FLOAT32))


@pytest.mark.parametrize("inside", [lambda layer: layer, Chain, lambda layer: Chain(Chain(layer), SmoothLeakyReLU())])
def test_a_layer_that_notes_nothing_is_compared(inside):
    flow = Flow(inside(Matrix(conditioned(4, 1e7))))
    assert_exact(flow, typical(flow, 4))


class ByClass(Bijection):
    """Shifts by a vector for each class, an integer context."""

    def __init__(self):
        super().__init__()
        self.shifts = nn.Embedding(3, 2)

    def forward(self, x, *, context=None):
        return x + self.shifts(context), x.new_zeros(len(x))

    def inverse(self, z, *, context=None):
        return z - self.shifts(context), z.new_zeros(len(z))


def test_integer_contexts_stay_integers():
    flow = Flow(Chain(ByClass(), SelfNormLinear(2))).float()
    with torch.no_grad():
        flow.bijection[1].weight.copy_(conditioned(2, 1e6))
    x, classes = torch.randn(9, 2, dtype=FLOAT32), torch.arange(9) % 3
    expected = oracle(flow).log_prob(x.double(), context=classes)
    assert_close(flow.log_prob(x, context=classes).double(), expected, rtol=1e-6, atol=1e-3)
    z = torch.randn(9, 2, dtype=FLOAT32)
    back = oracle(flow).decode(z.double(), "exact", context=classes)
    assert_close(flow.decode(z, "exact", context=classes).double(), back, rtol=1e-6, atol=0)


def test_contexts_become_float64():
    bad = Conv1x1(4)
    with torch.no_grad():
        bad.weight.copy_(conditioned(4, 1e6)[:, :, None, None])
    flow = Flow(Chain(AffineCoupling(4, 4, context_channels=3), bad)).float().eval()
    assert_exact(flow, torch.randn(7, 4, 3, 2, dtype=FLOAT32), torch.randn(7, 3, dtype=FLOAT32))


def test_the_gradient_is_that_of_float64():
    flow = with_weights(Chain(SelfNormLinear(5), SmoothLeakyReLU(), SelfNormLinear(5)), conditioned(5, 1e6), conditioned(5, 10))
    exact, x = oracle(flow), torch.randn(20, 5, dtype=FLOAT32).requires_grad_()
    other = x.detach().double().requires_grad_()
    flow.log_prob(x).mean().backward()
    exact.log_prob(other).mean().backward()
    assert_close(x.grad.double(), other.grad, rtol=1e-6, atol=1e-6)
    for found, expected in zip(flow.parameters(), exact.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None)
        if found.grad is not None:
            assert found.grad.dtype == FLOAT32
            assert_close(found.grad.double(), expected.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("condition", [1e5, 0.9e8])
def test_exact_codes_are_those_of_float64(condition):
    """Rounding z to float32 is all that a round trip loses."""
    flow = with_weights(Chain(SelfNormLinear(4), SelfNormLinear(4)), conditioned(4, condition), conditioned(4, 10))
    exact, x = oracle(flow), torch.randn(50, 4, dtype=FLOAT32)
    assert_close(flow.encode(x), exact.encode(x.double()).float(), rtol=1e-6, atol=0)
    z = torch.randn(50, 4, dtype=FLOAT32)
    assert_close(flow.decode(z, "exact"), exact.decode(z.double(), "exact").float(), rtol=1e-6, atol=0)


def test_samples_know_their_exact_likelihood():
    flow = with_weights(Chain(SelfNormLinear(4), SelfNormLinear(4)), conditioned(4, 1e7), conditioned(4, 10))
    flow.encode(torch.zeros(1, 4, dtype=FLOAT32))
    flow.base = StandardNormal(4).float()
    x, found = flow.sample_and_log_prob(100, "exact")
    assert (found - oracle(flow).log_prob(x.double())).abs().max() < 1e-3


# What well-conditioned flows do


def well_conditioned():
    flow = fc_flow(6, layers=3, rotate=True)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return flow.float().eval()


def test_well_conditioned_flows_stay_in_float32(monkeypatch):
    monkeypatch.setattr(accurate, "in_float64", None)
    flow, x = well_conditioned(), torch.randn(20, 6, dtype=FLOAT32)
    z, log_det = flow.bijection(x)
    assert torch.equal(flow.log_prob(x), flow.base.log_prob(z) + log_det)
    assert torch.equal(flow.encode(x), z)
    assert torch.equal(flow.decode(z, "exact"), flow.bijection.inverse(z)[0])


@pytest.fixture
def evaluations(monkeypatch):
    """Lists the flows that were evaluated in float64."""
    calls = []
    original = accurate.in_float64
    monkeypatch.setattr(accurate, "in_float64", lambda module: calls.append(module) or original(module))
    return calls


def test_many_harmless_layers_are_looked_at_once_for_rows_of_a_size(evaluations):
    """The product of their condition numbers bounds the error, but far from closely."""
    layers = [SelfNormLinear(12) for _ in range(8)]
    flow = with_weights(Chain(*layers), *(conditioned(12, 4) for _ in layers))
    x = torch.randn(30, 12, dtype=FLOAT32) / 10
    z, log_det = flow.bijection(x)
    for _ in range(3):
        assert torch.equal(flow.log_prob(x), flow.base.log_prob(z) + log_det)
    assert len(evaluations) == 1
    flow.log_prob(1.5 * x)
    assert len(evaluations) == 1
    flow.log_prob(3 * x)
    flow.log_prob(x)
    assert len(evaluations) == 2
    with torch.no_grad():
        layers[3].weight[0].mul_(2)
    flow.log_prob(x)
    flow.encode(x)
    assert len(evaluations) == 3


def test_factors_are_shared_between_dtypes(factorisations):
    flow = with_weights(SelfNormLinear(4), conditioned(4, 1e6))
    x = torch.randn(5, 4, dtype=FLOAT32)
    factorisations.clear()
    for _ in range(3):
        flow.log_prob(x)
    assert factorisations == ["lu_factor_ex"]


def test_training_never_looks_at_condition_numbers(factorisations, evaluations):
    flow = with_weights(Chain(ExactLinear(4), SmoothLeakyReLU()), conditioned(4, 1e6))
    factorisations.clear()
    flow.surrogate(torch.randn(5, 4, dtype=FLOAT32)).log_det.mean().backward()
    assert factorisations == ["slogdet"] and evaluations == []


# What is said above the limit


def test_above_the_limit_a_warning_names_the_layer_once_for_each_set_of_weights():
    flow, x = with_weights(Chain(SmoothLeakyReLU(), SelfNormLinear(4)), conditioned(4, 1e10)), torch.randn(5, 4, dtype=FLOAT32)
    for _ in range(2):
        with torch.no_grad():
            flow.bijection[1].weight.copy_(conditioned(4, 1e10))
        with pytest.warns(
            RuntimeWarning, match=r"Flow.log_prob: SelfNormLinear\(4, .*condition number of at most 1e\+08"
        ) as told:
            flow.log_prob(x)
        assert told[0].filename == __file__
        flow.log_prob(x)  # warnings are errors
        flow.encode(x)


def test_above_the_limit_an_exact_inverse_warns_as_well():
    """Rounding x to float32 then moves f(x) by units, however exactly x was computed."""
    flow, z = with_weights(SelfNormLinear(4), conditioned(4, 1e10)), torch.randn(5, 4, dtype=FLOAT32)
    with pytest.warns(
        RuntimeWarning, match=r"Flow.decode: SelfNormLinear\(4, .*at most 1e.*rounding alone may move the latent by"
    ) as told:
        flow.decode(z, "exact")
    assert told[0].filename == __file__
    with torch.no_grad():
        flow.bijection.weight.copy_(conditioned(4, 1e7))
    flow.decode(z, "exact")  # warnings are errors


@pytest.mark.parametrize(("condition", "layers", "told"), [(1e6, 3, True), (1e6, 2, False), (1e7, 3, True), (30, 12, True)])
@pytest.mark.parametrize("dtype", [FLOAT32, torch.float64])
def test_a_chain_that_float64_does_not_resolve_is_told_once(condition, layers, told, dtype):
    """No layer of it is to blame alone. The product of condition numbers, 1e18, is also that of harmless chains."""
    flow = aligned(condition, layers).to(dtype)
    x = typical(flow, 4).to(dtype)
    if told:
        with pytest.warns(RuntimeWarning, match=r"Flow.log_prob: expected layers that together magnify .*by about \de") as told:
            flow.log_prob(x)
        assert told.list[0].filename == __file__
    flow.log_prob(x)  # warnings are errors


def test_many_turned_layers_are_no_reason_to_warn():
    flow = with_weights(Chain(*(SelfNormLinear(12) for _ in range(30))), *(conditioned(12, 8) for _ in range(30)))
    flow.log_prob(torch.randn(30, 12, dtype=FLOAT32))


def test_float64_is_good_for_more():
    flow, x = with_weights(SelfNormLinear(4), conditioned(4, 1e10)).double(), torch.randn(5, 4)
    flow.log_prob(x)
    with torch.no_grad():
        flow.bijection.weight.copy_(conditioned(4, 1e13))
    with pytest.warns(RuntimeWarning, match=r"at most 1e\+12 for data in torch.float64"):
        flow.log_prob(x)


# Estimates


LAYERS = {
    "dense": (lambda: shaken(SelfNormLinear(30)), (30,)),
    "1x1": (lambda: shaken(Conv1x1(6)), (6, 3, 2)),
    "1x1 in groups": (lambda: shaken(SelfNormConv2d(6, 1, groups=2)), (6, 3, 2)),
    "zero padding": (lambda: shaken(ExactConv2d(2, 3)), (2, 5, 4)),
    "zero padding in groups": (lambda: shaken(SelfNormConv2d(4, 3, groups=2)), (4, 3, 4)),
    "circular": (lambda: shaken(ExactConv2d(3, 3, padding_mode="circular")), (3, 5, 4)),
    "triangular by rows": (lambda: shaken(AutoregressiveConv2d(2, 3)), (2, 4, 3)),
    "triangular by fronts": (lambda: shaken(AutoregressiveConv2d(24, 3, mirrored=True, mask="raster"), 0.1), (24, 2, 3)),
    "LU": (lambda: LULinear(30), (30,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_condition_numbers_are_estimated_within_a_factor_of_two(name):
    make, shape = LAYERS[name]
    layer = make().eval()
    if name == "LU":
        layer.load_state_dict({"weight": torch.randn(30, 30), "bias": torch.zeros(30)})
    rounding = Rounding()
    for _ in range(2):
        with step_context(rounding=rounding):
            layer(torch.randn(3, *shape))
    noted = rounding.conditions
    matrix = torch.func.jacrev(lambda x: layer(x)[0])(torch.zeros(1, *shape)).reshape(math.prod(shape), -1)
    exact = torch.linalg.cond(matrix).item()
    assert [who for who, _ in noted] == [layer, layer]
    assert all(0.5 * exact < condition < 1.001 * exact for _, condition in noted)


def test_an_image_of_another_size_has_another_condition():
    layer, rounding = shaken(AutoregressiveConv2d(1, 3), 2.0), Rounding()
    for side in (2, 6):
        with step_context(rounding=rounding):
            layer(torch.randn(1, 1, side, side))
    assert rounding.conditions[1][1] > 2 * rounding.conditions[0][1]


# The copy in float64


def test_the_copy_computes_in_float64_and_leaves_the_original_alone():
    shared = SelfNormLinear(3)
    flow = Flow(Chain(Flatten(), shared, ActNorm(3), shared)).float()
    before = {name: value.clone() for name, value in flow.state_dict().items()}
    wide = in_float64(flow)
    assert type(wide) is Flow and wide.bijection[1] is wide.bijection[3] is not shared
    x = torch.randn(4, 3)
    assert_close(wide.bijection(x), oracle(flow).bijection(x))
    assert wide.bijection[2].initialized.dtype == torch.bool
    assert all(
        torch.equal(value, before[name]) and value.dtype == before[name].dtype for name, value in flow.state_dict().items()
    )
    wide.bijection(x)[0].sum().backward()
    assert shared.weight.grad.dtype == FLOAT32


# Under autocast and transforms


def test_autocast_does_not_round_what_float32_cannot_hold():
    flow = with_weights(SelfNormLinear(4), conditioned(4, 1e7))
    x = torch.randn(20, 4, dtype=FLOAT32)
    expected = flow.log_prob(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flow.log_prob(x), expected)


def test_transforms_stay_in_float32(evaluations):
    flow = with_weights(SelfNormLinear(4), conditioned(4, 1e5))
    x = torch.randn(20, 4, dtype=FLOAT32)
    gradient = torch.func.grad(lambda x: flow.log_prob(x).sum())(x)
    assert evaluations == [] and gradient.dtype == FLOAT32
    leaf = x.clone().requires_grad_()
    flow.log_prob(leaf).sum().backward()
    assert_close(gradient, leaf.grad, rtol=1e-3, atol=1e-3 * leaf.grad.abs().max().item())


def test_a_known_condition_is_not_taken_for_that_of_a_weight_on_another_device():
    known, weight = KnownCondition(), torch.eye(3)
    assert known.of(weight, (3,), lambda _: torch.tensor(2.0)) == 2.0
    assert known.of(weight, (3,), lambda _: torch.tensor(3.0)) == 2.0
    assert known.of(weight.to("meta"), (3,), lambda _: torch.tensor(4.0)) == 4.0
    assert known.of(weight.float(), (3,), lambda _: torch.tensor(5.0)) == 5.0


@pytest.mark.parametrize("kind", [LULinear, EmergingConv2d])
def test_a_flow_may_move_to_another_device_between_two_calls(kind, device):
    layer, x = (kind(4), torch.randn(5, 4)) if kind is LULinear else (kind(2), torch.randn(5, 2, 4, 4))
    flow = Flow(layer)
    before = flow.log_prob(x)
    assert_close(flow.to(device).log_prob(x.to(device)).cpu(), before)
    assert_close(flow.cpu().log_prob(x), before)

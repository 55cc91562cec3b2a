"""Exact likelihoods in float32 with bases and layers of your own, contexts, gradients and samples."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad
from torch.testing import assert_close

from selfnorm import (
    AffineCoupling,
    Bijection,
    Chain,
    Conv1x1,
    Flow,
    SelfNormLinear,
    SmoothLeakyReLU,
    StandardNormal,
    accurate,
)
from support.precision import FLOAT32, assert_exact, conditioned, oracle, typical, with_weights


class Scaled(nn.Module):
    """A base distribution with a matrix of its own."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([[2.0, 1.0], [0.0, 0.5]]))

    def log_prob(self, z):
        return -0.5 * (z @ self.factor.mT).square().sum(1) + self.factor.diagonal().log().sum() - math.log(2 * math.pi)

    def sample(self, n, generator=None):
        return torch.linalg.solve_triangular(self.factor, torch.randn(2, n).to(self.factor), upper=True).mT


def test_a_steep_base_magnifies_errors():
    flow = with_weights(SelfNormLinear(2), conditioned(2, 500))
    flow.base = Scaled().float()
    with torch.no_grad():
        flow.base.factor.mul_(1000)
    x = oracle(flow).decode(torch.randn(50, 2) / 1000, "exact").detach().float()
    assert_exact(flow, x)


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


@pytest.mark.parametrize("base", [False, True], ids=["layer", "base"])
def test_what_cannot_be_copied_to_float64_is_told_under_transforms(base):
    flow = Flow(SelfNormLinear(4) if base else Chain(SelfNormLinear(4), Elsewhere())).float()
    x = torch.randn(20, 4, dtype=FLOAT32)
    flow.base = FixedScale() if base else flow.base
    with pytest.warns(RuntimeWarning, match=r"Flow.log_prob: expected a flow that can be evaluated in float64, .*same dtype"):
        found = grad(lambda x: flow.log_prob(x).sum())(x)
    leaf = x.clone().requires_grad_()
    flow.log_prob(leaf).sum().backward()
    assert_close(found, leaf.grad)
    if not base:
        with pytest.warns(RuntimeWarning, match=r"expected a flow that can be evaluated in float64, .*same dtype"):
            grad(lambda x: flow.decode(x, "exact").sum())(x)


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

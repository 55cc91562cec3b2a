"""Chain, Split and Flow hand on what they are given: every method, the context, the tolerance, both hooks."""

import pytest
import torch
from torch.testing import assert_close

from selfnorm import (
    Bijection,
    Chain,
    Flatten,
    Flow,
    SelfNormConv2d,
    SelfNormLinear,
    Split,
    StandardNormal,
    Surrogate,
    TrackedConv2d,
    TrackedLinear,
)
from selfnorm.models import fc_flow


class Recorder(Bijection):
    """The identity, which keeps a list of how it was called. Its learned inverse adds 1, its refined one 2, auto 3."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def note(self, method, context=None, **details):
        self.log.append((method, context, details))

    def forward(self, x, *, context=None):
        self.note("forward", context)
        return x, x.new_zeros(len(x)) + 0.5

    def inverse(self, z, *, context=None):
        self.note("inverse", context)
        return z, z.new_zeros(len(z)) - 0.5

    def surrogate(self, x, *, context=None):
        self.note("surrogate", context)
        return Surrogate(x, x.new_zeros(len(x)) + 0.25, x.new_zeros(len(x), 0))

    def approx_inverse(self, z, *, context=None):
        self.note("approx_inverse", context)
        return z + 1

    def refined_inverse(self, z, *, context=None, tolerance=None):
        self.note("refined_inverse", context, tolerance=tolerance)
        return z + 2

    def auto_inverse(self, z, *, context=None):
        self.note("auto_inverse", context)
        return z + 3

    def initialize(self, x, *, context=None):
        self.note("initialize", context, grad=torch.is_grad_enabled(), mean=float(x.mean()))

    def after_step(self, *, generator=None):
        self.note("after_step")


def calls(log, method):
    return [entry for entry in log if entry[0] == method]


def test_a_chain_hands_everything_on():
    log, x, context = [], torch.randn(3, 4), torch.randn(3, 2)
    chain = Chain(Recorder(log), Chain(Recorder(log)))
    assert_close(chain(x, context=context)[1], torch.full((3,), 1.0))
    assert_close(chain.inverse(x, context=context)[1], torch.full((3,), -1.0))
    assert_close(chain.surrogate(x, context=context).log_det, torch.full((3,), 0.5))
    assert_close(chain.approx_inverse(x, context=context), x + 2)
    assert_close(chain.refined_inverse(x, context=context, tolerance=0.125), x + 4)
    assert_close(chain.auto_inverse(x, context=context), x + 6)
    chain.initialize(x, context=context)
    chain.after_step()
    for method in ("forward", "inverse", "approx_inverse", "refined_inverse", "auto_inverse", "initialize"):
        assert len(calls(log, method)) == 2 and all(c is context for _, c, _ in calls(log, method)), method
    assert all(details == {"tolerance": 0.125} for _, _, details in calls(log, "refined_inverse"))
    assert all(not details["grad"] for _, _, details in calls(log, "initialize"))
    assert len(calls(log, "after_step")) == 2


def test_a_split_hands_everything_on_and_its_prior_the_half_that_stays():
    rest, prior, x, context = [], [], torch.randn(3, 4, 2, 2), torch.randn(3, 5)
    split = Split(Recorder(rest), Recorder(prior))
    z, log_det = split(x, context=context)
    assert_close(z, x.flatten(1))
    assert_close(log_det, torch.ones(3))
    assert_close(split.inverse(z, context=context)[0], x)
    assert_close(split.inverse(z, context=context)[1], -torch.ones(3))
    assert_close(split.surrogate(x, context=context).log_det, torch.full((3,), 0.5))
    assert_close(split.approx_inverse(z, context=context), x + 1)
    assert_close(split.refined_inverse(z, context=context, tolerance=0.125), x + 2)
    assert_close(split.auto_inverse(z, context=context), x + 3)
    split.initialize(x, context=context)
    split.after_step()
    for log, expected in ((rest, context), (prior, x[:, :2])):
        for method in ("forward", "inverse", "surrogate", "initialize"):
            assert calls(log, method) and all(torch.equal(c, expected) for _, c, _ in calls(log, method)), method
        assert calls(log, "refined_inverse")[0][2] == {"tolerance": 0.125} and len(calls(log, "after_step")) == 1
    assert torch.equal(calls(prior, "approx_inverse")[0][1], x[:, :2] + 1)
    assert calls(rest, "approx_inverse")[0][1] is context
    assert torch.equal(calls(prior, "auto_inverse")[0][1], x[:, :2] + 3)
    assert calls(rest, "auto_inverse")[0][1] is context
    assert calls(prior, "initialize")[0][2]["mean"] == float(x[:, 2:].mean())


def test_a_flow_hands_everything_on():
    log, x, context = [], torch.randn(3, 4), torch.randn(3, 2)
    flow = Flow(Recorder(log), StandardNormal(4))
    base = flow.base.log_prob(x)
    assert_close(flow.log_prob(x, context=context), base + 0.5)
    assert_close(flow.surrogate(x, context=context).log_det, base + 0.25)
    assert_close(flow.encode(x, context=context), x)
    for inverse, shift in (("auto", 3), ("learned", 1), ("exact", 0), ("refined", 2)):
        assert_close(flow.decode(x, inverse, context=context), x + shift)
        generator = torch.Generator().manual_seed(0)
        z = torch.randn(3, 4, generator=generator)
        generator.manual_seed(0)
        assert_close(flow.sample(3, inverse, generator, context=context), z + shift)
        generator.manual_seed(0)
        sample, log_prob = flow.sample_and_log_prob(3, inverse, generator, context=context)
        assert_close(sample, z + shift)
        assert_close(log_prob, flow.base.log_prob(sample) + 0.5)
    flow.initialize(x, context=context)
    flow.after_step()
    assert {method for method, _, _ in log} >= {"initialize", "after_step"}
    assert all(c is context for method, c, _ in log if method != "after_step")


def test_decode_and_sample_choose_the_inverse_themselves_unless_told_otherwise():
    flow = Flow(Recorder([]), StandardNormal(4))
    z = torch.randn(3, 4)
    assert_close(flow.decode(z), z + 3)
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(3, 4, generator=generator) + 3
    assert_close(flow.sample(3, generator=generator.manual_seed(0)), expected)
    assert_close(flow.sample_and_log_prob(3, generator=generator.manual_seed(0))[0], expected)


def test_slices_of_a_chain_are_chains_with_the_same_parameters():
    chain = fc_flow(3).bijection
    first = chain[:2]
    assert isinstance(first, Chain) and len(first) == 2 and first[1] is chain[1] and chain[-1] is chain[3]


def test_the_learned_inverse_takes_the_bias_off_first():
    image = torch.randn(2, 3, 4, 4)
    layers = [SelfNormLinear(3), TrackedLinear(3), SelfNormConv2d(3, 1), TrackedConv2d(3, 1, (4, 4))]
    for layer, z in zip(layers, (image[..., 0, 0], image[..., 0, 0], image, image), strict=True):
        with torch.no_grad():
            layer.bias.copy_(torch.randn(3))
            layer.weight_inv.add_(torch.randn_like(layer.weight_inv))
        bias = layer.bias if z.dim() == 2 else layer.bias[:, None, None]
        R = layer.weight_inv.reshape(3, 3)
        assert_close(layer.approx_inverse(z), torch.einsum("oi,ni...->no...", R, z - bias))


def test_flatten_without_a_shape_goes_back_to_the_last_one():
    flatten = Flatten()
    for shape in ((2, 3), (3, 2), (6,)):
        x = torch.randn(4, *shape)
        assert_close(flatten.inverse(flatten(x)[0])[0], x)


def test_the_default_base_follows_the_data_but_a_given_shape_is_held_to():
    base = StandardNormal()
    for shape in ((2, 3), (4,)):
        base.log_prob(torch.randn(2, *shape))
        assert base.sample(1).shape == (1, *shape)
    with pytest.raises(ValueError, match=r"StandardNormal\(\(3,\)\): expected an input of shape \(N, 3\), got \(2, 4\)"):
        StandardNormal(3).log_prob(torch.randn(2, 4))


class BadLogDet(Recorder):
    def forward(self, x, *, context=None):
        return x, x.new_full((len(x),), float("nan"))


class BadBase(StandardNormal):
    def log_prob(self, z):
        return z.new_full((len(z),), float("nan"))


def test_nan_is_found_in_a_log_det_and_in_the_base_too():
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"layer 1: BadLogDet.forward: expected a finite log_det, got 2 non-finite of 2"):
        Chain(Recorder([]), BadLogDet([]))(x)
    with pytest.raises(ValueError, match=r"Flow.log_prob: expected a finite log-determinant"):
        Flow(BadLogDet([])).log_prob(x)
    with pytest.raises(ValueError, match="expected numbers, got NaN from the base distribution BadBase"):
        Flow(Recorder([]), BadBase(3)).log_prob(x)


def test_a_sum_that_overflows_is_no_alarm():
    x = torch.full((2, 3), 3e38, dtype=torch.float32)
    assert torch.equal(Chain(Recorder([])).float()(x)[0], x)


def test_decode_refuses_integers():
    with pytest.raises(ValueError, match=r"Flow.decode: expected floating-point input, got torch.int64"):
        Flow(Recorder([])).decode(torch.ones(2, 3, dtype=torch.int64))

"""A context that no layer would use is refused; layers built for one get it, or say that it is missing."""

import pytest
import torch

from selfnorm import AffineCoupling, Bijection, Chain, ConditionalAffine, Flow, SelfNormLinear, Split
from selfnorm.models import glow
from selfnorm.objective import Loss
from support.registry import REGISTRY

METHODS = ("log_prob", "surrogate", "encode", "decode", "initialize", "loss", "sample", "sample_and_log_prob")


def call(flow, method, x, context):
    """Calls one of the methods of a flow, or its loss, on a batch whose examples have the shape of a latent, too."""
    if method == "loss":
        return Loss(flow)(x, context=context)
    return getattr(flow, method)(len(x) if method.startswith("sample") else x, context=context)


@pytest.mark.parametrize("method", METHODS)
def test_a_flow_without_a_layer_for_it_refuses_a_context(method):
    flow, x = Flow(Chain(SelfNormLinear(3), SelfNormLinear(3))), torch.randn(5, 3)
    flow.log_prob(x)  # so that it can sample
    with pytest.raises(
        ValueError, match=r"Flow\.\w+: expected no context, .* \(SelfNormLinear, SelfNormLinear\) takes one, got one"
    ):
        call(flow, method, x, torch.randn(5, 2))


def test_the_error_names_the_first_layers_of_a_long_flow():
    flow = glow((1, 4, 4), steps=2, hidden=4)
    with pytest.raises(ValueError, match=r"\(Squeeze, ActNorm, SelfNormConv2d, AffineCoupling, ActNorm, … 8 in all\)"):
        flow.log_prob(torch.randn(2, 1, 4, 4), context=torch.randn(2, 7))


@pytest.mark.parametrize("case", REGISTRY.values(), ids=REGISTRY)
def test_every_layer_knows_whether_it_takes_a_context(case):
    """The registry has a context for the layers that need one."""
    assert case.make().takes_context == (case.context is not None)


@pytest.mark.parametrize("method", ["forward", "inverse", "surrogate", "approx_inverse", "auto_inverse", "refined_inverse"])
@pytest.mark.parametrize("name", [name for name, case in REGISTRY.items() if case.context])
def test_a_layer_built_for_a_context_misses_it(name, method):
    layer = REGISTRY[name].build()
    x, context = REGISTRY[name].inputs(3)
    z = layer(x, context=context)[0]
    with pytest.raises(ValueError, match=r"expected a context of shape .* got none"):
        getattr(layer, method)(x if method in ("forward", "surrogate") else z)


def test_the_context_of_a_split_is_for_its_rest():
    """The prior's context is the half that stays, which is no business of the caller's."""
    assert not Split(SelfNormLinear(2), ConditionalAffine(2, 2, 4)).takes_context
    assert Split(AffineCoupling(2, 4, 3)).takes_context


class Shift(Bijection):
    """A layer that says nothing of its context."""

    def forward(self, x, *, context=None):
        return x + context, x.new_zeros(len(x))

    def inverse(self, z, *, context=None):
        return z - context, z.new_zeros(len(z))


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_of_the_users_own_is_given_the_context(method):
    x, context = torch.randn(5, 3), torch.randn(5, 3)
    flow = Flow(Chain(SelfNormLinear(3), Shift()))
    flow.log_prob(x, context=context)
    call(flow, method, x, context)
    assert torch.allclose(flow.encode(x, context=context), flow.encode(x, context=0 * context) + context)

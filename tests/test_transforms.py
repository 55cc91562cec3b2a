"""`log_prob` under transforms of torch.func, and models that are built without memory."""

import math

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap
from torch.testing import assert_close

from selfnorm import AffineCoupling, Chain, Flatten, Flow, SelfNormLinear, SmoothLeakyReLU, SplineActivation, Squeeze
from selfnorm.models import conv_flow, fc_flow, glow
from support.registry import REGISTRY
from support.transforms import LogProb


def linear():
    return Flow(Chain(SelfNormLinear(4), SelfNormLinear(4)))


def curved():
    return Flow(Chain(SelfNormLinear(4), SplineActivation(4), SelfNormLinear(4), SmoothLeakyReLU()))


def coupled():
    return Flow(Chain(Squeeze(), AffineCoupling(4, 4), Flatten((4, 1, 1)), SelfNormLinear(4)))


def batch(make, n=6):
    return torch.randn(n, *((1, 2, 2) if make is coupled else (4,)))


FLOWS = pytest.mark.parametrize("make", [linear, curved, coupled])


def shaken(flow):
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return flow.eval()


def of_one(flow):
    """log p of one example, without the batch dimension."""
    return lambda x: flow.log_prob(x[None])[0]


@FLOWS
def test_vmap_over_examples_gives_what_a_batch_gives(make):
    flow, x = shaken(make()), batch(make)
    assert_close(vmap(of_one(flow))(x), flow.log_prob(x))
    assert_close(vmap(flow.log_prob)(x.reshape(2, 3, *x.shape[1:])).flatten(), flow.log_prob(x))


@FLOWS
def test_vmap_over_an_ensemble_gives_what_each_flow_gives(make):
    flows, x = [shaken(make()) for _ in range(3)], batch(make)
    parameters, buffers = stack_module_state(flows)

    template = LogProb(flows[0])

    def evaluate(parameters, buffers):
        values = {f"flow.{name}": value for name, value in {**parameters, **buffers}.items()}
        return functional_call(template, values, (x,))

    assert_close(vmap(evaluate)(parameters, buffers), torch.stack([flow.log_prob(x) for flow in flows]))
    gradients = vmap(grad(lambda parameters, buffers: evaluate(parameters, buffers).mean()))(parameters, buffers)
    for index, flow in enumerate(flows):
        flow.log_prob(x).mean().backward()
        for name, parameter in flow.named_parameters():
            if parameter.grad is not None:
                assert_close(gradients[name][index], parameter.grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # from torch, on its first forward-mode derivative
@FLOWS
def test_derivatives_for_x_are_those_of_autograd(make):
    flow, x = shaken(make()), batch(make)
    exact = torch.autograd.functional.jacobian(lambda x: flow.log_prob(x).sum(), x)
    assert_close(vmap(grad(of_one(flow)))(x), exact)
    for jacobian in (jacrev, jacfwd):
        assert_close(torch.stack([jacobian(of_one(flow))(each) for each in x]), exact)
        assert_close(vmap(jacobian(of_one(flow)))(x), exact)
    curvature = torch.stack([torch.autograd.functional.hessian(of_one(flow), each) for each in x])
    assert_close(torch.stack([hessian(of_one(flow))(each) for each in x]), curvature)
    assert_close(vmap(hessian(of_one(flow)))(x), curvature)


@FLOWS
def test_exact_samples_under_vmap_are_those_of_a_batch(make):
    flow, z = shaken(make()), torch.randn(6, 4)
    assert_close(vmap(lambda z: flow.decode(z[None], "exact")[0])(z), flow.decode(z, "exact"))


def test_nothing_of_a_transform_stays_behind():
    flow, x = shaken(linear()), torch.randn(5, 4)
    vmap(of_one(flow))(x)
    with torch.no_grad():
        flow.bijection[0].weight.add_(torch.eye(4))
    z = x @ flow.bijection[0].weight.mT + flow.bijection[0].bias
    z = z @ flow.bijection[1].weight.mT + flow.bijection[1].bias
    log_det = sum(torch.linalg.slogdet(layer.weight).logabsdet for layer in flow.bijection)
    assert_close(flow.log_prob(x), log_det - 0.5 * z.square().sum(1) - 2 * math.log(2 * math.pi))


@pytest.mark.parametrize("case", REGISTRY.values(), ids=REGISTRY)
def test_every_layer_works_under_vmap(case):
    """`forward` and `inverse`, one example at a time."""
    layer, (x, context) = case.build(), case.inputs(3)
    z, log_det = layer(x, context=context)
    back = layer.inverse(z, context=context)

    def one(method):
        def call(value, context=None):
            out = method(value[None], context=None if context is None else context[None])
            return out[0][0], out[1][0]

        return lambda value: vmap(call)(value) if context is None else vmap(call)(value, context)

    assert_close(one(layer)(x), (z, log_det))
    assert_close(one(layer.inverse)(z), back, rtol=1e-6, atol=1e-6)


# Without memory

MODELS = {
    "fc": lambda: fc_flow((1, 4, 4), levels=16, standardize=True),
    "fc-rotated": lambda: fc_flow(5, layers=3, activation="spline", rotate=True),
    "conv": lambda: conv_flow((1, 4, 4), blocks=2),
    "glow": lambda: glow((1, 4, 4), blocks=2, steps=2, hidden=4, levels=8),
    **{f"fc-{kind}": lambda kind=kind: fc_flow(4, linear=kind) for kind in ("exact", "tracked", "sketch", "relative", "lu")},
    **{f"fc-{kind}-rotated": lambda kind=kind: fc_flow(4, linear=kind, rotate=True) for kind in ("tracked", "lu")},
    **{f"conv-{kind}": lambda kind=kind: conv_flow((1, 4, 4), blocks=2, conv=kind) for kind in ("tracked", "emerging", "exp")},
    **{f"layer-{name}": lambda case=case: Flow(case.make()) for name, case in REGISTRY.items() if name != "Standardize"},
}


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_built_on_meta_takes_the_state_of_another(name, assign):
    make = MODELS[name]
    flow = make()
    with torch.device("meta"):
        empty = make()
    assert all(value.is_meta for value in empty.state_dict().values())
    has_tensors = any(value.is_floating_point() for value in flow.state_dict().values())  # which tell where the flow is
    if assign and has_tensors:
        empty.load_state_dict(flow.state_dict(), assign=True)
    else:
        empty.to_empty(device="cpu").load_state_dict(flow.state_dict())
    assert {key: value.dtype for key, value in empty.state_dict().items()} == {
        key: value.dtype for key, value in flow.state_dict().items()
    }
    case = REGISTRY.get(name.removeprefix("layer-"))
    if case is None:
        shape = (5,) if name == "fc-rotated" else (4,) if "fc-" in name else (1, 4, 4)
        x, context = torch.rand(3, *shape), None
    else:
        x, context = case.inputs(3)
    assert torch.equal(empty.eval().log_prob(x, context=context), flow.eval().log_prob(x, context=context))
    drawn = [each.sample(3, "exact", torch.Generator().manual_seed(0), context=context) for each in (empty, flow)]
    assert torch.equal(*drawn)

"""The auto inverse has the derivatives of the exact one, of any order, in both modes and under transforms of torch.func."""

import copy
import pickle

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jacfwd, jacrev
from torch.testing import assert_close

from selfnorm import Chain, Flow, SelfNormConv2d, SelfNormLinear, StandardNormal, TrackedConv2d, TrackedLinear


@pytest.mark.parametrize("error", [0.0, 1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: SelfNormLinear(4), (4,)),
        (lambda: TrackedLinear(4), (4,)),
        (lambda: SelfNormConv2d(3, 1), (3, 2, 2)),
        (lambda: TrackedConv2d(2, 3, (3, 3)), (2, 3, 3)),
    ],
)
def test_derivatives_of_an_accurate_inverse_are_those_of_the_exact_one(make, shape, error, device):
    """Also if R is used as it is: x does not depend on R, but on W."""
    layer, z = make().to(device).eval(), torch.randn(4, *shape, device=device, requires_grad=True)
    layer.load_state_dict({name: value for name, value in layer.state_dict().items() if name in ("weight", "bias")}, strict=False)
    with torch.no_grad():
        right = layer.inverse_of(layer.weight)
        layer.weight_inv.copy_(right + error * torch.randn_like(right))
    probe = torch.randn_like(z)
    inputs = [z, layer.weight, layer.bias]

    def derivatives(inverse):
        first = torch.autograd.grad((inverse(z).sin() * probe).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), inputs, create_graph=True)
        return first, second, torch.autograd.grad(sum(each.sin().sum() for each in second), inputs)

    found, expected = derivatives(layer.auto_inverse), derivatives(lambda z: layer.inverse(z)[0])
    assert layer.last_plan.steps == 0 if error == 0 else layer.last_plan.steps > 0
    assert_close(found[:2], expected[:2], rtol=1e-6, atol=1e-7)
    assert_close(found[2], expected[2], rtol=1e-4, atol=1e-4)  # sums of larger terms
    assert all(gradient.abs().max() > 1e-3 for order in found for gradient in order)
    layer.auto_inverse(z).sum().backward()
    assert layer.weight_inv.grad is None


def test_the_stored_inverse_has_no_derivative_even_if_nothing_else_has_one():
    layer = SelfNormLinear(4).requires_grad_(False)
    layer.weight_inv.requires_grad_()
    assert layer.approx_inverse(torch.randn(2, 4)).requires_grad and not layer.auto_inverse(torch.randn(2, 4)).requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own forward mode
@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_tangents_are_those_of_the_exact_inverse(error, device):
    layer, z = SelfNormLinear(4).to(device), torch.randn(3, 4, device=device)
    tangents = torch.randn_like(z), torch.randn_like(layer.weight)
    with torch.no_grad():
        layer.weight_inv.copy_(torch.linalg.inv(layer.weight) + error * torch.randn_like(layer.weight))
    layer.auto_inverse(z)
    weight = layer.weight.detach()
    del layer.weight
    found = []
    for inverse in (layer.auto_inverse, lambda z: layer.inverse(z)[0]):
        with forward_ad.dual_level():
            layer.weight = forward_ad.make_dual(weight, tangents[1])
            found.append(forward_ad.unpack_dual(inverse(forward_ad.make_dual(z, tangents[0]))).tangent)
    assert_close(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own forward mode
def test_transforms_of_torch_func_work_and_leave_nothing_behind(device):
    flow = Flow(Chain(SelfNormLinear(3), SelfNormLinear(3)), StandardNormal(3)).to(device)
    z = torch.randn(2, 3, device=device)
    weights = dict(flow.named_parameters())

    def total(weights, u, inverse):
        return torch.func.functional_call(flow, weights, (u, inverse)).sin().sum()

    flow.forward = flow.decode  # what functional_call calls
    for scale in (1.0, 1.01):  # without a plan, and with one for other weights
        with torch.no_grad():
            flow.bijection[0].weight.mul_(scale)
        detached = {name: value.detach() for name, value in weights.items()}
        for inverse in ("auto", "exact"):
            by_z = torch.func.grad(lambda u, inverse=inverse: flow.decode(u, inverse).sin().sum())(z)
            by_weights = torch.func.grad(total)(detached, z, inverse)
            jacobians = [transform(lambda u, inverse=inverse: flow.decode(u, inverse))(z) for transform in (jacrev, jacfwd)]
            if inverse == "auto":
                found = by_z, by_weights, jacobians
        assert_close(found, (by_z, by_weights, jacobians))
        torch.func.grad(total)(detached, z, "learned")
        flow.decode(z).sum().backward()
        pickle.loads(pickle.dumps(copy.deepcopy(flow.bijection)))

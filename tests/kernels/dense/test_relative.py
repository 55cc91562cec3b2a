"""Gradients of biases by kernels, against the same in float64."""

import copy

import pytest
import torch

from selfnorm import RelativeLinear
from selfnorm.kernels.dispatch import used_on

pytest.importorskip("triton")

from selfnorm.kernels.dense import relative
from selfnorm.kernels.dense.bias import bias_gradient, bias_weights

pytestmark = pytest.mark.usefixtures("poisoned")
SHAPES = [(1, 1), (3, 5), (16, 32), (37, 70), (130, 33), (5, 1030)]


def single(device, *shape):
    return torch.randn(shape, dtype=torch.float32, device=device)


def close(got, expected):
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_and_sums_are_right_for_any_shape(device, kernels, shape):
    examples, features = shape
    z, grad_z = single(device, *shape), single(device, features, examples).mT  # not contiguous
    b, grad_log_det = single(device, features), single(device, 1).expand(examples)
    z_, g, b_, of_log_det = (tensor.double() for tensor in (z, grad_z, b, grad_log_det))

    u = bias_weights(z, b)
    close(u, z_ @ b_ + 1)
    into = torch.full_like(u, torch.nan)
    assert bias_weights(z, b, out=into) is into and torch.equal(into, u)
    close(bias_gradient(grad_z, u, b, grad_log_det), g.T @ (z_ @ b_ + 1) + of_log_det.sum() * b_)
    close(bias_gradient(grad_z), g.sum(0))


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_the_same_with_kernels_as_without(device, kernels, bias):
    layer = RelativeLinear(21, bias).to(device, torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x, arriving = single(device, 9, 21), single(device, 9, 21)
    found = []
    for twin, kinds in ((layer, (device.type,)), (copy.deepcopy(layer).double(), ())):
        with used_on(*kinds):
            start = x.to(twin.weight.dtype).detach().requires_grad_()
            z, log_det, _ = twin.surrogate(start)
            ((z * arriving).sum() - log_det.mean()).backward()
        found.append([z.detach(), log_det.detach(), start.grad, *(parameter.grad for parameter in twin.parameters())])
    for got, expected in zip(*found, strict=True):
        close(got, expected)


def test_only_what_is_wanted_is_made(device, kernels, monkeypatch):
    """No weights for a bias that is not there or not trained, and nothing of it in the backward pass."""
    calls = []
    for name in ("bias_weights", "bias_gradient"):
        original = getattr(relative, name)
        monkeypatch.setattr(
            relative, name, lambda *a, original=original, name=name, **k: (calls.append(name), original(*a, **k))[1]
        )
    for layer in (RelativeLinear(4), RelativeLinear(4, bias=False), RelativeLinear(4)):
        layer.to(device, torch.float32)
        if not calls:
            expected = ["bias_weights", "bias_gradient"]
        else:
            expected = []
            if layer.bias is not None:
                layer.bias.requires_grad_(False)
        calls.clear()
        z, log_det, _ = layer.surrogate(single(device, 2, 4))
        assert calls == expected[:1]
        (z.sum() + log_det.sum()).backward()
        assert calls == expected
        calls.append("the first is done")

"""Properties that every bijection has, over the registry."""

import copy
import math
import warnings

import pytest
import torch
from torch.testing import assert_close

from selfnorm import Bijection
from support.registry import REGISTRY

N = 3

pytestmark = pytest.mark.parametrize("name", REGISTRY)


@pytest.fixture
def case(name, device):
    case = REGISTRY[name]
    x, context = case.inputs(N)
    return case, case.build().to(device), x.to(device), None if context is None else context.to(device)


def test_round_trip(case):
    _, layer, x, context = case
    z, log_det = layer(x, context=context)
    back, inverse_log_det = layer.inverse(z, context=context)
    assert_close(back, x, rtol=1e-9, atol=1e-9)
    assert_close(inverse_log_det, -log_det, rtol=1e-9, atol=1e-9)


def test_round_trip_from_the_latent(case):
    _, layer, x, context = case
    z = torch.randn_like(layer(x, context=context)[0])
    x, log_det = layer.inverse(z, context=context)
    again, forward_log_det = layer(x, context=context)
    assert_close(again, z, rtol=1e-8, atol=1e-8)
    assert_close(forward_log_det, -log_det, rtol=1e-8, atol=1e-8)


def test_log_det_is_the_jacobians(case):
    _, layer, x, context = case
    _, log_det = layer(x, context=context)
    for i in range(N):
        row = None if context is None else context[i : i + 1]
        jacobian = torch.autograd.functional.jacobian(lambda v, row=row: layer(v, context=row)[0], x[i : i + 1])
        dimensions = math.prod(x.shape[1:])
        expected = torch.linalg.slogdet(jacobian.reshape(dimensions, dimensions)).logabsdet
        assert_close(log_det[i], expected, rtol=1e-9, atol=1e-9)


def test_gradients_of_the_exact_pair(case):
    """∂z/∂θ and ∂log_det/∂θ by autograd agree with finite differences, forwards and backwards."""
    _, layer, x, context = case
    parameters = [p for p in layer.parameters() if p.requires_grad]
    directions = [torch.randn_like(p) for p in parameters]
    z = layer(x, context=context)[0].detach()
    for method, at in ((layer.forward, x), (layer.inverse, z)):
        weights = torch.randn_like(method(at, context=context)[0])

        def value(method=method, at=at, weights=weights):
            out, log_det = method(at, context=context)
            return (out * weights).sum() + 3 * log_det.sum()

        if not parameters:
            continue
        gradients = torch.autograd.grad(value(), parameters, allow_unused=True)
        slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True) if g is not None)
        step, values = 1e-6, []
        with torch.no_grad():
            for sign in (1, -2):
                for p, d in zip(parameters, directions, strict=True):
                    p.add_(sign * step * d)
                values.append(value())
            for p, d in zip(parameters, directions, strict=True):
                p.add_(step * d)
        if isinstance(slope, int):
            slope = torch.zeros_like(values[0])
        assert_close(slope, (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-5)


def test_shapes(case):
    _, layer, x, context = case
    z, log_det = layer(x, context=context)
    assert z.shape[0] == N and math.prod(z.shape) == math.prod(x.shape)
    assert log_det.shape == (N,)
    assert layer.inverse(z, context=context)[1].shape == (N,)
    assert layer.approx_inverse(z, context=context).shape == x.shape
    surrogate = layer.surrogate(x, context=context)
    assert surrogate.log_det.shape == (N,)
    assert surrogate.reconstruction.shape == (N, len(layer.reconstruction_names))


def test_surrogate_has_the_exact_output(case):
    kind, layer, x, context = case
    tolerance = kind.surrogate_tolerance
    assert_close(layer.surrogate(x, context=context).z, layer(x, context=context)[0], rtol=tolerance, atol=tolerance)


def test_layers_without_a_learned_inverse_train_by_the_exact_log_det(case):
    kind, layer, x, context = case
    if not layer.reconstruction_names and not kind.free_of_determinant:
        assert_close(layer.surrogate(x, context=context).log_det, layer(x, context=context)[1])


def test_reconstruction_names_lead_to_the_layers(case):
    """Each column is ‖RWh − h‖² of the layer that its name leads to."""
    _, layer, x, context = case
    seen = {}
    for name in layer.reconstruction_names:
        module = layer.get_submodule(name)
        original = module.surrogate

        def record(h, *, context=None, name=name, original=original):
            result = original(h, context=context)
            seen[name] = result.reconstruction[:, 0]
            return result

        module.surrogate = record
    columns = layer.surrogate(x, context=context).reconstruction
    assert len(seen) == len(layer.reconstruction_names) == columns.shape[1]
    for column, name in zip(columns.T, layer.reconstruction_names, strict=True):
        assert_close(column, seen[name])


def test_a_log_det_is_the_callers_to_write_to(case):
    _, layer, x, context = case
    with torch.no_grad():
        for method in (layer.forward, lambda x, context: layer.surrogate(x, context=context)[:2]):
            _, log_det = method(x, context=context)
            expected = log_det.clone()
            log_det += 1
            assert_close(log_det, expected + 1)
            assert_close(method(x, context=context)[1], expected)


def test_examples_do_not_mix(case):
    _, layer, x, context = case
    z, log_det = layer(x, context=context)
    one, one_log_det = layer(x[1:2], context=None if context is None else context[1:2])
    assert_close(one, z[1:2])
    assert_close(one_log_det, log_det[1:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes(case, dtype):
    _, layer, x, context = case
    expected, expected_log_det = layer(x, context=context)
    layer, x = layer.to(dtype), x.to(dtype)
    context = None if context is None else context.to(dtype)
    z, log_det = layer(x, context=context)
    back, inverse_log_det = layer.inverse(z, context=context)
    surrogate = layer.surrogate(x, context=context)
    for value in (z, log_det, back, inverse_log_det, *surrogate, layer.approx_inverse(z, context=context)):
        assert value.dtype == dtype and value.device == x.device
    assert_close(z.double(), expected, rtol=1e-3, atol=1e-3)
    assert_close(log_det.double(), expected_log_det, rtol=1e-3, atol=1e-2)
    assert_close(back, x, rtol=1e-3, atol=1e-3)


def test_the_learned_inverse_with_and_without_a_gradient(case, device, kernels, poisoned):
    """Without one it may go through kernels."""
    _, layer, x, context = case
    z = layer(x, context=context)[0].detach().requires_grad_()
    expected = layer.approx_inverse(z, context=context)
    (slope,) = torch.autograd.grad(expected.square().sum(), z)
    layer, low = layer.float(), z.detach().float().requires_grad_()
    context = None if context is None else context.float()
    with torch.no_grad():
        found = layer.approx_inverse(low, context=context)
    again = layer.approx_inverse(low, context=context)
    assert found.dtype == torch.float32 and again.requires_grad
    for value, limit in ((found, expected), (again, expected), (torch.autograd.grad(again.square().sum(), low)[0], slope)):
        assert_close(value.double(), limit, rtol=1e-3, atol=1e-3)


def test_empty_batch(case):
    _, layer, x, context = case
    z, _ = layer(x, context=context)  # a shape that is taken from data is known from here on
    none = None if context is None else context[:0]
    empty, log_det = layer(x[:0], context=none)
    assert empty.shape == (0, *z.shape[1:]) and log_det.shape == (0,)
    back, log_det = layer.inverse(empty, context=none)
    assert back.shape == x[:0].shape and log_det.shape == (0,)
    assert layer.approx_inverse(empty, context=none).shape == x[:0].shape
    assert layer.refined_inverse(empty, context=none).shape == x[:0].shape
    assert layer.auto_inverse(empty, context=none).shape == x[:0].shape
    z, log_det, reconstruction = layer.surrogate(x[:0].requires_grad_(), context=none)
    (z.sum() + log_det.sum() + reconstruction.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


def test_state_dict(case):
    kind, layer, x, context = case
    expected = layer(x, context=context)
    other = kind.build().to(x.device)
    other.load_state_dict(layer.state_dict())
    assert_close(other(x, context=context), expected)
    twin = copy.deepcopy(layer)
    assert_close(twin(x, context=context), expected)


def test_refined_inverse_is_exact_or_warns(case):
    _, layer, x, context = case
    z, _ = layer(x, context=context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert_close(layer.refined_inverse(z, context=context), x, rtol=1e-7, atol=1e-7)


def test_auto_inverse_is_exact_to_its_tolerance(case):
    _, layer, x, context = case
    z, _ = layer(x, context=context)
    assert_close(layer.auto_inverse(z, context=context), x, rtol=1e-6, atol=1e-6)


def test_hooks_can_be_called_on_any_layer(case):
    _, layer, x, context = case
    layer.initialize(x, context=context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the registry moves weights further than a tracker follows
        layer.after_step()
    z, _ = layer(x, context=context)
    assert_close(layer.inverse(z, context=context)[0], x, rtol=1e-8, atol=1e-8)


def test_wrong_shapes_are_refused_by_name(case):
    kind, layer, x, context = case
    if kind.bad_shape is None:
        return
    bad = torch.rand(kind.bad_shape).to(x)
    leaves = {type(m).__name__ for m in layer.modules() if isinstance(m, Bijection)}
    for method in (layer.forward, layer.surrogate):
        with pytest.raises(ValueError, match=r"expected .* got ") as error:
            method(bad, context=context)
        assert any(leaf in str(error.value) for leaf in leaves), error.value

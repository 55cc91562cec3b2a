"""Which products each precision rounds, and that settings are restored."""

import pytest
import torch
from torch.testing import assert_close

from selfnorm import AffineCoupling, SelfNormConv2d
from selfnorm.kernels.dispatch import allows_tf32
from selfnorm.models import glow
from selfnorm.runtime.precision import (
    PRECISIONS,
    convolutions_in_tf32,
    full_float32,
    networks_in_bf16,
    precision,
    products_in_tf32,
)


def switches():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, networks_in_bf16()


def shaken(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def test_each_precision_sets_its_switches_and_restores_them():
    before = switches()
    expected = {"float32": (False, False, False), "tf32": (True, True, False), "bf16": (True, True, True)}
    assert set(PRECISIONS) == set(expected)
    for value, inside in expected.items():
        with precision(value):
            assert switches() == inside
        assert switches() == before


def test_they_nest_and_survive_errors():
    before = switches()
    with pytest.raises(KeyError), precision("bf16"):
        with precision("float32"):
            assert switches() == (False, False, False)
        assert switches() == (True, True, True)
        raise KeyError
    assert switches() == before


@pytest.fixture
def new_switches():
    """Torch's new settings, after whose use torch refuses to read the old ones."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    yield matmul, conv
    matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = (value == "tf32" for value in before)
    matmul.fp32_precision, conv.fp32_precision = before


@pytest.mark.parametrize("ours", [precision, lambda value: full_float32()])
@pytest.mark.parametrize("value", ["tf32", "ieee"])
def test_torchs_new_settings_are_restored_too(new_switches, value, ours):
    matmul, conv = new_switches
    matmul.fp32_precision = conv.fp32_precision = value
    if value == "tf32":
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            matmul.allow_tf32  # noqa: B018
    assert products_in_tf32() == convolutions_in_tf32() == (value == "tf32")
    with ours("float32"):
        assert not products_in_tf32() and not convolutions_in_tf32()
    assert matmul.fp32_precision == conv.fp32_precision == value


def test_kernels_read_torchs_new_setting(new_switches, device, kernels):
    new_switches[0].fp32_precision = "tf32"
    assert allows_tf32() == torch.cuda.is_available()
    layer, x = SelfNormConv2d(3, 3).float().to(device), torch.randn(2, 3, 5, 5).float().to(device)
    with torch.no_grad():
        assert torch.isfinite(layer.approx_inverse(layer.surrogate(x).z)).all()


def test_an_unknown_precision_is_refused():
    before = switches()
    with pytest.raises(ValueError, match="precision: expected one of float32, tf32, bf16, got 'half'"), precision("half"):
        pass
    assert switches() == before


def test_on_the_cpu_tf32_changes_nothing():
    layer, x = shaken(AffineCoupling(4, hidden=8)).float(), torch.randn(3, 4, 5, 5).float()
    with precision("float32"):
        full = layer(x)
    with precision("tf32"):
        assert all(torch.equal(a, b) for a, b in zip(layer(x), full, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bf16_affects_only_the_networks(device, dtype):
    """The map stays as invertible as in full precision: the inverse pass uses the same rounded network."""
    layer, x = shaken(AffineCoupling(4, hidden=16)).to(device, dtype), torch.randn(3, 4, 8, 8).to(device, dtype)
    with precision("float32"):
        z, log_det = layer(x)
    with precision("bf16"):
        low_z, low_log_det = layer(x)
        back, back_log_det = layer.inverse(low_z)
        with torch.no_grad():
            assert_close(layer.approx_inverse(low_z), x, rtol=1e-5, atol=1e-5)
    assert low_z.dtype == low_log_det.dtype == dtype
    assert not torch.equal(low_z, z)
    assert_close(low_z, z, rtol=0.02, atol=0.02)
    assert_close(low_log_det, log_det, rtol=0.02, atol=0.05)
    assert_close(back, x, rtol=1e-5, atol=1e-5)
    assert_close(back_log_det, -low_log_det)


def test_a_flows_likelihood_in_bf16_is_close_to_its_own(device):
    """Documented bound: one nat for 784 dimensions; this flow has 256."""
    flow, x = shaken(glow((1, 16, 16), blocks=2, steps=2, hidden=32, levels=256)), 256 * torch.rand(4, 1, 16, 16)
    flow.initialize(x)
    flow, x = flow.float().to(device), x.float().to(device)
    values = {}
    for value in PRECISIONS:
        with precision(value), torch.no_grad():
            values[value] = flow.log_prob(x)
    assert_close(values["tf32"], values["float32"], rtol=0, atol=0.1)
    assert_close(values["bf16"], values["float32"], rtol=0, atol=1.0)
    assert not torch.equal(values["bf16"], values["float32"])


def test_gradients_flow_through_bf16_in_the_parameters_own_dtype():
    layer, x = shaken(AffineCoupling(4, hidden=16)).float(), torch.randn(3, 4, 8, 8).float()
    gradients = {}
    for value in ("float32", "bf16"):
        layer.zero_grad()
        with precision(value):
            z, log_det, _ = layer.surrogate(x)
            (z.square().sum() - log_det.sum()).backward()
        gradients[value] = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    for name, gradient in gradients["float32"].items():
        low = gradients["bf16"][name]
        assert low.dtype == torch.float32
        assert (low - gradient).norm() < 0.15 * gradient.norm(), name


def test_in_float32_the_exact_path_is_twice_differentiable():
    layer, x = shaken(AffineCoupling(2, hidden=3)), torch.randn(2, 2, 2, 2, requires_grad=True)
    with precision("float32"):
        assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,))


def test_small_differences_are_taken_in_full_float32():
    with precision("tf32"):
        with pytest.raises(KeyError), full_float32():
            assert switches()[:2] == (False, False)
            raise KeyError
        assert switches()[:2] == (True, True)

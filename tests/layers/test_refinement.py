"""The refined inverse: exact where the learned one contracts, by factorisation and with a warning where it does not."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from selfnorm import SelfNormConv2d, SelfNormLinear
from selfnorm.linalg.iterations import refine


def layer_with_error(spectral_radius, features=8):
    """R = (I − E)W⁻¹, so that I − RW = E."""
    layer = SelfNormLinear(features)
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn(features, features))
        E = torch.randn(features, features)
        E *= spectral_radius / torch.linalg.eigvals(E).abs().max()
        layer.weight_inv.copy_((torch.eye(features) - E) @ torch.linalg.inv(layer.weight))
    return layer.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_refinement_converges_without_a_factorisation(dtype, factorisations, device):
    layer = layer_with_error(0.5).to(device, dtype)
    factorisations.clear()
    x = torch.randn(5, 8, dtype=dtype, device=device)
    z = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert (layer.approx_inverse(z) - x).norm() > 0.1 * x.norm()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    assert_close(layer.refined_inverse(z), x, rtol=tolerance, atol=tolerance)
    assert not factorisations


def test_refinement_takes_a_tolerance():
    layer, x = layer_with_error(0.5), torch.randn(5, 8)
    z, _ = layer(x)
    rough, fine = (layer.refined_inverse(z, tolerance=t) for t in (1e-2, 1e-9))
    residual = [((z - layer(v)[0]).norm(dim=1) / z.norm(dim=1)).max().item() for v in (rough, fine)]
    assert 1e-9 < residual[0] <= 1e-2 and residual[1] <= 1e-9


def test_refinement_accepts_whatever_is_within_the_tolerance():
    """The last step may gain less than a tenth and still arrive."""
    layer, x = layer_with_error(0.5), torch.randn(1, 8)
    with torch.no_grad():
        layer.weight_inv.copy_(0.05 * torch.linalg.inv(layer.weight))  # each step gains 5 per cent
    z, _ = layer(x)
    assert_close(layer.refined_inverse(z, tolerance=0.92), 0.0975 * x, rtol=1e-9, atol=1e-9)


def test_refinement_waits_out_a_growing_start():
    """A nilpotent E has spectral radius 0, however large its norm: the error grows before it vanishes."""
    layer = layer_with_error(0.5, features=4)
    with torch.no_grad():
        E = torch.diag(torch.full((3,), 8.0), 1)
        layer.weight_inv.copy_((torch.eye(4) - E) @ torch.linalg.inv(layer.weight))
    x = torch.randn(5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(layer.refined_inverse(layer(x)[0]), x, rtol=1e-8, atol=1e-8)


def test_refinement_that_does_not_contract_falls_back_with_a_warning(factorisations):
    layer, x = layer_with_error(1.5), torch.randn(5, 8)
    z, _ = layer(x)
    factorisations.clear()
    with pytest.warns(RuntimeWarning, match=r"SelfNormLinear\(8.*spectral radius"):
        assert_close(layer.refined_inverse(z), x, rtol=1e-9, atol=1e-9)
    assert factorisations == ["lu_factor_ex"]


class Counted:
    """A linear map that counts its uses."""

    def __init__(self, matrix):
        self.matrix, self.uses = matrix, 0

    def __call__(self, x):
        self.uses += 1
        return x @ self.matrix.T


@pytest.mark.parametrize(("rate", "most"), [(0.5, 60), (0.995, 60), (1.2, 12), (1e9, 12)])
def test_refinement_gives_up_in_time_and_tells_its_residual(rate, most):
    """I − RW = rate·I: converges fast, too slowly to be worth it, or not at all, or overflows."""
    W, z = torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.randn(2, 3)
    forward, approx = Counted(W), Counted((1 - rate) * torch.linalg.inv(W))
    x, residual = refine(forward, approx, z, tolerance=1e-9)
    assert forward.uses <= most
    assert_close(residual, ((z - x @ W.T).norm(dim=1) / z.norm(dim=1)).max().item(), rtol=1e-6, atol=1e-12)
    assert (residual <= 1e-9) == (rate == 0.5)


def test_refinement_measures_each_example_by_itself():
    """A large example must not hide a small one, and a zero is its own inverse."""
    W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    approx = Counted(torch.diag(torch.tensor([1.0, 0.7])))  # wrong along the second axis only
    z = torch.tensor([[1e6, 0.0], [0.0, 1e-6], [0.0, 0.0]])
    x, residual = refine(Counted(W), approx, z, tolerance=1e-6)
    assert residual <= 1e-6
    assert_close(x, z, rtol=1e-6, atol=0)


def test_refinement_of_a_convolution():
    layer, x = SelfNormConv2d(2, 3), torch.randn(5, 2, 6, 5)
    z, _ = layer(x)
    assert not torch.allclose(layer.approx_inverse(z), x, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(layer.refined_inverse(z), x, rtol=1e-9, atol=1e-9)

"""The convolution exponential against dense matrix exponentials, and the bound that keeps its series short."""

import copy
import math

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing import assert_close

from selfnorm import Chain, Conv1x1, ExpConv2d
from selfnorm.layers import exponential
from selfnorm.layers.exponential import ConvExponential, norm_bound
from selfnorm.linalg.convmatrix import Geometry, circular_symbols, convolve
from support.oracles import dense_matrix

GEOMETRY = Geometry()
# Kernels larger than the image, smaller, square or not.
SHAPES = {"3x3": (3, (3, 3), (5, 4)), "row": (2, (1, 5), (4, 3)), "large": (2, (7, 5), (2, 3)), "1x1": (3, (1, 1), (2, 2))}


def kernels(channels, kernel_size):
    """Of all kinds: noise, smooth (one frequency far above the rest), the identity (all of them equal), and small."""
    noise = torch.randn(channels, channels, *kernel_size)
    return {
        "noise": noise,
        "smooth": torch.randn(channels, channels, 1, 1) + 0.1 * noise,
        "identity": 3 * nn.init.dirac_(torch.empty_like(noise)),
        "small": 1e-3 * noise,
    }


def layer_with(weight):
    layer = ConvExponential(weight.shape[0], tuple(weight.shape[2:]))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.normal_()
    return layer


def kernel_of(layer, size):
    """k, written a second time."""
    return layer.weight * min(1.0, 0.9 / norm_bound(layer.weight, size).item())


def operator_norm(w, size):
    return torch.linalg.svdvals(dense_matrix(w.double(), size, GEOMETRY))[0].item()


def series(matrix, columns, terms):
    total = term = columns
    for i in range(1, terms + 1):
        term = matrix @ term / i
        total = total + term
    return total


@pytest.fixture(params=[(shape, kind) for shape in SHAPES for kind in kernels(1, (1, 1))], ids="-".join)
def layer_and_size(request):
    shape, kind = request.param
    channels, kernel_size, size = SHAPES[shape]
    return layer_with(kernels(channels, kernel_size)[kind]), size


def test_the_bound_is_one(layer_and_size):
    layer, size = layer_and_size
    sigma, true = norm_bound(layer.weight, size).item(), operator_norm(layer.weight, size)
    assert sigma >= true * (1 - 1e-12)
    # and no more than it says: C^(1/512) above the norm on the torus
    torus = [max(side + taps // 2, taps) for side, taps in zip(size, layer.kernel_size, strict=True)]
    circular = torch.linalg.svdvals(circular_symbols(layer.weight, tuple(torus), GEOMETRY)).max().item()
    assert circular * (1 - 1e-12) <= sigma <= circular * layer.channels ** (1 / 512) * (1 + 1e-12)


def test_the_bound_is_tight_for_large_images():
    w = torch.randn(2, 2, 3, 3)
    assert norm_bound(w, (20, 20)).item() < 1.02 * operator_norm(w, (20, 20))


def test_the_norm_is_held_and_small_kernels_are_left_alone(layer_and_size):
    layer, size = layer_and_size
    k = layer._kernel_for(torch.zeros(1, layer.channels, *size))
    assert operator_norm(k, size) <= 0.9 * (1 + 1e-12)
    assert_close(k, kernel_of(layer, size))
    if norm_bound(layer.weight, size) < 0.9:
        assert torch.equal(k, layer.weight)


def test_six_terms_in_training_and_thirteen_where_it_counts(layer_and_size, monkeypatch):
    layer, size = layer_and_size
    x = torch.randn(4, layer.channels, *size)
    bias = layer.bias[:, None, None]
    matrix = dense_matrix(kernel_of(layer, size), size, GEOMETRY)
    exact = torch.matrix_exp(matrix)
    columns = x.flatten(1).T
    calls = []
    monkeypatch.setattr(exponential, "convolve", lambda *args: calls.append(0) or convolve(*args))
    for z, terms, error in ((layer.surrogate(x).z, 6, 1.1e-4), (layer(x)[0], 13, 1e-11)):
        z = (z - bias).flatten(1).T
        assert_close(z, series(matrix, columns, terms), rtol=1e-12, atol=1e-12)
        assert ((z - exact @ columns).norm(dim=0) <= error * columns.norm(dim=0)).all()
    back = (layer.inverse(x + bias)[0]).flatten(1).T
    assert ((back - torch.linalg.solve(exact, columns)).norm(dim=0) <= 1e-11 * columns.norm(dim=0)).all()
    assert len(calls) == 6 + 13 + 13


def test_six_terms_can_be_as_far_off_as_they_are_said_to_be():
    """One channel, one tap: z = exp(0.9)·x, and the tail of that series."""
    layer = layer_with(torch.full((1, 1, 1, 1), 5.0))
    x = torch.ones(1, 1, 1, 1)
    error = math.exp(0.9) - (layer.surrogate(x).z - layer.bias).item()
    assert 1.06e-4 < error < 1.07e-4
    assert abs(math.exp(0.9) - (layer(x)[0] - layer.bias).item()) < 4e-12


def test_log_det_is_that_of_the_matrix_exponential(layer_and_size):
    layer, size = layer_and_size
    x = torch.randn(3, layer.channels, *size)
    matrix = torch.matrix_exp(dense_matrix(kernel_of(layer, size), size, GEOMETRY))
    expected = torch.linalg.slogdet(matrix).logabsdet.expand(3)
    assert_close(layer(x)[1], expected, rtol=1e-10, atol=1e-10)
    assert_close(layer.surrogate(x).log_det, expected, rtol=1e-10, atol=1e-10)
    assert_close(layer.inverse(x)[1], -expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_inverse(device, dtype, tolerance):
    layer = layer_with(torch.randn(4, 4, 3, 3)).to(device, dtype)
    x = torch.randn(8, 4, 8, 6, device=device, dtype=dtype)
    assert_close(layer.inverse(layer(x)[0])[0], x, rtol=tolerance, atol=tolerance)
    assert_close(layer(layer.inverse(x)[0])[0], x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_gradient_of_the_surrogate_is_that_of_the_dense_series(scale):
    """Through σ too, which is computed here from singular values, in another way."""
    size, channels = (4, 3), 2
    layer = layer_with(scale * torch.randn(channels, channels, 3, 3))
    x, weights = torch.randn(2, 3, channels, *size)
    z, log_det, _ = layer.surrogate(x)
    ((z * weights).sum() + 3 * log_det.sum()).backward()

    w = layer.weight.detach().clone().requires_grad_()
    singular = torch.linalg.svdvals(circular_symbols(w, (size[0] + 1, size[1] + 1), GEOMETRY))
    largest = singular.max().detach()  # its powers would be out of range
    sigma = largest * (singular / largest).pow(512).sum(-1).max().pow(1 / 512)
    assert (sigma > 0.9) == (scale == 1.0)
    matrix = dense_matrix(w * 0.9 / sigma.clamp_min(0.9), size, GEOMETRY)
    out = series(matrix, x.flatten(1).T, 6).T.reshape(x.shape)
    ((out * weights).sum() + 3 * 3 * matrix.trace()).backward()
    assert_close(layer.weight.grad, w.grad, rtol=1e-9, atol=1e-9)


def test_a_kernel_of_zeros_is_the_identity_and_has_a_gradient():
    layer = layer_with(torch.zeros(2, 2, 3, 3))
    x = torch.randn(3, 2, 4, 4)
    z, log_det, _ = layer.surrogate(x)
    assert_close(z - layer.bias[:, None, None], x)
    (z.square().sum() + log_det.sum()).backward()
    assert torch.isfinite(layer.weight.grad).all() and layer.weight.grad.abs().max() > 0


def test_it_starts_close_to_the_identity():
    layer = ConvExponential(12, 3)
    x = torch.randn(2, 12, 8, 8)
    assert (layer(x)[0] - x).norm() < 0.05 * x.norm()


def test_the_norm_is_held_in_training(device):
    """A target out of reach drives the kernel against the limit, and on from one singular vector to the next."""
    size = (5, 5)
    layer = ExpConv2d(3, mix=False).to(device)
    target = torch.randn(3, 3, 3, 3, device=device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    norms = []
    for _ in range(60):
        x = torch.randn(8, 3, *size, device=device)
        optimizer.zero_grad()
        (layer.surrogate(x).z - convolve(x, target, GEOMETRY)).square().mean().backward()
        optimizer.step()
        layer.after_step()
        norms.append(operator_norm(layer[0]._kernel_for(x), size))
    assert max(norms) <= 0.9 * (1 + 1e-12)
    assert norms[-1] > 0.75 and norm_bound(layer[0].weight, size) > 1  # it is the limit that holds it


def test_any_image_size_is_taken():
    layer = ExpConv2d(2)
    with torch.no_grad():
        layer[1].weight.normal_()
    for size in ((1, 1), (2, 7), (9, 9)):
        x = torch.randn(3, 2, *size)
        assert_close(layer.inverse(layer(x)[0])[0], x, rtol=1e-9, atol=1e-9)


def test_the_parts():
    layer = ExpConv2d(3, (1, 3))
    assert isinstance(layer, Chain) and [type(part) for part in layer] == [Conv1x1, ConvExponential]
    assert [type(part) for part in ExpConv2d(3, mix=False)] == [ConvExponential]
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "0.weight": (3, 3, 1, 1),
        "0.bias": (3,),
        "1.weight": (3, 3, 1, 3),
        "1.bias": (3,),
    }
    x = torch.randn(2, 3, 4, 4)
    mixed, log_det = layer[0](x)
    z, exponential_log_det = layer[1](mixed)
    assert_close(layer(x), (z, log_det + exponential_log_det))


def test_all_state_is_in_the_weights():
    layer = ExpConv2d(2)
    with torch.no_grad():
        layer[1].weight.normal_()
    x = torch.randn(3, 2, 4, 4)
    before = copy.deepcopy(layer.state_dict())
    expected = layer(x)
    layer.initialize(x)
    layer.surrogate(torch.randn(3, 2, 6, 5))
    layer.after_step()
    assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert_close(layer(x), expected, rtol=0, atol=0)
    other = ExpConv2d(2)
    other.load_state_dict(load(save(layer.state_dict())))
    assert_close(other(x), expected, rtol=0, atol=0)


def test_no_method_draws_at_random():
    layer, x = ExpConv2d(2), torch.randn(3, 2, 4, 4)
    state = torch.get_rng_state()
    layer.initialize(x)
    layer.inverse(layer(x)[0])
    layer.surrogate(x)
    layer.after_step()
    assert torch.equal(torch.get_rng_state(), state)


def test_training_never_reads_the_device():
    """A fake tensor has a shape, a dtype and a device, and nothing to be read."""
    with FakeTensorMode():
        layer = ExpConv2d(2, mix=False)
        z, log_det, _ = layer.surrogate(torch.randn(3, 2, 4, 4))
        (z.sum() + log_det.sum()).backward()
        layer.after_step()
        with pytest.raises(DataDependentOutputException):
            float(log_det[0])


def test_autocast_leaves_it_in_full_precision(device):
    layer = layer_with(torch.randn(2, 2, 3, 3)).to(device, torch.float32)
    x = torch.randn(3, 2, 4, 4, device=device, dtype=torch.float32)
    expected, surrogate = layer(x), layer.surrogate(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_close(layer(x), expected, rtol=0, atol=0)
        assert_close(layer.surrogate(x), surrogate, rtol=0, atol=0)
        assert layer(x.bfloat16())[0].dtype == torch.float32


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"ExpConv2d: ConvExponential: expected odd sides for kernel_size, got \(3, 2\)"):
        ExpConv2d(2, (3, 2))
    with pytest.raises(ValueError, match=r"ExpConv2d: .*expected channels to be a whole number of at least 1, got 0"):
        ExpConv2d(0)
    layer = ExpConv2d(2, mix=False)
    described = r"layer 0: ConvExponential\(2, kernel_size=\(3, 3\)\): expected"
    for method in (layer, layer.inverse, layer.surrogate):
        with pytest.raises(ValueError, match=described + r" an input of shape \(N, 2, H, W\), got \(5, 3, 4, 4\)"):
            method(torch.randn(5, 3, 4, 4))
        with pytest.raises(ValueError, match=described + " torch.float64 on cpu, got torch.float32 on cpu"):
            method(torch.randn(5, 2, 4, 4, dtype=torch.float32))

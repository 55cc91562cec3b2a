"""Newton–Schulz and the tracked convolution by kernels, against the same in float64."""

import copy
import math

import pytest
import torch

from selfnorm import TrackedConv2d, TrackedLinear
from selfnorm.kernels.dispatch import used_on
from selfnorm.linalg.convmatrix import Geometry
from selfnorm.runtime.streams import Branches, branching
from support.oracles import dense_matrix

pytest.importorskip("triton")

import triton.language as tl

from selfnorm.kernels.conv import tracked
from selfnorm.kernels.conv.tracked import error_of_convolution, tap_means
from selfnorm.kernels.dense import tracking
from selfnorm.kernels.dense.tracking import error_of, error_of_matrix, newton_schulz_update
from selfnorm.runtime.precision import precision

pytestmark = pytest.mark.usefixtures("poisoned")
LAYERS = {
    "linear 1": (lambda: TrackedLinear(1), (1,)),
    "linear": (lambda: TrackedLinear(37), (37,)),
    "3x3": (lambda: TrackedConv2d(2, 3, (5, 4)), (2, 5, 4)),
    "one channel": (lambda: TrackedConv2d(1, 3, (5, 4)), (1, 5, 4)),
    "5x1": (lambda: TrackedConv2d(3, (5, 1), (3, 4), bias=False), (3, 3, 4)),
    "one pixel": (lambda: TrackedConv2d(5, 3, (1, 1)), (5, 1, 1)),
    "several tiles": (lambda: TrackedConv2d(2, 3, (9, 8)), (2, 9, 8)),
    "1x1": (lambda: TrackedConv2d(5, 1, (3, 2)), (5, 3, 2)),
}
CONVOLUTIONS = [name for name in LAYERS if not name.startswith("linear")]


def single(device, *shape):
    return torch.randn(shape, dtype=torch.float32, device=device)


def close(got, expected, scale=1.0):
    scale = max(scale, float(expected.abs().max()))
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=2e-5, atol=1e-5 * scale)


def moved(name, device, by=0.02):
    """A layer whose weight has moved a little away from its inverse, in float32, and the shape of its examples."""
    build, shape = LAYERS[name]
    layer = build()
    with torch.no_grad():
        layer.weight.add_(by * torch.randn_like(layer.weight))
    return layer.to(device, torch.float32), shape


def matrix_of(layer):
    if layer.weight.dim() == 2 or layer.kernel_size == (1, 1):
        return layer.weight.detach().flatten(1).double()
    return dense_matrix(layer.weight.detach().double(), layer.size, layer.geometry)


@pytest.mark.parametrize("by", ["float32", "pairs"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_inverse_follows(device, kernels, monkeypatch, name, by):
    monkeypatch.setattr("selfnorm.layers.tracked.allows_tf32", lambda: by == "pairs")  # of bfloat16 numbers, for matrices
    layer, _ = moved(name, device)
    W, R = matrix_of(layer), layer.weight_inv.double()
    E = torch.eye(len(R)).to(R) - R @ W
    layer.track()
    close(layer.weight_inv, R + E @ R, scale=1.0 if by == "float32" else 30.0)
    torch.testing.assert_close(layer.residual, E.norm().float(), rtol=1e-3, atol=1e-6 if by == "float32" else 3e-4)
    assert int(layer.fallbacks) == 0


@pytest.mark.parametrize("rows", [1, 3, 61, 64, 101])
@pytest.mark.parametrize("programs", [1, 2, 256])
def test_the_two_passes(device, kernels, monkeypatch, rows, programs):
    """For any number of programs, with more than one step each."""
    monkeypatch.setattr(tracking, "PROGRAMS", programs)
    product, R, residual = single(device, rows, rows), single(device, rows, rows), single(device)
    expected, start = torch.eye(rows).to(device) - product.double(), R.clone()
    error, squares = error_of(product)
    assert error is product and len(squares) <= programs
    close(error, expected)
    close(squares.sum(), expected.square().sum())
    norm = float(expected.norm())
    newton_schulz_update(R, error, squares, residual, 1.01 * norm)
    close(R, start.double() + expected @ start.double())
    close(residual, expected.norm())
    R.copy_(start)
    residual.zero_()
    newton_schulz_update(R, error, squares, residual, 0.99 * norm)
    assert torch.equal(R, start)
    close(residual, expected.norm())


@pytest.mark.parametrize("rows", [1, 61])
def test_with_64_bits_to_count(device, kernels, monkeypatch, rows):
    """As large matrices take them, on small ones."""
    wide = []
    for module in (tracking, tracked):
        monkeypatch.setattr(module, "index_type", lambda numel: wide.append(numel) or tl.int64)
    test_the_two_passes(device, kernels, monkeypatch, rows, 2)
    test_the_sums_over_taps(device, kernels, 4, (6, 5), (5, 3))
    assert wide == [rows * rows] * 3 + [120 * 120]


@pytest.mark.gpu
def test_a_matrix_of_more_numbers_than_32_bits_count():
    rows = 46_344
    if torch.cuda.mem_get_info()[0] < 40 * rows**2:
        pytest.skip("not enough memory on the device")
    product, R = (torch.full((rows, rows), value, dtype=torch.float32, device="cuda") for value in (0.0, 1.0))
    residual = R.new_zeros(())
    with precision("tf32"):
        error, squares = error_of(product)
        assert squares.sum() == rows and (error.diagonal() == 1).all() and int(error.count_nonzero()) == rows
        newton_schulz_update(R, error, squares, residual, 1e6)
    assert (R == 2).all()
    close(residual, residual.new_tensor(math.sqrt(rows)))


@pytest.mark.parametrize("size", [1, 3, 31, 64, 101])
def test_the_error_of_a_matrixs_inverse(device, kernels, size):
    """Far closer than with TF32, which would be off by 5e-4; in Python the pairs are cut instead of rounded."""
    R, W = single(device, size, size), single(device, size, size)
    expected = torch.eye(size).to(device) - R.double() @ W.double()
    error, squares = error_of_matrix(R.mT.contiguous().mT, W.mT.contiguous().mT)
    pairs = 3 * 2**-18 if device.type == "cuda" else 3 * 2**-16
    assert ((error - expected).abs() <= (pairs + 2e-6) * (R.abs() @ W.abs()) + 1e-6).all()
    close(squares.sum(), error.double().square().sum())


@pytest.mark.gpu
def test_with_tf32_an_ill_conditioned_inverse_is_kept_up():
    """In TF32 alone, a good R of W with condition 3,000 would seem lost."""
    layer = TrackedLinear(100)
    u, v = (torch.linalg.qr(torch.randn(100, 100))[0] for _ in range(2))
    with torch.no_grad():
        layer.weight.copy_(u * torch.logspace(0, -3.5, 100) @ v)
        layer.weight_inv.copy_(layer.weight.inverse())
        layer.weight.addmm_(layer.weight.clone(), torch.randn(100, 100), alpha=0.003)  # by which R is off by a third
    layer.to("cuda", torch.float32)
    W, R = layer.weight.detach().double(), layer.weight_inv.double()
    E = torch.eye(100).to(R) - R @ W
    with precision("tf32"):
        layer.track()
    assert 0.2 < E.norm() < 0.5
    torch.testing.assert_close(layer.residual.double(), E.norm(), rtol=0.05, atol=0.05)
    left = torch.eye(100).to(R) - layer.weight_inv.double() @ W
    assert left.norm() < 0.1


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of the step-by-step kernels
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["linear", "3x3", "1x1", "one channel"])
def test_what_is_lost_stays_as_it_is(device, kernels, name, value):
    layer, _ = moved(name, device)
    with torch.no_grad():
        layer.weight.view(-1)[-1] = value
    before = layer.weight_inv.clone()
    layer.track()
    assert torch.equal(layer.weight_inv, before)
    assert not layer.residual < layer.largest_residual


@pytest.mark.parametrize("name", ["linear", "3x3"])
def test_kernels_are_used_and_change_the_inverse_in_place(device, kernels, monkeypatch, name):
    called = []
    monkeypatch.setattr(
        tracking, "newton_schulz_update", lambda *a, original=newton_schulz_update: (called.append(name), original(*a))
    )
    layer, _ = moved(name, device)
    place = layer.weight_inv.data_ptr()
    assert layer.weight_inv.is_contiguous()
    layer.after_step()
    assert called and layer.weight_inv.data_ptr() == place
    layer.weight_inv = layer.weight_inv.mT.contiguous().mT  # a layout that kernels do not accept
    layer.after_step()
    assert len(called) == 1
    for bad in (lambda R: error_of(R), lambda R: newton_schulz_update(R, R, R[0], layer.residual, 1.0)):
        with pytest.raises(ValueError, match="expected a contiguous"):
            bad(layer.weight_inv)


@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_convolution_and_its_gradients(device, kernels, name, examples):
    layer, shape = moved(name, device, by=0.3)
    with torch.no_grad():
        layer.weight_inv.normal_()
        if layer.bias is not None:
            layer.bias.normal_()
    x, arriving = single(device, examples, *shape[:2], shape[2] + 1)[..., 1:], single(device, examples, *shape)
    found = []
    for twin, kinds in ((layer, (device.type,)), (copy.deepcopy(layer).double(), ())):
        with used_on(*kinds):
            start = x.to(twin.weight.dtype).detach().requires_grad_()
            z, log_det, reconstruction = twin.surrogate(start)
            assert reconstruction.shape == (examples, 0)
            ((z * arriving).sum() - (log_det * torch.arange(1.0, examples + 1, device=device)).sum()).backward()
        found.append([z.detach(), log_det.detach(), start.grad, *(parameter.grad for parameter in twin.parameters())])
    for got, expected in zip(*found, strict=True):
        close(got, expected)
    assert not found[0][1].any()


@pytest.mark.parametrize(
    ("channels", "size", "sides"), [(1, (33, 32), (3, 3)), (4, (6, 5), (5, 3)), (9, (3, 4), (3, 3))], ids=str
)
def test_the_sums_over_taps(device, kernels, channels, size, sides):
    """Long ones that take several steps, and more of them than one per program."""
    w = single(device, channels, channels, *sides).double().requires_grad_()
    R = single(device, *2 * (channels * math.prod(size),))
    (expected,) = torch.autograd.grad((dense_matrix(w, size, Geometry()) * R.double().mT).sum(), w)
    means, zeros = torch.empty_like(w, dtype=torch.float32), torch.empty(130, dtype=torch.float32, device=device)
    tap_means(R.mT.contiguous().mT, w, size, means, zeros)
    close(means, expected / math.prod(size))
    assert not zeros.any()


@pytest.mark.parametrize(
    ("name", "pixels"),
    [*((name, None) for name in ("3x3", "one channel", "5x1", "several tiles", "one pixel")), ("3x3", 16), ("one channel", 16)],
)
def test_the_error_of_a_convolutions_inverse(device, kernels, monkeypatch, name, pixels):
    """Whether a tile takes a whole image or a part of it."""
    if pixels:
        monkeypatch.setattr(tracked, "image_tiles", lambda x, tiles=tracked.image_tiles: tiles(x) | {"PIXELS": pixels})
    layer, _ = moved(name, device, by=0.3)
    R = torch.randn_like(layer.weight_inv)
    error, squares = error_of_convolution(R, layer.weight, layer.size)
    expected = torch.eye(len(R)).to(device) - R.double() @ matrix_of(layer)
    close(error, expected)
    close(squares, expected.square().sum(1))


def test_more_channels_than_the_kernels_take(device, kernels):
    """Then the products are torch's, and Newton–Schulz's two passes are still the kernels'."""
    layer = TrackedConv2d(33, 3, (1, 2)).to(device, torch.float32)
    twin = copy.deepcopy(layer).double()
    for each in (layer, twin):
        with torch.no_grad():
            each.weight.mul_(1.01)
        z, log_det, _ = each.surrogate(torch.ones(2, 33, 1, 2).to(each.weight))
        (z.sum() + log_det.sum()).backward()
        each.after_step()
    close(layer.weight.grad, twin.weight.grad)
    close(layer.weight_inv, twin.weight_inv)


@pytest.mark.gpu
def test_layers_follow_beside_each_other():
    device = torch.device("cuda")
    layers = [moved(name, device)[0] for name in ("linear", "3x3", "1x1", "one channel")]
    twins = copy.deepcopy(layers)
    with branching(Branches(device)):
        for layer in layers:
            layer.after_step()
    for layer, twin in zip(layers, twins, strict=True):
        twin.after_step()
        assert torch.equal(layer.weight_inv, twin.weight_inv) and torch.equal(layer.residual, twin.residual)

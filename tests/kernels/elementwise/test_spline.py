"""The fused kernels of SplineActivation against its plain code in float64."""

import copy

import pytest
import torch

from selfnorm import SplineActivation
from selfnorm.kernels.dispatch import used_on

pytest.importorskip("triton")  # which the next two import
from selfnorm.kernels.elementwise import shared
from selfnorm.kernels.elementwise import spline as kernel

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def spline(device, shape, bins, scale=1.0, bound=2.0):
    layer = SplineActivation(shape, bins, bound).float().to(device)
    with torch.no_grad():
        for value in layer.parameters():
            value.normal_(std=scale)
    return layer


def batch(device, *shape, scale=1.0):
    return scale * torch.randn(shape, dtype=torch.float32, device=device)


def answers(layer, x, grad_z, grad_log_det):
    """z, log_det, and the gradients by x and by each parameter."""
    x = x.detach().requires_grad_()
    z, log_det, reconstruction = layer.surrogate(x)
    assert reconstruction.shape == (len(x), 0)
    grads = torch.autograd.grad([z, log_det], [x, *layer.parameters()], [grad_z, grad_log_det], materialize_grads=True)
    return [z.detach(), log_det.detach(), *grads]


def check(layer, x, grad_z, grad_log_det, slack=3e-6):
    """The kernel errs little more than plain float32 does; x, grad_z and the layer are float32."""
    found = answers(layer, x, grad_z, grad_log_det)
    with used_on():
        plain = answers(layer, x, grad_z, grad_log_det)
        exact = answers(copy.deepcopy(layer).double(), x.double(), grad_z.double(), grad_log_det.double())
    for mine, theirs, right in zip(found, plain, exact, strict=True):
        assert mine.dtype == torch.float32 and mine.shape == right.shape
        assert (mine - right).norm() <= 4 * (theirs - right).norm() + slack * right.norm()
    return found


@pytest.mark.parametrize(
    ("examples", "shape", "bins"),
    [
        (1, (1,), 5),
        (7, (2, 3, 5), 5),
        (33, (6,), 1),
        (3, (70,), 2),
        (20, (9,), 3),
        (9, (5,), 16),
        (270, (1,), 3),  # several programs per element backward, several examples per program forward
    ],
)
def test_values_and_gradients(device, examples, shape, bins):
    layer = spline(device, shape, bins)
    x, grad_z = batch(device, examples, *shape, scale=1.5), batch(device, examples, *shape)
    with torch.no_grad():
        x.view(-1)[::7] = 2.0  # the bound itself belongs to the tails
        x.view(-1)[3::11] = -2.0
    check(layer, x, grad_z, batch(device, examples))


@pytest.mark.parametrize(
    ("scale", "bound", "slack"), [(0.01, 10.0, 3e-6), (3.0, 10.0, 3e-4), (3.0, 300.0, 3e-4), (10.0, 0.5, 5e-3)]
)
def test_smooth_and_sharp_splines(device, scale, bound, slack):
    """In a narrow bin a rounding of its edges is a large part of its width, for any float32 code."""
    layer = spline(device, (6,), 5, scale, bound)
    check(layer, batch(device, 32, 6, scale=bound / 2), batch(device, 32, 6), batch(device, 32), slack)


def test_tiles_of_big_batches(device, monkeypatch):
    """As if a GPU were full with one program: several tiles in each, forward and backward."""
    for module in (shared, kernel):
        monkeypatch.setattr(module, "ENOUGH_PROGRAMS", 1)
    layer = spline(device, (130,), 2)
    assert shared.row_tiles(20, 130).steps == 2
    check(layer, batch(device, 20, 130), batch(device, 20, 130), batch(device, 20))
    layer = spline(device, (9,), 4)
    check(layer, batch(device, 140, 9), batch(device, 140, 9), batch(device, 140))
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", 3)  # 5 tiles for 3 programs
    check(spline(device, (1,), 3), batch(device, 520, 1), batch(device, 520, 1), batch(device, 520))


def test_long_examples_are_split(device):
    """Few examples of many elements: several programs each, and a second pass that adds up."""
    layer, x = spline(device, (1100,), 3), batch(device, 2, 1100)
    assert shared.row_tiles(2, 1100).grid(2, 1100) == (2, 2)
    with torch.no_grad():
        z, log_det, _ = layer.surrogate(x)
        expected, expected_log_det = copy.deepcopy(layer).double()(x.double())
    torch.testing.assert_close(z.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_det.double(), expected_log_det, rtol=1e-5, atol=1e-3)


def test_each_output_by_itself(device):
    layer, x = spline(device, (8,), 5), batch(device, 12, 8)
    check(layer, x, torch.zeros_like(x), batch(device, 12))
    check(layer, x, batch(device, 12, 8), torch.zeros_like(x[:, 0]))


def test_tails_pass_everything_through(device):
    layer = spline(device, (6,), 5)
    x = torch.tensor([[-3e38, -2.0, 2.0, 5.0, torch.inf, torch.nan]], dtype=torch.float32, device=device)
    grad_z = batch(device, 1, 6)
    z, log_det, grad_x, *grads = answers(layer, x, grad_z, torch.ones_like(x[:, 0]))
    torch.testing.assert_close(z, x, rtol=0, atol=0, equal_nan=True)
    assert log_det == 0 and torch.equal(grad_x, grad_z)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # NumPy's, in the interpreter: 1 / (1 + ∞) is meant
def test_steep_and_flat_knots_stay_finite(device):
    layer = spline(device, (7,), 5)
    with torch.no_grad():
        layer.slopes[:3] = 1e10
        layer.slopes[3:5] = -1e10
        layer.widths[5, 2] = 1e10
        layer.heights[6, 2] = -1e10
    assert all(torch.isfinite(value).all() for value in answers(layer, *(batch(device, 20, 7) for _ in "xg"), batch(device, 20)))


def test_strides_of_any_kind(device):
    layer = spline(device, (5, 4, 2), 3)
    x = batch(device, 4, 5, 2, 6).permute(3, 1, 0, 2)
    last = batch(device, 6, 5, 4, 2).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        layer.widths.data = batch(device, 3, 2, 4, 5).permute(3, 2, 1, 0)
    for grad_log_det in (batch(device, 1).expand(6), batch(device, 12)[::2]):
        check(layer, x, last, grad_log_det)
    check(layer, last, batch(device, 1).expand(6, 5, 4, 2), batch(device, 6))


def test_what_the_kernels_leave_alone(device, monkeypatch):
    """The exact paths, an empty batch and very many bins are plain; a second derivative is refused."""
    layer, x = spline(device, (4,), 16), batch(device, 3, 4)
    z, log_det, _ = layer.surrogate(x.requires_grad_())
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(z.sum() + log_det.sum(), x, create_graph=True)
    with pytest.raises(ValueError, match=r"SplineActivation\(.*\): expected an input of shape \(N, 4\), got \(3, 2\)"):
        layer.surrogate(x[:, :2])

    def refuse(*_):
        raise AssertionError("a kernel was called")

    monkeypatch.setattr(kernel, "spline", refuse)
    monkeypatch.setattr(kernel, "spline_inverse", refuse)
    layer(x), layer.inverse(x), layer.approx_inverse(x)  # their gradients may be needed
    assert layer.surrogate(x[:0]).z.shape == (0, 4)
    assert spline(device, (4,), 17).surrogate(x).z.shape == (3, 4)
    with torch.no_grad():
        assert layer.approx_inverse(x[:0]).shape == (0, 4)
        assert spline(device, (4,), 17).approx_inverse(x).shape == (3, 4)
        with pytest.raises(AssertionError, match="a kernel was called"):
            layer.approx_inverse(x)
    with pytest.raises(AssertionError, match="a kernel was called"):
        layer.surrogate(x)


def test_in_a_cuda_graph(device, never_waiting):
    if device.type != "cuda":
        pytest.skip("needs CUDA")
    layer, x, grad_z, grad_log_det = spline(device, (50,), 5), batch(device, 300, 50), batch(device, 300, 50), batch(device, 300)
    with never_waiting():
        expected = answers(layer, x, grad_z, grad_log_det)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = answers(layer, x, grad_z, grad_log_det)
    graph.replay()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@torch.no_grad()
def check_inverse(layer, z, slack=3e-6):
    found = layer.approx_inverse(z)
    with used_on():
        plain = layer.approx_inverse(z)
        exact = copy.deepcopy(layer).double().approx_inverse(z.double())
    assert found.dtype == torch.float32 and found.shape == exact.shape
    assert (found - exact).norm() <= 4 * (plain - exact).norm() + slack * exact.norm()
    return found


@pytest.mark.parametrize(
    ("examples", "shape", "bins"),
    [(1, (1,), 5), (1, (70,), 5), (7, (2, 3, 5), 5), (33, (6,), 1), (3, (70,), 2), (9, (5,), 16), (520, (1,), 3)],
)
def test_inverse(device, examples, shape, bins):
    layer, z = spline(device, shape, bins), batch(device, examples, *shape, scale=1.5)
    z.view(-1)[::7] = 2.0
    z.view(-1)[3::11] = -2.0
    x = check_inverse(layer, z)
    torch.testing.assert_close(layer.surrogate(x).z, z, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("scale", "bound", "slack"), [(0.01, 10.0, 3e-6), (3.0, 10.0, 3e-4), (10.0, 0.5, 5e-3)])
def test_inverse_of_smooth_and_sharp_splines(device, scale, bound, slack):
    check_inverse(spline(device, (6,), 5, scale, bound), batch(device, 32, 6, scale=bound / 2), slack)


def test_inverse_at_knots_in_tails_and_of_any_stride(device):
    layer = spline(device, (5, 4, 2), 3)
    check_inverse(layer, batch(device, 4, 5, 2, 6).permute(3, 1, 0, 2))
    check_inverse(layer, layer._knots()[1].detach().movedim(-1, 0).clone())
    z = torch.tensor([-3e38, -2.0, 2.0, torch.inf, torch.nan], dtype=torch.float32, device=device)
    with torch.no_grad():
        x = layer.approx_inverse(z.repeat(8).view(1, 5, 4, 2))
    torch.testing.assert_close(x.flatten(), z.repeat(8), rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_inverse_by_broken_parameters_is_nan(device):
    """Samples are checked for NaN, which must not be hidden."""
    for name in ("widths", "heights", "slopes"):
        layer = spline(device, (3,), 5)
        getattr(layer, name)[1] = torch.nan
        assert layer.approx_inverse(batch(device, 9, 3, scale=0.5)).isnan().any(0).tolist() == [False, True, False]

"""The fused kernels of SmoothLeakyReLU and ActNorm against their plain code in float64."""

import copy

import pytest
import torch

from selfnorm import ActNorm, SmoothLeakyReLU
from selfnorm.kernels.dispatch import used_on

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def answers(layer, x, grad_z, grad_log_det):
    """z, log_det, and the gradients by x and by each parameter."""
    x = x.detach().requires_grad_()
    z, log_det, reconstruction = layer.surrogate(x)
    assert reconstruction.shape == (len(x), 0)
    inputs = [x, *(value for value in layer.parameters() if value.numel())]
    return [z.detach(), log_det.detach(), *torch.autograd.grad([z, log_det], inputs, [grad_z, grad_log_det])]


def check(layer, x, grad_z, grad_log_det):
    """The kernel errs little more than plain float32 does; x, grad_z and the layer are float32."""
    found = answers(layer, x, grad_z, grad_log_det)
    with used_on():
        plain = answers(layer, x, grad_z, grad_log_det)
        exact = answers(copy.deepcopy(layer).double(), x.double(), grad_z.double(), grad_log_det.double())
    for mine, theirs, right in zip(found, plain, exact, strict=True):
        assert mine.dtype == torch.float32 and mine.shape == right.shape
        assert (mine - right).norm() <= 4 * (theirs - right).norm() + 1e-6 * right.norm()
    return found


def batch(device, *shape, scale=1.0, last=False):
    x = scale * torch.randn(shape, dtype=torch.float32, device=device)
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("alpha", [1e-6, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 70), (2, 3, 5, 4), (300, 7), (2, 2500), (70, 1100)])
def test_leaky_relu(device, shape, alpha):
    layer = SmoothLeakyReLU(alpha)
    check(layer, batch(device, *shape, scale=5), batch(device, *shape), batch(device, shape[0]))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # NumPy's, in the interpreter: exp(−∞) is meant
def test_leaky_relu_far_out(device):
    """Neither an overflow nor a NaN for any x, and the slope is α or 1 far out."""
    x = torch.tensor(
        [[-3e38, -1e4, -200, -89, -20, -1e-30, 0, 1e-30, 20, 89, 200, 1e4, 3e38]], dtype=torch.float32, device=device
    )
    ones = torch.ones_like(x)
    for alpha in (1e-6, 0.3):
        z, log_det, grad_x = check(SmoothLeakyReLU(alpha), x, ones, ones[:, 0])
        assert torch.isfinite(z).all() and torch.isfinite(log_det).all()
        torch.testing.assert_close(grad_x[0, :3], alpha * ones[0, :3], rtol=1e-5, atol=0)
        torch.testing.assert_close(grad_x[0, -3:], ones[0, -3:])


def test_leaky_relu_is_accurate_left_of_the_bend(device):
    """There softplus is small, and 1 + eˣ would round it away."""
    x = torch.linspace(-30, 0, 500, dtype=torch.float32, device=device)[None]
    z = SmoothLeakyReLU(1e-6).surrogate(x)[0]
    exact = SmoothLeakyReLU(1e-6)(x.double())[0]
    # αx and softplus(x) cancel near x = −11, so it is measured against their sizes
    sizes = 1e-6 * x.double().abs() + torch.nn.functional.softplus(x.double())
    assert ((z - exact).abs() / sizes).max() < 3e-6


@pytest.mark.parametrize(("x_last", "grad_last"), [(True, True), (True, False), (False, True)])
def test_leaky_relu_takes_channels_last_as_they_are(device, x_last, grad_last):
    x, grad_z = batch(device, 3, 5, 4, 2, scale=3, last=x_last), batch(device, 3, 5, 4, 2, last=grad_last)
    z, _, grad_x = check(SmoothLeakyReLU(), x, grad_z, batch(device, 3))
    assert z.stride() == x.stride() == grad_x.stride()


@torch.no_grad()
def inverses(alpha, z):
    """By the kernel, and the same in float64."""
    return SmoothLeakyReLU(alpha).approx_inverse(z), SmoothLeakyReLU(alpha).inverse(z.double())[0]


@pytest.mark.parametrize("alpha", [1e-6, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 5, 4), (300, 7), (1, 784), (70, 400)])
def test_leaky_relu_inverse(device, shape, alpha):
    z = batch(device, *shape, scale=5 * alpha if alpha < 0.1 else 5)
    found, exact = inverses(alpha, z)
    assert found.dtype == torch.float32 and found.shape == exact.shape
    # What a rounding of z means for x: near α = 0 the map is flat, left of its bend.
    slope = alpha + (1 - alpha) * torch.sigmoid(exact)
    sizes = alpha * exact.abs() + torch.nn.functional.softplus(exact)
    assert ((found - exact).abs() <= 1e-6 * (exact.abs() + sizes / slope)).all()


@pytest.mark.filterwarnings("ignore:overflow encountered")  # NumPy's, in the interpreter: z / α may be ∞
def test_leaky_relu_inverse_far_out_and_of_any_stride(device):
    z = torch.tensor([[-1e38, -1e4, -20, -1e-30, 0, 1e-30, 20, 1e4, 3e38]], dtype=torch.float32, device=device)
    found, exact = inverses(0.3, z)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    last = batch(device, 3, 5, 4, 2, last=True)
    for z in (batch(device, 4, 5, 3, 6).permute(3, 1, 0, 2), batch(device, 6, 5, 4, 6)[..., ::2], last):
        found, exact = inverses(0.3, z)
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    assert found.stride() == last.stride()


def test_leaky_relu_inverse_with_gradients_is_plain(device, monkeypatch):
    from selfnorm.kernels.elementwise import leaky_relu

    z = batch(device, 3, 4).requires_grad_()
    monkeypatch.setattr(leaky_relu, "leaky_inverse", None)
    (grad,) = torch.autograd.grad(SmoothLeakyReLU().approx_inverse(z).sum(), z)
    assert (grad >= 1).all()
    with torch.no_grad():
        assert SmoothLeakyReLU().approx_inverse(z[:0]).shape == (0, 4)
        with pytest.raises(TypeError):
            SmoothLeakyReLU().approx_inverse(z)


def actnorm(channels, device):
    layer = ActNorm(channels).float().to(device)
    with torch.no_grad():
        layer.shift.normal_()
        layer.log_scale.normal_(std=0.5)
    return layer


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (5, 3, 2, 3), (2, 3, 25, 30), (7, 33, 2, 3), (300, 40, 1, 2), (9, 1, 3, 3), (40, 5, 7, 7)],
)
def test_actnorm_of_images(device, shape, last):
    x, grad_z = batch(device, *shape, scale=3, last=last), batch(device, *shape, last=last)
    z, _, grad_x, *_ = check(actnorm(shape[1], device), x, grad_z, batch(device, shape[0]))
    assert z.stride() == x.stride() == grad_x.stride()


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (300, 70), (3, 1500), (4, 3, 5), (2, 2, 3, 2, 5), (1, 2, 600)])
def test_actnorm_of_vectors_and_volumes(device, shape):
    check(actnorm(shape[1], device), batch(device, *shape), batch(device, *shape), batch(device, shape[0]))


@pytest.mark.parametrize("x_last", [True, False])
def test_actnorm_when_the_gradient_comes_in_another_order(device, x_last):
    x, grad_z = batch(device, 3, 5, 4, 2, last=x_last), batch(device, 3, 5, 4, 2, last=not x_last)
    check(actnorm(5, device), x, grad_z, batch(device, 3))


@pytest.mark.parametrize("make", [lambda device: SmoothLeakyReLU(), lambda device: actnorm(5, device)], ids=["leaky", "actnorm"])
def test_strides_of_any_kind(device, make):
    x, grad_z = batch(device, 4, 5, 3, 6).permute(3, 1, 0, 2), batch(device, 6, 5, 4, 6)[..., ::2]
    for grad_log_det in (batch(device, 1).expand(6), batch(device, 12)[::2]):
        check(make(device), x, grad_z, grad_log_det)
    check(make(device), batch(device, 1, 5, 1, 1).expand(6, 5, 2, 3), batch(device, 1).expand(6, 5, 2, 3), batch(device, 6))


@pytest.mark.parametrize("make", [lambda device: SmoothLeakyReLU(), lambda device: actnorm(5, device)], ids=["leaky", "actnorm"])
def test_what_the_kernels_leave_alone(device, make, monkeypatch):
    """The exact paths and an empty batch are plain; a second derivative is refused, and NaN goes through."""
    from selfnorm.kernels.elementwise import actnorm, leaky_relu

    layer, x = make(device), batch(device, 2, 5)
    z, log_det, _ = layer.surrogate(x.requires_grad_())
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(z.sum() + log_det.sum(), x, create_graph=True)
    spoilt = torch.full_like(x, torch.nan)
    assert layer.surrogate(spoilt).z.isnan().all()
    assert isinstance(layer, ActNorm) or layer.surrogate(spoilt).log_det.isnan().all()

    def refuse(*_):
        raise AssertionError("a kernel was called")

    monkeypatch.setattr(leaky_relu, "leaky", refuse)
    monkeypatch.setattr(actnorm, "actnorm", refuse)
    layer(x), layer.inverse(x)
    assert layer.surrogate(x[:0]).z.shape == (0, 5)
    with pytest.raises(AssertionError, match="a kernel was called"):
        layer.surrogate(x)


@pytest.mark.parametrize("make", [lambda device: SmoothLeakyReLU(), lambda device: actnorm(5, device)], ids=["leaky", "actnorm"])
def test_in_a_cuda_graph(device, make, never_waiting):
    if device.type != "cuda":
        pytest.skip("needs CUDA")
    layer, x, grad_z, grad_log_det = make(device), batch(device, 9, 5, 7, 7), batch(device, 9, 5, 7, 7), batch(device, 9)
    with never_waiting():
        expected = answers(layer, x, grad_z, grad_log_det)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = answers(layer, x, grad_z, grad_log_det)
    graph.replay()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))

"""Kernels for convolutions of small images, and for small determinants, against float64 and plain PyTorch."""

import pytest
import torch
from torch.testing import assert_close

from selfnorm import SelfNormConv2d
from selfnorm.layers import exponential
from selfnorm.layers.selfnorm import _SelfNormConv2d
from selfnorm.linalg.convmatrix import Geometry, convolve
from selfnorm.runtime.precision import precision
from support.kernel_checks import agree, in_float64, normal, random_layer, strided, trained

pytestmark = pytest.mark.usefixtures("kernels", "poisoned", "short_sums")

# Images (N, C, H, W) and the sides of two kernels: one channel and several, one tile of pixels and more, kernels that reach
# beyond the image, rectangular ones, and an inverse that is smaller or larger.
SHAPES = {
    "one channel": ((2, 1, 6, 5), (3, 3), (3, 3)),
    "several tiles of one channel": ((1, 1, 37, 31), (3, 1), (1, 3)),
    "four channels": ((2, 4, 5, 7), (3, 3), (5, 3)),
    "odd channels": ((1, 3, 4, 5), (5, 3), (3, 7)),
    "many channels": ((2, 17, 3, 3), (3, 3), (3, 3)),
    "mixing of many channels": ((2, 48, 2, 3), (1, 1), (1, 1)),
    "several tiles": ((2, 2, 13, 23), (3, 5), (1, 1)),
    "larger than the image": ((3, 2, 2, 3), (7, 5), (3, 3)),
    "eight channels of a square": ((2, 8, 4, 4), (3, 3), (3, 3)),
    "a single value": ((1, 1, 1, 1), (1, 1), (3, 3)),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shapes(request):
    return request.param


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 100, 129, 1000])
def test_sums_reach_the_last_row(short_sums, rows):
    tiles = short_sums(rows)
    assert rows <= tiles["ROWS"] * tiles["STEPS"] < 2 * rows + 2 * tiles["ROWS"]


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
def test_self_normalizing_convolution(shapes, inverse_likelihood, device):
    from selfnorm.kernels.conv.selfnorm import selfnorm_conv_backward, selfnorm_conv_forward

    shape, sides, inverse_sides = shapes
    n, channels = shape[:2]
    x, w = normal(*shape, device=device), normal(channels, channels, *sides, device=device, scale=0.3)
    r = normal(channels, channels, *inverse_sides, device=device, scale=0.3)
    bias = normal(channels, device=device) if channels != 4 else None
    arriving = normal(*shape, device=device), normal(n, device=device), normal(n, 1, device=device)
    out, z, error, log_det, squares = selfnorm_conv_forward(strided(x), strided(w), r, bias)
    gradients = selfnorm_conv_backward(x, z, error, w, strided(r), *[strided(grad) for grad in arriving], inverse_likelihood)

    X, W, R, B = in_float64(x, w, r, torch.zeros(channels, device=device) if bias is None else bias)
    Z, zeros, expected = _SelfNormConv2d.apply(X, W, R, Geometry(), inverse_likelihood)
    torch.autograd.backward([Z + B[:, None, None], zeros, expected], [grad.double() for grad in arriving])
    agree([out, z, error], [Z + B[:, None, None], Z, convolve(Z, R, Geometry()) - X])
    agree([log_det, squares], [zeros, expected])
    agree(gradients, [X.grad, W.grad, R.grad, B.grad])

    grad_x, *same = selfnorm_conv_backward(x, z, error, w, r, *arriving, inverse_likelihood, input_gradient=False)
    agree(same, [W.grad, R.grad, B.grad])
    assert (grad_x is None) is not inverse_likelihood


@pytest.mark.parametrize("rows", [512, 2])
@pytest.mark.parametrize("terms", [1, 3, 6])
def test_series(shapes, terms, rows, device, monkeypatch):
    from selfnorm.kernels.conv import tiles
    from selfnorm.kernels.conv.series import series_backward, series_forward

    monkeypatch.setattr(tiles, "MAX_PARTIAL_ROWS", rows)
    shape, sides, _ = shapes
    n, channels = shape[:2]
    x, k = normal(*shape, device=device), normal(channels, channels, *sides, device=device, scale=0.2)
    bias = normal(channels, device=device) if terms != 3 else None
    grad_z, grad_log_det = normal(*shape, device=device), normal(n, device=device)
    z, log_det, kept = series_forward(strided(x), strided(k), bias, terms)
    gradients = series_backward(x, k, kept, strided(grad_z), grad_log_det, terms)

    X, K, B = in_float64(x, k, torch.zeros(channels, device=device) if bias is None else bias)
    trace = K[:, :, sides[0] // 2, sides[1] // 2].diagonal().sum()
    expected = [exponential._exponential(X, K, terms) + B[:, None, None], (shape[2] * shape[3] * trace).repeat(n)]
    torch.autograd.backward(expected, [grad_z.double(), grad_log_det.double()])
    agree([z, log_det], expected)
    agree(gradients, [X.grad, K.grad, B.grad])


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (2, 17, 3, 3)])
@pytest.mark.parametrize("terms", [6, 13])  # unrolled, and not
def test_all_terms_count_in_tf32(shape, terms, device):
    from selfnorm.kernels.conv.series import series_backward, series_forward

    channels = shape[1]
    x, grad_z = normal(*shape, device=device), normal(*shape, device=device)
    k = normal(channels, channels, 3, 3, device=device, scale=terms / (4 * channels**0.5))
    with precision("tf32"):
        z, _, kept = series_forward(x, k, None, terms)
        gradients = series_backward(x, k, kept, grad_z, x.new_zeros(shape[0]), terms)

    X, K = in_float64(x, k)
    Z, without_last = (exponential._exponential(X, K, number) for number in (terms, terms - 1))
    assert (Z - without_last).norm() > 0.05 * Z.norm()  # the kernel is so large that the last term would be missed
    Z.backward(grad_z.double())
    for got, expected in zip([z, *gradients[:2]], [Z, X.grad, K.grad], strict=True):
        assert (got - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 2, 4, 4), {"dilation": 2}),
        ((2, 2, 4, 4), {"groups": 2}),
        ((2, 2, 4, 4), {"padding_mode": "circular"}),
        ((1, 2, 64, 64), {}),
        ((1, 34, 2, 2), {}),
        ((1, 1, 4, 4), {"inverse_kernel_size": 9}),
    ],
)
def test_what_kernels_do_not_take_is_left_to_plain_code(shape, options, device, monkeypatch):
    calls = []
    monkeypatch.setattr("selfnorm.layers.selfnorm.convolve", lambda *args: calls.append(args) or convolve(*args))
    layer = random_layer(SelfNormConv2d(shape[1], 3, **options), device)
    layer.surrogate(normal(*shape, device=device))
    assert len(calls) == 2


def test_the_order_of_programs_does_not_matter(device):
    layer, x = random_layer(SelfNormConv2d(4, 3), device), normal(9, 4, 6, 6, device=device)
    for one, other in zip(trained(layer, x), trained(layer, x), strict=True):
        assert torch.equal(one, other)


NORMS = {
    "one channel": (1, (3, 3), (3, 2)),
    "four": (4, (3, 3), (2, 2)),
    "nine": (9, (1, 3), (1, 2)),
    "larger than the image": (2, (1, 5), (2, 1)),
}


def limited(w, torus):
    """The kernel w, scaled by Triton kernels to the norm that `ConvExponential` allows."""
    from selfnorm.kernels.conv.norm_limit import NormLimitedKernel

    return NormLimitedKernel.apply(w, torus, exponential.SQUARINGS, exponential.MAX_NORM)


@pytest.mark.parametrize("scale", [0.01, 2.0], ids=["small", "large"])
@pytest.mark.parametrize("name", NORMS)
def test_norm_limited_kernels(name, scale, device):
    channels, sides, size = NORMS[name]
    w, grad = (normal(channels, channels, *sides, device=device, scale=s) for s in (scale, 1.0))
    parameter = strided(w).requires_grad_()
    k = limited(parameter, exponential._torus(w, size))
    k.backward(strided(grad))
    (exact,) = in_float64(w)
    sigma = exponential.norm_bound(exact, size)
    assert (sigma > exponential.MAX_NORM) == (scale > 1)
    expected = exact * (exponential.MAX_NORM / sigma.clamp_min(exponential.MAX_NORM))
    expected.backward(grad.double())
    agree([k, parameter.grad], [expected, exact.grad])


def test_norm_limited_kernels_whose_singular_values_lie_close_together(device):
    """There the gradient is spread over all of them, by a high power of each."""
    w = 2 * torch.eye(3, device=device)[:, :, None, None] + 0.01 * torch.randn(3, 3, 1, 1, device=device)
    parameter = w.float().requires_grad_()
    limited(parameter, (1, 1)).square().sum().backward()
    (exact,) = in_float64(parameter)
    (exact * (exponential.MAX_NORM / exponential.norm_bound(exact, (1, 1)))).square().sum().backward()
    agree([parameter.grad], [exact.grad], tolerance=1e-4)


def test_a_norm_limited_kernel_of_zeros_has_a_gradient(device):
    w = torch.zeros(2, 2, 1, 3, dtype=torch.float32, device=device, requires_grad=True)
    k = limited(w, (2, 3))
    k.sum().backward()
    assert torch.equal(k, w) and torch.equal(w.grad, torch.ones_like(w))


MATRICES = {
    "noise": lambda c: torch.randn(c, c),
    "permutation": lambda c: 2 * torch.eye(c)[torch.randperm(c)],
    "zeros on the diagonal": lambda c: torch.randn(c, c) * (1 - torch.eye(c)) if c > 1 else torch.ones(1, 1),
    "rows of all sizes": lambda c: torch.logspace(-4, 4, c)[:, None] * (torch.randn(c, c) + 2 * torch.eye(c)),
    "rotation": lambda c: torch.linalg.qr(torch.randn(c, c)).Q,
}


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("channels", [1, 2, 3, 19, 64])
def test_small_determinants(kind, channels, device):
    from selfnorm.kernels.dense.small_determinants import small_slogdet

    matrices = torch.stack([MATRICES[kind](channels) for _ in range(3)]).to(device, torch.float32)
    logabsdet, inverse_transposed = small_slogdet(strided(matrices))
    exact = matrices.double()
    inverse = torch.linalg.inv(exact)
    assert logabsdet.shape == (3,)
    assert_close(logabsdet.double(), torch.linalg.slogdet(exact).logabsdet, atol=1e-4, rtol=1e-5)
    # Scaled by rows, the identity is what is left of a float32 inverse, up to its condition.
    condition = torch.linalg.cond(exact).max().item() if kind != "rows of all sizes" else 1e4
    scale = inverse.abs().amax((-2, -1), keepdim=True)
    assert_close(inverse_transposed.double().mT / scale, inverse / scale, atol=1e-6 * max(3.0, condition), rtol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of divisions by zero
def test_small_determinants_of_one_matrix_of_singular_ones_and_of_nan(device):
    from selfnorm.kernels.dense.small_determinants import small_slogdet

    one = torch.tensor([[0.0, 2.0], [-4.0, 0.0]], dtype=torch.float32, device=device)
    logabsdet, inverse_transposed = small_slogdet(one)
    assert logabsdet.shape == () and logabsdet.item() == pytest.approx(torch.tensor(8.0).log().item())
    assert_close(inverse_transposed.cpu(), torch.tensor([[0.0, 0.5], [-0.25, 0.0]], dtype=torch.float32))
    assert small_slogdet(torch.zeros(5, 3, 3, dtype=torch.float32, device=device))[0].tolist() == [-torch.inf] * 5
    assert small_slogdet(torch.full((3, 3), torch.nan, dtype=torch.float32, device=device))[0].isnan()
    with pytest.raises(ValueError, match=r"small_slogdet: expected square matrices of at most 64 rows, got \(65, 65\)"):
        small_slogdet(torch.zeros(65, 65, dtype=torch.float32, device=device))

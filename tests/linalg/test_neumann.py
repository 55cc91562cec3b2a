"""The debiased log-determinant gradient: exactly, on average, and where it is refused."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from selfnorm import SelfNormConv2d, SelfNormLinear
from selfnorm.linalg.neumann import draw_terms, expect_finite_variance, neumann_tail, spectral_radius
from support.oracles import dense_matrix

LAYERS = {
    "linear": (lambda: SelfNormLinear(6), (6,)),
    "1x1": (lambda: SelfNormConv2d(3, 1), (3, 4, 3)),
    "3x3": (lambda: SelfNormConv2d(2, 3), (2, 5, 4)),
    "circular": (lambda: SelfNormConv2d(2, 3, padding_mode="circular"), (2, 5, 4)),
    "grouped-dilated": (lambda: SelfNormConv2d(4, 3, groups=2, dilation=(2, 1)), (4, 6, 5)),
    "asymmetric": (lambda: SelfNormConv2d(2, 3, inverse_kernel_size=7), (2, 5, 4)),
    "smaller-inverse": (lambda: SelfNormConv2d(2, (5, 3), inverse_kernel_size=(3, 5)), (2, 4, 6)),
    "everything": (
        lambda: SelfNormConv2d(4, (1, 3), (5, 3), groups=2, dilation=(1, 2), padding_mode="circular"),
        (4, 5, 6),
    ),
}


def dense(layer, shape):
    """W, differentiable, and R."""
    if len(shape) == 1:
        return layer.weight, layer.weight_inv.detach()
    size = shape[1:]
    return dense_matrix(layer.weight, size, layer.geometry), dense_matrix(layer.weight_inv, size, layer.geometry).detach()


def error_of(layer, shape):
    W, R = dense(layer, shape)
    return torch.eye(len(W)) - R @ W.detach()


def layer_with_an_error(name):
    """A layer well away from the identity whose R is off, but not so far that the series diverges, and its shape."""
    make, shape = LAYERS[name]
    layer = make()
    with torch.no_grad():
        layer.weight.add_(0.1 * torch.randn_like(layer.weight))
        layer.load_state_dict({"weight": layer.weight.clone(), "bias": layer.bias})  # the best R of its size
        layer.weight_inv.add_(0.04 * torch.randn_like(layer.weight_inv))
    assert 0.05 < torch.linalg.eigvals(error_of(layer, shape)).abs().max() < 0.5
    return layer, shape


def exact_gradient(layer, shape):
    return torch.autograd.grad(torch.linalg.slogdet(dense(layer, shape)[0]).logabsdet, layer.weight)[0]


def head(layer, shape):
    """What the layer itself has for the log-determinant; the other half of its gradient is R's."""
    return 2 * torch.autograd.grad(layer.surrogate(torch.zeros(1, *shape)).log_det.sum(), layer.weight)[0]


def tail(layer, probes, terms, keep):
    return torch.autograd.grad(neumann_tail(layer, probes, terms=terms, keep=keep), layer.weight)[0]


def basis(shape):
    """√D·e_i, over which the mean of vvᵀ is the identity and not just near it."""
    return (math.prod(shape) ** 0.5 * torch.eye(math.prod(shape))).reshape(-1, *shape)


def expected_tail(layer, shape, keep, most=35):
    """The tail, with a basis for noise and summed over N by its probabilities: exact but for terms above `most`."""
    chances = [(1 - keep) * keep**n for n in range(most)] + [keep**most]
    probes = basis(shape)
    return sum(chance * neumann_tail(layer, probes, terms=[n] * len(probes), keep=keep) for n, chance in enumerate(chances))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("keep", [0.3, 0.8])
def test_the_expectation_is_the_exact_gradient(name, keep):
    layer, shape = layer_with_an_error(name)
    exact, first = exact_gradient(layer, shape), head(layer, shape)
    (rest,) = torch.autograd.grad(expected_tail(layer, shape, keep), layer.weight)
    assert_close(first + rest, exact, rtol=1e-10, atol=1e-10)
    assert torch.linalg.norm(exact - first) > 0.01 * torch.linalg.norm(exact)  # there was something to correct


@pytest.mark.parametrize("name", ["linear", "3x3", "everything"])
def test_each_term_is_its_power_over_its_probability(name, device):
    layer, shape = layer_with_an_error(name)
    W, R = dense(layer, shape)
    E = error_of(layer, shape)
    series, power, keep = torch.zeros_like(R), R, 0.7
    for n in range(1, 5):
        power = E @ power
        series = series + power / keep**n
        (expected,) = torch.autograd.grad((W * series.T).sum(), layer.weight, retain_graph=True)
        moved, probes = copy.deepcopy(layer).to(device), basis(shape).to(device)
        assert_close(tail(moved, probes, [n] * len(probes), keep).cpu(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["linear", "3x3", "everything"])
def test_sampled_the_mean_is_the_exact_gradient_and_without_the_tail_it_is_not(name):
    """20,000 probes: ten projections within 4 standard errors, which Rᵀ alone misses by more than 10."""
    layer, shape = layer_with_an_error(name)
    exact, first = exact_gradient(layer, shape), head(layer, shape)
    directions = torch.randn(10, exact.numel())
    keep, generator = 0.6, torch.Generator().manual_seed(1)
    draws = []
    for _ in range(200):
        probes = torch.randn(100, *shape)
        draws.append(directions @ tail(layer, probes, draw_terms(100, keep, generator), keep).flatten())
    draws = torch.stack(draws)
    standard_error = draws.std(0) / len(draws) ** 0.5
    missing = directions @ (exact - first).flatten()
    assert ((draws.mean(0) - missing).abs() < 4 * standard_error).all()
    assert (missing.abs() > 10 * standard_error).any()


@pytest.mark.parametrize("name", ["linear", "everything"])
def test_probes_are_averaged_each_with_its_own_number_of_terms(name):
    layer, shape = layer_with_an_error(name)
    probes = torch.randn(4, *shape)
    together = tail(layer, probes, [3, 1, 1, 0], 0.5)
    alone = [tail(layer, probe[None], [n], 0.5) for probe, n in zip(probes, [3, 1, 1, 0], strict=True)]
    assert_close(together, torch.stack(alone).mean(0))
    assert not alone[3].any()
    assert_close(tail(layer, probes, [1, 0, 1, 3], 0.5), together)


@pytest.mark.parametrize("name", ["linear", "3x3"])
def test_the_value_is_zero_and_only_the_weight_has_a_gradient(name):
    layer, shape = layer_with_an_error(name)
    probes = torch.randn(3, *shape, requires_grad=True)
    value = neumann_tail(layer, probes, terms=[2, 0, 4], keep=0.5)
    assert value.shape == () and value.item() == 0
    (1e3 * value).backward()
    assert_close(layer.weight.grad, 1e3 * tail(layer, probes, [2, 0, 4], 0.5))
    assert layer.weight.grad.any() and layer.weight.grad.is_contiguous()
    assert layer.weight_inv.grad is None and layer.bias.grad is None and probes.grad is None
    layer.weight.requires_grad_(False)
    assert not neumann_tail(layer, probes, terms=[2, 0, 4], keep=0.5).requires_grad


def test_with_half_of_it_a_loss_has_half_the_exact_gradient():
    """Added to the layer's own −½Rᵀ, which a mean over any batch gives."""
    layer, shape = layer_with_an_error("3x3")
    loss = -layer.surrogate(torch.randn(7, *shape)).log_det.mean() - expected_tail(layer, shape, keep=0.5) / 2
    (gradient,) = torch.autograd.grad(loss, layer.weight)
    assert_close(gradient, -exact_gradient(layer, shape) / 2, rtol=1e-10, atol=1e-10)


def test_autocast_leaves_the_tail_in_full_precision(device):
    layer, shape = layer_with_an_error("3x3")
    layer, probes = layer.float().to(device), torch.randn(5, *shape).float().to(device)
    expected = tail(layer, probes, [3, 2, 2, 1, 0], 0.5)
    with torch.autocast(device.type, torch.bfloat16):
        value = neumann_tail(layer, probes, terms=[3, 2, 2, 1, 0], keep=0.5)
        radius = spectral_radius(layer, shape, generator=torch.Generator(device).manual_seed(0))
    assert_close(torch.autograd.grad(value, layer.weight)[0], expected)
    assert radius == spectral_radius(layer, shape, generator=torch.Generator(device).manual_seed(0))


@pytest.mark.gpu
def test_nothing_waits_on_the_device(never_waiting):
    if not torch.cuda.is_available():
        pytest.skip("only CUDA can tell")
    layer, shape = layer_with_an_error("3x3")
    layer, probes = layer.cuda(), torch.randn(16, *shape).cuda()
    terms = draw_terms(16, 0.7, torch.Generator().manual_seed(0))
    tail(layer, probes, terms, 0.7)  # the first call may load kernels
    with never_waiting():
        tail(layer, probes, terms, 0.7)


@pytest.mark.parametrize("terms", [[], [1], [1, 2, 3, 4]])
def test_terms_must_match_the_probes(terms):
    layer = SelfNormLinear(3)
    with pytest.raises(ValueError, match=rf"SelfNormLinear\(3.*as many terms as probes.*got {len(terms)} terms and 3 probes"):
        neumann_tail(layer, torch.randn(3, 3), terms=terms, keep=0.5)


def test_probes_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"expected an input of shape \(N, 3\), got \(2, 4\)"):
        neumann_tail(SelfNormLinear(3), torch.randn(2, 4), terms=[1, 1], keep=0.5)


# How many terms


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9])
def test_terms_are_geometric(keep):
    draws = 100_000
    terms = torch.tensor(draw_terms(draws, keep, torch.Generator().manual_seed(2)))
    for k in range(6):
        standard_error = (keep**k * (1 - keep**k) / draws) ** 0.5
        assert abs((terms >= k).double().mean().item() - keep**k) <= 4 * standard_error
    mean, standard_error = keep / (1 - keep), keep**0.5 / (1 - keep) / draws**0.5
    assert abs(terms.double().mean().item() - mean) < 4 * standard_error


def test_terms_are_the_generators_whatever_the_default_dtype():
    first = draw_terms(50, 0.8, torch.Generator().manual_seed(3))
    torch.set_default_dtype(torch.float32)
    assert draw_terms(50, 0.8, torch.Generator().manual_seed(3)) == first
    assert draw_terms(50, 0.8, torch.Generator().manual_seed(4)) != first


@pytest.mark.parametrize("keep", [0.0, 1.0, -0.5, float("nan")])
def test_keep_must_be_a_probability(keep):
    for use in (
        lambda: draw_terms(3, keep),
        lambda: neumann_tail(SelfNormLinear(3), torch.randn(1, 3), terms=[1], keep=keep),
        lambda: expect_finite_variance(SelfNormLinear(3), 0.1, keep),
    ):
        with pytest.raises(ValueError, match=r"expected keep.* between 0 and 1, got"):
            use()


# The spectral radius


def rotation(angle, skew=1.0):
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    stretch = torch.diag(torch.tensor([1.0, skew]))
    return stretch @ turn @ torch.linalg.inv(stretch)


ERRORS = {
    "symmetric": lambda: torch.diag(torch.tensor([0.5, -0.2, 0.1, 0.05])),
    "negative": lambda: torch.diag(torch.tensor([-0.8, 0.5, 0.1])),
    "opposite": lambda: torch.diag(torch.tensor([-0.6, 0.6, 0.1])),
    "complex pair": lambda: torch.block_diag(0.7 * rotation(1.0), torch.tensor([[0.3]])),
    "skewed complex pair": lambda: torch.block_diag(0.7 * rotation(0.4, skew=20.0), torch.tensor([[0.3]])),
    "Jordan block": lambda: 0.5 * torch.eye(3) + torch.diag(torch.full((2,), 1.0), 1),
    "far from normal": lambda: torch.block_diag(torch.tensor([[0.4, 100.0], [0.0, 0.3]]), torch.tensor([[0.2]])),
    "divergent": lambda: 1.3 * rotation(2.0),
    "random": lambda: 0.1 * torch.randn(20, 20),
}


@pytest.mark.parametrize("name", ERRORS)
def test_spectral_radius_of_a_linear_layer(name):
    E = ERRORS[name]()
    layer = SelfNormLinear(len(E))
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn_like(E))
        layer.weight_inv.copy_((torch.eye(len(E)) - E) @ torch.linalg.inv(layer.weight))
    expected = torch.linalg.eigvals(E).abs().max().item()
    assert spectral_radius(layer, len(E)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", LAYERS)
def test_spectral_radius_of_every_kind_of_layer(name):
    layer, shape = layer_with_an_error(name)
    expected = torch.linalg.eigvals(error_of(layer, shape)).abs().max().item()
    assert spectral_radius(layer, shape) == pytest.approx(expected, rel=0.02)


def test_spectral_radius_at_the_inverse_and_without_an_end():
    layer = SelfNormLinear(4)
    torch.nn.init.eye_(layer.weight)
    torch.nn.init.eye_(layer.weight_inv)
    assert spectral_radius(layer, 4) < 1e-100
    torch.nn.init.constant_(layer.weight_inv, float("nan"))
    assert math.isnan(spectral_radius(layer, 4))
    assert layer.weight_inv.grad is None


# The refusal


@pytest.mark.parametrize(("radius", "keep"), [(0.0, 0.01), (0.5, 0.26), (0.94, 0.9)])
def test_finite_variance_passes(radius, keep):
    expect_finite_variance(SelfNormLinear(3), radius, keep)


@pytest.mark.parametrize(("radius", "keep"), [(0.5, 0.25), (0.8, 0.5)])
def test_infinite_variance_is_refused(radius, keep):
    with pytest.raises(
        ValueError,
        match=r"SelfNormLinear\(3, bias=True\): expected .*infinite variance.*reconstruction_weight.*raise keep above",
    ):
        expect_finite_variance(SelfNormLinear(3), radius, keep)


@pytest.mark.parametrize("radius", [1.0, 3.0, float("inf"), float("nan")])
def test_a_series_that_diverges_is_refused_whatever_keep_is(radius):
    with pytest.raises(ValueError, match=r"no keep makes the gradient unbiased; .*a larger reconstruction_weight$"):
        expect_finite_variance(SelfNormLinear(3), radius, 0.99)


def test_the_variance_is_finite_below_the_bound_and_not_above():
    """E = ρI: the second moment, summed over N by its probabilities, converges for ρ² < q alone; the mean does for both."""
    layer, keep = SelfNormLinear(2), 0.5
    torch.nn.init.eye_(layer.weight)
    growth = {}
    for radius in (0.6, 0.8):
        torch.nn.init.eye_(layer.weight_inv)
        layer.weight_inv.data.mul_(1 - radius)
        norms = [tail(layer, basis((2,)), [n] * 2, keep).square().sum().item() for n in (40, 41)]
        growth[radius] = keep * norms[1] / norms[0]
        assert growth[radius] == pytest.approx(radius**2 / keep, rel=1e-3)
    assert growth[0.6] < 1 < growth[0.8]

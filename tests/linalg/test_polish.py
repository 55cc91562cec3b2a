"""Each polish against what it promises, on layers whose inverse is inaccurate."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from selfnorm import SelfNormConv2d, SelfNormLinear, SingularWeightError
from selfnorm.linalg.polish import POLISHES, expect_polish, polish_inverse
from support.oracles import dense_matrix

D = 16


def linear(error=0.02):
    """W well conditioned, R off by `error` in every entry."""
    layer = SelfNormLinear(D)
    with torch.no_grad():
        layer.weight.add_(0.1 * torch.randn(D, D))
        layer.weight_inv.copy_(torch.linalg.inv(layer.weight) + error * torch.randn(D, D))
    return layer


def convolution(kernel_size=3, inverse_kernel_size=None, **options):
    layer = SelfNormConv2d(2, kernel_size, inverse_kernel_size, **options)
    with torch.no_grad():
        layer.weight.add_(0.1 * torch.randn_like(layer.weight))
        layer.weight_inv.add_(0.3 * torch.randn_like(layer.weight_inv))
    layer.surrogate(torch.randn(1, 2, 6, 5))  # to know the size
    return layer


def error_of(layer):
    return torch.eye(D) - layer.weight_inv.detach() @ layer.weight.detach()


@pytest.mark.parametrize("method", POLISHES)
def test_only_the_inverse_moves(method, device):
    layer = linear().to(device)
    weight, before = layer.weight.clone(), error_of(layer.cpu()).norm()
    polish_inverse(layer.to(device), method)
    assert torch.equal(layer.weight, weight)
    assert error_of(layer.cpu()).norm() < before


def test_newton_schulz_squares_the_error():
    layer = linear()
    before = error_of(layer)
    polish_inverse(layer, "newton-schulz")
    assert_close(error_of(layer), before @ before)


def test_newton_schulz_leaves_alone_what_it_would_make_worse():
    layer = linear(error=1.0)
    before = layer.weight_inv.clone()
    assert error_of(layer).norm() > 1
    polish_inverse(layer, "newton-schulz")
    assert torch.equal(layer.weight_inv, before)


def left_by_low_rank(condition, sizes, rows=200):
    """The part of an error with these singular values that a low-rank polish leaves, for a weight with this condition number."""

    def orthonormal(columns):
        return torch.linalg.qr(torch.randn(rows, columns)).Q

    layer = SelfNormLinear(rows)
    with torch.no_grad():
        layer.weight.copy_(orthonormal(rows) @ torch.diag(torch.logspace(0, -math.log10(condition), rows)) @ orthonormal(rows))
        noise = orthonormal(len(sizes)) @ torch.diag(sizes) @ orthonormal(len(sizes)).T
        layer.weight_inv.copy_(torch.linalg.inv(layer.weight) + noise)
        before = (torch.eye(rows) - layer.weight_inv @ layer.weight).norm()
        polish_inverse(layer, "low-rank", torch.Generator().manual_seed(0))
        return float((torch.eye(rows) - layer.weight_inv @ layer.weight).norm() / before)


def test_low_rank_finds_the_eight_largest_directions():
    """Errors of 0.8^i in twenty directions; a rotation has no other difficulty, so that the best choice leaves 0.8^8."""
    assert left_by_low_rank(1.0, 0.8 ** torch.arange(20.0)) < 1.05 * 0.8**8


def test_low_rank_needs_its_three_krylov_blocks():
    assert left_by_low_rank(10**0.5, torch.tensor([60.0, 10.0, 2.0])) < 0.16  # 0.11 with three, 0.23 with two


@pytest.mark.parametrize("method", ["newton-schulz", "low-rank"])
def test_autocast_does_not_reach_a_polish(method):
    layer = linear().float()
    twin = copy.deepcopy(layer)
    polish_inverse(layer, method, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        polish_inverse(twin, method, torch.Generator().manual_seed(0))
    assert torch.equal(layer.weight_inv, twin.weight_inv)


def test_a_kernels_inverse_is_computed_in_double_precision():
    layer = convolution().float()
    twin = copy.deepcopy(layer).double()
    for each in (layer, twin):
        polish_inverse(each, "least-squares")
    assert torch.equal(layer.weight_inv, twin.weight_inv.float())


def test_a_1x1_with_a_larger_inverse_is_a_kernel(monkeypatch):
    with pytest.raises(ValueError, match="expected least-squares or tap-mean"):
        expect_polish("newton-schulz", [SelfNormConv2d(2, 1, 3)])
    monkeypatch.setattr("selfnorm.linalg.polish.MAX_FACTORISED_ROWS", 30)
    layer = SelfNormConv2d(4, 3, groups=4)
    layer.surrogate(torch.randn(1, 4, 5, 6))
    polish_inverse(layer, "tap-mean")  # 30 rows in each group


def test_newton_schulz_works_in_groups():
    layer = SelfNormConv2d(6, 1, groups=2)
    with torch.no_grad():
        layer.weight_inv.add_(0.05 * torch.randn_like(layer.weight_inv))
    h = torch.randn(5, 6, 2, 2)
    before = layer.reconstruction(h).mean()
    for _ in range(4):
        polish_inverse(layer, "newton-schulz")
    assert layer.reconstruction(h).mean() < 1e-9 * before


@pytest.mark.parametrize("make", [linear, lambda: convolution(1)], ids=["linear", "1x1"])
def test_low_rank_mends_an_error_in_a_few_directions_at_once(make):
    """An error like the one that long runs were seen to end with: huge, and in three directions."""
    layer = make()
    rows = layer.weight.shape[0]
    W, few = layer.weight.detach().flatten(1), min(3, rows)
    with torch.no_grad():
        noise = torch.randn(rows, few) @ torch.diag(torch.tensor([60.0, 10.0, 2.0])[:few]) @ torch.randn(few, rows) / rows
        layer.weight_inv.copy_((torch.linalg.inv(W) + noise).view_as(layer.weight_inv))
    before = (torch.eye(rows) - layer.weight_inv.detach().flatten(1) @ W).norm()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        polish_inverse(layer, "low-rank", generator)
    after = (torch.eye(rows) - layer.weight_inv.detach().flatten(1) @ W).norm()
    assert before > 1 and after < 1e-3 * before


def test_low_rank_mends_what_an_ill_conditioned_weight_let_drift():
    """The error is where W is smallest, as data that hardly varies there leaves it; D is far above the number of directions."""
    layer, rows = SelfNormLinear(200), 200
    U, V = (torch.linalg.qr(torch.randn(rows, rows)).Q for _ in range(2))
    with torch.no_grad():
        layer.weight.copy_(U @ torch.diag(torch.logspace(0, -2, rows)) @ V)
        noise = torch.randn(rows, 3) @ torch.diag(torch.tensor([60.0, 10.0, 2.0])) @ U[:, -3:].T
        layer.weight_inv.copy_(torch.linalg.inv(layer.weight) + noise)
        before = (torch.eye(rows) - layer.weight_inv @ layer.weight).norm()
        polish_inverse(layer, "low-rank", torch.Generator().manual_seed(0))
        after = (torch.eye(rows) - layer.weight_inv @ layer.weight).norm()
    assert after < 0.1 * before


def test_least_squares_of_a_matrix_is_its_inverse():
    layer = linear(error=1.0)
    polish_inverse(layer, "least-squares")
    assert_close(layer.weight_inv @ layer.weight, torch.eye(D))


def test_least_squares_of_a_kernel_is_best_away_from_the_border():
    """No other kernel of its size has a smaller ‖r ⋆ w − δ‖."""
    layer = convolution(3, 5)
    polish_inverse(layer, "least-squares")

    def distance(r):
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            twin.weight_inv.copy_(r)
        impulse = torch.zeros(2, 2, 13, 13)
        impulse[0, 0, 6, 6] = impulse[1, 1, 6, 6] = 1
        return float(twin.reconstruction(impulse).detach().sum())

    best = layer.weight_inv.detach().clone()
    assert all(distance(best + 1e-3 * torch.randn_like(best)) > distance(best) for _ in range(20))


@pytest.mark.parametrize(
    "options",
    [{}, {"inverse_kernel_size": 5}, {"groups": 2}, {"dilation": 2}, {"padding_mode": "circular"}, {"kernel_size": (1, 5)}],
    ids=str,
)
def test_with_the_tap_mean_the_log_determinants_gradient_is_exact(options):
    """Half of it, since R's side of the objective has the other half; the least-squares kernel comes near at best."""
    layer = convolution(**options)
    x = torch.randn(1, 2, 6, 5)

    def gradient():
        return torch.autograd.grad(layer.surrogate(x).log_det.sum(), layer.weight)[0]

    T = dense_matrix(layer.weight, (6, 5), layer.geometry)
    (exact,) = torch.autograd.grad(torch.linalg.slogdet(T).logabsdet, layer.weight)
    polish_inverse(layer, "tap-mean")
    assert_close(gradient(), exact / 2, rtol=1e-9, atol=1e-9)
    if layer.geometry.padding_mode == "zeros":
        polish_inverse(layer, "least-squares")
        assert (gradient() - exact / 2).norm() > 1e-3 * exact.norm()


def test_the_tap_mean_of_a_tap_that_no_pixel_uses():
    layer = SelfNormConv2d(1, 5)
    layer.surrogate(torch.randn(1, 1, 2, 2))
    polish_inverse(layer, "tap-mean")
    assert torch.isfinite(layer.weight_inv).all()


def test_what_is_refused():
    with pytest.raises(ValueError, match="polish: expected one of newton-schulz, low-rank, least-squares, tap-mean, got 'shine'"):
        expect_polish("shine", [])
    for method in ("newton-schulz", "low-rank"):
        with pytest.raises(ValueError, match=rf"expected least-squares or tap-mean for SelfNormConv2d\(.*got {method}"):
            expect_polish(method, [linear(), convolution()])
        expect_polish(method, [linear(), convolution(1)])
    with pytest.raises(ValueError, match=r"SelfNormConv2d.*expected a known image size"):
        polish_inverse(SelfNormConv2d(2, 3), "tap-mean")
    large = SelfNormConv2d(2, 3)
    large.example_shape = (2, 64, 64)
    with pytest.raises(ValueError, match=r"expected images of at most 4096 dimensions.*got 2×64×64"):
        polish_inverse(large, "tap-mean")
    singular = linear()
    with torch.no_grad():
        singular.weight.zero_()
    with pytest.raises(SingularWeightError, match="SelfNormLinear"):
        polish_inverse(singular, "least-squares")

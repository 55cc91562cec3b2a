import math

import pytest
import torch
from torch.testing import assert_close

from selfnorm import ActNorm, Affine, Logit, SmoothLeakyReLU, SplineActivation

ANYWHERE = torch.cat([torch.linspace(-1e4, 1e4, 2001), torch.linspace(-50, 50, 5001)]).double()


@pytest.mark.parametrize("alpha", [1e-6, 1e-4, 0.01, 0.1, 0.3, 0.7, 1.0])
def test_smooth_leaky_relu_inverse_converges_from_anywhere(alpha):
    layer = SmoothLeakyReLU(alpha)
    z = ANYWHERE[None]
    x, _ = layer.inverse(z)
    assert torch.all((layer(x)[0] - z).abs() <= 1e-6 * z.abs().clamp(min=1))
    assert layer._iterations + 1 <= 20
    # in fact to rounding
    assert_close(layer(x)[0], z, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.7])
def test_smooth_leaky_relu_inverse_in_float32_is_good_to_a_few_ulp(alpha):
    layer = SmoothLeakyReLU(alpha)
    z = ANYWHERE.float()[None]
    x = layer.inverse(z)[0]
    exact = layer.inverse(z.double())[0]
    ulp = torch.finfo(torch.float32).eps * torch.maximum(exact.abs(), z.abs().double()).clamp(min=1)
    assert ((x.double() - exact).abs() / ulp).max() < 4 / alpha


def test_smooth_leaky_relu_has_no_seam():
    """softplus as torch has it jumps by 2e-9 at its default threshold."""
    layer = SmoothLeakyReLU(0.3)
    x = torch.linspace(15, 60, 10001)[None]
    expected = 0.3 * x + 0.7 * torch.logaddexp(x, torch.zeros(()))
    assert_close(layer(x)[0], expected, rtol=1e-15, atol=0)


def test_smooth_leaky_relu_inverse_has_its_gradient():
    layer = SmoothLeakyReLU(0.3)
    z = torch.randn(2, 3, requires_grad=True)
    torch.autograd.gradcheck(lambda z: layer.inverse(z)[0], z)
    torch.autograd.gradgradcheck(layer.inverse, z)


def test_logit_in_float32_is_accurate_at_both_ends():
    """1 − squashed, taken in float32 near 1, would be off by 6 per cent and the logit by 0.06."""
    layer = Logit()
    u = torch.tensor([0, 1e-9, 1e-6, 1e-3, 0.5, 1 - 1e-3, 1 - 2**-24, 1.0], dtype=torch.float32)[None]
    z, log_det = layer(u)
    exact, exact_log_det = layer(u.double())
    assert_close(z.double(), exact, rtol=2e-6, atol=1e-6)
    assert_close(log_det.double(), exact_log_det, rtol=2e-6, atol=0)
    assert_close(exact[0, 0].item(), math.log(1e-6 / (1 - 1e-6)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.05, 0.49])
@pytest.mark.parametrize("levels", [256, 17, 3])
def test_whatever_logit_decodes_can_be_scored(dtype, alpha, levels):
    """Latents far beyond the data's range must not decode to a value that forward refuses, through any scaling in front."""
    logit, scale = Logit(alpha), Affine(0.0, 1 / levels).to(dtype)
    z = torch.tensor([-1e4, -200, -40, -17, 0, 17, 40, 200, 1e4], dtype=dtype)[None]
    x = scale.inverse(logit.inverse(z)[0])[0]
    again, log_det = logit(scale(x)[0])
    assert torch.isfinite(again).all() and torch.isfinite(log_det).all()
    assert (again.sign() == z.sign())[z != 0].all()


def test_logit_is_a_bijection_beyond_the_ends_of_the_unit_interval():
    """logit(1 − α) is 13.8; what lies beyond decodes to a little more than 1, and comes back."""
    z = torch.linspace(-25, 25, 101)[None]
    x, _ = Logit().inverse(z)
    assert x.min() < 0 and x.max() > 1
    assert_close(Logit()(x)[0], z, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), float("inf"), -1e-5])
def test_logit_refuses_what_is_outside(bad):
    x = torch.tensor([[0.2, bad, 0.7]])
    with pytest.raises(ValueError, match=r"Logit\(alpha=1e-06\): expected values in \[0, 1\], got 1 outside it"):
        Logit()(x)


def test_logit_without_squashing_takes_the_open_interval():
    with pytest.raises(ValueError, match=r"expected values in \(0, 1\), got 2 outside it, from 0 to 1"):
        Logit(0.0)(torch.tensor([[0.0, 0.5, 1.0]]))


def test_affine_is_shift_then_scale():
    z, log_det = Affine(1.0, 3.0)(torch.tensor([[1.0, 2.0]]))
    assert_close(z, torch.tensor([[6.0, 9.0]]))
    assert_close(log_det, torch.tensor([2 * math.log(3)]))


@pytest.mark.parametrize("shape", [(64, 3), (64, 3, 5, 4)])
def test_actnorm_normalises_its_first_batch_only(shape):
    layer = ActNorm(3)
    x = 4 * torch.randn(shape) + 3
    assert_close(layer(x)[0], x)  # the identity until it is initialised
    layer.initialize(x)
    z = layer(x)[0].transpose(0, 1).flatten(1)
    assert_close(z.mean(1), torch.zeros(3), rtol=0, atol=1e-10)
    assert_close(z.std(1, correction=0), torch.ones(3), rtol=1e-5, atol=0)
    before = layer.log_scale.clone()
    layer.initialize(100 * x)
    assert_close(layer.log_scale, before)
    other = ActNorm(3)
    other.load_state_dict(layer.state_dict())
    other.initialize(100 * x)
    assert_close(other.log_scale, before)


def test_actnorm_refuses_data_that_would_break_it():
    layer = ActNorm(2)
    with pytest.raises(ValueError, match=r"ActNorm\(2\): expected an input of shape \(N, 2, …\), got \(4, 3\)"):
        layer.initialize(torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"ActNorm\(2\): expected finite values"):
        layer.initialize(torch.tensor([[1.0, float("inf")], [0.0, 1.0]]))
    assert not layer.initialized and not layer.shift.any()


def test_affine_refuses_a_scale_with_more_axes_than_an_example():
    with pytest.raises(ValueError, match=r"expected examples that a scale of shape \(3, 2\) broadcasts to, got \(2,\)"):
        Affine(0.0, torch.ones(3, 2))(torch.randn(4, 2))


def test_actnorm_takes_a_constant_channel():
    layer = ActNorm(2)
    x = torch.randn(8, 2)
    x[:, 1] = 5
    layer.initialize(x)
    assert torch.isfinite(layer(x)[0]).all()


def test_actnorm_needs_two_values():
    with pytest.raises(ValueError, match=r"ActNorm\(2\): expected 2 or more values per channel to initialise from, got 1"):
        ActNorm(2).initialize(torch.randn(1, 2))


# Spline


def spline(scale, shape=(3,)):
    layer = SplineActivation(shape)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(scale * torch.randn_like(parameter))
    return layer


def test_spline_starts_near_the_identity_with_the_papers_parameters():
    layer = SplineActivation((4, 5, 5))
    assert layer.widths.shape == layer.heights.shape == (4, 5, 5, 5) and layer.slopes.shape == (4, 5, 5, 4)
    x = 8 * torch.rand(20, 4, 5, 5) - 4
    z, log_det = layer(x)
    assert (z - x).abs().max() < 0.3
    assert (log_det / 100).abs().max() < 0.05
    for raw in (layer.widths, layer.heights, layer.slopes):
        assert_close(raw.std().item(), 0.01, rtol=0.15, atol=0)
    with torch.no_grad():
        for raw in layer.parameters():
            raw.zero_()
    assert_close(layer(x)[0], x)  # raw zeros are the identity: equal bins, slope 1


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_spline_is_monotone_smooth_and_the_identity_outside(scale):
    layer = spline(scale)
    x = torch.linspace(-12, 12, 20001)[:, None].expand(-1, 3)
    z, _ = layer(x)
    assert (z.diff(dim=0) > 0).all()
    outside = x.abs() >= 10
    assert torch.equal(z[outside], x[outside])
    # slope 1 at the seam, from the inside too
    edge = torch.tensor([[-10 + 1e-7] * 3, [10 - 1e-7] * 3], requires_grad=True)
    (slope,) = torch.autograd.grad(layer(edge)[0].sum(), edge)
    assert_close(slope, torch.ones(2, 3), rtol=0, atol=1e-2 if scale > 1 else 1e-4)


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spline_inverse_is_analytic_and_accurate(scale, dtype):
    layer = spline(scale).to(dtype)
    x = (torch.rand(500, 3) * 24 - 12).to(dtype)
    z, log_det = layer(x)
    back, inverse_log_det = layer.inverse(z)
    again, _ = layer(back)
    eps = torch.finfo(dtype).eps
    assert_close(again, z, rtol=200 * eps, atol=2000 * eps)
    if scale <= 1:
        assert_close(back, x, rtol=2000 * eps, atol=2000 * eps)
        assert_close(inverse_log_det, -log_det, rtol=1e4 * eps, atol=1e4 * eps)


def test_spline_knots_meet_their_targets():
    """At the knots the spline passes through (knot_x, knot_z) with the knot's slope."""
    layer = spline(1.0, shape=(2,))
    knots_x, knots_z, slopes = (k.detach() for k in layer._knots())
    assert torch.equal(knots_x[:, [0, -1]], torch.tensor([[-10.0, 10.0]] * 2))
    assert torch.equal(knots_z[:, [0, -1]], torch.tensor([[-10.0, 10.0]] * 2))
    x = knots_x.T.clone().requires_grad_()
    z, _ = layer(x)
    assert_close(z, knots_z.T)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    assert_close(gradient[1:-1], slopes.T[1:-1])


@pytest.mark.parametrize("scale", [6.0, 10.0, 30.0])
def test_sharp_splines_in_float32_stay_finite_both_ways(scale):
    layer = spline(scale, shape=(1000,)).float()
    z, log_det = layer(torch.rand(50, 1000, dtype=torch.float32) * 20 - 10)
    x, inverse_log_det = layer.inverse(z)
    for value in (z, log_det, x, inverse_log_det):
        assert torch.isfinite(value).all()


def test_spline_bins_and_slopes_have_a_least_size():
    layer = SplineActivation(1)
    with torch.no_grad():
        layer.widths.copy_(torch.tensor([[-900.0, 0, 0, 0, 0]]))
        layer.heights.copy_(torch.tensor([[0.0, 0, 0, 0, -900]]))
        layer.slopes.fill_(-900)
    knots_x, knots_z, slopes = layer._knots()
    assert_close(knots_x[0, 1].item(), -10 + 20e-3)
    assert_close(knots_z[0, -2].item(), 10 - 20e-3)
    assert_close(slopes[0], torch.tensor([1, 1e-3, 1e-3, 1e-3, 1e-3, 1]))


def test_spline_gradients_are_finite_everywhere():
    layer = spline(3.0)
    x = torch.tensor([[-1e200, -10.0, 10.0], [1e200, 0.0, 9.999999999]], requires_grad=True)
    z, log_det = layer(x)
    (z.clamp(-1e3, 1e3).sum() + log_det.sum()).backward()
    for value in (x.grad, *(p.grad for p in layer.parameters())):
        assert torch.isfinite(value).all()

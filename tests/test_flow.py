"""Densities: normalised, exact, in pixel units, sampled; and what a Flow refuses."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from selfnorm import (
    ActNorm,
    Affine,
    AffineCoupling,
    Chain,
    Flatten,
    Flow,
    InaccurateInverseWarning,
    Logit,
    SelfNormConv2d,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    Split,
    Squeeze,
    StandardNormal,
)
from selfnorm.models import CONV, LINEAR, MIX, conv_flow, fc_flow, glow
from support.mnist_levels import MNIST_TEST_LEVELS


def shaken(flow, scale=0.15):
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return flow.eval()


def grid(low, high, points):
    axis = torch.linspace(low, high, points)
    return torch.cartesian_prod(axis, axis), (axis[1] - axis[0]) ** 2


@pytest.mark.parametrize("linear", ["selfnorm", "exact"])
def test_a_2d_density_integrates_to_one(linear):
    flow = shaken(fc_flow(2, layers=3, linear=linear))  # its left tails are 1/0.3² times as long as the base's
    points, cell = grid(-80, 60, 1401)
    with torch.no_grad():
        assert abs((flow.log_prob(points).exp() * cell).sum().item() - 1) < 1e-3


def test_a_2d_spline_density_integrates_to_one():
    flow = shaken(Flow(Chain(SelfNormLinear(2), SplineActivation(2), SelfNormLinear(2))))
    points, cell = grid(-20, 20, 1201)
    with torch.no_grad():
        assert abs((flow.log_prob(points).exp() * cell).sum().item() - 1) < 1e-3


def test_a_density_in_pixel_units_integrates_to_one_over_the_pixels_range():
    flow = shaken(fc_flow(2, alpha=0.7, levels=4))
    logits, cell = grid(-13.8, 13.8, 1201)  # the density is steep at the edges: spread the points out there
    unit = torch.sigmoid(logits)
    jacobian = (4 * unit * (1 - unit)).log().sum(1)
    with torch.no_grad():
        assert abs(((flow.log_prob(4 * unit) + jacobian).exp() * cell).sum().item() - 1) < 1e-3


def test_log_prob_is_the_change_of_variables():
    flow, x = shaken(fc_flow(3)), torch.randn(4, 3)
    for row, value in zip(x, flow.log_prob(x), strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda v: flow.encode(v[None])[0], row)
        base = torch.distributions.Normal(0.0, 1.0).log_prob(flow.encode(row[None])).sum()
        assert_close(value, base + torch.linalg.slogdet(jacobian).logabsdet)


def test_surrogate_includes_the_base_and_has_its_gradient():
    flow, x = shaken(fc_flow(3)), torch.randn(4, 3)
    surrogate = flow.surrogate(x)
    assert_close(surrogate.z, flow.encode(x))
    inner = flow.bijection.surrogate(x)
    assert_close(surrogate.log_det, inner.log_det + flow.base.log_prob(inner.z))
    # biases keep their full gradient: the exact likelihood's
    biases = [p for name, p in flow.named_parameters() if name.endswith("bias")]
    ours = torch.autograd.grad(surrogate.log_det.sum(), biases)
    assert_close(ours, torch.autograd.grad(flow.log_prob(x).sum(), biases))


# MNIST's front end. How often each grey level occurs in the 10,000 test digits says all that the mean log-determinant of
# scaling and logit depends on, so that the figure can be checked without the images.


def front_end_log_det(pixels):
    chain = Chain(*list(fc_flow(784, levels=256).bijection)[:2])
    assert [type(layer) for layer in chain] == [Affine, Logit]
    return chain(pixels)[1]


def test_mnist_front_end_adds_272_6_nats_by_the_test_sets_grey_levels():
    counts = torch.tensor(MNIST_TEST_LEVELS, dtype=torch.float64)
    assert counts.sum() == 10_000 * 784
    noise = (torch.arange(4096) + 0.5) / 4096
    log_dets = front_end_log_det((torch.arange(256)[:, None] + noise).reshape(-1, 1)).reshape(256, -1).mean(1)
    assert abs((counts @ log_dets).item() / 10_000 - 272.6) < 1


@pytest.mark.data
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mnist_front_end_adds_272_6_nats_on_the_test_digits(dtype):
    file = Path(os.environ.get("SELFNORM_DATA", ".")) / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    if not file.exists():
        pytest.skip("needs MNIST/raw/t10k-images-idx3-ubyte under $SELFNORM_DATA")
    digits = torch.frombuffer(bytearray(file.read_bytes()[16:]), dtype=torch.uint8).reshape(10_000, 784)
    mean = front_end_log_det(digits.to(dtype) + torch.rand(10_000, 784, dtype=dtype)).mean().item()
    assert abs(mean - 272.6) < 1


# Sampling


@pytest.mark.parametrize("inverse", ["auto", "learned", "exact", "refined"])
def test_decode_by_each_inverse(inverse):
    flow = fc_flow(4)
    x = torch.randn(5, 4)
    z = flow.encode(x)
    with torch.no_grad():
        for layer in (flow.bijection[1], flow.bijection[3]):
            layer.weight_inv.copy_(torch.linalg.inv(layer.weight) @ (torch.eye(4) + 1e-3 * torch.randn(4, 4)))
    error = (flow.decode(z, inverse) - x).abs().max()
    assert (1e-5 < error < 0.1) if inverse == "learned" else error < 1e-9


def test_samples_follow_the_density():
    """The mean of log p over exact samples is the negative entropy; for a linear flow that is known."""
    flow = shaken(Flow(SelfNormLinear(3), StandardNormal((3,))))
    x, log_prob = flow.sample_and_log_prob(20_000)
    entropy = 1.5 * math.log(2 * math.pi * math.e) - torch.linalg.slogdet(flow.bijection.weight).logabsdet
    assert_close(-log_prob.mean(), entropy, rtol=0, atol=0.03)
    covariance = torch.linalg.inv(flow.bijection.weight.T @ flow.bijection.weight)
    assert_close(torch.cov(x.T), covariance, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("inverse", ["auto", "learned", "exact", "refined"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: fc_flow((1, 2, 2), levels=256),
        lambda: conv_flow((1, 4, 4), levels=256),
        lambda: glow((1, 4, 4), steps=2, hidden=4, levels=256),
    ],
    ids=["fc", "conv", "glow"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_can_be_scored(make, inverse, dtype, device):
    flow = make().to(device, dtype).eval()
    x, log_prob = flow.sample_and_log_prob(6, inverse=inverse)
    assert x.dtype == log_prob.dtype == dtype and x.device.type == device.type
    assert log_prob.shape == (6,)
    rounding = 1e-6 if dtype == torch.float64 else 0.3  # near the edges of the pixels' range a rounding of x moves its logit
    assert_close(flow.log_prob(x), log_prob, rtol=1e-3, atol=rounding)
    assert flow.sample(2, inverse=inverse).shape == x[:2].shape


def test_the_density_of_a_sample_is_that_of_the_pixels_it_was_rounded_to():
    """Bright pixels: float32 resolves 1 − u only to 1e-7, so x is not quite what z was, and its density not quite z's."""
    flow = Flow(Chain(Affine(0.0, 1 / 256), Logit(), Affine(-8.0, 1 / 4)), StandardNormal((784,))).float()
    x, log_prob = flow.sample_and_log_prob(50)
    assert_close(log_prob.double(), flow.double().log_prob(x.double()), rtol=1e-5, atol=0.01)


def test_a_fresh_model_samples_before_it_has_seen_data():
    for flow, shape in (
        (fc_flow((1, 2, 3)), (1, 2, 3)),
        (conv_flow((2, 4, 8)), (2, 4, 8)),
        (glow((1, 8, 8), blocks=3, steps=1, hidden=4), (1, 8, 8)),
    ):
        for inverse in ("auto", "learned", "exact"):
            assert flow.sample(2, inverse=inverse).shape == (2, *shape)


def test_a_generator_makes_samples_repeatable():
    flow = fc_flow(3)
    one, other = (flow.sample(4, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, other) and not torch.equal(one, flow.sample(4))
    assert not one.requires_grad


def test_sample_and_log_prob_is_differentiable():
    flow = fc_flow(3)
    x, log_prob = flow.sample_and_log_prob(4)
    (x.square().sum() + log_prob.sum()).backward()
    assert all(p.grad is not None for n, p in flow.named_parameters() if not n.endswith("weight_inv"))


class Wide(torch.nn.Module):
    """A user-defined base, with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def log_prob(self, z):
        return -0.5 * (z / self.scale).square().sum(1) - z.shape[1] * (self.scale.log() + 0.5 * math.log(2 * math.pi))

    def sample(self, n, generator=None):
        return self.scale * torch.randn(n, 2, generator=generator, dtype=self.scale.dtype, device=self.scale.device)


def test_a_base_of_the_users_own_is_a_part_of_the_flow():
    flow = Flow(SelfNormLinear(2), Wide())
    assert "base.scale" in dict(flow.named_parameters())
    points, cell = grid(-30, 30, 601)
    with torch.no_grad():
        assert abs((flow.log_prob(points).exp() * cell).sum().item() - 1) < 1e-3
    assert flow.float().sample(3).dtype == torch.float32


def test_the_default_base_learns_its_shape_from_data():
    flow = Flow(SelfNormConv2d(2, 3))
    with pytest.raises(ValueError, match="StandardNormal: expected a known latent shape"):
        flow.sample(2)
    flow.log_prob(torch.randn(3, 2, 4, 5))
    assert flow.sample(2).shape == (2, 2, 4, 5)


def test_a_context_passes_layers_that_have_no_use_for_it():
    couple = AffineCoupling(4, 4, context_channels=7)  # starts as the identity
    plain = Chain(Squeeze(), ActNorm(4), SelfNormConv2d(4, 1), Flatten((4, 2, 2)))
    flow, x = Flow(Chain(*plain[:3], couple, plain[3]), StandardNormal(16)), torch.randn(3, 1, 4, 4)
    assert_close(flow.log_prob(x, context=torch.randn(3, 7)), Flow(plain).log_prob(x))
    assert flow.sample(3, context=torch.randn(3, 7)).shape == x.shape


def test_a_context_conditions_the_density():
    flow = Flow(Chain(Squeeze(), AffineCoupling(4, 4, context_channels=3), Split(AffineCoupling(2, 4, 3))), StandardNormal((16,)))
    shaken(flow)
    x, one, other = torch.randn(3, 1, 4, 4), torch.randn(3, 3), torch.randn(3, 3)
    assert not torch.allclose(flow.log_prob(x, context=one), flow.log_prob(x, context=other))
    z = flow.encode(x, context=one)
    for inverse in ("auto", "learned", "exact", "refined"):
        assert_close(flow.decode(z, inverse, context=one), x)
    assert flow.surrogate(x, context=one).z.shape == z.shape
    sample, log_prob = flow.sample_and_log_prob(3, context=one)
    assert_close(flow.log_prob(sample, context=one), log_prob)
    with pytest.raises(ValueError, match=r"AffineCoupling.*expected a context"):
        flow.initialize(x)


# What is refused


def test_integers_are_not_cast_in_silence():
    with pytest.raises(ValueError, match=r"expected floating-point input, got torch.uint8; add uniform noise"):
        fc_flow(4, levels=256).log_prob(torch.zeros(2, 4, dtype=torch.uint8))


@pytest.mark.parametrize("method", ["log_prob", "surrogate", "encode", "decode", "initialize"])
def test_arrays_are_not_tensors(method):
    with pytest.raises(ValueError, match=rf"Flow.{method}: expected a torch.Tensor, got ndarray"):
        getattr(fc_flow(4), method)(np.zeros((2, 4)))


@pytest.mark.parametrize("method", ["log_prob", "surrogate", "encode", "decode"])
def test_another_dtype_than_the_flows_is_refused(method):
    with pytest.raises(ValueError, match=r"expected torch.float64.* got torch.float32"):
        getattr(fc_flow(4), method)(torch.randn(2, 4, dtype=torch.float32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_input_is_refused(bad):
    x = torch.randn(3, 4)
    x[1, 2] = bad
    for method in (fc_flow(4).log_prob, fc_flow(4).encode):
        with pytest.raises(ValueError, match="expected a finite input, got 1 non-finite of 12 values"):
            method(x)


def test_a_flow_of_one_layer_is_watched_as_a_chain_is():
    flow = Flow(SelfNormLinear(2))
    flow.bijection.bias.data[0] = float("nan")
    for method in (flow.log_prob, flow.encode):
        with pytest.raises(ValueError, match=r"expected a finite latent.*non-finite parameters: bijection.bias"):
            method(torch.randn(3, 2))


def test_nan_in_a_parameter_is_traced_to_its_layer():
    flow = Flow(Chain(SelfNormLinear(3), SmoothLeakyReLU(), SplineActivation(3), SelfNormLinear(3)))
    with torch.no_grad():
        flow.bijection[2].widths[0] = float("nan")
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"layer 2: SplineActivation.forward: expected a finite output"):
        flow.log_prob(x)
    with pytest.raises(ValueError, match=r"layer 2: SplineActivation.inverse: expected a finite"):
        flow.decode(x, "exact")
    with pytest.raises(ValueError, match=r"Flow.decode\(inverse='learned'\): expected a finite result"):
        flow.decode(x, "learned")


def test_errors_say_where_in_nested_chains_they_arose():
    flow = glow((1, 4, 4), steps=1, hidden=4)
    flow.bijection[-1].rest[2].weight.data.zero_()
    with pytest.raises(ValueError, match=r"^layer 4: rest: layer 2: SelfNormConv2d\(8.*singular"):
        flow.log_prob(torch.randn(2, 1, 4, 4))


@pytest.mark.parametrize("bad", [300.0, float("nan"), -1.0])
def test_initialize_refuses_bad_data_and_can_be_called_again(bad):
    flow, x = glow((1, 4, 4), steps=1, hidden=4, levels=256), 256 * torch.rand(8, 1, 4, 4)
    broken = x.clone()
    broken[0, 0, 0, 0] = bad
    with pytest.raises(ValueError, match="expected a finite"):
        flow.initialize(broken)
    flow.initialize(x)
    assert torch.isfinite(flow.log_prob(x)).all()


def test_non_finite_parameters_behind_a_bad_sample_are_named():
    flow = fc_flow(3)
    flow.bijection[3].weight_inv.data[0, 0] = float("nan")
    with (
        pytest.raises(ValueError, match=r"expected a finite result.*non-finite parameters: bijection.3.weight_inv"),
        pytest.warns(InaccurateInverseWarning, match=r"layer 3, SelfNormLinear.* got nan"),
    ):
        flow.sample(2, "learned")


class Elementwise(Wide):
    def log_prob(self, z):
        return -0.5 * z.square()


def test_a_base_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"expected base to be a module with log_prob\(z\) and sample.* got str"):
        Flow(SelfNormLinear(2), "normal")
    with pytest.raises(ValueError, match=r"expected Elementwise.log_prob\(z\) to give one number .* \(2,\), got \(2, 2\)"):
        Flow(SelfNormLinear(2), Elementwise()).log_prob(torch.randn(2, 2))


def test_a_negative_number_of_samples():
    with pytest.raises(ValueError, match="expected a number of samples of at least 0, got -1"):
        fc_flow(3).sample(-1)


def test_unknown_inverse():
    with pytest.raises(ValueError, match="expected inverse to be one of auto, learned, exact, refined, got 'fast'"):
        fc_flow(3).sample(2, inverse="fast")


def test_only_bijections_make_flows_and_chains():
    for make in (lambda m: Flow(m), lambda m: Chain(m)):
        with pytest.raises(ValueError, match="Linear"):
            make(torch.nn.Linear(2, 2))


def test_a_far_outlier_scores_minus_infinity_not_nan():
    flow = fc_flow(2).float()
    assert flow.log_prob(torch.full((1, 2), 1e25, dtype=torch.float32)).item() == -math.inf


def test_a_surrogate_says_whether_it_is_a_likelihood():
    """By its value: over every kind of every model."""
    builders = [(fc_flow, "linear", LINEAR, (1, 4, 4)), (conv_flow, "conv", CONV, (1, 4, 4)), (glow, "mix", MIX, (1, 8, 8))]
    for build, name, kinds, shape in builders:
        for kind in kinds:
            flow = build(shape, **{name: kind}, **({"hidden": 4} if build is glow else {}))
            with torch.no_grad():
                for parameter in flow.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            x = torch.randn(3, *shape)
            alike = torch.allclose(flow.surrogate(x).log_det, flow.log_prob(x), rtol=1e-9)
            assert alike == flow.surrogate_is_exact, kind
            assert alike == (kind in ("exact", "lu", "emerging")), kind


@pytest.mark.parametrize("levels", [None, 256])
def test_a_flow_with_its_front_split_off_is_the_same_flow(levels):
    flow = fc_flow((1, 2, 3), levels=levels, standardize=True)
    preprocessing, rest = flow.split_preprocessing()
    assert not list(preprocessing.parameters())
    assert list(rest.parameters()) == list(flow.parameters())
    assert next(iter(rest.bijection)) is next(layer for layer in flow.bijection if list(layer.parameters()))
    x = torch.rand(5, 1, 2, 3)
    h, log_det, _ = preprocessing.surrogate(x)
    parts, whole = rest.surrogate(h), flow.surrogate(x)
    torch.testing.assert_close(parts.log_det + log_det, whole.log_det)
    torch.testing.assert_close(parts.z, whole.z)
    torch.testing.assert_close(parts.reconstruction, whole.reconstruction)


def test_a_flow_that_is_no_chain_has_nothing_in_front():
    flow = Flow(SelfNormLinear(3))
    preprocessing, rest = flow.split_preprocessing()
    assert len(preprocessing) == 0
    assert rest is flow

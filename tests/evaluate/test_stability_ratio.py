"""The stability ratio: its formula, and that 1 is where the Jacobian of the gradient field changes sign."""

import math

import pytest
import torch

from selfnorm import Chain, Flow, SelfNormConv2d, SelfNormLinear, SmoothLeakyReLU
from selfnorm.evaluate import stability
from selfnorm.evaluate.stability import stability_ratios
from selfnorm.linalg.convmatrix import dirac
from selfnorm.linalg.moments import patch_second_moment
from selfnorm.models import conv_flow, fc_flow
from selfnorm.objective import GECO, MDMM, Loss
from support.gradient_field import jacobian, velocity

pytestmark = pytest.mark.filterwarnings("ignore::selfnorm.objective.UnstableObjectiveWarning")


def smallest(h):
    return torch.linalg.eigvalsh(h.mT @ h / len(h))[0].item()


def test_ratio_of_each_linear_layer():
    flow = Flow(Chain(SelfNormLinear(3), SmoothLeakyReLU(), SelfNormLinear(3)))
    x = torch.randn(50, 3) * torch.tensor([0.3, 1.0, 2.0])
    h = SmoothLeakyReLU()(flow.bijection[0](x)[0])[0].detach()
    found = stability_ratios(Loss(flow, 0.7, inverse_likelihood=True), x.split(13))  # 13, 13, 13 and 11 examples
    assert found == {name: pytest.approx(1 / (8 * 0.7 * smallest(inputs))) for name, inputs in {"0": x, "2": h}.items()}
    assert flow.training


def test_the_one_sided_objective_has_no_ratio():
    assert stability_ratios(Loss(fc_flow(3), 0.7), [torch.randn(5, 3)]) == {}


@pytest.mark.parametrize("penalty", [GECO(400.0), MDMM(400.0)], ids=["geco", "mdmm"])
def test_multipliers_count_per_dimension(penalty):
    flow, x = Flow(Chain(SelfNormLinear(4))), torch.randn(50, 4)
    found = stability_ratios(Loss(flow, penalty, inverse_likelihood=True), [x])
    assert found["0"] == pytest.approx(1 / (8 * 400 / 4 * smallest(x)), rel=1e-6)  # multipliers are float32


def test_probes_add_white_noise():
    flow, x = Flow(Chain(SelfNormLinear(4))), torch.randn(50, 4)
    found = stability_ratios(Loss(flow, 2.0, probes=3, inverse_likelihood=True), [x])
    assert found["0"] == pytest.approx(1 / (8 * 2 * (smallest(x) + 1)))


def test_without_variance_or_weight_the_ratio_is_huge_and_not_a_number_of_the_wrong_sign():
    flow = Flow(Chain(SelfNormLinear(3)))
    flat = torch.randn(50, 1) * torch.ones(3)
    assert stability_ratios(Loss(flow, 1.0, inverse_likelihood=True), [flat])["0"] > 1e6
    assert stability_ratios(Loss(flow, 1.0, inverse_likelihood=True), [torch.zeros(5, 3), torch.zeros(0, 3)])["0"] == math.inf
    assert stability_ratios(Loss(flow, 0.0, inverse_likelihood=True), [torch.randn(50, 3)])["0"] == math.inf


def test_layers_too_large_for_eigenvalues_have_none(monkeypatch):
    monkeypatch.setattr(stability, "MAX_MOMENT_SIZE", 8)
    flow, x = conv_flow((1, 4, 4), blocks=1, layers_per_block=1, kernel_size=3), torch.randn(6, 1, 4, 4)
    assert set(stability_ratios(Loss(flow, inverse_likelihood=True), [x]).values()) == {None}
    found = stability_ratios(Loss(fc_flow(9), inverse_likelihood=True), [torch.randn(6, 9)])
    assert [*found.values()] == [None, None]


class Stationary(torch.nn.Module):
    """The Gaussian log-density −½ Σ ẑ(ω)*S(ω)⁻¹ẑ(ω) of circular images, up to a constant."""

    def __init__(self, x):
        super().__init__()
        spectrum = torch.fft.fft2(x, norm="ortho").permute(2, 3, 1, 0)  # (H, W, C, N)
        self.precision = torch.linalg.inv(spectrum @ spectrum.mH / len(x))

    def log_prob(self, z):
        spectrum = torch.fft.fft2(z, norm="ortho").permute(2, 3, 1, 0)
        return -0.5 * (spectrum.conj() * (self.precision @ spectrum)).real.sum((0, 1, 2))

    def sample(self, n, generator=None):
        raise NotImplementedError


SMOOTH = {(0, 1): 0.6, (1, 0): 0.5}  # how much of which other pixels is added to a pixel
HOLLOW = {(0, 2): 0.95}  # little power at middle frequencies, which an antisymmetric kernel picks


def coloured(x, neighbours):
    return x + sum(amount * x.roll(shift, (2, 3)) for shift, amount in neighbours.items())


@pytest.mark.parametrize(
    ("channels", "size", "inverse_size", "neighbours"),
    [(1, 3, 3, SMOOTH), (1, (1, 3), (1, 3), HOLLOW), (1, 3, 5, SMOOTH), (1, (1, 3), (3, 3), SMOOTH), (2, 3, 3, SMOOTH)],
)
def test_the_ratio_is_1_where_the_identity_turns_unstable(channels, size, inverse_size, neighbours):
    """k×k kernels on 7×7 images, at w = r = identity: the bound is that of patches, not of single frequencies."""
    x = torch.randn(40, channels, 7, 7) * torch.linspace(0.5, 1, channels).view(-1, 1, 1)
    x = coloured(x, neighbours)
    x = x + 0.4 * x.roll(1, 1).roll((1, 2), (2, 3)) if channels > 1 else x

    def loss_of(weight):
        layer = SelfNormConv2d(channels, size, inverse_size, padding_mode="circular", bias=False)
        with torch.no_grad():
            layer.weight.copy_(dirac(channels, layer.kernel_size))
            layer.weight_inv.copy_(dirac(channels, layer.inverse_kernel_size))
        return Loss(Flow(Chain(layer), Stationary(x)), weight, inverse_likelihood=True)

    def grows(weight):
        loss = loss_of(weight)
        assert velocity(loss, x, [*loss.parameters()]).abs().max() < 1e-9
        values = torch.linalg.eigvals(jacobian(loss, x))
        return bool((values.real[values.abs() > 1e-7 * values.abs().max()] > 0).any())  # rotations neither grow nor shrink

    bound = stability_ratios(loss_of(1.0), [x])["0"]
    assert not grows(1.005 * bound) and grows(0.995 * bound)


def test_the_ratio_of_patches_is_below_that_of_frequencies_and_of_their_smallest_moment():
    """An antisymmetric kernel, which the smallest moment belongs to, is never lost."""
    x = coloured(torch.randn(40, 1, 7, 7), HOLLOW)
    loss = Loss(Flow(Chain(SelfNormConv2d(1, (1, 3), padding_mode="circular"))), inverse_likelihood=True)
    patches = patch_second_moment(x, (1, 3), loss.flow.bijection[0].geometry)
    frequencies = patch_second_moment(x, (7, 7), loss.flow.bijection[0].geometry)
    bounds = [1 / (8 * torch.linalg.eigvalsh(moment).min().item()) for moment in (patches, frequencies)]
    assert stability_ratios(loss, [x])["0"] < 0.9 * bounds[0] < 0.9 * bounds[1]


def test_a_larger_w_than_r_counts_as_a_larger_r():
    x = torch.randn(40, 1, 6, 6)
    ratios = [
        stability_ratios(Loss(Flow(Chain(SelfNormConv2d(1, *sizes))), inverse_likelihood=True), [x])["0"]
        for sizes in ((3, 3), (3, 5), (5, 3))
    ]
    assert ratios[0] < ratios[1] == ratios[2]

"""The stability ratio: its formula, and that 1 is where the Jacobian of the gradient field changes sign."""

import math

import pytest
import torch

from selfnorm import Chain, Flow, SelfNormConv2d, SelfNormLinear, SmoothLeakyReLU
from selfnorm.evaluate import stability
from selfnorm.evaluate.stability import stability_ratios
from selfnorm.models import conv_flow, fc_flow
from selfnorm.objective import GECO, MDMM, Loss

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
    assert stability_ratios(Loss(flow, 0.0, inverse_likelihood=True), [torch.randn(50, 3)])["0"] == math.inf


def test_layers_too_large_for_eigenvalues_have_none(monkeypatch):
    monkeypatch.setattr(stability, "MAX_MOMENT_SIZE", 8)
    flow, x = conv_flow((1, 4, 4), blocks=1, layers_per_block=1, kernel_size=3), torch.randn(6, 1, 4, 4)
    assert set(stability_ratios(Loss(flow, inverse_likelihood=True), [x]).values()) == {None}
    found = stability_ratios(Loss(fc_flow(9), inverse_likelihood=True), [torch.randn(6, 9)])
    assert [*found.values()] == [None, None]


def test_patches_of_the_larger_kernel_count():
    x = torch.randn(40, 1, 6, 6)
    ratios = [
        stability_ratios(Loss(Flow(Chain(SelfNormConv2d(1, *sizes))), inverse_likelihood=True), [x])["0"]
        for sizes in ((3, 3), (3, 5), (5, 3))
    ]
    assert ratios[0] < ratios[1] == ratios[2]


class Stationary(torch.nn.Module):
    """The Gaussian log-density −½ Σ |ẑ(ω)|²/S(ω) of circular images, up to a constant."""

    def __init__(self, power):
        super().__init__()
        self.power = power

    def log_prob(self, z):
        return -0.5 * (torch.fft.fft2(z, norm="ortho").abs().square() / self.power).flatten(1).sum(1)

    def sample(self, n, generator=None):
        raise NotImplementedError


def test_the_ratio_of_a_small_kernel_is_1_where_its_identity_turns_unstable():
    """A 3×3 kernel on 7×7 images, at w = r = identity: the bound is that of 3×3 patches, not of single frequencies."""
    x = torch.randn(30, 1, 7, 7)
    x = x + 0.6 * x.roll(1, -1) + 0.5 * x.roll(1, -2) + 0.3
    power = torch.fft.fft2(x, norm="ortho").abs().square().mean((0, 1))

    def loss_of(weight):
        layer = SelfNormConv2d(1, 3, padding_mode="circular", bias=False)
        with torch.no_grad():
            for kernel in layer.parameters():
                kernel.zero_()[0, 0, 1, 1] = 1
        return Loss(Flow(Chain(layer), Stationary(power)), weight, inverse_likelihood=True)

    def growth(weight):
        """The largest real part of the Jacobian's eigenvalues, other than those of the four rotations."""
        loss = loss_of(weight)
        parameters = [*loss.parameters()]

        def velocity(point):
            with torch.no_grad():
                for parameter, part in zip(parameters, point.split(9), strict=True):
                    parameter.copy_(part.view_as(parameter))
            return -torch.cat([g.flatten() for g in torch.autograd.grad(loss(x)[0], parameters)])

        centre = torch.cat([parameter.detach().flatten() for parameter in parameters])
        assert velocity(centre).abs().max() < 1e-10
        steps = 1e-4 * torch.eye(18)
        matrix = torch.stack([(velocity(centre + step) - velocity(centre - step)) / 2e-4 for step in steps], 1)
        odd = torch.eye(9)[:4] - torch.eye(9).flip(1)[:4]
        rest = torch.linalg.qr(torch.cat([odd, -odd], 1).mT, mode="complete").Q[:, 4:]
        return torch.linalg.eigvals(rest.mT @ matrix @ rest).real.max().item()

    bound = stability_ratios(loss_of(1.0), [x])["0"]
    assert bound < 0.9 / (8 * power.min().item()), "the bound by frequencies would be another"
    assert growth(1.002 * bound) < 0 < growth(0.998 * bound)

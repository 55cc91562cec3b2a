"""The objective against its formulas, written out by hand in float64."""

import math
from itertools import pairwise

import pytest
import torch

from selfnorm import Chain, Flow, SelfNormConv2d, SelfNormLinear, SmoothLeakyReLU
from selfnorm.models import conv_flow, fc_flow, glow
from selfnorm.objective import GECO, MDMM, Fixed, Loss


def perturbed(flow):
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return flow


def test_fixed_is_the_papers_penalty():
    flow, x = perturbed(fc_flow(5, layers=3)), torch.randn(7, 5)
    value, metrics = Loss(flow, 2.5)(x)
    surrogate = flow.surrogate(x)
    expected = -surrogate.log_det.mean() + 2.5 * surrogate.reconstruction.sum(1).mean()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(metrics.surrogate, -surrogate.log_det.mean().detach())
    torch.testing.assert_close(metrics.reconstruction, surrogate.reconstruction.mean(0).detach() / 5)


def test_the_error_is_per_dimension_of_its_own_layer():
    flow = perturbed(glow((1, 8, 8), blocks=2, steps=1, hidden=4))
    x = torch.randn(3, 1, 8, 8)
    _, metrics = Loss(flow)(x)
    # Behind the split only half of the 64 dimensions are left.
    expected = flow.surrogate(x).reconstruction.mean(0) / torch.tensor([64.0, 32.0])
    torch.testing.assert_close(metrics.reconstruction, expected.detach())


@pytest.mark.parametrize("penalty", [Fixed(3.0), GECO(), MDMM()], ids=["fixed", "geco", "mdmm"])
def test_without_learned_inverses_there_is_nothing_to_pay(penalty):
    flow, x = fc_flow(4, linear="exact"), torch.randn(6, 4)
    with pytest.warns(UserWarning, match="probes=2 has no effect: no layer of the flow learns its inverse"):
        loss = Loss(flow, penalty, probes=2)
    value, metrics = loss(x)
    loss.after_step(metrics)
    torch.testing.assert_close(value, -flow.log_prob(x).mean())
    assert metrics.reconstruction.shape == (0,)


def test_geco_by_hand():
    """Three steps: the average starts at the first value, and λ is multiplied by exp(η·average)."""
    penalty = GECO(weight=2.0, tolerance=0.1, rate=0.5)
    penalty.attach(2)
    weight, average = [2.0, 2.0], None
    for error in ([0.5, 0.1], [0.3, 0.02], [0.1, 0.0]):
        constraint = [value - 0.1 for value in error]
        average = constraint if average is None else [0.99 * a + 0.01 * c for a, c in zip(average, constraint, strict=True)]
        measured = torch.tensor(error, requires_grad=True)
        value = penalty(measured, torch.tensor([5.0, 7.0]))
        assert value.item() == pytest.approx(sum(w * a for w, a in zip(weight, average, strict=True)), rel=1e-12)
        (gradient,) = torch.autograd.grad(value, measured)
        torch.testing.assert_close(gradient, torch.tensor(weight))  # of λ·C, not of λ·average
        penalty.after_step(measured.detach())
        weight = [w * math.exp(0.5 * a) for w, a in zip(weight, average, strict=True)]
        torch.testing.assert_close(penalty.weight, torch.tensor(weight))
        torch.testing.assert_close(penalty.average, torch.tensor(average))


def test_geco_raises_lambda_while_violated_and_lowers_it_once_met():
    penalty = GECO(weight=1.0, tolerance=0.1, rate=1.0, decay=0.5)
    penalty.attach(1)
    course = []
    for error in [0.5] * 20 + [0.0] * 40:
        penalty.after_step(torch.tensor([error]))
        course.append(penalty.weight.item())
    assert all(later > earlier for earlier, later in pairwise(course[:20]))
    assert course[-1] < course[-20] < course[25]


def test_geco_keeps_within_its_bounds():
    penalty = GECO(weight=1.0, tolerance=1.0, rate=1.0, decay=0.0, bounds=(0.5, 4.0))
    penalty.attach(2)
    for _ in range(20):
        penalty.after_step(torch.tensor([1e30, 0.0]))
    assert penalty.weight.tolist() == [4.0, 0.5]


def test_geco_raises_lambda_by_no_more_than_e_in_a_step():
    penalty = GECO(weight=1.0, tolerance=0.0, rate=1.0, bounds=(1e-3, 1e30))
    penalty.attach(1)
    penalty.after_step(torch.tensor([1e9]))
    assert penalty.weight.item() == pytest.approx(math.e)


@pytest.mark.parametrize("penalty", [GECO(), MDMM()], ids=["geco", "mdmm"])
@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_a_step_that_failed_moves_no_multiplier(penalty, error):
    penalty.attach(2)
    penalty.after_step(torch.tensor([1e-3, 1e-3]))
    before = {name: value.clone() for name, value in penalty.state_dict().items()}
    penalty.after_step(torch.tensor([error, error]))
    assert all(torch.equal(value, before[name]) for name, value in penalty.state_dict().items())


def test_after_step_reaches_the_layers(monkeypatch):
    loss, called = Loss(fc_flow(2)), []
    monkeypatch.setattr(SelfNormLinear, "after_step", lambda self, generator: called.append(self))
    loss.after_step(loss(torch.randn(3, 2))[1])
    assert len(called) == 2


def test_another_image_size_has_other_dimensions():
    loss = Loss(perturbed(Flow(Chain(SelfNormConv2d(1, 3)))))
    for side in (4, 8):
        x = torch.randn(3, 1, side, side)
        torch.testing.assert_close(loss(x)[1].reconstruction, loss.flow.surrogate(x).reconstruction.mean(0).detach() / side**2)


def test_mdmm_by_hand():
    penalty = MDMM(weight=2.0, tolerance=0.1, rate=0.5, damping=3.0)
    penalty.attach(2)
    error = torch.tensor([0.6, 0.04], requires_grad=True)
    value = penalty(error, torch.tensor([5.0, 7.0]))
    assert value.item() == pytest.approx(2 * 0.5 + 1.5 * 0.25 + 2 * -0.06, rel=1e-12)
    (gradient,) = torch.autograd.grad(value, error)
    torch.testing.assert_close(gradient, torch.tensor([2 + 3 * 0.5, 2.0]))  # damped on the violated side alone
    penalty.after_step(error.detach())
    torch.testing.assert_close(penalty.weight, torch.tensor([2 + 0.5 * 0.5, 2 - 0.5 * 0.06]))
    for _ in range(1000):
        penalty.after_step(torch.tensor([0.0, 0.0]))
    assert penalty.weight.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("flow", "shape"), [(fc_flow(6), (6,)), (Flow(Chain(SelfNormConv2d(2, 1))), (2, 3, 4))], ids=["linear", "1x1"]
)
def test_probes_estimate_the_distance_to_the_inverse(flow, shape):
    flow = perturbed(flow.double())
    layer = flow.bijection.get_submodule(flow.reconstruction_names[0])
    W, R = layer.weight.flatten(1), layer.weight_inv.flatten(1)
    expected = (R @ W - torch.eye(len(W))).square().sum() / len(W)
    x = torch.zeros(2, *shape)  # all-zero data has nothing to reconstruct
    _, metrics = Loss(flow, probes=10_000)(x, generator=torch.Generator().manual_seed(1))
    assert metrics.reconstruction[0].item() == pytest.approx(expected.item(), rel=0.05)


def test_probes_reach_w_and_r_and_no_other_parameter():
    flow = perturbed(Flow(Chain(SelfNormLinear(3), SmoothLeakyReLU(), SelfNormLinear(3))))
    x = torch.randn(5, 3)

    def gradients(probes):
        loss = Loss(flow, 1.0, probes=probes)
        loss.zero_grad()
        loss(x, generator=torch.Generator().manual_seed(0))[0].backward()
        return {name: parameter.grad.clone() for name, parameter in flow.named_parameters()}

    without, with_probes = gradients(0), gradients(3)
    changed = {name for name in without if not torch.equal(without[name], with_probes[name])}
    assert changed == {f"bijection.{index}.{name}" for index in (0, 2) for name in ("weight", "weight_inv")}


def test_probes_repeat_with_their_generator():
    loss, x = Loss(perturbed(conv_flow((1, 4, 4), blocks=1)), probes=2), torch.randn(3, 1, 4, 4)
    first, again, other = (loss(x, generator=torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("make", [lambda: Fixed(3.0), lambda: GECO(rate=1.0), MDMM], ids=["fixed", "geco", "mdmm"])
def test_all_state_is_in_the_state_dict(make):
    loss, x = Loss(perturbed(fc_flow(4)), make()), torch.randn(6, 4)
    for _ in range(3):
        loss.after_step(loss(x)[1])
    other = Loss(fc_flow(4), make())
    other.load_state_dict(loss.state_dict())
    for _ in range(2):
        value, metrics = loss(x)
        copied, copied_metrics = other(x)
        assert torch.equal(value, copied)
        loss.after_step(metrics)
        other.after_step(copied_metrics)
        assert torch.equal(loss.penalty.weight, other.penalty.weight)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Fixed(-1.0), "weight"),
        (lambda: Fixed(math.nan), "weight"),
        (lambda: GECO(tolerance=-1.0), "tolerance"),
        (lambda: GECO(rate=0.0), "rate"),
        (lambda: GECO(decay=1.0), "decay"),
        (lambda: GECO(weight=1e9), "bounds"),
        (lambda: MDMM(damping=math.inf), "damping"),
        (lambda: Loss(fc_flow(2), probes=-1), "probes"),
    ],
)
def test_nonsense_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_objective_never_waits_on_the_device(never_waiting):
    device = torch.accelerator.current_accelerator()
    x = torch.randn(4, 1, 8, 8, device=device)
    for penalty in (Fixed(3.0), GECO(), MDMM()):
        loss = Loss(glow((1, 8, 8), steps=2, hidden=4), penalty, probes=2).to(device)
        generator = torch.Generator(device).manual_seed(0)
        loss(x, generator=generator)[0].backward()
        with never_waiting():
            value, metrics = loss(x, generator=generator)
            value.backward()
            loss.after_step(metrics)


def test_a_layer_with_reconstructions_must_be_a_learned_inverse():
    class Named(Chain):
        reconstruction_names = ("0",)

    with pytest.raises(ValueError, match=r"expected layer 0, .* to have an `example_shape`.*got SmoothLeakyReLU"):
        Loss(Flow(Named(SmoothLeakyReLU())))
    layer = Named(SmoothLeakyReLU())
    layer[0].example_shape = (3,)
    Loss(Flow(layer))
    with pytest.raises(ValueError, match=r"all of `linalg.learned.LearnedInverse`, got SmoothLeakyReLU"):
        Loss(Flow(layer), probes=1)

"""The objective against its formulas, written out by hand in float64."""

import math
from itertools import pairwise

import pytest
import torch

from selfnorm import Chain, Flow, SelfNormConv2d, SelfNormLinear, SmoothLeakyReLU
from selfnorm.models import conv_flow, fc_flow, glow
from selfnorm.neumann import InfiniteVarianceError, draw_terms
from selfnorm.objective import GECO, MDMM, VARIANCE_CHECK, Fixed, Loss


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
    _, metrics = Loss(flow, probes=20_000)(x, generator=torch.Generator().manual_seed(1))
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


@pytest.mark.parametrize("make", [lambda: SelfNormLinear(5), lambda: SelfNormConv2d(1, 3, 5)], ids=["linear", "conv"])
def test_symmetric_reconstruction_by_hand(make):
    """½(‖RWx − x‖² + ‖WRz − z‖²), z = Wx without the bias, with x and z constants: no gradient leaves the layer."""
    torch.manual_seed(2)
    flow = perturbed(Flow(make()))
    layer = flow.bijection
    x = torch.randn(4, *((5,) if isinstance(layer, SelfNormLinear) else (1, 4, 3))).requires_grad_()
    Loss(flow, 1.0, symmetric=True)(x.detach())
    column = layer.surrogate(x).reconstruction[:, 0]
    h = x.detach()
    z = layer.apply_weight(h).detach()
    expected = (layer.reconstruction(h) + (layer.apply_weight(layer.apply_inverse(z)) - z).square().flatten(1).sum(1)) / 2
    torch.testing.assert_close(column, expected)
    parameters = [layer.weight, layer.weight_inv]
    for one, other in zip(
        torch.autograd.grad(column.sum(), parameters, retain_graph=True),
        torch.autograd.grad(expected.sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    (passed_down,) = torch.autograd.grad(column.sum(), x, allow_unused=True)
    assert passed_down is None or not passed_down.any()
    Loss(flow, 1.0)(h)
    torch.testing.assert_close(layer.surrogate(x).reconstruction[:, 0], layer.reconstruction(h))


def test_polish_happens_at_its_steps_and_a_state_remembers_which():
    def steps(loss, number):
        distances = []
        for _ in range(number):
            _, metrics = loss(torch.randn(4, 5))
            loss.after_step(metrics)
            layer = flow_of(loss)
            distances.append(float((layer.weight_inv @ layer.weight - torch.eye(5)).detach().norm()))
        return distances

    def flow_of(loss):
        return loss.flow.bijection

    loss = Loss(perturbed(Flow(SelfNormLinear(5))), polish="least-squares", polish_every=3)
    before = steps(loss, 3)
    assert before[0] == before[1] > 0.01 and before[2] < 1e-12
    with torch.no_grad():
        flow_of(loss).weight_inv.add_(0.1)
    steps(loss, 1)
    other = Loss(Flow(SelfNormLinear(5)), polish="least-squares", polish_every=3)
    other.load_state_dict(loss.state_dict())
    after = steps(other, 2)
    assert after[0] > 0.01 and after[1] < 1e-12


def test_a_loss_that_counts_nothing_keeps_its_state_as_it_was():
    assert "steps" not in Loss(fc_flow(3)).state_dict()


def test_a_polish_that_does_not_suit_a_layer_is_refused_at_once():
    with pytest.raises(ValueError, match=r"expected least-squares or tap-mean for SelfNormConv2d"):
        Loss(conv_flow((1, 4, 4), blocks=1), polish="newton-schulz")
    with pytest.raises(ValueError, match="Loss: expected polish_every"):
        Loss(fc_flow(3), polish_every=0)


def off_by(layer, size):
    """R, a random matrix of norm `size` away from W⁻¹: ρ(I − RW) is of that order."""
    with torch.no_grad():
        error = torch.randn_like(layer.weight)
        layer.weight_inv.copy_((torch.eye(len(error)) + size * error / error.norm()) @ torch.linalg.inv(layer.weight))
    return layer


def test_the_debiased_loss_has_half_the_exact_gradient_on_average():
    """4 standard errors on 10 fixed projections; without the tail the same test fails by far."""
    layer = off_by(perturbed(SelfNormLinear(6)), 0.6)
    x = torch.randn(3, 6)
    flow = Flow(layer)
    (exact,) = torch.autograd.grad(-flow.log_prob(x).mean(), layer.weight)
    projections = torch.randn(10, 36)

    def projected(loss, draws):
        generator = torch.Generator().manual_seed(7)
        found = []
        for _ in range(draws):
            (gradient,) = torch.autograd.grad(loss(x, generator=generator)[0], layer.weight)
            generator = torch.Generator().manual_seed(generator.initial_seed() + 1)
            found.append(projections @ gradient.flatten())
        return torch.stack(found)

    found = projected(Loss(flow, 0.0, debias=200), 300)
    standard_error = found.std(0) / math.sqrt(len(found))
    missed = (found.mean(0) - projections @ exact.flatten() / 2).abs() / standard_error
    assert missed.max() < 4
    plain = projected(Loss(flow, 0.0), 1)[0]
    assert ((plain - projections @ exact.flatten() / 2).abs() / standard_error).max() > 10


def test_debiasing_changes_neither_the_value_nor_the_inverses_gradient():
    layer = off_by(perturbed(SelfNormLinear(6)), 0.3)
    x = torch.randn(3, 6)
    plain, debiased = (Loss(Flow(layer), 2.0, debias=number)(x)[0] for number in (0, 8))
    torch.testing.assert_close(plain, debiased)
    for one, other in ((layer.weight_inv, True), (layer.bias, True), (layer.weight, False)):
        gradients = [torch.autograd.grad(value, one, retain_graph=True)[0] for value in (plain, debiased)]
        assert torch.equal(*gradients) == other


@pytest.mark.parametrize(("size", "message"), [(0.95, "infinite variance"), (1.3, "does not converge")])
def test_debiasing_is_refused_where_its_variance_is_infinite(size, message):
    flow = Flow(Chain(SmoothLeakyReLU(), off_by(SelfNormLinear(6), 0.0)))
    layer = flow.bijection[1]
    with torch.no_grad():
        layer.weight_inv.copy_((1 - size) * torch.linalg.inv(layer.weight))  # I − RW = size·I
    loss = Loss(flow, debias=2)
    _, metrics = loss(torch.randn(4, 6))
    with pytest.raises(ValueError, match=rf"layer 1: SelfNormLinear\(6.*expected ρ\(I − RW\)² below keep = 0.5.*{message}"):
        loss.after_step(metrics)


def test_what_draws_asks_for_a_generator():
    assert not Loss(fc_flow(3)).draws and not Loss(fc_flow(3, linear="tracked")).draws
    for loss in (Loss(fc_flow(3), probes=1), Loss(fc_flow(3), debias=1), Loss(fc_flow(3), polish="low-rank")):
        assert loss.draws
    assert Loss(fc_flow(3, linear="sketch")).draws


def scaled_inverse(dimensions, factor):
    """W = I and R = factor·I: I − RW is (1 − factor)·I, and half of the exact gradient of −log|det W| is −½·I."""
    layer = SelfNormLinear(dimensions, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(dimensions))
        layer.weight_inv.copy_(factor * torch.eye(dimensions))
    return layer


@pytest.mark.parametrize(("debias", "keep", "draws"), [(1, 0.5, 2000), (100, 0.3, 100), (100, 0.8, 100)])
def test_debiasing_is_unbiased_for_one_probe_and_any_keep(debias, keep, draws):
    """How many terms there are must not depend on the noise: with one probe that would show."""
    layer = scaled_inverse(20, 0.6)
    loss, x = Loss(Flow(layer), 0.0, debias=debias, debias_keep=keep), torch.zeros(1, 20)
    found = torch.stack(
        [
            torch.autograd.grad(loss(x, generator=torch.Generator().manual_seed(seed))[0], layer.weight)[0].diagonal()
            for seed in range(draws)
        ]
    )
    missed = (found.mean(0) + 0.5).abs() / (found.std(0) / math.sqrt(draws))
    assert missed.max() < 4.5


def test_terms_are_drawn_anew_for_every_layer_and_step(monkeypatch):
    drawn = []

    def draw(*args):
        drawn.append(tuple(draw_terms(*args)))
        return drawn[-1]

    monkeypatch.setattr("selfnorm.objective.draw_terms", draw)
    loss = Loss(Flow(Chain(SelfNormLinear(4), SelfNormLinear(4))), debias=8)
    generator = torch.Generator().manual_seed(0)  # kept over steps, as a caller may
    for _ in range(3):
        for _ in range(2):  # gradient accumulation
            _, metrics = loss(torch.randn(2, 4), generator=generator)
        loss.after_step(metrics)
    assert len(set(drawn)) == 12


def test_the_variance_is_looked_at_again():
    loss = Loss(Flow(SelfNormLinear(4)), debias=1)
    _, metrics = loss(torch.randn(3, 4))
    loss.after_step(metrics)
    loss.load_state_dict(loss.state_dict() | {"steps": torch.tensor(VARIANCE_CHECK - 1)})
    layer = loss.flow.bijection
    with torch.no_grad():
        layer.weight_inv.copy_(3 * torch.linalg.inv(layer.weight))
    loss.after_step(metrics)
    with pytest.raises(InfiniteVarianceError):
        loss.after_step(metrics)


def test_debiasing_draws_nothing_from_the_global_generator():
    loss = Loss(Flow(SelfNormLinear(4)), debias=2)
    before, generator = torch.get_rng_state(), torch.Generator().manual_seed(0)
    _, metrics = loss(torch.ones(3, 4), generator=generator)
    loss.after_step(metrics, generator=generator)  # looks at the variance, too
    assert torch.equal(torch.get_rng_state(), before)


def test_two_losses_of_one_flow_do_not_disturb_each_other():
    flow, x = perturbed(fc_flow(4)), torch.randn(5, 4)
    symmetric, plain = Loss(flow, symmetric=True), Loss(flow)
    values = [float(loss(x)[0].detach()) for loss in (symmetric, plain, symmetric, plain)]
    assert values[0] == values[2] != values[1] == values[3]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Loss(fc_flow(3, linear="exact"), polish="shine"), "polish: expected one of newton-schulz"),
        (lambda: Loss(fc_flow(3), debias=2, debias_keep=1.5), "Loss: expected keep"),
        (lambda: Loss(fc_flow(3))(torch.randn(0, 3)), "Loss: expected at least one example, got none"),
        (
            lambda: Loss(Flow(SelfNormConv2d(1, 3)), polish="tap-mean")(torch.randn(1, 1, 65, 65)),
            "expected images of at most 4096 dimensions",
        ),
    ],
)
def test_what_a_loss_refuses_at_once(build, message):
    with pytest.raises(ValueError, match=message):
        build()

"""Options of a loss: symmetric reconstruction and polish, which keep learned inverses accurate, and debiasing."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from selfnorm import Bijection, Chain, Flow, SelfNormConv2d, SelfNormLinear, SmoothLeakyReLU, Surrogate
from selfnorm.linalg.neumann import InfiniteVarianceError, draw_terms
from selfnorm.models import conv_flow, fc_flow
from selfnorm.objective import VARIANCE_CHECK_EVERY, Loss
from selfnorm.runtime.context import step_context


def perturbed(flow):
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return flow


@pytest.mark.parametrize("make", [lambda: SelfNormLinear(5), lambda: SelfNormConv2d(1, 3, 5)], ids=["linear", "conv"])
def test_symmetric_reconstruction_by_hand(make):
    """½(‖RWx − x‖² + ‖WRz − z‖²), z = Wx without the bias, with x and z constants: no gradient leaves the layer."""
    torch.manual_seed(2)
    flow = perturbed(Flow(make()))
    layer = flow.bijection
    x = torch.randn(4, *((5,) if isinstance(layer, SelfNormLinear) else (1, 4, 3))).requires_grad_()
    with step_context(symmetric=True):
        column = layer.surrogate(x).reconstruction[:, 0]
    _, metrics = Loss(flow, 1.0, symmetric=True)(x.detach())
    torch.testing.assert_close(metrics.reconstruction[0] * x[0].numel(), column.mean().detach())
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
    _, metrics = Loss(flow, 1.0)(h)
    torch.testing.assert_close(metrics.reconstruction[0] * x[0].numel(), layer.reconstruction(h).mean().detach())
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


def test_terms_are_drawn_again_for_every_layer_and_step(monkeypatch):
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
    loss.load_state_dict(loss.state_dict() | {"steps": torch.tensor(VARIANCE_CHECK_EVERY - 1)})
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_symmetric_reconstruction_survives_activation_checkpointing(reentrant):
    class Checkpointed(Bijection):
        reconstruction_names = ("inner",)

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def surrogate(self, x, *, context=None):
            return Surrogate(*checkpoint(lambda x: tuple(self.inner.surrogate(x)), x, use_reentrant=reentrant))

    torch.manual_seed(4)
    layer = perturbed(Flow(SelfNormLinear(5))).bijection
    x, found = torch.randn(6, 5, requires_grad=True), []
    for bijection in (layer, Checkpointed(layer)):
        layer.zero_grad()
        Loss(Flow(bijection), 3.0, symmetric=True)(x)[0].backward()
        found.append([layer.weight.grad.clone(), layer.weight_inv.grad.clone()])
    torch.testing.assert_close(*found)

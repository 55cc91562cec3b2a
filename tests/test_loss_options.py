"""Options of a loss: who takes the likelihood's gradient, and what a loss refuses."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from selfnorm import Bijection, Flow, SelfNormConv2d, SelfNormLinear, Surrogate
from selfnorm.models import fc_flow
from selfnorm.objective import Loss, UnstableObjectiveWarning
from support.oracles import plain_surrogate


def perturbed(flow):
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return flow


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
@pytest.mark.parametrize("make", [lambda: SelfNormLinear(5), lambda: SelfNormConv2d(1, 3, 5)], ids=["linear", "conv"])
def test_gradient_of_a_loss_by_hand(make, inverse_likelihood):
    torch.manual_seed(2)
    flow = perturbed(Flow(make()))
    layer = flow.bijection
    x = torch.randn(4, *((5,) if isinstance(layer, SelfNormLinear) else (1, 4, 3)))
    parameters = list(layer.parameters())
    found = torch.autograd.grad(Loss(flow, 3.0, inverse_likelihood=inverse_likelihood)(x)[0], parameters)
    z, log_det, reconstruction = plain_surrogate(layer, x, inverse_likelihood)
    expected = z.square().flatten(1).sum(1).mean() / 2 - log_det.mean() + 3 * reconstruction.mean()
    torch.testing.assert_close(found, torch.autograd.grad(expected, parameters))


def test_one_sided_is_the_default_and_gives_a_weight_its_exact_gradient():
    flow, x = Flow(SelfNormLinear(5)), torch.randn(7, 5)
    layer = flow.bijection
    with torch.no_grad():
        layer.weight.copy_(torch.randn(5, 5))
        layer.weight_inv.copy_(torch.linalg.inv(layer.weight))
    exact, _ = torch.autograd.grad(-flow.log_prob(x).mean(), [layer.weight, layer.bias])
    (whole,) = torch.autograd.grad(Loss(flow)(x)[0], [layer.weight])
    (half,) = torch.autograd.grad(Loss(flow, inverse_likelihood=True)(x)[0], [layer.weight])
    torch.testing.assert_close(whole, exact)
    torch.testing.assert_close(half, exact / 2)


def test_the_state_of_a_loss_that_counted_steps_still_loads():
    loss = Loss(fc_flow(3))
    loss.load_state_dict(loss.state_dict() | {"steps": torch.tensor(7)})
    assert "steps" not in loss.state_dict()


def test_two_losses_of_one_flow_do_not_disturb_each_other():
    flow, x = perturbed(fc_flow(4)), torch.randn(5, 4)
    paper, one_sided = Loss(flow, inverse_likelihood=True), Loss(flow)
    weights = [parameter for parameter in flow.parameters() if parameter.dim() == 2]
    found = [torch.autograd.grad(loss(x)[0], weights) for loss in (paper, one_sided, paper, one_sided)]
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[3])
    assert not torch.allclose(found[0][0], found[1][0])


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="Loss: expected at least one example, got none"):
        Loss(fc_flow(3))(torch.randn(0, 3))


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_objective_survives_activation_checkpointing(reentrant, inverse_likelihood):
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
        Loss(Flow(bijection), 3.0, inverse_likelihood=inverse_likelihood)(x)[0].backward()
        found.append([layer.weight.grad.clone(), layer.weight_inv.grad.clone()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("probes", [-1, 10_001, 2.5, True, False, 0.0, None, []])
def test_probes_out_of_range(probes):
    with pytest.raises(ValueError, match=r"Loss: expected .*probes.*got"):
        Loss(fc_flow(3), probes=probes)


@pytest.mark.parametrize("value", ["false", None, 1, torch.tensor(True)])
def test_the_objective_is_true_or_false(value):
    with pytest.raises(ValueError, match="Loss: expected inverse_likelihood to be True or False, got"):
        Loss(fc_flow(3), inverse_likelihood=value)


@pytest.mark.parametrize("inverse_likelihood", [True, False])
def test_a_weight_of_zero_warns(inverse_likelihood):
    with pytest.warns(UnstableObjectiveWarning, match="λ = 0, nothing trains the learned inverses"):
        Loss(fc_flow(3), 0.0, inverse_likelihood=inverse_likelihood)


@pytest.mark.parametrize(("weight", "probes", "bound"), [(0.1, 0, "1.25"), (0.05, 8, "1.5")])
def test_a_weight_too_small_for_the_paper_warns(weight, probes, bound):
    with pytest.warns(
        UnstableObjectiveWarning, match=f"λ = {weight:g}, .* second moment below {bound} .*inverse_likelihood=False"
    ):
        Loss(fc_flow(3), weight, probes, inverse_likelihood=True)


def test_a_weight_that_is_no_problem_does_not_warn():
    Loss(fc_flow(3), 0.1)
    Loss(fc_flow(3), 0.13, inverse_likelihood=True)
    Loss(fc_flow(3), 0.1, probes=1, inverse_likelihood=True)
    Loss(fc_flow(3, linear="exact"), 0.1, inverse_likelihood=True)

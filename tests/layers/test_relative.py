"""The relative gradient against its strict derivation, in the augmented matrix [[W, b], [0, 1]]."""

import pytest
import torch
from torch.testing import assert_close

from selfnorm import Chain, ExactLinear, Flow, RelativeLinear, SelfNormLinear, SmoothLeakyReLU
from selfnorm.models import fc_flow
from selfnorm.objective import Loss

D, N = 6, 9


def layer(bias=True, device="cpu"):
    made = RelativeLinear(D, bias)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made.to(device)


def augmented(W, b):
    """A = [[W, b], [0, 1]], which acts on (x, 1)."""
    last = torch.zeros(1, W.shape[1] + 1).to(W)
    last[0, -1] = 1
    return torch.cat([torch.cat([W, b[:, None]], 1), last])


@pytest.mark.parametrize("scale", [1.0, 1 / 64, -3.0])
def test_equals_the_augmented_derivation(device, scale):
    """∂A·AᵀA of the exact loss, log|det A| included, for any scale of the loss."""
    relative = layer(device=device)
    x, weights = torch.randn(N, D, device=device), torch.randn(N, D, device=device)
    z, log_det, _ = relative.surrogate(x)
    (scale * ((z.tanh() * weights).sum() - log_det.mean())).backward()

    A = augmented(relative.weight.detach(), relative.bias.detach()).requires_grad_()
    z = (torch.cat([x, torch.ones(N, 1).to(x)], 1) @ A.T)[:, :D]
    (scale * ((z.tanh() * weights).sum() - torch.linalg.slogdet(A).logabsdet)).backward()
    expected = A.grad @ A.detach().T @ A.detach()
    assert_close(relative.weight.grad, expected[:D, :D], rtol=1e-10, atol=1e-10)
    assert_close(relative.bias.grad, expected[:D, D], rtol=1e-10, atol=1e-10)


def test_the_term_with_the_bias_is_there():
    """Without data only the log-determinant speaks: −W for the weight, and −b for the bias."""
    relative = layer()
    _, log_det, _ = relative.surrogate(torch.randn(N, D))
    (-log_det.mean()).backward()
    assert_close(relative.weight.grad, -relative.weight.detach())
    assert_close(relative.bias.grad, -relative.bias.detach())


def test_without_a_bias_it_is_the_gradient_times_its_gram_matrix():
    relative = layer(bias=False)
    exact = ExactLinear(D, bias=False)
    exact.load_state_dict(relative.state_dict())
    x = torch.randn(N, D)
    for each in (relative, exact):
        z, log_det, _ = each.surrogate(x)
        (z.square().sum(1) / 2 - log_det).mean().backward()
    W = exact.weight.detach()
    assert_close(relative.weight.grad, exact.weight.grad @ W.T @ W, rtol=1e-10, atol=1e-10)


def test_what_is_passed_down_is_the_full_gradient():
    """Layers below a relative one get the gradient of the loss, not a relative one."""
    relative, x = layer(), torch.randn(N, D, requires_grad=True)
    weights = torch.randn(N, D)
    z, log_det, _ = relative.surrogate(x)
    ((z * weights).sum() - log_det.sum()).backward()
    assert_close(x.grad, weights @ relative.weight.detach())


def test_is_a_descent_direction_and_needs_no_factorisation(factorisations):
    """⟨∂A, ∂A·AᵀA⟩ ≥ 0: a small step along it lowers the exact loss."""
    flow = Flow(Chain(layer(), SmoothLeakyReLU(), layer()))
    x = torch.randn(200, D)
    before = -flow.log_prob(x).mean()
    factorisations.clear()
    value, _ = Loss(flow)(x)
    value.backward()
    assert factorisations == []
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter -= 1e-5 * parameter.grad
    assert -flow.log_prob(x).mean() < before


def test_twins_load_each_others_state():
    source = SelfNormLinear(D)
    relative = RelativeLinear(D)
    relative.load_state_dict(source.state_dict())
    assert_close(relative.weight, source.weight)
    ExactLinear(D).load_state_dict(relative.state_dict())
    SelfNormLinear(D).load_state_dict(relative.state_dict())


def test_trains(device):
    torch.manual_seed(1)
    x = (torch.randn(500, 3) @ torch.randn(3, 3) + 2).to(device)
    flow = fc_flow(3, linear="relative").to(device)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    loss = Loss(flow).to(device)
    first = -flow.log_prob(x).mean().item()
    for _ in range(300):
        value, metrics = loss(x)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        loss.after_step(metrics)
    gaussian = torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T))
    assert -flow.log_prob(x).mean() < -gaussian.log_prob(x).mean() + 0.15 < first

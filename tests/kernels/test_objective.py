"""The objective's kernels against the plain objective in float64."""

import pytest
import torch

from selfnorm.kernels.dispatch import used_on
from selfnorm.models import conv_flow, fc_flow
from selfnorm.objective import Loss


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize(("examples", "features", "columns"), [(1, 1, 0), (3, 7, 1), (5, 1300, 2), (130, 4, 3), (1025, 2, 5)])
def test_kernels_compute_the_objective_and_its_gradients(device, examples, features, columns):
    from selfnorm.kernels.objective import objective, objective_gradients

    z, log_det, reconstruction = (torch.randn(shape) for shape in ((examples, features), (3, examples), (examples, columns)))
    weight, dimensions = torch.rand(columns) + 0.5, torch.randint(1, 9, (columns,)).double()
    inputs = [value.requires_grad_() for value in (z, log_det, reconstruction)]
    nll = -(torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1) + log_det.sum(0)).mean()
    errors = reconstruction.mean(0) / dimensions
    value = nll + (weight * dimensions * errors).sum()
    wanted = torch.autograd.grad(3 * value, inputs, allow_unused=True, materialize_grads=True)

    def single(x):
        return x.detach().float().to(device)

    got, parts = objective(*map(single, (z, log_det, reconstruction, weight, dimensions)))
    torch.testing.assert_close(got.double().cpu(), value.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.double().cpu(), torch.cat([nll[None], errors]).detach(), rtol=1e-5, atol=1e-5)
    gradients = objective_gradients(single(z), single(weight), torch.tensor(3.0, dtype=torch.float32, device=device))
    wanted = (wanted[0], wanted[1][1], wanted[2])  # each layer's log_det has the same
    for gradient, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.double().cpu(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["fc", "conv"])
def test_the_loss_is_the_same_with_and_without_kernels(device, kind):
    flow = fc_flow(6) if kind == "fc" else conv_flow((1, 4, 4), 2, 1)
    loss = Loss(flow.float(), penalty=3.0).to(device)
    loss.penalty.weight[0] = 0.25  # each layer its own
    x = torch.randn(5, *((6,) if kind == "fc" else (1, 4, 4)), dtype=torch.float32, device=device)
    results = []
    for where in ((), (device.type,)):
        with used_on(*where):
            value, metrics = loss(x)
            gradients = torch.autograd.grad(value, list(loss.parameters()))
        results.append([value, *metrics, *gradients])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=2e-4, atol=1e-5)

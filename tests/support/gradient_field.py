"""Gradient descent as a flow in the space of parameters: its velocity, and its Jacobian by five-point differences.

With a quadratic log-density the field is a polynomial of degree 3 in the weights. The differences are exact up to degree 4.
"""

import torch


def velocity(loss, x, parameters):
    """Returns −gradient of the loss, as one vector."""
    gradients = torch.autograd.grad(loss(x)[0], parameters)
    return -torch.cat([gradient.flatten() for gradient in gradients])


def jacobian(loss, x):
    """Returns the Jacobian of gradient descent on the loss by all its trainable parameters."""
    parameters = [p for p in loss.parameters() if p.requires_grad]
    columns = []
    for parameter in parameters:
        step = 2e-3 * float(parameter.detach().square().mean().sqrt())
        entries = parameter.data.view(-1)
        for index in range(len(entries)):
            centre = float(entries[index])
            at = {}
            for k in (-2, -1, 1, 2):
                entries[index] = centre + k * step
                at[k] = velocity(loss, x, parameters)
            entries[index] = centre
            columns.append((8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step))
    return torch.stack(columns, 1)


def growth(loss, x, neutral=None):
    """Returns the largest real part of the Jacobian's eigenvalues, other than those of neutral directions (P, K)."""
    matrix = jacobian(loss, x)
    if neutral is not None and neutral.shape[1]:
        assert (matrix @ neutral).abs().max() < 1e-6 * matrix.abs().max() * neutral.abs().max()
        rest = torch.linalg.qr(neutral, mode="complete").Q[:, neutral.shape[1] :]
        matrix = rest.mT @ matrix @ rest
    return float(torch.linalg.eigvals(matrix).real.max())


def independent(columns):
    """Returns an orthonormal basis of the span of some columns."""
    U, singular, _ = torch.linalg.svd(columns, full_matrices=False)
    return U[:, singular > 1e-9 * singular[0]]

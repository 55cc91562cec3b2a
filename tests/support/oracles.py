"""Slow but obvious references: the self-normalizing gradient in plain autograd with detach, and the exact gradient."""

import torch
from torch import Tensor

from selfnorm.linalg.convmatrix import conv_matrix


def half(parameter: Tensor) -> Tensor:
    """Returns the same value with half the gradient."""
    return parameter / 2 + parameter.detach() / 2


def plain_self_normalize(x: Tensor, W: Tensor, R: Tensor, inverse_likelihood: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Returns z, log_det, reconstruction of a self-normalizing layer with matrices W and R, which may be functions of kernels.

    Each line adds one term of equations 10 and 11 of the paper; one-sided, W takes the likelihood whole.
    """
    error = x.detach() @ W.T @ R.T - x.detach()
    reconstruction = error.square().sum(1, keepdim=True)
    if not inverse_likelihood:
        log_det = (W * R.detach().T).sum()
        return x @ W.T, (log_det - log_det.detach()).expand(x.shape[0]), reconstruction
    z = x @ half(W).T  # ½ δ_z xᵀ for W, the full δ_x for x
    through_inverse = z.detach() @ R.T
    z = z - (through_inverse - through_inverse.detach()) @ W.detach().T / 2  # −½ δ_x zᵀ for R, adds nothing
    log_det = ((W * R.detach().T).sum() - (R * W.detach().T).sum()) / 2  # ½ Rᵀ for W, −½ Wᵀ for R
    return z, (log_det - log_det.detach()).expand(x.shape[0]), reconstruction


def dense_matrix(w: Tensor, size: tuple[int, int], geometry) -> Tensor:
    """Returns T(w) (D, D), differentiable in w."""
    return torch.block_diag(*conv_matrix(w, size, geometry))


def plain_surrogate(layer, x: Tensor, inverse_likelihood: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `layer.surrogate(x)` should return, for both kinds of self-normalizing layer."""
    W, R = layer.weight, layer.weight_inv
    if W.dim() == 4:
        size = (x.shape[2], x.shape[3])
        W, R = dense_matrix(W, size, layer.geometry), dense_matrix(R, size, layer.geometry)
    z, log_det, reconstruction = plain_self_normalize(x.flatten(1), W, R, inverse_likelihood)
    return z.reshape(x.shape) + layer.broadcast_bias(), log_det, reconstruction


def exact_log_likelihood(layer, x: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum over the batch of ⟨z, weights⟩ + log|det W|, computed with a dense matrix."""
    W = layer.weight
    if W.dim() == 4:
        W = dense_matrix(W, (x.shape[2], x.shape[3]), layer.geometry)
    z = (x.flatten(1) @ W.T).reshape(x.shape) + layer.broadcast_bias()
    return (z * weights).sum() + x.shape[0] * torch.linalg.slogdet(W).logabsdet

"""Training by the relative gradient: the determinant's gradient cancels instead of being estimated.

The relative gradient of a loss in W is ∂W·WᵀW (Gresele et al., 2020). In it log|det W| contributes W⁻ᵀWᵀW = W: no inverse is
left. With the bias in the augmented matrix A = [[W, b], [0, 1]], whose relative gradient is ∂A·AᵀA and whose log|det A| is
log|det W|, the gradients g_z and g_log_det arriving at z = Wx + b become

    W:  g_zᵀ(zW) + g_log_det·W          b:  g_zᵀ(zb + 1) + g_log_det·b

summed over the batch: since g_z xᵀWᵀW + g_z bᵀW = g_z (Wx + b)ᵀW, each product is of a batch with a matrix, O(D²) per example.
`docs/choosing.md` says when to use this layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfnorm.bijection import Surrogate
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.linear import DenseMap, drop_stored_inverse
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.context import current_step


class RelativeLinear(DenseMap):
    """z = Wx + b, W any invertible D × D matrix, trained by the relative gradient: O(D²) per example, no inverse to keep.

    Parameters: weight (D, D), bias (D,), as in `ExactLinear`. The optimiser gets a descent direction instead of the gradient: ∂W
    preconditioned by WᵀW. `forward` and `inverse` are exact. Gresele et al. (2020), "Relative gradient
    optimization of the Jacobian term in unsupervised deep learning".

    >>> layer = RelativeLinear(3)
    >>> z, log_det, _ = layer.surrogate(torch.randn(5, 3))
    >>> z.shape, log_det.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    surrogate_is_exact = False

    def _plain(self, x: Tensor) -> Surrogate:
        return Surrogate.exact(*_RelativeLinear.apply(x, self.weight, self.bias))

    def _fused(self, x: Tensor) -> Surrogate | None:
        if not usable(x, self.weight, self.bias):
            return None
        from selfnorm.kernels.dense.relative import FusedRelativeLinear

        return Surrogate.exact(*FusedRelativeLinear.apply(x, self.weight, self.bias, current_step()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_stored_inverse(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _RelativeLinear(torch.autograd.Function):
    """x (N, D), W (D, D), b (D,) or None -> Wx + b, zeros (N,), with the gradients above: 4 matrix products in all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        z = F.linear(x, W, b)
        ctx.save_for_backward(z, W, b)
        return z, x.new_zeros(x.shape[0])

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        refuse_second_derivative()
        z, W, b = ctx.saved_tensors
        scale = grad_log_det.sum()
        grad_W = (scale * W).addmm_(grad_z.mT, z @ W)
        grad_b = None if b is None else grad_z.mT @ (z @ b + 1) + scale * b
        return grad_z @ W if ctx.needs_input_grad[0] else None, grad_W, grad_b

"""Training by the relative gradient: the determinant's gradient cancels instead of being estimated.

The relative gradient of a loss in W is ∂W·WᵀW (Gresele et al., 2020). In it log|det W| contributes W⁻ᵀWᵀW = W: no inverse is
left. With the bias in the augmented matrix A = [[W, b], [0, 1]], whose relative gradient is ∂A·AᵀA and whose log|det A| is
log|det W|, the gradients g_z and g_log_det arriving at z = Wx + b become

    W:  g_zᵀ(zW) + g_log_det·W          b:  g_zᵀ(zb + 1) + g_log_det·b

summed over the batch: since g_z xᵀWᵀW + g_z bᵀW = g_z (Wx + b)ᵀW, each product is of a batch with a matrix, O(D²) an example.
The term with b is easily lost, and the derivation needs it. `docs/methods.md` says when to use this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfnorm.bijection import Surrogate
from selfnorm.kernels.dense.factored import Collector, SingleRecord, collector_for
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.linear import (
    DenseMap,
    backward_in_full_precision,
    drop_kept_inverse,
    in_full_precision,
    refuse_second_derivative,
)
from selfnorm.runtime.streams import beside


class RelativeLinear(DenseMap):
    """z = Wx + b, W any invertible D × D matrix, trained by the relative gradient: O(D²) an example, no inverse to keep.

    Parameters: weight (D, D), bias (D,), those of `ExactLinear`. What the optimiser sees is no gradient of the loss but a descent
    direction of it: ∂W preconditioned by WᵀW. `forward` and `inverse` are exact. Gresele et al. (2020), "Relative gradient
    optimization of the Jacobian term in unsupervised deep learning".

    >>> layer = RelativeLinear(3)
    >>> z, log_det, _ = layer.surrogate(torch.randn(5, 3))
    >>> z.shape, log_det.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    surrogate_is_exact = False

    @in_full_precision
    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        self.check_input(x)
        if usable(x, self.weight, self.bias):
            z, log_det = _FusedRelativeLinear.apply(x, self.weight, self.bias, collector_for(self.weight))
        else:
            z, log_det = _RelativeLinear.apply(x, self.weight, self.bias)
        return Surrogate.exact(z, log_det)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_kept_inverse(state_dict, prefix)
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


class _FusedRelativeLinear(torch.autograd.Function):
    """The same by kernels: 3 products in 2 launches; the last, W's gradient, goes to a collector in factors, if there is one.

    Of the bias's gradient, what asks nothing of the way back is made beside the way there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor | None, collector: Collector | None) -> tuple[Tensor, Tensor]:
        from selfnorm.kernels.dense.products import affine
        from selfnorm.kernels.dense.relative import weights

        log_det, u = x.new_empty(2, x.shape[0])  # in one piece: u must live until the branch has written it, as log_det does
        _, z = affine(x, W, b, zeros=log_det)
        if b is None or not ctx.needs_input_grad[2]:
            u = None
        else:
            with beside():  # nobody needs it before the way back
                weights(z, b, out=u)
        ctx.save_for_backward(z, W, b, u)
        ctx.collector, ctx.weight = collector, W
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        refuse_second_derivative()
        from selfnorm.kernels.dense.products import times
        from selfnorm.kernels.dense.relative import bias_gradient

        z, W, b, u = ctx.saved_tensors
        zW, grad_x = times(z, W, grad_z, W) if ctx.needs_input_grad[0] else times(z, W)
        grad_b = None if u is None else bias_gradient(grad_z, u, b, grad_log_det)
        record = SingleRecord(ctx.weight, grad_z, zW, W, False, grad_log_det)
        if ctx.collector is not None and ctx.needs_input_grad[1]:
            ctx.collector.append(record)
            return grad_x, None, grad_b, None
        return grad_x, record.gradients()[0], grad_b, None

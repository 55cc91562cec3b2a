"""The relative gradient of a dense layer, by kernels; `layers.relative` has the formulas and the plain form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfnorm.kernels.dense.bias import bias_gradient, bias_weights
from selfnorm.kernels.dense.factored import SingleGradient, collected_or_multiplied
from selfnorm.kernels.dense.products import affine, times
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.context import StepContext


class FusedRelativeLinear(torch.autograd.Function):
    """x (N, D), W (D, D), b (D,) or None -> Wx + b and zeros (N,), with the relative gradient: 3 products in 2 launches.

    The fourth product, W's gradient, goes to the step's collector as factors, if it has one. The part of the bias's gradient that
    depends on the forward pass only is computed in parallel to it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        # One allocation: u must live until the branch has written it, as log_det does.
        log_det, u = x.new_empty(2, x.shape[0])
        _, z = affine(x, W, b, zeros=log_det)
        if b is None or not ctx.needs_input_grad[2]:
            u = None
        else:
            with step.on_side_stream():  # only the backward pass needs u
                bias_weights(z, b, out=u)
        ctx.save_for_backward(z, W, b, u)
        ctx.collector, ctx.weight = step.collector_for(W), W
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        refuse_second_derivative()
        z, W, b, u = ctx.saved_tensors
        zW, grad_x = times(z, W, grad_z, W) if ctx.needs_input_grad[0] else times(z, W)
        grad_b = None if u is None else bias_gradient(grad_z, u, b, grad_log_det)
        gradient = SingleGradient(ctx.weight, grad_z, zW, W, False, grad_log_det)
        (grad_W,) = collected_or_multiplied(gradient, ctx.collector if ctx.needs_input_grad[1] else None)
        return grad_x, grad_W, grad_b, None

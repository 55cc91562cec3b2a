"""The self-normalizing gradient of a dense layer, by kernels; `layers.selfnorm` has the formulas and the plain form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfnorm.kernels.dense.factored import PairGradient, collected_or_multiplied
from selfnorm.kernels.dense.products import add_penalty, affine, pull_back, reconstruct, times
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.context import StepContext


class FusedSelfNormLinear(torch.autograd.Function):
    """x (N, D), W, R (D, D), b (D,) or None -> Wx + b, zeros (N,), ‖RWx − x‖² (N, 1): 4 products in 3 launches.

    The other 2 products, the weights' gradients, go to the step's collector as factors, if it has one. One-sided, if the input
    needs no gradient, there are 3 products, all in the forward pass: the penalty's part of W's gradient, eR, needs nothing from
    above.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, R: Tensor, b: Tensor | None, inverse_likelihood: bool, step: StepContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_det = x.new_empty(x.shape[0])
        z, out = affine(x, W, b, zeros=log_det)
        with step.on_side_stream(z, x):  # the next layer needs only `out`
            error, squares = reconstruct(z, R, x)
            early = not inverse_likelihood and ctx.needs_input_grad[1] and not ctx.needs_input_grad[0]
            back = times(error, R)[0] if early else None
        ctx.save_for_backward(x, z, error, W, R, back)
        ctx.collector, ctx.weights, ctx.has_bias = step.collector_for(W, R), (W, R), b is not None
        ctx.inverse_likelihood = inverse_likelihood
        return out, log_det, squares

    @staticmethod
    @backward_in_full_precision
    def backward(
        ctx: Any, grad_z: Tensor, grad_log_det: Tensor, grad_reconstruction: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None, None]:
        refuse_second_derivative()
        x, z, error, W, R, back = ctx.saved_tensors
        grad_x = None
        if back is None:
            grad_x, towards_w, towards_r, grad_b = pull_back(
                grad_z, W, R, error, grad_reconstruction, ctx.has_bias, ctx.inverse_likelihood
            )
        else:
            towards_w, towards_r, grad_b = add_penalty(grad_z, error, back, grad_reconstruction, ctx.has_bias)
        W, R = ctx.weights  # the parameters themselves
        gradient = PairGradient(W, R, towards_w, x, towards_r, z, grad_log_det, ctx.inverse_likelihood)
        grad_W, grad_R = collected_or_multiplied(gradient, ctx.collector if all(ctx.needs_input_grad[1:3]) else None)
        return grad_x, grad_W, grad_R, grad_b, None, None

"""The convolution whose inverse is tracked: one kernel for the forward pass and one for R's part, two for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfnorm.kernels.conv.plain import conv_backward, conv_forward
from selfnorm.kernels.dense.tracking import tap_means
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.streams import beside


class FusedTrackedConv2d(torch.autograd.Function):
    """x (N, C, H, W), w, b (C,) or None, R -> w ⋆ x + b, and zeros (N,) whose gradient for w is that of log|det T(w)|.

    R, the tracked inverse, stands for T(w)⁻¹. Its part of the gradient is computed alongside the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, R: Tensor) -> tuple[Tensor, Tensor]:
        # One allocation, so that all memory that lives as long as log_det exists when the branch writes to it.
        log_det, of_log_det = x.new_empty(x.shape[0] + w.numel()).tensor_split([x.shape[0]])
        of_log_det = of_log_det.view(w.shape)
        with beside():  # neither is needed before the end of the step
            tap_means(R, w, (x.shape[2], x.shape[3]), of_log_det, log_det)
        ctx.save_for_backward(x, w, of_log_det)
        return conv_forward(x, w, b)[0], log_det

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        refuse_second_derivative()
        x, w, of_log_det = ctx.saved_tensors
        grad_x, grad_w, grad_b = conv_backward(
            x, w, grad_z, grad_log_det=grad_log_det, inverse_transposed=of_log_det, wants_x=ctx.needs_input_grad[0]
        )
        return grad_x, grad_w, grad_b if ctx.needs_input_grad[2] else None, None

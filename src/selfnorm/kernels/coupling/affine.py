"""The affine map of a coupling, computed by matrix products: an autograd function, and its inverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfnorm.kernels.coupling.choice import NetworkWeights
from selfnorm.kernels.coupling.columns import gather_columns, scatter_columns
from selfnorm.kernels.coupling.head import affine_head, affine_head_backward
from selfnorm.kernels.coupling.hidden import first_layer_backward, last_layer_backward, masked_product, on_tensor_cores
from selfnorm.kernels.coupling.weights import pack_weights, unpack_gradients
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.precision import summed_in_float32


class MatrixAffine(torch.autograd.Function):
    """x, network_input or None, in_bf16, *NetworkWeights -> z = x·exp(log s) + t and log_det = Σ log s (N,).

    log s = 2·tanh(h_even/2) and t = h_odd for the output h of Glow's network, by matrix products over pixels as rows:

        A = gather(input)    H₁ = relu(A·W₁ᵀ + b₁)    H₂ = relu(H₁·W₂ᵀ + b₂)    h = (scatter(H₂·W₃ᵀ) + b₃)·exp(3l)

    and backward, from the gradient Y of scatter(…),

        B = gather(Y)    G₂ = (B·W₃) ⊙ [H₂ > 0]    G₁ = (G₂·W₂) ⊙ [H₁ > 0]    d input = scatter(G₁·W₁)
        dW₃ = BᵀH₂       dW₂ = G₂ᵀH₁               dW₁ = G₁ᵀA                 db = column sums

    With a network_input, all of x (N, C, H, W) is changed. Without one, the first C₁ channels of x are the input, and they stay
    as they are. in_bf16: whether the products take bfloat16 numbers.

    Memory traffic is mostly that of H₁ and H₂, (NHW, D). Forward, each is written once and read once, since bias and ReLU are in
    the products' epilogues. Backward, H₁ is read twice and H₂ once, G₂ is written once and read twice, and G₁ is never stored.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, network_input: Tensor | None, in_bf16: bool, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        z, log_det, kept = _affine_by_products(x, network_input, in_bf16, parameters)
        ctx.save_for_backward(*kept)
        ctx.input_shape = None if network_input is None else network_input.shape
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, columns, h1, h2, h, w1, w2, w3, log_scale = ctx.saved_tensors
        n, channels, height, width = x.shape
        changing = h.shape[1] // 2
        stay = channels - changing
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_y, head_sums = affine_head_backward(grad_z, grad_log_det, x, h, log_scale, grad_x, stay)
        last_columns = gather_columns(grad_y.view(n, height, width, 2 * changing).permute(0, 3, 1, 2), columns.dtype)
        g2, second_sums, grad_w3 = _through_last_layer(last_columns, w3, h2)
        grad_w2 = _float32_product(g2.t(), h1)
        first_sums, grad_w1, input_columns = _through_first_layer(g2, w2, h1, columns, w1)
        if ctx.input_shape is None:
            grad_input = None
            scatter_columns(input_columns, grad_x[:, :stay], add=grad_z[:, :stay])
        else:
            grad_input = torch.empty(ctx.input_shape, dtype=x.dtype, device=x.device)
            scatter_columns(input_columns, grad_input)
        input_channels = stay if grad_input is None else grad_input.shape[1]
        first, first_bias, second_bias, last, last_bias, last_log_scale = unpack_gradients(
            grad_w1, first_sums, second_sums, grad_w3, head_sums, input_channels
        )
        second = grad_w2[:, :, None, None]
        return grad_x, grad_input, None, first, first_bias, second, second_bias, last, last_bias, last_log_scale


def matrix_inverse(z: Tensor, network_input: Tensor | None, weights: NetworkWeights) -> Tensor:
    """Returns the inverse of `MatrixAffine` in float32: x = (z − t)·exp(−log s), without a gradient."""
    return _affine_by_products(z, network_input, False, weights, inverse=True)[0]


def _affine_by_products(
    x: Tensor, network_input: Tensor | None, in_bf16: bool, parameters: Sequence[Tensor], *, inverse: bool = False
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Returns the affine map of x, or its inverse; its log_det; and the tensors that the backward pass needs."""
    weights = NetworkWeights(*(parameter.contiguous() for parameter in parameters))
    stay = weights.first.shape[1] if network_input is None else 0
    w1, b1, w2, b2, w3, w2_across, w3_across = pack_weights(*weights[:5], torch.bfloat16 if in_bf16 else torch.float32)
    columns = gather_columns(x[:, :stay] if network_input is None else network_input, w1.dtype)
    h1 = _relu_layer(columns, w1, b1)
    h2 = _relu_layer(h1, w2, b2)
    last = _float32_product(h2, w3.t())
    z, log_det, h = affine_head(last, weights.last_bias, weights.last_log_scale, x, stay, inverse=inverse)
    return z, log_det, (x, columns, h1, h2, h, w1, w2_across, w3_across, weights.last_log_scale)


def _through_last_layer(columns: Tensor, w3: Tensor, h2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns G₂ = (B·W₃) ⊙ [H₂ > 0], and in parts its column sums and BᵀH₂: in one pass if B has few enough columns."""
    if on_tensor_cores(columns.dtype) and columns.shape[1] <= (64 if columns.dtype == torch.float32 else 128):
        return last_layer_backward(columns, w3, h2)
    g2, sums = masked_product(columns, w3, h2)
    return g2, sums, _float32_product(columns.t(), h2)[None]


def _through_first_layer(g2: Tensor, w2: Tensor, h1: Tensor, columns: Tensor, w1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, in parts, the column sums of G₁ = (G₂·W₂) ⊙ [H₁ > 0], G₁ᵀA and G₁·W₁.

    G₁ is not stored if A has few enough columns.
    """
    if on_tensor_cores(g2.dtype) and columns.shape[1] <= 64:
        return first_layer_backward(g2, w2, h1, columns, w1)
    g1, sums = masked_product(g2, w2, h1)
    return sums, _float32_product(g1.t(), columns)[None], _float32_product(g1, w1)[None]


def _relu_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns relu(x·Wᵀ + b), in one pass: cuBLAS adds the bias and clips before it writes."""
    fused = getattr(torch, "_addmm_activation", None)
    if fused is None:
        return F.relu(torch.addmm(bias, x, weight.t()))
    return fused(bias, x, weight.t(), use_gelu=False)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a·b in float32, for float32 or bfloat16 factors."""
    return a @ b if a.dtype == torch.float32 else summed_in_float32(a, b)

"""The network of a coupling, Glow's 3×3 → ReLU → 1×1 → ReLU → 3×3, in plain PyTorch and as matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selfnorm.kernels.dispatch import usable
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.precision import convolutions_in_tf32, networks_in_bf16, products_in_tf32, summed_in_float32

# Beyond these the kernels' tiles, which hold all taps of all channels, would not fit into registers.
WIDEST_GUIDE, WIDEST_CHANGE = 128, 64


class Weights(NamedTuple):
    """The parameters of a coupling's network: D is its width, C the channels that it scales and shifts."""

    first: Tensor  # (D, C₁, 3, 3)
    first_bias: Tensor
    second: Tensor  # (D, D, 1, 1)
    second_bias: Tensor
    last: Tensor  # (2C, D, 3, 3)
    last_bias: Tensor
    last_log_scale: Tensor  # (2C,)


def read(weights: Weights, guide: Tensor) -> tuple[Tensor, Tensor]:
    """log s = 2·tanh(h/2) from the even channels of the network's output h, and t from the odd ones: (N, C, H, W) each.

    Twice differentiable. With `precision("bf16")` the convolutions are of bfloat16 numbers, and the last one's sum is float32.
    """
    first, first_bias, second, second_bias, last, last_bias, log_scale = weights
    if networks_in_bf16():
        low = torch.bfloat16
        h = F.relu(F.conv2d(guide.to(low), first.to(low), first_bias.to(low), padding=1))
        h = F.relu(F.conv2d(h, second.to(low), second_bias.to(low)))
        h = F.conv2d(h.to(guide.dtype), last.to(low).to(guide.dtype), last_bias, padding=1)
    else:
        h = F.relu(F.conv2d(guide, first, first_bias, padding=1))
        h = F.relu(F.conv2d(h, second, second_bias))
        h = F.conv2d(h, last, last_bias, padding=1)
    # Under autocast the convolutions are in half precision; this product with a parameter brings h back to full.
    h = h * (3 * log_scale).exp()[:, None, None]
    return 2 * torch.tanh(h[:, 0::2] / 2), h[:, 1::2]


def fusable(weights: Weights, x: Tensor, guide: Tensor) -> bool:
    """Whether `MatrixAffine` and `matrix_inverse` can take over from `read`."""
    return (
        usable(x, guide, *weights)
        and not torch.is_autocast_enabled(x.device.type)
        and guide.shape[1] <= WIDEST_GUIDE
        and weights.last.shape[0] <= 2 * WIDEST_CHANGE
    )


def reads_alike() -> bool:
    """Whether products round as the convolutions of `read` do, so that the inverse by the ones undoes the map by the others."""
    return not networks_in_bf16() and products_in_tf32() == convolutions_in_tf32()


class MatrixAffine(torch.autograd.Function):
    """z = x·exp(log s) + t and log_det = Σ log s with log s and t as `read` gives them, by matrix products over pixels as rows.

        A = gather(guide)    H₁ = relu(A·W₁ᵀ + b₁)    H₂ = relu(H₁·W₂ᵀ + b₂)    h = (scatter(H₂·W₃ᵀ) + b₃)·exp(3l)

    and backward, from the gradient Y of scatter(…),

        B = gather(Y)    G₂ = (B·W₃) ⊙ [H₂ > 0]    G₁ = (G₂·W₂) ⊙ [H₁ > 0]    d guide = scatter(G₁·W₁)
        dW₃ = BᵀH₂       dW₂ = G₂ᵀH₁               dW₁ = G₁ᵀA                 db = column sums

    With a guide, x (N, C, H, W) is all changed; without one its first C₁ channels are the guide, and stay.

    H₁ and H₂, (NHW, D), are what costs: each is written once and read once forward (bias and ReLU are in the products'
    epilogues); backward H₁ is read twice and H₂ once, G₂ written once and read twice, G₁ never leaves its kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, guide: Tensor | None, low: bool, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        z, log_det, kept = _by_products(x, guide, low, parameters)
        ctx.save_for_backward(*kept)
        ctx.guide_shape = None if guide is None else guide.shape
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        from selfnorm.kernels.coupling.head import gather, head_backward, scatter
        from selfnorm.kernels.coupling.packing import unpack

        x, columns, h1, h2, h, w1, w2, w3, log_scale = ctx.saved_tensors
        n, channels, height, width = x.shape
        changing = h.shape[1] // 2
        stay = channels - changing
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_y, head_sums = head_backward(grad_z, grad_log_det, x, h, log_scale, grad_x, stay)
        last_columns = gather(grad_y.view(n, height, width, 2 * changing).permute(0, 3, 1, 2), columns.dtype)
        g2, second_sums, grad_w3 = _through_last(last_columns, w3, h2)
        grad_w2 = _product(g2.t(), h1)
        first_sums, grad_w1, guide_columns = _through_first(g2, w2, h1, columns, w1)
        if ctx.guide_shape is None:
            grad_guide = None
            scatter(guide_columns, grad_x[:, :stay], add=grad_z[:, :stay])
        else:
            grad_guide = torch.empty(ctx.guide_shape, dtype=x.dtype, device=x.device)
            scatter(guide_columns, grad_guide)
        guiding = stay if grad_guide is None else grad_guide.shape[1]
        first, first_bias, second_bias, last, last_bias, last_log_scale = unpack(
            grad_w1, first_sums, second_sums, grad_w3, head_sums, guiding
        )
        second = grad_w2[:, :, None, None]
        return grad_x, grad_guide, None, first, first_bias, second, second_bias, last, last_bias, last_log_scale


def matrix_inverse(z: Tensor, guide: Tensor | None, weights: Weights) -> Tensor:
    """What `MatrixAffine` makes z of, by the same products of float32 numbers: (z − t)·exp(−log s), without a gradient."""
    return _by_products(z, guide, False, weights, back=True)[0]


def _by_products(
    x: Tensor, guide: Tensor | None, low: bool, parameters: Sequence[Tensor], *, back: bool = False
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The affine map, or its inverse; its log_det; and what a backward pass needs."""
    from selfnorm.kernels.coupling.head import gather, head
    from selfnorm.kernels.coupling.packing import pack

    weights = Weights(*(parameter.contiguous() for parameter in parameters))
    stay = weights.first.shape[1] if guide is None else 0
    w1, b1, w2, b2, w3, w2_across, w3_across = pack(*weights[:5], torch.bfloat16 if low else torch.float32)
    columns = gather(x[:, :stay] if guide is None else guide, w1.dtype)
    h1 = _hidden(columns, w1, b1)
    h2 = _hidden(h1, w2, b2)
    z, log_det, h = head(_product(h2, w3.t()), weights.last_bias, weights.last_log_scale, x, stay, back=back)
    return z, log_det, (x, columns, h1, h2, h, w1, w2_across, w3_across, weights.last_log_scale)


def _through_last(columns: Tensor, w3: Tensor, h2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """G₂ = (B·W₃) ⊙ [H₂ > 0], and in parts its column sums and BᵀH₂: in one pass if B's columns are few enough."""
    from selfnorm.kernels.coupling.masked import last_backward, masked_product, on_tensor_cores

    if on_tensor_cores(columns.dtype) and columns.shape[1] <= (64 if columns.dtype == torch.float32 else 128):
        return last_backward(columns, w3, h2)
    g2, sums = masked_product(columns, w3, h2)
    return g2, sums, _product(columns.t(), h2)[None]


def _through_first(g2: Tensor, w2: Tensor, h1: Tensor, columns: Tensor, w1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of G₁ = (G₂·W₂) ⊙ [H₁ > 0], in parts: column sums, G₁ᵀA and G₁·W₁; G₁ is not written if A's columns are few enough."""
    from selfnorm.kernels.coupling.masked import first_backward, masked_product, on_tensor_cores

    if on_tensor_cores(g2.dtype) and columns.shape[1] <= 64:
        return first_backward(g2, w2, h1, columns, w1)
    g1, sums = masked_product(g2, w2, h1)
    return sums, _product(g1.t(), columns)[None], _product(g1, w1)[None]


def _hidden(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x·Wᵀ + b), in one pass: cuBLAS adds the bias and clips before it writes."""
    fused = getattr(torch, "_addmm_activation", None)
    if fused is None:
        return F.relu(torch.addmm(bias, x, weight.t()))
    return fused(bias, x, weight.t(), use_gelu=False)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b in float32, of whatever a and b are."""
    return a @ b if a.dtype == torch.float32 else summed_in_float32(a, b)

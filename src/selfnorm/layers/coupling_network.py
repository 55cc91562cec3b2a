"""The network of a coupling, Glow's 3×3 → ReLU → 1×1 → ReLU → 3×3, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfnorm.kernels.coupling.choice import NetworkWeights
from selfnorm.runtime.precision import convolutions_in_tf32, networks_in_bf16, products_in_tf32


def scale_and_shift(weights: NetworkWeights, network_input: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log s = 2·tanh(h/2) from the even channels of the network's output h, and t from the odd ones: (N, C, H, W) each.

    Twice differentiable. With `precision("bf16")` the convolutions are of bfloat16 numbers, and the last one's sum is float32.
    """
    first, first_bias, second, second_bias, last, last_bias, log_scale = weights
    if networks_in_bf16():
        low = torch.bfloat16
        h = F.relu(F.conv2d(network_input.to(low), first.to(low), first_bias.to(low), padding=1))
        h = F.relu(F.conv2d(h, second.to(low), second_bias.to(low)))
        h = F.conv2d(h.to(network_input.dtype), last.to(low).to(network_input.dtype), last_bias, padding=1)
    else:
        h = F.relu(F.conv2d(network_input, first, first_bias, padding=1))
        h = F.relu(F.conv2d(h, second, second_bias))
        h = F.conv2d(h, last, last_bias, padding=1)
    # Under autocast the convolutions are in half precision; this product with a parameter brings h back to full precision.
    h = h * (3 * log_scale).exp()[:, None, None]
    return 2 * torch.tanh(h[:, 0::2] / 2), h[:, 1::2]


def products_round_like_convolutions() -> bool:
    """Returns whether matrix products round as convolutions do, so that an inverse by products undoes a map by convolutions."""
    return not networks_in_bf16() and products_in_tf32() == convolutions_in_tf32()

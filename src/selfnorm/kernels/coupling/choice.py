"""The parameters of a coupling network, and whether kernels can evaluate it. Importing this does not import Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfnorm.kernels.dispatch import usable

# Beyond these the kernels' tiles, which hold all taps of all channels, would not fit into registers.
MAX_INPUT_CHANNELS, MAX_CHANGED_CHANNELS = 128, 64


class NetworkWeights(NamedTuple):
    """The parameters of a coupling network: D is its width, C₁ its input channels, C the channels that it scales and shifts."""

    first: Tensor  # (D, C₁, 3, 3)
    first_bias: Tensor
    second: Tensor  # (D, D, 1, 1)
    second_bias: Tensor
    last: Tensor  # (2C, D, 3, 3)
    last_bias: Tensor
    last_log_scale: Tensor  # (2C,)


def coupling_kernels_fit(weights: NetworkWeights, x: Tensor, network_input: Tensor) -> bool:
    """Returns whether `MatrixAffine` and `matrix_inverse` can compute the map: usable tensors, no autocast, few channels."""
    return (
        usable(x, network_input, *weights)
        and not torch.is_autocast_enabled(x.device.type)
        and network_input.shape[1] <= MAX_INPUT_CHANNELS
        and weights.last.shape[0] <= 2 * MAX_CHANGED_CHANNELS
    )

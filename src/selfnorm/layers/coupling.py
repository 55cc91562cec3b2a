"""Affine maps whose scale and shift a small network computes from other values: a context, or half of the channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfnorm.bijection import Surrogate
from selfnorm.kernels.coupling.choice import NetworkWeights, coupling_kernels_fit
from selfnorm.layers.coupling_network import products_round_like_convolutions, scale_and_shift
from selfnorm.layers.events import sum_event
from selfnorm.layers.fusable import FusableLayer
from selfnorm.runtime.checks import describe, expect_like, expect_shape, positive_int
from selfnorm.runtime.precision import networks_in_bf16


class ConditionalAffine(FusableLayer):
    """z = x·exp(log s) + t with log s and t computed from a context image: log s = 2·tanh(h/2) is within ±2.

    The network is Glow's: 3×3 → ReLU → 1×1 → ReLU → 3×3, `hidden` wide. Its last layer starts at zero, so that the map
    starts as the identity. x: (N, channels, H, W); context: (N, context_channels, H, W).
    """

    notes_rounding = False  # errors of the context pass through the network

    def __init__(self, channels: int, context_channels: int, hidden: int = 512) -> None:
        super().__init__()
        self.channels = positive_int("ConditionalAffine", "channels", channels)
        self.context_channels = positive_int("ConditionalAffine", "context_channels", context_channels)
        self.hidden = positive_int("ConditionalAffine", "hidden", hidden)
        self.network = nn.Sequential(
            nn.Conv2d(context_channels, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, hidden, 1), nn.ReLU()
        )
        self.last = nn.Conv2d(hidden, 2 * channels, 3, padding=1)
        self.last_log_scale = nn.Parameter(torch.zeros(2 * channels))
        nn.init.zeros_(self.last.weight)
        assert self.last.bias is not None
        nn.init.zeros_(self.last.bias)

    def extra_repr(self) -> str:
        return f"{self.channels}, context_channels={self.context_channels}, hidden={self.hidden}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        log_scale, shift = self._scale_and_shift(x, context)
        return x * log_scale.exp() + shift, sum_event(log_scale)

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        log_scale, shift = self._scale_and_shift(z, context)
        return (z - shift) * (-log_scale).exp(), -sum_event(log_scale)

    def _fused_inverse(self, z: Tensor, *, context: Tensor | None) -> Tensor | None:
        expect_shape(self, z, self.channels, "H", "W")
        context = expect_context(self, context, self.context_channels, z)
        weights = self.weights()
        if not _inverse_kernels_fit(weights, z, context):
            return None
        from selfnorm.kernels.coupling.affine import matrix_inverse

        return matrix_inverse(z, context, weights)

    def _fused(self, x: Tensor, *, context: Tensor | None) -> Surrogate | None:
        expect_shape(self, x, self.channels, "H", "W")
        context = expect_context(self, context, self.context_channels, x)
        weights = self.weights()
        if not coupling_kernels_fit(weights, x, context):
            return None
        from selfnorm.kernels.coupling.affine import MatrixAffine

        return Surrogate.exact(*MatrixAffine.apply(x, context, networks_in_bf16(), *weights))

    def weights(self) -> NetworkWeights:
        """Returns the network's parameters, in the order in which they are used."""
        convolutions = (self.network[0], self.network[2], self.last)
        return NetworkWeights._make([*(part for each in convolutions for part in (each.weight, each.bias)), self.last_log_scale])

    def _scale_and_shift(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        expect_shape(self, x, self.channels, "H", "W")
        return scale_and_shift(self.weights(), expect_context(self, context, self.context_channels, x))


class AffineCoupling(FusableLayer):
    """Keeps the first half of the channels, and scales and shifts the other half as a function of it (Dinh et al., 2017; Glow).

    With `context_channels`, the network also reads a context: (N, context_channels, H, W), or (N, context_channels) for the whole
    image.

    >>> layer = AffineCoupling(4, hidden=8)
    >>> z, log_det = layer(torch.randn(5, 4, 6, 6))
    >>> z.shape, log_det.shape
    (torch.Size([5, 4, 6, 6]), torch.Size([5]))
    """

    notes_rounding = True  # through its `affine`

    def __init__(self, channels: int, hidden: int = 512, context_channels: int = 0) -> None:
        super().__init__()
        if not isinstance(channels, int) or channels < 2:
            raise ValueError(f"AffineCoupling: expected at least 2 channels to split, got {channels}")
        if context_channels < 0:
            raise ValueError(f"AffineCoupling: expected context_channels of at least 0, got {context_channels}")
        self.channels = channels
        self.context_channels = context_channels
        self.affine = ConditionalAffine(channels - channels // 2, channels // 2 + context_channels, hidden)

    @property
    def takes_context(self) -> bool:  # type: ignore[override]
        return self.context_channels > 0

    def extra_repr(self) -> str:
        return f"{self.channels}, hidden={self.affine.hidden}, context_channels={self.context_channels}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stay, change, network_input = self._split(x, context)
        change, log_det = self.affine(change, context=network_input)
        return torch.cat([stay, change], dim=1), log_det

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stay, change, network_input = self._split(z, context)
        change, log_det = self.affine.inverse(change, context=network_input)
        return torch.cat([stay, change], dim=1), log_det

    def _fused_inverse(self, z: Tensor, *, context: Tensor | None) -> Tensor | None:
        stay, change, network_input = self._split(z, context)
        weights = self.affine.weights()
        if not _inverse_kernels_fit(weights, z, network_input):
            return None
        from selfnorm.kernels.coupling.affine import matrix_inverse

        if not self.context_channels:
            return matrix_inverse(z, None, weights)
        return torch.cat([stay, matrix_inverse(change, network_input, weights)], dim=1)

    def _fused(self, x: Tensor, *, context: Tensor | None) -> Surrogate | None:
        stay, change, network_input = self._split(x, context)
        weights = self.affine.weights()
        if not coupling_kernels_fit(weights, x, network_input):
            return None
        from selfnorm.kernels.coupling.affine import MatrixAffine

        if not self.context_channels:
            return Surrogate.exact(*MatrixAffine.apply(x, None, networks_in_bf16(), *weights))
        change, log_det = MatrixAffine.apply(change, network_input, networks_in_bf16(), *weights)
        return Surrogate.exact(torch.cat([stay, change], dim=1), log_det)

    def _split(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the half that stays, the half that changes, and the network's input."""
        expect_shape(self, x, self.channels, "H", "W")
        stay, change = x[:, : self.channels // 2], x[:, self.channels // 2 :]
        if not self.context_channels:
            return stay, change, stay
        return stay, change, torch.cat([stay, expect_context(self, context, self.context_channels, x)], dim=1)


def _inverse_kernels_fit(weights: NetworkWeights, z: Tensor, network_input: Tensor) -> bool:
    """Returns whether kernels can compute the inverse, and round as the plain forward pass does."""
    return products_round_like_convolutions() and coupling_kernels_fit(weights, z, network_input)


def expect_context(layer: nn.Module, context: Tensor | None, channels: int, x: Tensor) -> Tensor:
    """Returns the context as an image of x's size; a vector for the whole image is expanded to it."""
    if context is not None and context.dim() == 2:
        context = context[:, :, None, None].expand(-1, -1, *x.shape[2:])
    expected = (x.shape[0], channels, *x.shape[2:])
    if context is None or tuple(context.shape) != expected:
        got = "none" if context is None else f"{tuple(context.shape)}"
        raise ValueError(
            f"{describe(layer)}: expected a context of shape {expected} or {expected[:2]}, got {got}; pass it as context="
        )
    expect_like(layer, context, x)
    return context

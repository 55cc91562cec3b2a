"""Per-channel normalisation that is initialised from data and then trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from selfnorm.bijection import Surrogate
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.fusable import FusableLayer
from selfnorm.runtime.checks import describe, positive_int
from selfnorm.runtime.rounding import note_affine


class ActNorm(FusableLayer):
    """z = (x + shift)·exp(log_scale) for each channel; `initialize` makes a first batch zero-mean and unit-variance.

    Parameters: shift (C,), log_scale (C,), both 0 at first, which is the identity (Kingma & Dhariwal, 2018). Takes (N, C) or
    (N, C, …).
    """

    takes_context = False
    notes_rounding = True
    initialized: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = positive_int("ActNorm", "channels", channels)
        self.shift = nn.Parameter(torch.zeros(channels))
        self.log_scale = nn.Parameter(torch.zeros(channels))
        self.register_buffer("initialized", torch.tensor(False))

    def extra_repr(self) -> str:
        return f"{self.channels}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shift, log_scale = self._parameters_for(x)
        z = (x + shift) * log_scale.exp()
        note_affine(shift, log_scale, z)
        return z, self._log_det(x)

    def _fused(self, x: Tensor, *, context: Tensor | None) -> Surrogate | None:
        self._parameters_for(x)  # raises ValueError for a wrong shape
        if not usable(x, self.shift, self.log_scale):
            return None
        from selfnorm.kernels.elementwise.actnorm import FusedActNorm

        return Surrogate.exact(*FusedActNorm.apply(x, self.shift, self.log_scale))

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._undo(z), -self._log_det(z)

    def _fused_inverse(self, z: Tensor, *, context: Tensor | None) -> Tensor | None:
        return self._undo(z)  # without the log-determinant it is cheap enough

    def _undo(self, z: Tensor) -> Tensor:
        shift, log_scale = self._parameters_for(z)
        return z * (-log_scale).exp() - shift

    @torch.no_grad()
    def initialize(self, x: Tensor, *, context: Tensor | None = None) -> None:
        self._parameters_for(x)  # raises ValueError for a wrong shape
        if self.initialized:
            return
        values = x.transpose(0, 1).flatten(1)
        if not torch.isfinite(values).all():
            raise ValueError(f"{describe(self)}: expected finite values to initialise from, got non-finite ones")
        if values.shape[1] < 2:
            raise ValueError(f"{describe(self)}: expected 2 or more values per channel to initialise from, got {values.shape[1]}")
        self.shift.copy_(-values.mean(1))
        self.log_scale.copy_(-(values.std(1, correction=0) + 1e-6).log())
        self.initialized.fill_(True)

    def _parameters_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dim() < 2 or x.shape[1] != self.channels:
            raise ValueError(f"{describe(self)}: expected an input of shape (N, {self.channels}, …), got {tuple(x.shape)}")
        shape = (self.channels, *[1] * (x.dim() - 2))
        return self.shift.view(shape), self.log_scale.view(shape)

    def _log_det(self, x: Tensor) -> Tensor:
        return (math.prod(x.shape[2:]) * self.log_scale.sum()).repeat(x.shape[0])

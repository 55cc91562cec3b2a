"""The base distributions of flows: `StandardNormal`, and what a module must define to be one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from selfnorm.runtime.checks import event_shape, expect_shape
from selfnorm.runtime.shapes import ShapeMemory


class StandardNormal(ShapeMemory):
    """Standard normal N(0, I) over latents of a shape; if that is None, over the shape of the last latent scored.

    In the latter case the shape is part of the state dict, so that a flow can sample once it has loaded its state.
    """

    _like: Tensor

    def __init__(self, shape: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self._fixed = None if shape is None else event_shape("StandardNormal", shape)
        self._seen = self._fixed
        # Carries device and dtype along with .to().
        self.register_buffer("_like", torch.zeros(()), persistent=False)

    def leave_meta(self, like: Tensor) -> None:
        """Moves this module, if it was built on the meta device, to where a tensor is."""
        if self._like.is_meta:
            self._like = torch.zeros((), dtype=like.dtype, device=like.device)

    def extra_repr(self) -> str:
        return "" if self._fixed is None else f"{self._fixed}"

    def log_prob(self, z: Tensor) -> Tensor:
        """Returns log N(z; 0, I), (N,)."""
        self.remember_shape(z)
        dimensions = math.prod(z.shape[1:])
        return -0.5 * z.square().flatten(1).sum(1) - 0.5 * dimensions * math.log(2 * math.pi)

    def remember_shape(self, z: Tensor) -> None:
        """Remembers the latent's shape for `sample`; raises ValueError if the shape was fixed and differs."""
        if self._fixed is not None:
            expect_shape(self, z, *self._fixed)
        elif self._seen != z.shape[1:]:
            self._seen = tuple(z.shape[1:])

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns n draws, (n, *shape), on this module's device and in its dtype."""
        if self._seen is None:
            raise ValueError(
                "StandardNormal: expected a known latent shape, got none; build the flow with base=StandardNormal(shape), "
                "score a batch of data once, or load the state of a flow that has"
            )
        return torch.randn(n, *self._seen, generator=generator, device=self._like.device, dtype=self._like.dtype)


class BaseDistribution(Protocol):
    """Interface of the latent distribution of a `Flow`, which must be a module as well."""

    def log_prob(self, z: Tensor) -> Tensor: ...

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor: ...

"""Bijections that only rearrange elements: squeeze, flatten, and the split of a multiscale flow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfnorm.bijection import Bijection, Chain, Surrogate, joined_names, located
from selfnorm.runtime.checks import describe, event_shape, expect_shape, positive_int
from selfnorm.runtime.context import current_step
from selfnorm.runtime.shapes import ShapeMemory


class Squeeze(Bijection):
    """Moves space into channels: (N, C, H, W) → (N, C·f², H/f, W/f). Each f × f patch of a channel becomes f² channels."""

    takes_context = False
    notes_rounding = True

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.factor = positive_int("Squeeze", "factor", factor)

    def extra_repr(self) -> str:
        return f"{self.factor}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        f = self.factor
        expect_shape(self, x, "C", "H", "W")
        n, channels, height, width = x.shape
        if height % f or width % f:
            raise ValueError(f"{describe(self)}: expected height and width divisible by {f}, got {height}×{width}")
        patches = x.reshape(n, channels, height // f, f, width // f, f).permute(0, 1, 3, 5, 2, 4)
        return patches.reshape(n, channels * f * f, height // f, width // f), x.new_zeros(n)

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        f = self.factor
        expect_shape(self, z, "C", "H", "W")
        n, channels, height, width = z.shape
        if channels % (f * f):
            raise ValueError(f"{describe(self)}: expected channels divisible by {f * f}, got {channels}")
        patches = z.reshape(n, channels // (f * f), f, f, height, width).permute(0, 1, 4, 2, 5, 3)
        return patches.reshape(n, channels // (f * f), height * f, width * f), z.new_zeros(n)


class Flatten(ShapeMemory, Bijection):
    """(N, *shape) → (N, D). Without a shape it takes any, and `inverse` returns to the last shape seen, before or after it was
    saved and loaded."""

    takes_context = False
    notes_rounding = True

    def __init__(self, shape: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self._fixed = None if shape is None else event_shape("Flatten", shape)
        self._seen = self._fixed

    def extra_repr(self) -> str:
        return "" if self._fixed is None else f"{self._fixed}"

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self._fixed is not None:
            expect_shape(self, x, *self._fixed)
        elif x.dim() < 2:
            raise ValueError(f"{describe(self)}: expected a batch of examples (N, …), got {tuple(x.shape)}")
        elif self._seen != x.shape[1:]:
            self._seen = tuple(x.shape[1:])
        return x.flatten(1), x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self._seen is None:
            raise ValueError(
                f"{describe(self)}: expected a known input shape, got none; build it as Flatten(shape), or call it once on data"
            )
        expect_shape(self, z, math.prod(self._seen))
        return z.reshape(z.shape[0], *self._seen), z.new_zeros(z.shape[0])


class Split(ShapeMemory, Bijection):
    """Sends half of the channels through `rest` and factors out the other half. The latent is one flat vector.

    The half that is factored out goes through `prior`, if given: a bijection whose context is the half that stays. The caller's
    context goes to `rest`. The whole is a bijection x → [flatten(rest(x₁)), flatten(prior(x₂ | x₁))] with one Jacobian. Takes an
    even number of channels.

    If `rest` ends with `Flatten(shape)`, `inverse` knows the shape from the start. If its latent is not flat, `inverse` uses the
    shape that the last forward pass saw, which is part of the state dict.

    >>> from selfnorm import Chain
    >>> split = Split(Chain(Squeeze()))
    >>> z, log_det = split(torch.randn(5, 4, 6, 6))
    >>> z.shape
    torch.Size([5, 144])
    """

    notes_rounding = True  # through its parts

    def __init__(self, rest: Bijection, prior: Bijection | None = None) -> None:
        super().__init__()
        for name, part in (("rest", rest), ("prior", prior)):
            if not isinstance(part, Bijection) and (name == "rest" or part is not None):
                raise ValueError(f"Split: expected {name} to be a Bijection, got {type(part).__name__}")
        self.rest = rest
        self.prior = Chain() if prior is None else prior  # the empty chain is the identity

    @property
    def takes_context(self) -> bool:  # type: ignore[override]
        return self.rest.takes_context  # the context of `prior` is the half that stays

    @property
    def reconstruction_names(self) -> tuple[str, ...]:
        return joined_names((("rest", self.rest), ("prior", self.prior)))

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stay, leave = self._halves(x)
        with located("rest"):
            done, log_det = self.rest(stay, context=context)
        with located("prior"):
            leave, prior_log_det = self.prior(leave, context=stay)
        return self._flatten(done, leave), log_det + prior_log_det

    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        step, (stay, leave) = current_step(), self._halves(x)
        with located("rest"):
            done, log_det, reconstruction = step.surrogate_of(self.rest, stay, context)
        with located("prior"):
            leave, prior_log_det, prior_reconstruction = step.surrogate_of(self.prior, leave, stay)
        step.join()
        columns = torch.cat([reconstruction, prior_reconstruction], dim=1)
        return Surrogate(self._flatten(done, leave), log_det + prior_log_det, columns)

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        done, leave = self._unflatten(z)
        with located("rest"):
            stay, log_det = self.rest.inverse(done, context=context)
        with located("prior"):
            leave, prior_log_det = self.prior.inverse(leave.reshape(stay.shape), context=stay)
        return torch.cat([stay, leave], dim=1), log_det + prior_log_det

    def approx_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        done, leave = self._unflatten(z)
        with located("rest"):
            stay = self.rest.approx_inverse(done, context=context)
        with located("prior"):
            leave = self.prior.approx_inverse(leave.reshape(stay.shape), context=stay)
        return torch.cat([stay, leave], dim=1)

    def refined_inverse(self, z: Tensor, *, context: Tensor | None = None, tolerance: float | None = None) -> Tensor:
        done, leave = self._unflatten(z)
        with located("rest"):
            stay = self.rest.refined_inverse(done, context=context, tolerance=tolerance)
        with located("prior"):
            leave = self.prior.refined_inverse(leave.reshape(stay.shape), context=stay, tolerance=tolerance)
        return torch.cat([stay, leave], dim=1)

    def auto_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        done, leave = self._unflatten(z)
        with located("rest"):
            stay = self.rest.auto_inverse(done, context=context)
        with located("prior"):
            leave = self.prior.auto_inverse(leave.reshape(stay.shape), context=stay)
        return torch.cat([stay, leave], dim=1)

    def initialize(self, x: Tensor, *, context: Tensor | None = None) -> None:
        stay, leave = self._halves(x)
        with located("rest"):
            self.rest.initialize(stay, context=context)
        with located("prior"):
            self.prior.initialize(leave, context=stay)

    def after_step(self, *, generator: torch.Generator | None = None) -> None:
        with located("rest"):
            self.rest.after_step(generator=generator)
        with located("prior"):
            self.prior.after_step(generator=generator)

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dim() < 2 or x.shape[1] % 2:
            raise ValueError(f"Split: expected an even number of channels (N, C, …), got {tuple(x.shape)}")
        stay, leave = x.chunk(2, dim=1)
        return stay, leave

    def _flatten(self, done: Tensor, leave: Tensor) -> Tensor:
        if done.dim() > 2 and done.shape[1:] != self._seen:
            self._seen = tuple(done.shape[1:])
        return torch.cat([done.flatten(1), leave.flatten(1)], dim=1)

    def _unflatten(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if z.dim() != 2 or z.shape[1] % 2:
            raise ValueError(f"Split: expected a flat latent (N, D) with D even, got {tuple(z.shape)}")
        done, leave = z.chunk(2, dim=1)
        if self._seen is not None:
            if done.shape[1] != math.prod(self._seen):
                expected = 2 * math.prod(self._seen)
                raise ValueError(f"Split: expected a flat latent (N, {expected}), got {tuple(z.shape)}")
            done = done.reshape(z.shape[0], *self._seen)
        return done, leave

"""`Flow`: a density made of a bijection and a base distribution, to score, train and sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from selfnorm.bijection import Bijection, Chain, InverseTracker, Surrogate
from selfnorm.runtime.checks import event_shape, expect_finite, expect_float, expect_shape
from selfnorm.runtime.context import current_step
from selfnorm.runtime.shapes import ShapeMemory

Inverse = Literal["learned", "exact", "refined"]


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


class Flow(nn.Module):
    """A density over x: z = bijection(x) follows the base distribution, N(0, I) unless another is given.

    base: a module with `log_prob(z) -> (N,)` and `sample(n, generator=None) -> z`.

    >>> from selfnorm import Chain, SelfNormLinear, SmoothLeakyReLU
    >>> flow = Flow(Chain(SelfNormLinear(2), SmoothLeakyReLU(), SelfNormLinear(2)))
    >>> x = torch.randn(8, 2)
    >>> flow.log_prob(x).shape, flow.sample(3).shape
    (torch.Size([8]), torch.Size([3, 2]))
    """

    def __init__(self, bijection: Bijection, base: nn.Module | BaseDistribution | None = None) -> None:
        super().__init__()
        if not isinstance(bijection, Bijection):
            raise ValueError(f"Flow: expected a Bijection, got {type(bijection).__name__}")
        self.bijection = bijection
        made = StandardNormal() if base is None else base
        if not isinstance(made, nn.Module) or not all(hasattr(made, name) for name in ("log_prob", "sample")):
            raise ValueError(
                f"Flow: expected base to be a module with log_prob(z) and sample(n, generator=None), got {type(base).__name__}"
            )
        self.base = cast(BaseDistribution, made)

    @property
    def reconstruction_names(self) -> tuple[str, ...]:
        """The path in `bijection` of the layer behind each column of `surrogate(x).reconstruction`."""
        return self.bijection.reconstruction_names

    @property
    def surrogate_is_exact(self) -> bool:
        """Whether `surrogate(x).log_det` is log p(x), as it is if every layer trains by its exact log-determinant."""
        return all(layer.surrogate_is_exact for layer in self._layers().values())

    @property
    def draws_after_step(self) -> bool:
        """Whether a layer draws random numbers in `after_step`."""
        return any(layer.draws_after_step for layer in self._layers().values())

    def inverse_trackers(self) -> dict[str, InverseTracker]:
        """Returns the layers that update a stored inverse after each step, by their path in `bijection`."""
        trackers = {name: layer.inverse_tracker for name, layer in self._layers().items()}
        return {name: tracker for name, tracker in trackers.items() if tracker is not None}

    def log_prob(self, x: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Returns log p(x), (N,): exact. Linear layers factorise their weight once; further batches cost no factorisation."""
        z, log_det = self._encode("log_prob", x, context)
        log_prob = self._base_log_prob(z) + log_det
        if torch.isnan(log_prob).any():
            raise ValueError(f"Flow.log_prob: expected numbers, got NaN from the base distribution {type(self.base).__name__}")
        return log_prob

    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        """Returns the training surrogate: `log_det` includes the base's log-density. It is made to be differentiated and is not a
        likelihood.

        loss = −log_det.mean() + λ·reconstruction.sum(1).mean()
        """
        expect_float("Flow.surrogate", x)
        step = current_step()
        z, log_det, reconstruction = step.surrogate_of(self.bijection, x, context)
        step.join()
        return Surrogate(z, self._base_log_prob(z) + log_det, reconstruction)

    def split_preprocessing(self) -> tuple[Chain, Flow]:
        """Returns the leading layers without parameters, and a flow of the rest; both share their layers with this flow.

        Training can preprocess many batches at once: `rest.surrogate(preprocessing(x))` is this flow's surrogate of x without the
        log-determinant of the preprocessing.
        """
        if not isinstance(self.bijection, Chain):
            return Chain(), self
        trained = [next(layer.parameters(), None) is not None for layer in self.bijection]
        preprocessing = trained.index(True) if True in trained else len(trained)
        return Chain(*list(self.bijection)[:preprocessing]), Flow(Chain(*list(self.bijection)[preprocessing:]), self.base)

    def encode(self, x: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Maps x → z, exactly."""
        return self._encode("encode", x, context)[0]

    def decode(self, z: Tensor, inverse: Inverse = "learned", *, context: Tensor | None = None) -> Tensor:
        """Maps z → x by the learned inverse, the exact one, or the learned one refined until it is exact to a tolerance."""
        if inverse not in get_args(Inverse):
            raise ValueError(f"Flow.decode: expected inverse to be one of {', '.join(get_args(Inverse))}, got {inverse!r}")
        expect_float("Flow.decode", z)
        if inverse == "learned":
            x = self.bijection.approx_inverse(z, context=context)
        elif inverse == "refined":
            x = self.bijection.refined_inverse(z, context=context)
        else:
            x = self.bijection.inverse(z, context=context)[0]
        expect_finite(f"Flow.decode(inverse={inverse!r})", "result", x, self._non_finite_parameters)
        return x

    @torch.no_grad()
    def sample(
        self,
        n: int,
        inverse: Inverse = "learned",
        generator: torch.Generator | None = None,
        *,
        context: Tensor | None = None,
    ) -> Tensor:
        """Returns n draws of x, without gradient.

        "learned" is the cheapest, and only as accurate as the learned inverse; "exact" samples from p(x).
        """
        return self.decode(self._draw(n, generator), inverse, context=context)

    def sample_and_log_prob(
        self,
        n: int,
        inverse: Inverse = "exact",
        generator: torch.Generator | None = None,
        *,
        context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns n draws of x and the exact log p(x) of each, (n,), for any kind of inverse. Differentiable."""
        x = self.decode(self._draw(n, generator), inverse, context=context)
        return x, self.log_prob(x, context=context)

    def initialize(self, x: Tensor, *, context: Tensor | None = None) -> None:
        """Initialises layers from a first batch of data (`ActNorm`); call it once, before the first step."""
        expect_float("Flow.initialize", x)
        expect_finite("Flow.initialize", "input", x)
        self.bijection.initialize(x, context=context)

    def after_step(self, *, generator: torch.Generator | None = None) -> None:
        """Runs the layers' hooks; call it after each optimiser step. `generator` is for layers that draw random numbers."""
        self.bijection.after_step(generator=generator)

    def _layers(self) -> dict[str, Bijection]:
        return {name: module for name, module in self.bijection.named_modules() if isinstance(module, Bijection)}

    def _draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        if n < 0:
            raise ValueError(f"Flow.sample: expected a number of samples of at least 0, got {n}")
        return self.base.sample(n, generator=generator)

    def _base_log_prob(self, z: Tensor) -> Tensor:
        log_prob = self.base.log_prob(z)
        if log_prob.shape != z.shape[:1]:
            raise ValueError(
                f"Flow: expected {type(self.base).__name__}.log_prob(z) to give one number for each example, shape "
                f"{tuple(z.shape[:1])}, got {tuple(log_prob.shape)}"
            )
        return log_prob

    def _non_finite_parameters(self) -> str:
        names = [name for name, value in self.named_parameters() if not torch.isfinite(value).all()]
        return f"; non-finite parameters: {', '.join(names)}" if names else ""

    def _encode(self, method: str, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        expect_float(f"Flow.{method}", x)
        expect_finite(f"Flow.{method}", "input", x)
        z, log_det = self.bijection(x, context=context)
        expect_finite(f"Flow.{method}", "latent", z, self._non_finite_parameters)
        expect_finite(f"Flow.{method}", "log-determinant", log_det, self._non_finite_parameters)
        return z, log_det

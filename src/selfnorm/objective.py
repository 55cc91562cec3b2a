"""`Loss`, the training objective: the mean surrogate NLL, plus the penalty for reconstruction errors (`selfnorm.penalties`)."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfnorm.base import StandardNormal
from selfnorm.bijection import Chain
from selfnorm.flow import Flow
from selfnorm.kernels.dispatch import usable
from selfnorm.linalg.learned import LearnedInverse, is_learned_inverse
from selfnorm.penalties import GECO, MDMM, Fixed, Penalty
from selfnorm.runtime.checks import expect_batch, whole_number
from selfnorm.runtime.context import step_context

MAX_PROBES = 10_000

__all__ = ["GECO", "MDMM", "Fixed", "Loss", "Metrics", "Penalty", "UnstableObjectiveWarning"]


class Metrics(NamedTuple):
    """The figures of a step, on the device and without gradient. Those of several steps are stacked, one row per step.

    surrogate:       mean of −`Surrogate.log_det`; not a likelihood.
    reconstruction:  (K,) ‖RWh − h‖²/D of each self-normalizing layer, averaged over the batch; with probes, plus its average
                     over them.
    """

    surrogate: Tensor
    reconstruction: Tensor


class UnstableObjectiveWarning(UserWarning):
    """Issued for a λ with which `Loss` cannot keep learned inverses accurate: 0, or too small for the paper's objective."""


class Loss(nn.Module):
    """−mean(surrogate log-likelihood) + penalty(reconstruction errors). To use DDP or `torch.compile`, wrap this module.

    penalty:             a `Penalty`, or a number λ for `Fixed(λ)`.
    probes:              number of white-noise vectors that each self-normalizing layer also reconstructs, at each step. Data
                         leaves R undetermined in directions in which it does not vary; noise varies in all.
    inverse_likelihood:  whether R takes half of the likelihood's gradient, as in the paper. By default W takes all of it and R
                         learns from the reconstruction alone, which no small second moment of the input destabilises
                         (docs/stability.md).

    >>> from selfnorm.models import fc_flow
    >>> loss = Loss(fc_flow(3), penalty=10.0)
    >>> value, metrics = loss(torch.randn(8, 3))
    >>> value.shape, metrics.reconstruction.shape
    (torch.Size([]), torch.Size([2]))
    """

    def __init__(self, flow: Flow, penalty: Penalty | float = 1.0, probes: int = 0, *, inverse_likelihood: bool = False) -> None:
        super().__init__()
        self.flow = flow
        self.penalty = penalty if isinstance(penalty, Penalty) else Fixed(penalty)
        self.penalty.attach(len(flow.reconstruction_names))
        self.probes = whole_number("Loss", "probes", probes)
        if self.probes > MAX_PROBES:
            raise ValueError(f"Loss: expected at most {MAX_PROBES:,} probes, got {probes}")
        if self.probes and not flow.reconstruction_names:
            warnings.warn(f"Loss: probes={probes} has no effect: no layer of the flow learns its inverse", stacklevel=2)
        if not isinstance(inverse_likelihood, bool):
            raise ValueError(f"Loss: expected inverse_likelihood to be True or False, got {inverse_likelihood!r}")
        self.inverse_likelihood = inverse_likelihood
        if type(self.penalty) is Fixed and flow.reconstruction_names:  # other penalties move their λ
            self._warn_of_small_weight()
        for name, layer in zip(flow.reconstruction_names, self._layers(), strict=True):
            if not (is_learned_inverse(layer) if probes else hasattr(layer, "example_shape")):
                raise ValueError(
                    f"Loss: expected layer {name}, which has a reconstruction, to have an `example_shape`, and with probes "
                    f"all of `linalg.learned.LearnedInverse`, got {type(layer).__name__}"
                )
        self._shapes: list[tuple[int, ...]] = []
        self._dimensions = torch.zeros(0)

    def forward(
        self, x: Tensor, *, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Metrics]:
        """Returns the loss of a batch, and its parts. Probes are drawn from `generator`."""
        return self.without_preprocessing(self.flow, x, context=context, generator=generator)

    def without_preprocessing(
        self, flow: Flow, x: Tensor, *, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Metrics]:
        """Returns the loss of the rest of `Flow.split_preprocessing`, without the log-determinant of the preprocessing."""
        expect_batch(self, x)
        flow.expect_context("surrogate", context)
        if len(x) == 0:
            raise ValueError("Loss: expected at least one example, got none")
        with step_context(inverse_likelihood=self.inverse_likelihood):
            if self._fits_kernel(flow, x):
                return self._by_kernel(flow, x, context)
            return self._by_torch(flow, x, context, generator)

    def _by_kernel(self, flow: Flow, x: Tensor, context: Tensor | None) -> tuple[Tensor, Metrics]:
        from selfnorm.kernels.objective import FusedObjective

        chain = flow.bijection if isinstance(flow.bijection, Chain) else Chain(flow.bijection)
        found = chain.surrogate_by_layer(x, context=context)
        assert isinstance(flow.base, StandardNormal)
        flow.base.remember_shape(found.z)
        dimensions = self._dimensions_of(self._layers(), x)
        value, parts = FusedObjective.apply(*found, self.penalty.reconstruction_weight, dimensions)
        return value, Metrics(parts[0], parts[1:])

    def _by_torch(
        self, flow: Flow, x: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Metrics]:
        surrogate, layers = flow.surrogate(x, context=context), self._layers()
        dimensions = self._dimensions_of(layers, x)
        error = surrogate.reconstruction.mean(0) / dimensions
        if self.probes and layers:
            error = error + torch.stack([self._probe(layer, x, generator) for layer in layers]) / dimensions
        nll = -surrogate.log_det.mean()
        return nll + self.penalty(error, dimensions), Metrics(nll.detach(), error.detach())

    @property
    def draws(self) -> bool:
        """Whether the loss or a layer draws random numbers, and so needs a generator."""
        return self.probes > 0 or self.flow.draws_after_step

    def after_step(self, metrics: Metrics, *, generator: torch.Generator | None = None) -> None:
        """Updates multipliers and trackers; call it after each optimiser step. Trackers wait for the device."""
        self.penalty.after_step(metrics.reconstruction)
        self.flow.after_step(generator=generator)

    def _fits_kernel(self, flow: Flow, x: Tensor) -> bool:
        """Returns whether the objective's kernel can compute the loss: a fixed λ, no probes, and a standard normal base."""
        usual = type(self.penalty) is Fixed and type(flow.base) is StandardNormal and not self.probes
        return usual and usable(x, self.penalty.reconstruction_weight if len(self.penalty.reconstruction_weight) else None)

    def _warn_of_small_weight(self) -> None:
        """Warns of a λ that trains no inverse, or with which the paper's objective loses inputs of unit second moment
        (docs/stability.md)."""
        weight, noise = float(self.penalty.reconstruction_weight.max()), float(self.probes > 0)
        if weight == 0:
            line = "with λ = 0, nothing trains the learned inverses, nor the gradients that rely on them. Use a λ above 0"
        elif self.inverse_likelihood and 8 * weight * (1 + noise) <= 1:
            line = (
                f"with λ = {weight:g}, the paper's objective (inverse_likelihood=True) loses the learned inverse of every layer "
                f"whose input has a second moment below {1 / (8 * weight) - noise:.3g} in some direction. Use "
                "inverse_likelihood=False, which has no such bound, or a larger λ"
            )
        else:
            return
        warnings.warn(f"Loss: {line}", UnstableObjectiveWarning, stacklevel=3)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(prefix + "steps", None)  # counted by earlier versions for settings that are gone
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _layers(self) -> list[LearnedInverse]:
        return [self.flow.bijection.get_submodule(name) for name in self.flow.reconstruction_names]  # type: ignore[misc]

    def _dimensions_of(self, layers: list[LearnedInverse], x: Tensor) -> Tensor:
        # Made only if a shape changed: a copy from the host cannot be part of a captured step.
        shapes = [layer.example_shape for layer in layers]
        if shapes != self._shapes or self._dimensions.device != x.device or self._dimensions.dtype != x.dtype:
            self._shapes, self._dimensions = shapes, x.new_tensor([math.prod(shape) for shape in shapes])
        return self._dimensions

    def _probe(self, layer: LearnedInverse, x: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(self.probes, *layer.example_shape, generator=generator, device=x.device, dtype=x.dtype)
        return layer.reconstruction(noise).mean()

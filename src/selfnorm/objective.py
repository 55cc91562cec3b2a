"""`Loss`, the training objective: the mean surrogate NLL, plus the penalty for reconstruction errors (`selfnorm.penalties`)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfnorm.bijection import Chain, located
from selfnorm.flow import Flow, StandardNormal
from selfnorm.kernels.dispatch import usable
from selfnorm.linalg.learned import LearnedInverse, is_learned_inverse, likelihood_shares
from selfnorm.linalg.neumann import draw_terms, expect_finite_variance, expect_probability, neumann_tail, spectral_radius
from selfnorm.linalg.polish import expect_polish, expect_tap_mean, polish_inverse
from selfnorm.penalties import GECO, MDMM, Fixed, Penalty
from selfnorm.runtime.checks import expect_batch, positive_int
from selfnorm.runtime.context import step_context
from selfnorm.runtime.seeds import HostGenerators

__all__ = ["GECO", "MDMM", "Fixed", "Loss", "Metrics", "Penalty"]

VARIANCE_CHECK_EVERY = 100  # steps between two checks that debiasing has a finite variance


class Metrics(NamedTuple):
    """The figures of a step, on the device and without gradient. Those of several steps are stacked, one row per step.

    surrogate:       mean of −`Surrogate.log_det`; not a likelihood.
    reconstruction:  (K,) mean squared error ‖RWh − h‖²/D of each self-normalizing layer, with probes; if symmetric, half of it
                     plus half of ‖WRz − z‖²/D.
    """

    surrogate: Tensor
    reconstruction: Tensor


class Loss(nn.Module):
    """−mean(surrogate log-likelihood) + penalty(reconstruction errors). To use DDP or `torch.compile`, wrap this module.

    penalty:       a `Penalty`, or a number λ for `Fixed(λ)`.
    probes:        number of white-noise vectors that each self-normalizing layer also reconstructs, at each step. Data leaves R
                   undetermined in directions in which it does not vary; noise varies in all.
    inverse_likelihood:  whether R takes half of the likelihood's gradient, as in the paper. By default W takes all of it, and R
                   learns from the reconstruction alone, which no small second moment destabilises (docs/stability.md).
    symmetric:     reconstruct z from Rz as well: the mean of ‖RWx − x‖² and ‖WRz − z‖², with x and z constant.
    polish:        a method of `selfnorm.linalg.polish`, which moves R towards W⁻¹ after every `polish_every` steps.
    debias:        number of white-noise vectors that estimate W⁻ᵀ − Rᵀ at each step (`linalg.neumann`); 0 for none.
    debias_keep:   q, the probability of one more term in that estimate. Every 100 steps, ρ(I − RW)² < q is checked.

    >>> from selfnorm.models import fc_flow
    >>> loss = Loss(fc_flow(3), penalty=10.0)
    >>> value, metrics = loss(torch.randn(8, 3))
    >>> value.shape, metrics.reconstruction.shape
    (torch.Size([]), torch.Size([2]))
    """

    steps: Tensor

    def __init__(
        self,
        flow: Flow,
        penalty: Penalty | float = 1.0,
        probes: int = 0,
        *,
        inverse_likelihood: bool = False,
        symmetric: bool = False,
        polish: str | None = None,
        polish_every: int = 100,
        debias: int = 0,
        debias_keep: float = 0.5,
    ) -> None:
        super().__init__()
        self.flow = flow
        self.penalty = penalty if isinstance(penalty, Penalty) else Fixed(penalty)
        self.penalty.attach(len(flow.reconstruction_names))
        self.probes = positive_int("Loss", "probes", probes) if probes else 0
        self.polish, self.polish_every = polish, positive_int("Loss", "polish_every", polish_every)
        self.debias = positive_int("Loss", "debias", debias) if debias else 0
        self.debias_keep = expect_probability("Loss", debias_keep)
        self.inverse_likelihood, self.symmetric = inverse_likelihood, symmetric
        for name, layer in zip(flow.reconstruction_names, self._layers(), strict=True):
            if not (is_learned_inverse(layer) if probes or debias or polish else hasattr(layer, "example_shape")):
                raise ValueError(
                    f"Loss: expected layer {name}, which has a reconstruction, to have an `example_shape`, and with probes, "
                    f"debias or polish all of `linalg.learned.LearnedInverse`, got {type(layer).__name__}"
                )
        if polish is not None:
            expect_polish(polish, self._layers())
        # A resumed run must polish and check at the same steps, so their count is state, mirrored on the host.
        self._counts = polish is not None or debias > 0
        self._host_steps = 0
        self._host_generators = HostGenerators()
        if self._counts:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
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
        if len(x) == 0:
            raise ValueError("Loss: expected at least one example, got none")
        with step_context(inverse_likelihood=self.inverse_likelihood, symmetric=self.symmetric):
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
        value = nll + self.penalty(error, dimensions)
        if self.debias:
            of_w, _ = likelihood_shares(self.inverse_likelihood)  # of Rᵀ, which W has already
            value = value - of_w * sum(self._tail(layer, x, generator) for layer in layers)
        return value, Metrics(nll.detach(), error.detach())

    @property
    def draws(self) -> bool:
        """Whether the loss or a layer draws random numbers, and so needs a generator."""
        return bool(self.probes or self.debias) or self.polish == "low-rank" or self.flow.draws_after_step

    def after_step(self, metrics: Metrics, *, generator: torch.Generator | None = None) -> None:
        """Updates multipliers, trackers and polish; call it after each optimiser step. Trackers wait for the device."""
        self.penalty.after_step(metrics.reconstruction)
        self.flow.after_step(generator=generator)
        if not self._counts:
            return
        self.steps += 1
        self._host_steps += 1
        self._host_generators.restart(self._host_steps)
        polish = self.polish if self._host_steps % self.polish_every == 0 else None
        look = self.debias and self._host_steps % VARIANCE_CHECK_EVERY == 1
        for name, layer in zip(self.flow.reconstruction_names, self._layers(), strict=True):
            with located(f"layer {name}"):
                if polish is not None:
                    polish_inverse(layer, polish, generator)
                if look:
                    radius = spectral_radius(layer, layer.example_shape, generator=generator)
                    expect_finite_variance(layer, radius, self.debias_keep)

    def _fits_kernel(self, flow: Flow, x: Tensor) -> bool:
        """Returns whether the objective's kernel can compute the loss: the paper's penalty, on a standard normal base."""
        usual = type(self.penalty) is Fixed and type(flow.base) is StandardNormal and not (self.probes or self.debias)
        return usual and usable(x, self.penalty.reconstruction_weight if len(self.penalty.reconstruction_weight) else None)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self._counts:
            self._host_steps = int(self.steps)
            self._host_generators.restart(self._host_steps)

    def _layers(self) -> list[LearnedInverse]:
        return [self.flow.bijection.get_submodule(name) for name in self.flow.reconstruction_names]  # type: ignore[misc]

    def _dimensions_of(self, layers: list[LearnedInverse], x: Tensor) -> Tensor:
        # Made only if a shape changed: a copy from the host cannot be part of a captured step.
        shapes = [layer.example_shape for layer in layers]
        if shapes != self._shapes or self._dimensions.device != x.device or self._dimensions.dtype != x.dtype:
            self._shapes, self._dimensions = shapes, x.new_tensor([math.prod(shape) for shape in shapes])
            if self.polish == "tap-mean":  # now that sizes are known
                for layer in layers:
                    expect_tap_mean(layer)
        return self._dimensions

    def _probe(self, layer: LearnedInverse, x: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(self.probes, *layer.example_shape, generator=generator, device=x.device, dtype=x.dtype)
        return layer.reconstruction(noise).mean()

    def _tail(self, layer: LearnedInverse, x: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(self.debias, *layer.example_shape, generator=generator, device=x.device, dtype=x.dtype)
        terms = draw_terms(self.debias, self.debias_keep, self._host_generators.derive(generator))
        return neumann_tail(layer, noise, terms=terms, keep=self.debias_keep)

"""The objective: mean surrogate NLL plus the price of reconstruction errors, and the rules that set that price.

A layer's reconstruction error ‖RWh − h‖² keeps its learned inverse R honest. How much it weighs is a `Penalty`: a fixed λ, as in
most of the paper, or a Lagrange multiplier for each layer, which grows while the layer misses a tolerance and falls once it meets
it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm.bijection import Chain, located
from selfnorm.flow import Flow, StandardNormal
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.linear import refuse_second_derivative
from selfnorm.layers.selfnorm import SelfNormConv2d, SelfNormLinear
from selfnorm.linalg.neumann import draw_terms, expect_finite_variance, expect_probability, neumann_tail, spectral_radius
from selfnorm.linalg.polish import expect_polish, expect_tap_mean, polish_inverse
from selfnorm.penalties import GECO, MDMM, Fixed, Penalty
from selfnorm.runtime.checks import count, expect_batch

__all__ = ["GECO", "MDMM", "Fixed", "Loss", "Metrics", "Penalty"]

VARIANCE_CHECK = 100  # steps between two looks at whether debiasing has a finite variance


class Metrics(NamedTuple):
    """What a step tells the loop, on the device and without gradient. Of several steps it is stacked, a row for each.

    surrogate:       mean of −`Surrogate.log_det`; not a likelihood.
    reconstruction:  (K,) mean squared error ‖RWh − h‖²/D of each self-normalizing layer, probes added; if symmetric, half of it
                     with half of ‖WRz − z‖²/D.
    """

    surrogate: Tensor
    reconstruction: Tensor


class Loss(nn.Module):
    """What training minimises: −mean(surrogate log-likelihood) + penalty(reconstruction errors). Wrap *this* in DDP or compile.

    penalty:  a `Penalty`, or a number for `Fixed`.
    probes:   how many white-noise vectors each self-normalizing layer also has to reconstruct, at each step. Data leaves R
              free in directions in which it does not vary; noise has none.
    symmetric:     reconstruct z from Rz, too: the mean of ‖RWx − x‖² and ‖WRz − z‖², whose x and z are both constants.
    polish:        a method of `selfnorm.linalg.polish`, which moves R towards W⁻¹ after every `polish_every` steps.
    debias:        how many white-noise vectors estimate, at each step, what Rᵀ lacks of W⁻ᵀ (`linalg.neumann`); 0 for none.
    debias_keep:   q, the probability of one more term in that estimate. It is checked now and then that ρ(I − RW)² < q.

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
        self.probes = count("Loss", "probes", probes) if probes else 0
        self.polish, self.polish_every = polish, count("Loss", "polish_every", polish_every)
        self.debias, self.debias_keep = count("Loss", "debias", debias) if debias else 0, expect_probability("Loss", debias_keep)
        self.symmetric = symmetric
        if polish is not None:
            expect_polish(polish, self._layers())
        # What happens every so many steps must happen at the same ones after a resume: the count is state, which the host knows.
        self._counts = polish is not None or debias > 0
        self._host_steps = self._uses = 0  # steps, and uses of the host's generator since the last
        if self._counts:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._shapes: list[tuple[int, ...]] = []
        self._dimensions = torch.zeros(0)

    def forward(
        self, x: Tensor, *, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Metrics]:
        """The loss of a batch, and its parts; `generator` is what the probes are drawn from."""
        return self.of(self.flow, x, context=context, generator=generator)

    def of(
        self, flow: Flow, x: Tensor, *, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Metrics]:
        """The same for what `Flow.in_two` leaves of the flow, whose loss lacks the front's log-determinant."""
        expect_batch(self, x)
        if len(x) == 0:
            raise ValueError("Loss: expected at least one example, got none; there is no mean over nothing")
        layers = self._layers()
        for layer in layers:
            layer.symmetric = self.symmetric  # another loss of the same flow may have it otherwise
        if self._is_plain(flow, x):
            chain = flow.bijection if isinstance(flow.bijection, Chain) else Chain(flow.bijection)
            found = chain.surrogate_by_layer(x, context=context)
            assert isinstance(flow.base, StandardNormal)
            flow.base.see(found.z)
            value, parts = _Objective.apply(*found, self.penalty.reconstruction_weight, self._dimensions_of(layers, x))
            return value, Metrics(parts[0], parts[1:])
        surrogate = flow.surrogate(x, context=context)
        dimensions = self._dimensions_of(layers, x)
        error = surrogate.reconstruction.mean(0) / dimensions
        if self.probes and layers:
            error = error + torch.stack([self._probe(layer, x, generator) for layer in layers]) / dimensions
        nll = -surrogate.log_det.mean()
        value = nll + self.penalty(error, dimensions)
        if self.debias:
            value = value - sum(self._tail(layer, x, generator) for layer in layers) / 2  # each has ½Rᵀ already
        return value, Metrics(nll.detach(), error.detach())

    @property
    def draws(self) -> bool:
        """Whether there is a use for a generator."""
        layers = (getattr(module, "draws", False) for module in self.flow.modules())
        return bool(self.probes or self.debias) or self.polish == "low-rank" or any(layers)

    def after_step(self, metrics: Metrics, *, generator: torch.Generator | None = None) -> None:
        """Call after each optimiser step, with what its `forward` gave. Reads the device where there are trackers or checks."""
        self.penalty.after_step(metrics.reconstruction)
        self.flow.after_step(generator=generator)
        if not self._counts:
            return
        self.steps += 1
        self._host_steps, self._uses = self._host_steps + 1, 0
        polish = self.polish if self._host_steps % self.polish_every == 0 else None
        look = self.debias and self._host_steps % VARIANCE_CHECK == 1
        for name, layer in zip(self.flow.reconstruction_names, self._layers(), strict=True):
            with located(f"layer {name}"):
                if polish is not None:
                    polish_inverse(layer, polish, generator)
                if look:
                    radius = spectral_radius(layer, layer.example_shape, generator=generator)
                    expect_finite_variance(layer, radius, self.debias_keep)

    def _is_plain(self, flow: Flow, x: Tensor) -> bool:
        """Whether the loss is one that a kernel knows: the paper's, on a standard normal base."""
        usual = type(self.penalty) is Fixed and type(flow.base) is StandardNormal and not (self.probes or self.debias)
        return usual and usable(x, self.penalty.reconstruction_weight if len(self.penalty.reconstruction_weight) else None)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self._counts:
            self._host_steps, self._uses = int(self.steps), 0

    def _layers(self) -> list[SelfNormLinear | SelfNormConv2d]:
        return [self.flow.bijection.get_submodule(name) for name in self.flow.reconstruction_names]  # type: ignore[misc]

    def _dimensions_of(self, layers: list[SelfNormLinear | SelfNormConv2d], x: Tensor) -> Tensor:
        # Made only when something changed, since a copy from the host would break into a captured step.
        shapes = [layer.example_shape for layer in layers]
        if shapes != self._shapes or self._dimensions.device != x.device or self._dimensions.dtype != x.dtype:
            self._shapes, self._dimensions = shapes, x.new_tensor([math.prod(shape) for shape in shapes])
            if self.polish == "tap-mean":  # now that sizes are known, rather than after so many steps
                for layer in layers:
                    expect_tap_mean(layer)
        return self._dimensions

    def _probe(self, layer: SelfNormLinear | SelfNormConv2d, x: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(self.probes, *layer.example_shape, generator=generator, device=x.device, dtype=x.dtype)
        return layer.reconstruction(noise).mean()

    def _tail(self, layer: SelfNormLinear | SelfNormConv2d, x: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(self.debias, *layer.example_shape, generator=generator, device=x.device, dtype=x.dtype)
        terms = draw_terms(self.debias, self.debias_keep, self._host_generator(generator))
        return neumann_tail(layer, noise, terms=terms, keep=self.debias_keep)

    def _host_generator(self, generator: torch.Generator | None) -> torch.Generator | None:
        """A new one for each use, for what the host must know and must not wait for a device's generator to tell.

        It follows from the given one's seed, but not from that alone: it must not repeat the noise that comes from there, nor
        itself, from layer to layer or from step to step.
        """
        if generator is None:
            return None
        self._uses += 1
        words = (generator.initial_seed() % 2**64, self._host_steps, self._uses)
        seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
        return torch.Generator().manual_seed(seed >> 1)


class _Objective(torch.autograd.Function):
    """z, log_dets (L, N), reconstruction (N, K), λ (K,), D (K,) -> the loss; nll and the K errors (1 + K,), without gradient."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, log_dets: Tensor, reconstruction: Tensor, weight: Tensor, dimensions: Tensor
    ) -> tuple[Tensor, Tensor]:
        from selfnorm.kernels.objective import objective

        ctx.save_for_backward(z, weight)
        ctx.layers = len(log_dets)
        ctx.set_materialize_grads(False)  # or zeros are made for the one that has none
        value, parts = objective(z, log_dets, reconstruction, weight, dimensions)
        ctx.mark_non_differentiable(parts)
        return value, parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None, None]:
        from selfnorm.kernels.objective import objective_gradients

        refuse_second_derivative()
        z, weight = ctx.saved_tensors
        grad_z, grad_log_det, grad_reconstruction = objective_gradients(z, weight, grad)
        return grad_z, grad_log_det.expand(ctx.layers, -1), grad_reconstruction, None, None

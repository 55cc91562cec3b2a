"""Penalties: the cost of reconstruction errors, and the rules that set their weight λ.

A layer's reconstruction error ‖RWh − h‖² keeps its learned inverse R close to W⁻¹. Its weight in the loss is fixed, as in most of
the paper (`Fixed`), or a Lagrange multiplier for each layer that grows while the layer misses a tolerance and shrinks once the
layer meets it (`GECO`, `MDMM`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm.runtime.aliases import accepts_old_names


class Penalty(nn.Module):
    """The cost of K reconstruction errors per dimension. Abstract: `forward` is pure, `after_step` moves the multipliers.

    Buffer: reconstruction_weight (K,), λ of each layer. Its former name, `weight`, still works for arguments, for reading, and in
    the state of older checkpoints.
    """

    reconstruction_weight: Tensor

    @accepts_old_names(weight="reconstruction_weight")
    def __init__(self, reconstruction_weight: float) -> None:
        super().__init__()
        self._initial_weight = _positive(type(self).__name__, "reconstruction_weight", reconstruction_weight, zero=True)

    @property
    def weight(self) -> Tensor:
        """The old name of `reconstruction_weight`."""
        return self.reconstruction_weight

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.reconstruction_weight = value

    def attach(self, layers: int) -> None:
        """Makes the state for a flow with that many self-normalizing layers."""
        self.register_buffer("reconstruction_weight", torch.full((layers,), self._initial_weight))

    def forward(self, error: Tensor, dimensions: Tensor) -> Tensor:
        """Returns the penalty, from the layers' mean squared errors per dimension (K,) and their dimensions (K,)."""
        raise NotImplementedError

    def after_step(self, error: Tensor) -> None:
        """Moves the multipliers, given the errors of the step that was taken.

        Must not wait for the device. An error is NaN if its step failed or changed no weight: leave its multiplier unchanged.
        """

    @torch.no_grad()
    def raise_weight(self, factor: float) -> None:
        """Multiplies every λ, as a rollback after a divergence does."""
        self.reconstruction_weight.mul_(factor)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if prefix + "weight" in state_dict:
            state_dict[prefix + "reconstruction_weight"] = state_dict.pop(prefix + "weight")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class Fixed(Penalty):
    """Σ λ·‖RWh − h‖², the paper's penalty: summed over dimensions, averaged over the batch, one λ for all layers."""

    @accepts_old_names(weight="reconstruction_weight")
    def __init__(self, reconstruction_weight: float = 1.0) -> None:
        super().__init__(reconstruction_weight)

    def forward(self, error: Tensor, dimensions: Tensor) -> Tensor:
        return (self.reconstruction_weight * dimensions * error).sum()


class GECO(Penalty):
    """Σ λ·C with C = ‖RWh − h‖²/D − κ for each layer, λ ← λ·exp(η·C̄), C̄ a moving average (Rezende & Viola, 2018).

    The tolerance κ and the error that λ multiplies are per dimension, so λ is about D times a fixed λ. It falls again once κ is
    met, within `bounds`. The loss shows λ·C̄ and has the gradient of λ·C. Keller et al. (2021, table 5)
    used it without a tolerance: λ could only grow.

    Buffers besides reconstruction_weight: average (K,), C̄; started, whether it has seen a first value.
    """

    average: Tensor
    started: Tensor

    @accepts_old_names(weight="reconstruction_weight")
    def __init__(
        self,
        reconstruction_weight: float = 1e4,
        tolerance: float = 1e-4,
        rate: float = 10.0,
        decay: float = 0.99,
        bounds: tuple[float, float] = (1e-3, 1e8),
    ) -> None:
        super().__init__(reconstruction_weight)
        self.tolerance = _positive("GECO", "tolerance", tolerance, zero=True)
        self.rate = _positive("GECO", "rate", rate)
        if not 0 <= decay < 1:
            raise ValueError(f"GECO: expected decay in [0, 1), got {decay}")
        if not 0 < bounds[0] <= reconstruction_weight <= bounds[1]:
            raise ValueError(
                "GECO: expected 0 < bounds[0] ≤ reconstruction_weight ≤ bounds[1], "
                f"got bounds {bounds} and reconstruction_weight {reconstruction_weight}"
            )
        self.decay, self.bounds = decay, bounds

    def attach(self, layers: int) -> None:
        super().attach(layers)
        self.register_buffer("average", torch.zeros(layers))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, error: Tensor, dimensions: Tensor) -> Tensor:
        constraint = error - self.tolerance
        correction = (self._averaged(constraint) - constraint).detach()
        return (self.reconstruction_weight * (constraint + correction)).sum()

    @torch.no_grad()
    def after_step(self, error: Tensor) -> None:
        known = torch.isfinite(error)  # a failed step changes nothing
        self.average.copy_(torch.where(known, self._averaged(error - self.tolerance), self.average))
        self.started.fill_(True)
        # An error of thousands must not move λ past its bounds in one step, nor make exp() overflow.
        factor = (self.rate * self.average).clamp(max=1.0).exp()
        self.reconstruction_weight.copy_(
            torch.where(known, (self.reconstruction_weight * factor).clamp(*self.bounds), self.reconstruction_weight)
        )

    def _averaged(self, constraint: Tensor) -> Tensor:
        blend = self.decay * self.average + (1 - self.decay) * constraint
        return torch.where(self.started, blend, constraint)


class MDMM(Penalty):
    """Σ λC + (c/2)·max(C, 0)², C as in `GECO`: the modified differential method of multipliers (Platt & Barr, 1987).

    λ ← max(0, λ + η·C) is gradient ascent; the quadratic term, on the violated side only, damps the oscillation.
    """

    @accepts_old_names(weight="reconstruction_weight")
    def __init__(
        self, reconstruction_weight: float = 1e4, tolerance: float = 1e-4, rate: float = 1e5, damping: float = 1e7
    ) -> None:
        super().__init__(reconstruction_weight)
        self.tolerance = _positive("MDMM", "tolerance", tolerance, zero=True)
        self.rate = _positive("MDMM", "rate", rate)
        self.damping = _positive("MDMM", "damping", damping, zero=True)

    def forward(self, error: Tensor, dimensions: Tensor) -> Tensor:
        constraint = error - self.tolerance
        return (self.reconstruction_weight * constraint + self.damping / 2 * constraint.clamp(min=0).square()).sum()

    @torch.no_grad()
    def after_step(self, error: Tensor) -> None:
        moved = (self.reconstruction_weight + self.rate * (error - self.tolerance)).clamp(min=0)
        self.reconstruction_weight.copy_(
            torch.where(torch.isfinite(moved), moved, self.reconstruction_weight)
        )  # a failed step changes nothing


def _positive(who: str, name: str, value: float, *, zero: bool = False) -> float:
    number = float(value)
    if not (number >= 0 if zero else number > 0) or math.isinf(number):
        raise ValueError(f"{who}: expected a finite {name} {'of at least' if zero else 'above'} 0, got {value}")
    return number

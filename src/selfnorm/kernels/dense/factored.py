"""Weight gradients of dense layers as factors.

A fused layer leaves one of these with the step's `GradientCollector`; `train.adam` applies it, multiplying where it updates.
Importing this module does not import Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfnorm.kernels.dispatch import usable
from selfnorm.linalg.iterations import transposed
from selfnorm.linalg.learned import likelihood_shares
from selfnorm.runtime.collector import AdamArguments, FactoredGradient, GradientCollector, Moments


@dataclass(frozen=True)
class PairGradient:
    """The gradients of a self-normalizing layer, with `inverse_likelihood` and without:

    ∂W = towards_wᵀ x + ½Σscale·Rᵀ,  ∂R = towards_rᵀ z − ½Σscale·Wᵀ
    ∂W = towards_wᵀ x + Σscale·Rᵀ,   ∂R = towards_rᵀ z
    """

    W: nn.Parameter
    R: nn.Parameter
    towards_w: Tensor
    x: Tensor
    towards_r: Tensor
    z: Tensor
    scale: Tensor
    inverse_likelihood: bool

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self.W, self.R

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.towards_w, self.x, self.towards_r, self.z, self.scale

    @torch.no_grad()
    def multiplied(self) -> list[Tensor]:
        of_w, of_r = likelihood_shares(self.inverse_likelihood)
        grad_w = _multiplied(self.towards_w, self.x, self.R, True, self.scale, of_w)
        if not of_r:
            return [grad_w, self.towards_r.mT @ self.z]
        return [grad_w, _multiplied(self.towards_r, self.z, self.W, True, self.scale, -of_r)]

    def update_by_kernel(self, moments: Sequence[Moments], adam: AdamArguments) -> None:
        """Takes one step of Adam for W and R, in place, by one kernel that multiplies the factors itself."""
        from selfnorm.kernels.dense.adam import adam_pair

        adam_pair(self.W, self.R, (moments[0], moments[1]), *self.factors, self.inverse_likelihood, adam)


@dataclass(frozen=True)
class SingleGradient:
    """∂W = aᵀb + Σscale·M, or Σscale·Mᵀ: M = W for the relative gradient, Mᵀ = Rᵀ for a tracked inverse R."""

    W: nn.Parameter
    a: Tensor
    b: Tensor
    addend: Tensor
    addend_transposed: bool
    scale: Tensor

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.W,)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return self.a, self.b, self.addend, self.scale

    @torch.no_grad()
    def multiplied(self) -> list[Tensor]:
        return [_multiplied(self.a, self.b, self.addend, self.addend_transposed, self.scale, 1.0)]

    def update_by_kernel(self, moments: Sequence[Moments], adam: AdamArguments) -> None:
        """Takes one step of Adam for W, in place, by one kernel that multiplies the factors itself."""
        from selfnorm.kernels.dense.adam import adam_single

        adam_single(self.W, moments[0], self.a, self.b, self.addend, self.addend_transposed, self.scale, 1.0, adam)


def collected_or_multiplied(gradient: FactoredGradient, collector: GradientCollector | None) -> Sequence[Tensor | None]:
    """Returns the gradient of each parameter, or None for each if there is a collector, which takes the factors instead."""
    if collector is None:
        return gradient.multiplied()
    collector.append(gradient)
    return [None] * len(gradient.parameters)


def _multiplied(a: Tensor, b: Tensor, addend: Tensor, addend_transposed: bool, scale: Tensor, factor: float) -> Tensor:
    """Returns aᵀb + factor·Σscale·M with M the addend, transposed or not."""
    if usable(a, b, addend, scale):
        from selfnorm.kernels.dense.gradient import gradient_from_factors

        return gradient_from_factors(a, b, addend, addend_transposed, scale, factor)
    term = transposed(addend) if addend_transposed else addend.clone()
    return term.mul_(factor * scale.sum()).addmm_(a.mT, b)

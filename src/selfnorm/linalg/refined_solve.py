"""Solves Wx = z by an approximate inverse R and a fixed number of refinements, with the derivatives of the exact solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfnorm.runtime.precision import full_float32


@dataclass(frozen=True)
class RefinedSolver:
    """Solves Wx = z for a linear map W that depends on a weight.

    apply:           (x, weight) -> Wx.
    approx_inverse:  z -> Rz, where R is a constant.
    steps:           the number of steps x ← x + R(z − Wx), after x = Rz.
    """

    apply: Callable[[Tensor, Tensor], Tensor]
    approx_inverse: Callable[[Tensor], Tensor]
    steps: int

    def solve(self, z: Tensor, weight: Tensor) -> Tensor:
        x = self.approx_inverse(z)
        for _ in range(self.steps):
            x = x + self.approx_inverse(z - self.apply(x, weight))
        return x

    def transposed(self) -> RefinedSolver:
        """Returns the solver of Wᵀx = z. Its result is the transpose of this one's, so it is as accurate."""
        return RefinedSolver(
            lambda x, weight: _transposed(lambda v: self.apply(v, weight), x),
            lambda z: _transposed(self.approx_inverse, z),
            self.steps,
        )


class RefinedSolve(torch.autograd.Function):
    """apply(z, weight, solver) -> x = W⁻¹z, with derivatives of any order.

    Differentiating the refinements themselves would be wrong: x depends on W, but its first approximation Rz does not. Instead
    ∂z = W⁻ᵀ∂x and ∂W = −∂z xᵀ, where W⁻ᵀ is solved in the same way.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, solver: RefinedSolver) -> Tensor:
        x = solver.solve(z, weight)
        ctx.save_for_backward(x, weight)
        ctx.solver = solver
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        solver: RefinedSolver = ctx.solver
        with full_float32():
            grad_z: Tensor = RefinedSolve.apply(grad, weight, solver.transposed())
            if not ctx.needs_input_grad[1]:
                return grad_z, None, None
            pull_back = torch.func.vjp(lambda w: solver.apply(x, w), weight)[1]
            return grad_z, -pull_back(grad_z)[0], None


def _transposed(linear: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """Returns Aᵀz for a linear map v -> Av that keeps shapes."""
    transposed: Tensor = torch.func.vjp(linear, torch.zeros_like(z))[1](z)[0]
    return transposed

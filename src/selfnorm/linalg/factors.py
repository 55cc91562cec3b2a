"""Exact log-determinants and inverses of linear maps, from LU factors that are cached while the weight stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selfnorm.linalg.blocks import BlockForm


class SingularWeightError(ValueError):
    """An exact log-determinant or inverse was asked of a weight that has none."""


def widen(x: Tensor) -> Tensor:
    """x in float64, on the CPU if its own device has no float64."""
    return x.to("cpu" if x.device.type == "mps" else x.device, torch.float64)


class ExactFactors:
    """log|det| and, where asked, LU factors of the square blocks that a form makes of a weight.

    The results belong to a *copy* of the weight, compared at each use: an in-place edit, a write through `.data`, a
    `load_state_dict`, a move to another device or dtype, or a replayed CUDA graph can never leave them stale, and weights that
    did not change cost one comparison, O(D²), instead of a factorisation, O(D³).
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._form: BlockForm | None = None
        self._weight: Tensor | None = None
        self._log_det: Tensor | None = None
        self._lu: tuple[Tensor, Tensor] | None = None

    def _is_for(self, weight: Tensor, form: BlockForm) -> bool:
        kept = self._weight
        return (
            kept is not None
            and form == self._form
            and kept.dtype == weight.dtype
            and kept.device == weight.device
            and torch.equal(kept, weight)
        )

    # What is kept may be needed later by a backward pass, so it must not be made of inference-mode tensors.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _factorise(self, who: str, weight: Tensor, form: BlockForm) -> None:
        self._forget()
        bad = int((~torch.isfinite(weight)).sum())
        if bad:
            raise ValueError(f"{who}: expected finite weights, got {bad} non-finite of {weight.numel()} entries")
        wide = widen(weight)
        lu, pivots, _ = torch.linalg.lu_factor_ex(form.blocks(wide))
        diagonal = lu.diagonal(dim1=-2, dim2=-1).abs()
        # Pivot k is a difference, a_kk − Σ_j l_kj u_jk. One that is no larger than the rounding of its terms is a zero, and what
        # it says of the determinant is noise. Measured so, rows and columns of very different scale are no cause for alarm:
        # over random matrices of 3 to 784 rows, |pivot| / (eps·terms) had its minimum below 5e3 in all singular ones, and above
        # 5e10 in all regular ones, even with rows and columns scaled from 1e-30 to 1e30.
        terms = (lu.tril(-1).abs() * lu.triu(1).mT.abs()).sum(-1) + diagonal
        noise = 1e4 * torch.finfo(wide.dtype).eps * terms + form.rounding(wide)
        zeros = int((diagonal <= noise).sum())
        if zeros:
            raise SingularWeightError(
                f"{who}: expected an invertible weight, got a singular one ({zeros} of {diagonal.numel()} pivots vanish in "
                "float64); it has no exact inverse and no finite log-determinant"
            )
        self._form, self._weight, self._lu = form, weight.clone(), (lu, pivots)
        self._log_det = form.copies * diagonal.log().sum()

    @torch.no_grad()
    def log_abs_det(self, who: str, weight: Tensor, form: BlockForm) -> Tensor:
        """log|det W|, a float64 scalar without gradient; only the scalar is kept."""
        if not self._is_for(weight, form):
            self._factorise(who, weight, form)
            self._lu = None
        assert self._log_det is not None
        return self._log_det

    @torch.no_grad()
    def lu(self, who: str, weight: Tensor, form: BlockForm, keep: bool) -> tuple[Tensor, Tensor]:
        """LU factors and pivots of the blocks; kept for the next call only if asked, since they are as large as the matrix."""
        if self._lu is None or not self._is_for(weight, form):
            self._factorise(who, weight, form)
        factors = self._lu
        assert factors is not None
        if not keep:
            self._lu = None
        return factors


class AmortisedLogDet(torch.autograd.Function):
    """A log-determinant whose value is known already, and whose gradient is computed only if somebody asks for it.

    apply(weight, value, log_det) -> value, with the derivatives of log_det(weight), of any order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, value: Tensor, log_det: Callable[[Tensor], Tensor]) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, _, ctx.log_det = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        gradient = torch.func.grad(ctx.log_det)(weight)
        return (grad * gradient.to(grad)).to(weight), None, None


class FactoredSolve(torch.autograd.Function):
    """blocks⁻¹ rhs from factors made earlier, differentiable in the blocks and in the right-hand side."""

    generate_vmap_rule = True

    @staticmethod
    def forward(blocks: Tensor, rhs: Tensor, lu: Tensor, pivots: Tensor) -> Tensor:
        solution: Tensor = torch.linalg.lu_solve(lu, pivots, rhs)
        return solution

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        blocks, _, lu, pivots = inputs
        ctx.save_for_backward(blocks, lu, pivots, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        blocks, lu, pivots, solution = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, torch.linalg.lu_solve(lu, pivots, grad, adjoint=True), None, None
        if torch.is_grad_enabled():  # a second derivative is wanted, which the factors, being constants, would not give
            grad_rhs = torch.linalg.solve(blocks.mH, grad)
        else:
            grad_rhs = torch.linalg.lu_solve(lu, pivots, grad, adjoint=True)
        return -grad_rhs @ solution.mH, grad_rhs, None, None


def invert(who: str, weight: Tensor, form: BlockForm) -> Tensor:
    """The inverse of each of the weight's blocks, or a `SingularWeightError` that names the layer."""
    lu, pivots = ExactFactors().lu(who, weight, form, keep=False)
    return torch.linalg.lu_solve(lu, pivots, torch.eye(lu.shape[-1], dtype=lu.dtype, device=lu.device).expand_as(lu))


def log_abs_det(weight: Tensor, form: BlockForm) -> Tensor:
    """log|det W| in the weight's own precision: differentiable, unchecked, and without waiting for the device."""
    return form.copies * torch.linalg.slogdet(form.blocks(weight)).logabsdet.sum()

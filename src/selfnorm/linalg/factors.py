"""Exact log-determinants and inverses of linear maps, from LU factors that are cached while the weight stays the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfnorm.linalg.blocks import BlockForm
from selfnorm.linalg.condition import estimate_condition
from selfnorm.runtime.autograd import is_transformed, refuse_nested_forward_mode


class SingularWeightError(ValueError):
    """Raised when a weight is singular and so has no exact inverse and no finite log-determinant."""


def to_float64(x: Tensor) -> Tensor:
    """Returns x in float64, on the CPU if its own device has no float64."""
    return x.to("cpu" if x.device.type == "mps" else x.device, torch.float64)


class Factorisation(NamedTuple):
    """What is known of a weight W under a block form; complete when it is made, and never changed.

    weight:     a copy of W.
    log_det:    log|det W|, a float64 scalar without gradient.
    condition:  an estimate of W's condition number; see `estimate_condition`.
    lu:         LU factors and pivots of the blocks, as large as the matrix; None if they were dropped.
    """

    form: BlockForm
    weight: Tensor
    log_det: Tensor
    condition: float
    lu: tuple[Tensor, Tensor] | None

    def is_of(self, weight: Tensor, form: BlockForm) -> bool:
        """Returns whether this is the factorisation of these numbers, in whatever dtype. Waits for the device."""
        if form != self.form or weight.device != self.weight.device:
            return False
        if weight.dtype == self.weight.dtype:
            return torch.equal(self.weight, weight)
        return torch.equal(to_float64(self.weight), to_float64(weight))


class ExactFactors:
    """Caches log|det W| and, on request, LU factors of the square blocks into which a form splits W.

    The cache keeps a *copy* of the weight and compares it at each use, so it is never stale: not after an in-place edit, a write
    through `.data`, `load_state_dict`, a move to another device, or the replay of a CUDA graph. For an unchanged weight, one
    comparison, O(D²), replaces a factorisation, O(D³). Nothing is kept under a transform of torch.func.

    Several threads may use it: it holds one reference to an immutable record, which each call reads once.
    """

    def __init__(self) -> None:
        self._last: Factorisation | None = None

    @torch.no_grad()
    def factorise(
        self, who: str, weight: Tensor, form: BlockForm, *, with_lu: bool = False, keep_lu: bool = False
    ) -> Factorisation:
        """Returns the factorisation of a weight; errors start with `who`.

        with_lu:  whether the result has LU factors.
        keep_lu:  whether the cache keeps them for the next call; they are as large as the matrix.
        """
        last = self._last
        if last is not None and (last.lu is not None or not with_lu) and last.is_of(weight, form):
            found = last
        else:
            found = _factorised(who, weight, form)
        if is_transformed():
            self._last = None
            return found
        keeps = keep_lu if with_lu else found is last
        self._last = found if keeps else found._replace(lu=None)
        return found


# A later backward pass may use the tensors, so they must not be created in inference mode.
@torch.inference_mode(False)
@torch.no_grad()
def _factorised(who: str, weight: Tensor, form: BlockForm) -> Factorisation:
    if weight.is_meta:
        lu = torch.empty_like(form.blocks(to_float64(weight)))
        return Factorisation(
            form, weight, lu.real.sum(), math.nan, (lu, torch.empty(lu.shape[:-1], dtype=torch.int32, device="meta"))
        )
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise ValueError(f"{who}: expected finite weights, got {bad} non-finite of {weight.numel()} entries")
    wide = to_float64(weight)
    blocks = form.blocks(wide)
    lu, pivots, _ = torch.linalg.lu_factor_ex(blocks)
    diagonal = lu.diagonal(dim1=-2, dim2=-1).abs()
    # Pivot k is a difference, a_kk − Σ_j l_kj u_jk. If it is no larger than the rounding error of its terms, it counts as
    # zero. This criterion tolerates rows and columns of very different scale: over random matrices of 3 to 784 rows, the
    # smallest |pivot| / (eps·terms) was below 5e3 in all singular ones and above 5e10 in all regular ones, even with rows
    # and columns scaled from 1e-30 to 1e30.
    terms = (lu.tril(-1).abs() * lu.triu(1).mT.abs()).sum(-1) + diagonal
    noise = 1e4 * torch.finfo(wide.dtype).eps * terms + form.rounding(wide)
    zeros, condition = torch.stack([(diagonal <= noise).sum(), estimate_condition(blocks, lu, pivots)]).tolist()  # one read
    if zeros:
        raise SingularWeightError(
            f"{who}: expected an invertible weight, got a singular one ({zeros:.0f} of {diagonal.numel()} pivots vanish in "
            "float64); it has no exact inverse and no finite log-determinant"
        )
    return Factorisation(form, weight.clone(), form.copies * diagonal.log().sum(), condition, (lu, pivots))


class AmortisedLogDet(torch.autograd.Function):
    """Returns a log-determinant whose value is already known; its gradient is computed only in a backward pass.

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
        ctx.save_for_forward(weight)

    @staticmethod
    def jvp(ctx: Any, weight: Tensor, value: None, log_det: None) -> Tensor:
        refuse_nested_forward_mode()
        (at,) = ctx.saved_for_forward
        return (torch.func.grad(ctx.log_det)(at) * weight).sum().double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        gradient = torch.func.grad(ctx.log_det)(weight)
        return (grad * gradient.to(grad)).to(weight), None, None


class FactoredSolve(torch.autograd.Function):
    """Solves blocks · x = rhs from existing LU factors, differentiable in blocks and rhs.

    apply(blocks (…, m, m), rhs (…, m, n), lu, pivots) -> x (…, m, n). Cost: O(m²n) per block.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(blocks: Tensor, rhs: Tensor, lu: Tensor, pivots: Tensor) -> Tensor:
        solution: Tensor = torch.linalg.lu_solve(lu, pivots, rhs)
        return solution

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        blocks, _, lu, pivots = inputs
        ctx.save_for_backward(blocks, lu, pivots, output)
        ctx.save_for_forward(lu, pivots, output)

    @staticmethod
    def jvp(ctx: Any, blocks: Tensor, rhs: Tensor, lu: None, pivots: None) -> Tensor:
        refuse_nested_forward_mode()
        lu_factors, lu_pivots, solution = ctx.saved_for_forward
        tangent: Tensor = torch.linalg.lu_solve(lu_factors, lu_pivots, rhs - blocks @ solution)
        return tangent

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        blocks, lu, pivots, solution = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, torch.linalg.lu_solve(lu, pivots, grad, adjoint=True), None, None
        if torch.is_grad_enabled():  # for second derivatives: the factors are constants to autograd
            grad_rhs = torch.linalg.solve(blocks.mH, grad)
        else:
            grad_rhs = torch.linalg.lu_solve(lu, pivots, grad, adjoint=True)
        return -grad_rhs @ solution.mH, grad_rhs, None, None


def invert(who: str, weight: Tensor, form: BlockForm) -> Tensor:
    """Returns the inverse of each block (…, m, m); raises a `SingularWeightError` that starts with `who` if there is none."""
    lu, pivots = lu_factors(who, weight, form)
    return torch.linalg.lu_solve(lu, pivots, torch.eye(lu.shape[-1], dtype=lu.dtype, device=lu.device).expand_as(lu))


def lu_factors(who: str, weight: Tensor, form: BlockForm) -> tuple[Tensor, Tensor]:
    """Returns LU factors and pivots of the blocks; raises a `SingularWeightError` that starts with `who` if there are none."""
    lu = _factorised(who, weight, form).lu
    assert lu is not None
    return lu


def log_abs_det(weight: Tensor, form: BlockForm) -> Tensor:
    """Returns log|det W| in the weight's own precision: differentiable, unchecked, and without waiting for the device."""
    return form.copies * torch.linalg.slogdet(form.blocks(weight)).logabsdet.sum()

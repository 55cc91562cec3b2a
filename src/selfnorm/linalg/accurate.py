"""Evaluates flows in float64 where the condition numbers of their linear layers ask for it.

A product z = Wx in float32 is off by about eps·‖W‖·‖x‖, which for typical data is eps·cond(W)·‖z‖. So is the likelihood, relative
to the number of dimensions, however well its result could be rounded.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfnorm.linalg.factors import to_float64
from selfnorm.linalg.wide import in_float64, widened
from selfnorm.runtime.autograd import is_transformed
from selfnorm.runtime.checks import describe
from selfnorm.runtime.context import step_context

# Up to this condition number the likelihoods of single matrices of 4 to 300 rows were off by at most 6e-5 nats a dimension in
# float32, at data of unit variance; the error grows in proportion.
FLOAT32_CONDITION = 1e3
# For a chain, the product of the layers' condition numbers is a bound, but a pessimistic one. Above FLOAT32_CONDITION, this many
# rows are evaluated in float64, and must agree to this many nats a dimension.
COMPARED_ROWS, FLOAT32_ERROR = 8, 1e-4
# The condition numbers up to which likelihoods are promised to be exact, by the dtype of the data. Above 1e8, rounding the data
# to float32 changes them by nats; above 1e12, float64 does not resolve the products.
LARGEST_CONDITION = {torch.float32: 1e8, torch.float64: 1e12}


class ChosenPrecision(NamedTuple):
    """Whether a flow is evaluated in float64, and the condition numbers of its layers for which that was decided."""

    conditions: tuple[float, ...]
    float64: bool


def forward_accurately(
    who: str, bijection: nn.Module, x: Tensor, context: Tensor | None, last: ChosenPrecision | None
) -> tuple[Tensor, Tensor, ChosenPrecision | None]:
    """Returns z and log|det ∂z/∂x| of a bijection, in float64 if float32 is not enough, and the choice to pass the next time.

    The choice is made once for each set of weights. If even float64 is too little, a warning that starts with `who` says so.
    """
    noted: list[tuple[nn.Module, float]] = []
    with step_context(conditions=noted):
        z, log_det = bijection(x, context=context)
    if _float32_suffices(noted) or is_transformed() or not x.numel():
        return z, log_det, last
    conditions = tuple(sorted(condition for _, condition in noted))
    choice = last
    if choice is None or choice.conditions != conditions:
        choice = ChosenPrecision(conditions, conditions[-1] > FLOAT32_CONDITION or _differs(bijection, x, context, z, log_det))
        _warn_above(who, noted, x.dtype)
    if choice.float64 and x.dtype == torch.float32:
        z, log_det = _forward_in_float64(bijection, x, context)
    return z, log_det, choice


def inverse_accurately(bijection: Any, z: Tensor, context: Tensor | None) -> Tensor:
    """Returns x by the exact inverse of a bijection, computed in float64 if the product of the condition numbers asks for it."""
    noted: list[tuple[nn.Module, float]] = []
    with step_context(conditions=noted):
        x: Tensor = bijection.inverse(z, context=context)[0]
    if z.dtype != torch.float32 or _float32_suffices(noted) or is_transformed() or not z.numel():
        return x
    with torch.autocast(z.device.type, enabled=False):
        x = in_float64(bijection).inverse(to_float64(z), context=widened(context))[0]
    return x.to(z)


def _float32_suffices(noted: list[tuple[nn.Module, float]]) -> bool:
    return math.prod(condition for _, condition in noted) <= FLOAT32_CONDITION


def _forward_in_float64(bijection: nn.Module, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        z, log_det = in_float64(bijection)(to_float64(x), context=widened(context))
    return z, log_det


@torch.no_grad()
def _differs(bijection: nn.Module, x: Tensor, context: Tensor | None, z: Tensor, log_det: Tensor) -> bool:
    """Returns whether log N(z; 0, I) + log_det is too far off in some of the first rows."""
    if x.dtype != torch.float32:
        return False
    rows = slice(COMPARED_ROWS)
    exact_z, exact_log_det = _forward_in_float64(bijection, x[rows], None if context is None else context[rows])
    error = (z[rows].to(exact_z).square() - exact_z.square()).flatten(1).sum(1) / 2
    error = error.abs() + (log_det[rows].to(exact_z) - exact_log_det).abs()
    return not bool((error <= FLOAT32_ERROR * z[0].numel()).all())


def _warn_above(who: str, noted: list[tuple[nn.Module, float]], dtype: torch.dtype) -> None:
    layer, worst = max(noted, key=lambda each: each[1])
    largest = LARGEST_CONDITION.get(dtype, math.inf)
    if worst > largest:
        warnings.warn(
            f"{who}: {describe(layer)}: expected a weight with a condition number of at most {largest:.0e} for data in {dtype}, "
            f"got about {worst:.0e}; rounding alone may change log-likelihoods by more than 1e-3 nats a dimension. Use float64, "
            "or look for columns that depend on each other",
            RuntimeWarning,
            stacklevel=5,
        )

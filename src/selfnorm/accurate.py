"""Evaluates flows in float64 where float32 would round too much.

A product z = Wx in float32 is off by about eps·‖W‖·‖x‖, which for typical data is eps·cond(W)·‖z‖. So is the likelihood, relative
to the number of dimensions, however well its result could be rounded.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from selfnorm.bijection import Bijection
from selfnorm.linalg.factors import to_float64
from selfnorm.linalg.wide import in_float64, widened
from selfnorm.runtime.autograd import is_transformed
from selfnorm.runtime.checks import describe
from selfnorm.runtime.context import step_context
from selfnorm.runtime.modules import all_modules
from selfnorm.runtime.rounding import Rounding, norms

# Up to this growth the likelihoods of single matrices of 4 to 300 rows were off by at most 6e-5 nats a dimension in float32, at
# data of unit variance; the error grows in proportion to it and to ‖z‖²/D.
FLOAT32_GROWTH = 1e3
# For a chain the growth is a pessimistic bound. Above FLOAT32_GROWTH, some rows are compared with float64; see `_largest_rows`.
# Rounding errors grow with the rows and their context, and with the slopes and bends of elementwise layers.
COMPARED_ROWS = 16  # at most; fewer show nothing of other rows
FLOAT32_ERROR = 3e-5  # nats a dimension, to which they must agree
LARGER = 2.0  # times as large or as steep as these, other rows are taken to be right as well; errors grow with its square
# The condition numbers up to which likelihoods are promised to be exact, by the dtype of the data. Above 1e8, rounding the data
# to float32 changes them by nats; above 1e12, float64 does not resolve the products.
LARGEST_CONDITION = {torch.float32: 1e8, torch.float64: 1e12}
PROMISED_ERROR = 1e-3  # nats a dimension
EPS, ROUNDINGS = torch.finfo(torch.float64).eps, 4096  # so many, so that their effect stands out from rounding itself
IN_FORWARD, IN_INVERSE = 5, 4  # how many calls a warning is below the one of a method of Flow


class Compared(NamedTuple):
    """What is known of a flow's rounding errors.

    weights:  what stands for its weights: the condition numbers of its linear layers and the norms of all its tensors.
    float64:  whether it needs float64.
    sizes:    the largest norms of rows, at each linear layer, at both ends and of the context, and the steepest slopes and
              sharpest bends, for which it does not; None if too few rows were compared to tell.
    """

    weights: tuple[float, ...]
    float64: bool
    sizes: Tensor | None = None

    def holds_for(self, sizes: Tensor) -> bool:
        if self.float64 or self.sizes is None:
            return self.float64
        return sizes.shape == self.sizes.shape and bool((sizes <= LARGER * self.sizes).all())


def forward_accurately(
    who: str,
    bijection: Bijection,
    x: Tensor,
    context: Tensor | None,
    last: Compared | None,
    log_base: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Compared | None]:
    """Returns z and log|det ∂z/∂x| of a bijection, in float64 if float32 is not enough, and what to pass the next time.

    Nothing is known of layers that do not report how much they amplify rounding errors (`Bijection.notes_rounding`): then some
    rows are compared with float64. If even float64 is too little, for a layer or for the chain, a warning that starts with `who`
    says so, once for each set of weights.

    log_base:  the log-density of z in its own precision; None stands for the standard normal's. Of a base of the user's own
               nothing is known, so its rows are compared at each call.
    """
    if is_transformed():
        return *_forward_in_transform(who, bijection, x, context, log_base), last
    if not x.numel():
        return *bijection(x, context=context), last
    rounding = Rounding(all(each.notes_rounding for each in all_modules(bijection) if isinstance(each, Bijection)))
    with step_context(rounding=rounding):
        z, log_det = bijection(x, context=context)
    square = float(norms(z).max()) ** 2 / z[0].numel()
    bounded = rounding.growth() * max(1.0, square) <= FLOAT32_GROWTH
    if (bounded and log_base is None) or not math.isfinite(square):
        return z, log_det, last
    weights = (*(condition for _, condition in rounding.conditions), *_norms_of_tensors(bijection, x))
    known = last if last is not None and last.weights == weights else None
    before, effect = known, "change log-likelihoods by more than 1e-3 nats a dimension"
    has_warned = known is None and _warn_of_condition(who, rounding.conditions, x.dtype, effect)
    sizes = rounding.sizes(x, z, context)
    largest = sizes.amax(1)
    try:
        if x.dtype != torch.float32:
            known = known or Compared(weights, float64=False)
        elif known is None or log_base is not None or not known.holds_for(largest):
            needed = any(condition > FLOAT32_GROWTH for _, condition in rounding.conditions) or _differs(
                bijection, x, context, z, log_det, log_base or _log_normal, sizes
            )
            known = Compared(weights, needed, None if needed or len(x) < COMPARED_ROWS else largest)
        is_new = not has_warned and (before is None or before.float64 != known.float64)
        is_wide = known.float64 or (x.dtype == torch.float64 and rounding.growth() < math.inf)  # else nothing is known of a layer
        if is_new and is_wide and rounding.growth() > LARGEST_CONDITION[torch.float64]:
            _warn_of_float64(who, bijection, x, context, sizes)
        if known.float64:
            wide = _forward_in_float64(bijection, x, context)
            if log_base is not None:
                log_base(wide[0][:1])  # raises here, where a warning follows, if the base cannot be copied
            return *wide, known
    except torch.OutOfMemoryError:  # fewer rows may do
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        if not bounded:
            _warn_of_float32(who, error)
    return z, log_det, known


def inverse_accurately(who: str, bijection: Bijection, z: Tensor, context: Tensor | None) -> Tensor:
    """Returns x by the exact inverse of a bijection, computed in float64 if the product of the condition numbers asks for it.

    A warning that starts with `who` says so if that fails, or if a layer magnifies the rounding of x itself too much.
    """
    if z.dtype != torch.float32 or not z.numel():
        return bijection.inverse(z, context=context)[0]
    if is_transformed() and not _refuses_float32(bijection):
        try:
            return _inverse_in_float64(bijection, z, context)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            x = bijection.inverse(z, context=context)[0]  # raises again what has nothing to do with float64
            _warn_of_float32(who, error, IN_INVERSE)
            return x
    rounding = Rounding()
    with step_context(rounding=rounding):
        x = bijection.inverse(z, context=context)[0]
    _warn_of_condition(who, rounding.conditions, z.dtype, "move the latent by more than 1", IN_INVERSE)
    if rounding.growth() <= FLOAT32_GROWTH:
        return x
    try:
        return _inverse_in_float64(bijection, z, context)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        _warn_of_float32(who, error, IN_INVERSE)
        return x


def _forward_in_transform(
    who: str, bijection: Bijection, x: Tensor, context: Tensor | None, log_base: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Returns z and log|det ∂z/∂x|, of float32 in float64, since a transform of torch.func leaves no numbers to judge by."""
    if x.dtype != torch.float32 or _refuses_float32(bijection) or not x.numel():
        return bijection(x, context=context)
    try:
        wide = _forward_in_float64(bijection, x, context)
        if log_base is not None:
            log_base(wide[0][:1])
        return wide
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        narrow = bijection(x, context=context)  # raises again what has nothing to do with float64
        _warn_of_float32(who, error, IN_FORWARD + 1)
        return narrow


def _refuses_float32(bijection: Bijection) -> bool:
    return any(value.dtype == torch.float64 for value in bijection.parameters())


def _inverse_in_float64(bijection: Bijection, z: Tensor, context: Tensor | None) -> Tensor:
    with torch.autocast(z.device.type, enabled=False):
        return in_float64(bijection).inverse(to_float64(z), context=widened(context))[0].to(z)


def _forward_in_float64(bijection: Bijection, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        z, log_det = in_float64(bijection)(to_float64(x), context=widened(context))
    return z, log_det


@torch.no_grad()
def _differs(
    bijection: Bijection,
    x: Tensor,
    context: Tensor | None,
    z: Tensor,
    log_det: Tensor,
    log_base: Callable[[Tensor], Tensor],
    sizes: Tensor,
) -> bool:
    """Returns whether log_base(z) + log_det is too far off in some of the rows that are largest at some layer."""
    rows = _largest_rows(sizes)
    exact_z, exact_log_det = _forward_in_float64(bijection, x[rows], _rows_of(context, x, rows))
    error = (log_base(z[rows]).to(exact_z) - log_base(exact_z)).abs()
    error = error + (log_det[rows].to(exact_z) - exact_log_det).abs()
    return not bool((error <= FLOAT32_ERROR * z[0].numel()).all())


def _warn_of_float64(who: str, bijection: Bijection, x: Tensor, context: Tensor | None, sizes: Tensor) -> None:
    """Warns if even float64 rounds too much: if changes of x by a few thousand of its roundings move likelihoods as many times.

    Condition numbers of the layers alone do not show that: those of a chain multiply only if they stretch the same directions.
    """
    rows = _largest_rows(sizes)
    some, given = to_float64(x[rows]), _rows_of(context, x, rows)
    signs = 2.0 * torch.randint(2, some.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(some) - 1
    with torch.no_grad():
        before, after = (
            _log_normal(z) + log_det
            for z, log_det in (
                _forward_in_float64(bijection, each, given) for each in (some, some * (1 + ROUNDINGS * EPS * signs))
            )
        )
    rounding = float((after - before).abs().max()) / ROUNDINGS
    if rounding > PROMISED_ERROR * x[0].numel():
        warnings.warn(
            f"{who}: expected layers that together magnify rounding errors by less than about 1e12, got a chain in which "
            f"float64 rounding alone changes log-likelihoods by about {rounding / x[0].numel():.0e} nats a dimension; look for "
            "columns that depend on each other, or for layers with extreme weights",
            RuntimeWarning,
            stacklevel=IN_FORWARD,
        )


def _largest_rows(sizes: Tensor) -> Tensor:
    """Returns the places of the rows to compare, given what their errors grow with, (K, N): the largest by each of the K in turn.

    In turn, so that rows which are large by one measure do not hide those that are large by another. A few rows from anywhere
    stand for the typical ones.
    """
    total = sizes.shape[1]
    few = min(COMPARED_ROWS, total)
    if few == total:
        return torch.arange(total, device=sizes.device)
    relative = (sizes / sizes.mean(1, keepdim=True)).nan_to_num()
    most_uneven = relative.amax(1).argsort(descending=True, stable=True)
    largest = relative[most_uneven].topk(few, dim=1).indices.mT.flatten()
    typical = torch.arange(few // 4, device=sizes.device) * total // (few // 4)
    candidates = torch.cat([typical, largest])
    return torch.tensor(list(dict.fromkeys(candidates.tolist()))[:few], device=sizes.device)


def _rows_of(context: Tensor | None, x: Tensor, rows: Tensor) -> Tensor | None:
    """Returns the context of some rows of x; one for all rows stays as it is."""
    return context if context is None or context.shape[:1] != x.shape[:1] else context[rows]


@torch.no_grad()
def _norms_of_tensors(module: nn.Module, like: Tensor) -> list[float]:
    """Returns the norms of a module's parameters and buffers. They show nearly any change of weights, however it was made; one
    that keeps all norms, such as a change of sign, hardly changes rounding errors."""
    tensors = [
        value
        for each in all_modules(module)
        for value in (*each._parameters.values(), *each._buffers.values())
        if value is not None and value.is_floating_point()
    ]
    norms = torch._foreach_norm(tensors) if tensors else ()
    return torch.stack([norm.to(like) for norm in norms]).tolist() if norms else []


def _log_normal(z: Tensor) -> Tensor:
    """Returns log N(z; 0, I) without its constant, in float64."""
    return -to_float64(z).square().flatten(1).sum(1) / 2


def _warn_of_float32(who: str, error: Exception, stacklevel: int = IN_FORWARD) -> None:
    """Warns that some layer or base, of the user's own, keeps tensors where a copy in float64 does not find them."""
    why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    warnings.warn(
        f"{who}: expected a flow that can be evaluated in float64, to check or avoid rounding errors, got an error ({why}); the "
        "result is computed in float32, and may be off by more than 1e-3 nats a dimension. Keep all tensors of a layer in its "
        "parameters and buffers, and its parts in submodules",
        RuntimeWarning,
        stacklevel=stacklevel,
    )


def _warn_of_condition(
    who: str, noted: list[tuple[nn.Module, float]], dtype: torch.dtype, effect: str, stacklevel: int = IN_FORWARD
) -> bool:
    """Warns if a layer's own condition number is above what is promised, and of what rounding may do; returns whether it did."""
    layer, worst = max(noted, key=lambda each: each[1], default=(None, 0.0))
    largest = LARGEST_CONDITION.get(dtype, math.inf)
    if layer is not None and worst > largest:
        warnings.warn(
            f"{who}: {describe(layer)}: expected a weight with a condition number of at most {largest:.0e} for data in {dtype}, "
            f"got about {worst:.0e}; rounding alone may {effect}. Use float64, or look for columns that depend on each other",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
    return worst > largest

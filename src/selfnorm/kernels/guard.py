"""Whether a step may change weights, and its number: a few scalars, which would otherwise take a launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def begin_update(failed: Tensor, late: Tensor, lost: Tensor, frozen: Tensor, step: Tensor, *, advance: bool = True) -> None:
    """Whether the next update may change anything, and its number: all float32 scalars on the device, flags 0 or 1.

    late:     raised by the update before, if it was that which failed: it goes to `failed`, and that step is not counted.
    frozen:   = max(failed, lost).
    advance:  whether an update follows, so that step += 1 − frozen.
    """
    _begin_update[(1,)](failed, late, lost, frozen, step, ADVANCE=advance, num_warps=1)


def note_lost(lost: Tensor, residuals: Tensor, limits: Tensor) -> None:
    """Raise `lost` unless each residual (K,) is below its limit, which a NaN is not."""
    _note_lost[(1,)](lost, residuals, limits, len(limits), BLOCK=triton.next_power_of_2(len(limits)), num_warps=1)


@triton.jit
def _begin_update(failed, late, lost, frozen, step, ADVANCE: tl.constexpr):
    before, after = tl.load(failed), tl.load(late)
    number = tl.load(step) - tl.where((after > 0) & (before == 0), 1.0, 0.0)
    failure = tl.maximum(before, after)
    stop = tl.maximum(failure, tl.load(lost))
    if ADVANCE:
        number += 1 - stop
    tl.store(failed, failure)
    tl.store(late, 0.0)
    tl.store(frozen, stop)
    tl.store(step, number)


@triton.jit
def _note_lost(lost, residuals, limits, count, BLOCK: tl.constexpr):
    layer = tl.arange(0, BLOCK)
    residual = tl.load(residuals + layer, mask=layer < count, other=0.0)
    fine = residual < tl.load(limits + layer, mask=layer < count, other=1.0)
    wrong = tl.max(tl.where(fine, 0.0, 1.0), axis=0)
    tl.store(lost, tl.maximum(tl.load(lost), wrong))

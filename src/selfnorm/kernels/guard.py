"""Whether a step may change weights, and its number: a few scalars, which would otherwise take a launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def begin_update(failed: Tensor, lost: Tensor, frozen: Tensor, step: Tensor) -> None:
    """frozen = max(failed, lost), and step += 1 − frozen: all of them float32 scalars on the device, flags 0 or 1."""
    _begin_update[(1,)](failed, lost, frozen, step, num_warps=1)


def note_lost(lost: Tensor, residuals: Tensor, limits: Tensor) -> None:
    """Raise `lost` unless each residual (K,) is below its limit, which a NaN is not."""
    _note_lost[(1,)](lost, residuals, limits, len(limits), BLOCK=triton.next_power_of_2(len(limits)), num_warps=1)


@triton.jit
def _begin_update(failed, lost, frozen, step):
    stop = tl.maximum(tl.load(failed), tl.load(lost))
    tl.store(frozen, stop)
    tl.store(step, tl.load(step) + 1 - stop)


@triton.jit
def _note_lost(lost, residuals, limits, count, BLOCK: tl.constexpr):
    layer = tl.arange(0, BLOCK)
    residual = tl.load(residuals + layer, mask=layer < count, other=0.0)
    fine = residual < tl.load(limits + layer, mask=layer < count, other=1.0)
    wrong = tl.max(tl.where(fine, 0.0, 1.0), axis=0)
    tl.store(lost, tl.maximum(tl.load(lost), wrong))

"""Whether a step may change weights, and its number: a few scalars, which would otherwise take a launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def begin_update(failed: Tensor, lost: Tensor, frozen: Tensor, step: Tensor) -> None:
    """frozen = max(failed, lost), and step += 1 − frozen: all of them float32 scalars on the device, flags 0 or 1."""
    _begin_update[(1,)](failed, lost, frozen, step, num_warps=1)


@triton.jit
def _begin_update(failed, lost, frozen, step):
    stop = tl.maximum(tl.load(failed), tl.load(lost))
    tl.store(frozen, stop)
    tl.store(step, tl.load(step) + 1 - stop)

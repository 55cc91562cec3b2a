"""Whether a step may change weights, and its number: a few scalars, which would otherwise take a launch each."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

FEW, SMALL, BLOCK = 8, 2**16, 1024  # gradients, and numbers in them, that one program looks at as fast as many would


def few_and_small(gradients: Sequence[Tensor]) -> bool:
    """Whether `begin_update` may look at them."""
    total = sum(gradient.numel() for gradient in gradients)
    return len(gradients) <= FEW and total <= SMALL and all(gradient.is_contiguous() for gradient in gradients)


def begin_update(
    failed: Tensor,
    late: Tensor,
    lost: Tensor,
    frozen: Tensor,
    step: Tensor,
    *,
    advance: bool = True,
    loss: Tensor | None = None,
    gradients: Sequence[Tensor] = (),
) -> None:
    """Whether the next update may change anything, and its number: all float32 scalars on the device, flags 0 or 1.

    late:       raised by the update before, if it was that which failed: it goes to `failed`, and that step is not counted.
    frozen:     = max(failed, lost).
    advance:    whether an update follows, so that step += 1 − frozen.
    loss:       raises `failed` if it is not finite, and so do
    gradients:  whose squares have no finite sum; as many as are `few_and_small`.
    """
    _begin_update[(1,)](
        failed, late, lost, frozen, step, failed if loss is None else loss, tuple(gradients),
        tuple(gradient.numel() for gradient in gradients), ADVANCE=advance, LOOK=loss is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def note_lost(lost: Tensor, residuals: Tensor, limits: Tensor) -> None:
    """Raise `lost` unless each residual (K,) is below its limit, which a NaN is not."""
    _note_lost[(1,)](lost, residuals, limits, len(limits), BLOCK=triton.next_power_of_2(len(limits)), num_warps=1)


@triton.jit
def _begin_update(
    failed, late, lost, frozen, step, loss, gradients, sizes, ADVANCE: tl.constexpr, LOOK: tl.constexpr, BLOCK: tl.constexpr
):
    before, after = tl.load(failed), tl.load(late)
    number = tl.load(step) - tl.where((after > 0) & (before == 0), 1.0, 0.0)
    failure = tl.maximum(before, after)
    if LOOK:
        value = tl.load(loss)
        failure = tl.where(value - value == 0, failure, 1.0)
        for which in tl.static_range(len(gradients)):
            squares = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, sizes[which], BLOCK):
                at = start + tl.arange(0, BLOCK)
                gradient = tl.load(gradients[which] + at, mask=at < sizes[which], other=0.0)
                squares += gradient * gradient
            failure = tl.where(tl.sum(squares, axis=0) < float("inf"), failure, 1.0)  # a NaN is not
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

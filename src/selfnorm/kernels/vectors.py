"""Vectors with a number for each example: adding them up in a fixed order, and filling them with one value."""

from __future__ import annotations

import triton
import triton.language as tl


def sum_blocks(count: int) -> tuple[int, int]:
    """Returns the size and the number of blocks in which a kernel sums `count` numbers."""
    block = min(triton.next_power_of_2(count), 1024)
    return block, triton.cdiv(count, block)


@triton.jit
def vector_sum(values, count, stride, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """The sum of count ≤ BLOCK·STEPS values, `stride` apart."""
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(values + at.to(tl.int64) * stride, mask=at < count, other=0.0)
    return tl.sum(total)


@triton.jit
def fill_vector(values, count, value):
    """Stores `value` in each of `count` places."""
    for start in range(0, count, 128):
        at = start + tl.arange(0, 128)
        tl.store(values + at, tl.zeros((128,), tl.float32) + value, mask=at < count)

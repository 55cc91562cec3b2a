"""Small whole numbers divided by multiplication, because of what compilers make of a division.

LLVM takes the division of a number that it knows to be small, and all that depends on it, in 16 bits, two numbers to a register.
NVIDIA's assemblers 12.8 (that of Triton 3.6 and 3.7), 12.9 and 13.0 get some such sums wrong; 13.4 does not. If something is
added to a constant by `add.s16x2`, and only the upper half is needed, the constant is taken for 0: taps of a convolution then
read other taps' pixels. In 32 bits nothing of the kind happens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _shift(divisor: int, below: int) -> int:
    """The least s with 2ˢ ≥ below·divisor: then ⌈2ˢ / divisor⌉ is near enough to 2ˢ / divisor."""
    return (below * divisor - 1).bit_length()


@triton.constexpr_function
def _multiplier(divisor: int, below: int) -> int:
    return -(-(1 << (below * divisor - 1).bit_length()) // divisor)


@triton.jit
def quotient_and_rest(x, DIVISOR: tl.constexpr, BELOW: tl.constexpr = 8192):
    """x // DIVISOR and x % DIVISOR for int32 with 0 ≤ x < BELOW. No product on the way reaches 2·BELOW² + BELOW."""
    wide = x
    if BELOW > 16384:
        wide = x.to(tl.int64)
    quotient = ((wide * _multiplier(DIVISOR, BELOW)) >> _shift(DIVISOR, BELOW)).to(tl.int32)
    return quotient, x - quotient * DIVISOR

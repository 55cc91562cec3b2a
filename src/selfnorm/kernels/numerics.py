"""Arithmetic that kernels share: the size and division of integers, and a correction for TF32's truncation.

Division. LLVM divides numbers that it knows to be small in 16 bits, two to a register, together with everything that depends on
them. NVIDIA's assemblers 12.8 (the one in Triton 3.6 and 3.7), 12.9 and 13.0 get some of these sums wrong; 13.4 does not. If
`add.s16x2` adds something to a constant and only the upper half is needed, the constant is taken for 0: taps of a convolution
then read the pixels of other taps. Dividing by multiplication in 32 bits avoids this.

Truncation. Matrix units take the upper 10 bits of a float32 factor's mantissa and cut off the rest, always towards 0. If
mantissas m in [1, 2) have density 1/(m·log 2), as those of many numbers do, a factor becomes too small by
2⁻¹¹·E[1/m] = 2⁻¹²/log 2, and a product by twice as much: 7.0e-4, where 7.1e-4 was measured. Multiplying it back into the result
leaves an error like that of rounding to nearest. Rounding each factor instead took a product of 100 × 784 by 784 × 784 from 7.2
to 11.4 µs.
"""

from __future__ import annotations

import triton
import triton.language as tl

TRUNCATION_CORRECTION = tl.constexpr(1 + 2 * 2**-12 / 0.6931471805599453)


def index_type(numel: int) -> tl.dtype:
    """Returns the integer type that can index this many numbers and a tile more.

    64 bits only if needed, since their division is slow.
    """
    return tl.int64 if numel > 2**30 else tl.int32


@triton.constexpr_function
def _shift(divisor: int, below: int) -> int:
    """Returns the least s with 2ˢ ≥ below·divisor: then ⌈2ˢ / divisor⌉ is close enough to 2ˢ / divisor."""
    return (below * divisor - 1).bit_length()


@triton.constexpr_function
def _multiplier(divisor: int, below: int) -> int:
    """Returns ⌈2ˢ / divisor⌉ for s = `_shift`."""
    return -(-(1 << (below * divisor - 1).bit_length()) // divisor)


@triton.jit
def quotient_and_remainder(x, DIVISOR: tl.constexpr, BELOW: tl.constexpr = 8192):
    """x // DIVISOR and x % DIVISOR for int32 with 0 ≤ x < BELOW. No intermediate product reaches 2·BELOW² + BELOW."""
    wide = x
    if BELOW > 16384:
        wide = x.to(tl.int64)
    quotient = ((wide * _multiplier(DIVISOR, BELOW)) >> _shift(DIVISOR, BELOW)).to(tl.int32)
    return quotient, x - quotient * DIVISOR


@triton.jit
def correct_truncation(product, PRECISION: tl.constexpr):
    """The product, scaled up by what TF32 truncation removes on average; unchanged in any other precision."""
    if PRECISION == "tf32":
        product *= TRUNCATION_CORRECTION
    return product

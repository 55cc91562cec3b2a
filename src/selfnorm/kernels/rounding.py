"""Rounding to TF32, to the nearest: left to themselves, the matrix units cut, which makes every product too small by 7e-4."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """x as the matrix units are to take it."""
    if PRECISION == "tf32":
        x = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r, r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x

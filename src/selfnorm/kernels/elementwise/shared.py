"""Helpers of the elementwise kernels: tiles of rows, elementary functions, and memory orders.

All elementwise kernels take float32 and sum in a fixed order, so that results are the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

# Fewer programs than this leave multiprocessors of a big GPU idle.
ENOUGH_PROGRAMS = 132


class RowTiles(NamedTuple):
    """Division of a map of (N, E): each program takes `rows` examples and `steps` times `columns` of the elements."""

    rows: int
    columns: int
    steps: int
    warps: int

    def grid(self, examples: int, elements: int) -> tuple[int, int]:
        return cdiv(examples, self.rows), cdiv(elements, self.columns * self.steps)


def row_tiles(examples: int, elements: int) -> RowTiles:
    """Returns tiles for sums over the elements: a program for one or a few examples, several for each of few long examples."""
    rows = min(next_power_of_2(cdiv(examples, 2 * ENOUGH_PROGRAMS)), 8)
    columns = min(next_power_of_2(elements), 1024 // rows)
    programs, blocks = cdiv(examples, rows), cdiv(elements, columns)
    # Several programs per example need a second pass that adds up: only where most of the GPU would be idle otherwise.
    splits = min(blocks, cdiv(ENOUGH_PROGRAMS, programs)) if 2 * programs < ENOUGH_PROGRAMS else 1
    return RowTiles(rows, columns, cdiv(blocks, splits), min(max(rows * columns // 128, 1), 8))


def as_dense(x: Tensor) -> Tensor:
    """Returns x itself if it is contiguous with its channels first or last, otherwise a contiguous copy."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x if last else x.contiguous()


def in_order_of(x: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient in the memory order of the dense x; copied only if its own order differs."""
    return grad.contiguous() if x.is_contiguous() else grad.contiguous(memory_format=torch.channels_last)


@triton.jit
def fast_exp(x):
    """eˣ with a relative error of x·1e-7: a product and one instruction. Triton's own also handles results below 1e-38."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def series_log1p(e):
    """log(1 + e) for e in [0, 1], to a few roundings, as 2·artanh(s) = 2(s + s³/3 + … + s¹³/13) of s = e/(2 + e) ≤ 1/3."""
    s = e / (2.0 + e)
    r = s * s
    series = 1.0 / 9.0 + r * (1.0 / 11.0 + r * (1.0 / 13.0))
    return 2.0 * s * (1.0 + r * (1.0 / 3.0 + r * (1.0 / 5.0 + r * (1.0 / 7.0 + r * series))))

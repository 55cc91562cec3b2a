"""Tiles: the parts of a matrix that programs compute, and where a tile is in memory."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class ProductTiles(NamedTuple):
    """A program computes rows × columns of a product, `depth` terms of the sum at a time, in `stages` of a pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@triton.jit
def matrix_tile(height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows and columns of the program's tile of a matrix (height, width), their offsets, and which of these are inside."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = tile_offsets(rows, columns, height, width)
    return rows, columns, at, inside


@triton.jit
def tile_offsets(rows, columns, height, width):
    """The offsets of these rows and columns in a contiguous matrix (height, width), and which of them are inside."""
    at = rows[:, None].to(tl.int64) * width + columns[None, :]
    return at, (rows[:, None] < height) & (columns[None, :] < width)

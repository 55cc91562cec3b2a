"""Splits the lines of a text table into cells: which separator it has, and whether its lines end with one."""

from __future__ import annotations

import csv
from collections.abc import Sequence

from selfnorm.data.headers import is_number


def split_cells(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Returns the cells of each line that is not empty."""
    return [row for row in csv.reader(lines, delimiter=separator, skipinitialspace=True) if row]


def without_ends(rows: list[list[str]]) -> list[list[str]]:
    """Returns rows without the empty cell after a separator at the end of some lines.

    Those are all lines, all lines but the first, or the first line alone.
    """
    first, *below = rows
    longer = {len(row) - len(first) for row in below}
    all_end = bool(below) and all(len(row) > 1 and not row[-1].strip() for row in below)
    if len(first) > 1 and not first[-1].strip() and (all_end or longer == {-1}):
        first = first[:-1]
    elif longer != {1}:
        return rows
    return [first, *(row[:-1] for row in below)] if all_end else [first, *below]


def separator_of(lines: Sequence[str]) -> str:
    """Returns the separator with which most of the first lines have as many cells as the first, and most cells are numbers.

    If there is none, all lines below the first may have one more cell.
    """

    def fit(separator: str) -> tuple[int, int, float]:
        try:
            first, *below = without_ends(split_cells(lines[:100], separator))
        except csv.Error:  # a line without this separator may be too long for one cell
            return 0, 0, 0.0
        even = [row for row in below if len(row) == len(first) > 1]
        longer = bool(below) and all(len(row) == len(first) + 1 for row in below)
        if below and not even and not longer:
            return 0, 0, 0.0
        cells = [cell for row in [first, *(below if longer else even)] for cell in row]
        return len(even), int(longer), sum(is_number(cell, commas=separator != ",") for cell in cells) / len(cells)

    return max(",;\t", key=fit)

"""Finds gross outliers: rows so far from all others that a flow trained on them would fit them at the expense of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.labels import namer

Floats = NDArray[np.float64]

LEAST_ROWS = 20  # fewer do not show how far a distribution reaches
LARGEST_PART, FEW = 0.01, 3  # of the rows, or one in 20 up to three; more of them would be part of the distribution
# How many times as far as the largest of all rows is expected to lie. A row of 200 columns four times as wide as others costs the
# others 0.3 nats; the same for fewer rows, whose tail is less well known, would set aside rows of heavy tails.
FACTOR, FACTOR_ROWS = 2.5, 600
TABLES = 100.0  # one clean table in so many with heavy tails, up to Cauchy's, may lose a row
BLOCK_VALUES = 1 << 22


@dataclass(frozen=True)
class Outlier:
    """A row, counted from 0, and its most unusual entry: its place in the flattened row, its value, and the range of others."""

    row: int
    entry: int
    value: float
    usual: tuple[float, float]


def gross_outliers(x: NDArray[np.floating]) -> list[Outlier]:
    """Returns the gross outliers among the rows of x, (N, D): at most 1 % of the rows, or three, or one in 20 of fewer than 60.

    The tail of each column, and of the length of the rows in robust units, is extrapolated as a power law from its largest values
    without as many of the outermost. A row is a gross outlier if it lies several times beyond the place where the largest of N
    values is expected, and beyond what one in `TABLES` clean tables has. So the rule follows heavy tails, such as Cauchy's.
    Cost: O(N·D).
    """
    total = len(x)
    if total < LEAST_ROWS or not x.shape[1]:
        return []
    width = int((x != x[:1]).any(0).sum())  # constant columns are left out later, and must not matter
    most = max(int(LARGEST_PART * total), min(FEW, total // LEAST_ROWS))
    powers: list[float] = []
    excess, entry, length = np.zeros(total), np.zeros(total, np.int64), np.zeros(total)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for start, values in _blocks(x):
            low, centre, high = np.quantile(_thinned(values), (0.25, 0.5, 0.75), axis=0)
            distance = np.abs(values - centre)
            far, power = _tail(distance, most)
            powers += power[far > 0].tolist()
            limit = _beyond(power, FACTOR_ROWS / total) * far * ((most + 1) * width) ** power
            ratio = np.where(limit > 0, distance / limit, 0.0)
            worst = ratio.argmax(1)
            largest = ratio[np.arange(total), worst]
            entry[largest > excess] = worst[largest > excess] + start
            np.maximum(excess, largest, out=excess)
            unit = np.where(high > low, (high - low) / 1.349, far)
            length += np.square(np.where(unit > 0, distance / unit, 0.0)).sum(1)
        length = np.sqrt(length)
        far, power = _tail(length[:, None], most)
        # The lengths of rows with many columns are nearly equal; then few of them tell how far the largest may lie.
        unsure = np.minimum(1.0, 2 * power) if width > 1 else 1.0
        # Sums of many heavy tails look lighter than they are until far out.
        heaviest = np.maximum(power, np.median(powers or [0.0]))
        limit = _beyond(heaviest, FACTOR_ROWS / total * unsure) * far * (most + 1) ** power
        excess = np.maximum(excess, np.where(limit > 0, length / limit, 0.0))
    found = np.flatnonzero(excess > 1)
    found = np.sort(found[np.argsort(-excess[found], kind="stable")][:most])
    return [_described(x, int(row), int(entry[row]), found) for row in found]


def describe_outliers(found: Sequence[Outlier], total: int, labels: Sequence[str], overrule: str) -> str:
    """Returns one line about the rows that were set aside; empty if there are none.

    labels:    what to call each column, as in `Dependence.described`.
    overrule:  how to keep the rows.
    """
    if not found:
        return ""
    shown = [
        f"row {each.row} ({namer(labels)(each.entry)} is {each.value:.4g}, others are in "
        f"[{each.usual[0]:.4g}, {each.usual[1]:.4g}])"
        for each in found[:3]
    ]
    rest = [str(each.row) for each in found[3:10]]
    more = f", row{'s' if len(rest) > 1 else ''} {', '.join(rest)}" if rest else ""
    more += f" and {len(found) - 10:,} more" if len(found) > 10 else ""
    they, them = ("it lies", "it") if len(found) == 1 else ("they lie", "them")
    return (
        f"{len(found)} of {total} rows set aside, neither trained nor tested on, because {they} far from all others: "
        f"{', '.join(shown)}{more}; rows are numbered from 0, as `score` numbers them; keep {them} with {overrule}"
    )


def _blocks(x: NDArray[np.floating]) -> Iterator[tuple[int, Floats]]:
    """Yields the columns of x in blocks of a bounded size, each after the number of its first column."""
    width = max(1, BLOCK_VALUES // len(x))
    for start in range(0, x.shape[1], width):
        yield start, np.asarray(x[:, start : start + width], np.float64)


def _thinned(values: Floats) -> Floats:
    """Returns about 10,000 of the rows: enough for a median, and a hundredth of the time for a million rows."""
    return values[:: max(1, len(values) // 10_000)]


def _tail(distance: Floats, most: int) -> tuple[Floats, Floats]:
    """Returns for each column its (most + 1)-th largest distance, and the power of the tail below it."""
    total = len(distance)
    inner, outer = max(0, total - 10 * (most + 1)), total - 1 - most
    ordered = np.partition(np.ascontiguousarray(distance.T), (inner, outer), axis=1)
    near, far = ordered[:, inner], ordered[:, outer]
    decades = np.log10((total - inner) / (most + 1))
    return far, np.minimum(np.where(near > 0, np.log10(far / near) / decades, 2.0), 2.0)


def _beyond(power: Floats, unsure: Floats | float) -> Floats:
    """Returns how many times beyond the expected largest value an outlier must be: where one table in `TABLES` has a value."""
    beyond: Floats = np.maximum(FACTOR * (1 + unsure), TABLES ** np.minimum(power, 1.0))
    return beyond


def _described(x: NDArray[np.floating], row: int, entry: int, found: NDArray[np.int64]) -> Outlier:
    others = np.delete(x[:, entry], found)
    return Outlier(row, entry, float(x[row, entry]), (float(others.min()), float(others.max())))

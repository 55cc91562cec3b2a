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
CROWD_PART = 0.05  # of the rows; beyond 1 % they are not set aside, but worth a note
# How many times as far as the largest of the other rows lies, or is expected to lie. A row of 200 columns four times as wide as
# others costs the others 0.3 nats; the same for fewer rows, whose tail is less well known, would set aside rows of heavy tails.
FACTOR, FACTOR_ROWS = 2.5, 600
TABLES = 100.0  # one clean table in so many with heavy tails, up to Cauchy's, may lose a row
ALONE = 1e5  # times the value of all other rows, or times 1 if they are smaller; amounts, e.g. of money, are hardly larger
FEW_VALUES = 5  # that differ from the common one; fewer do not show how far such values reach
ROUNDING = 1e-6  # relative to a distance; values that differ by less are equal
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

    See `_far_rows`. Cost: O(N·D).
    """
    most = max(int(LARGEST_PART * len(x)), min(FEW, len(x) // LEAST_ROWS))
    found, entry, excess = _far_rows(x, most)
    return _described(x, np.sort(found[np.argsort(-excess, kind="stable")][:most]), entry)


def crowd_of_outliers(x: NDArray[np.floating]) -> list[Outlier]:
    """Returns the rows of x, (N, D), that would be gross outliers if there were not so many of them, up to about 5 % of the rows.

    Codes for missing values, such as -999, are often such a crowd. Cost: O(N·D).
    """
    found, entry, _ = _far_rows(x, int(CROWD_PART * len(x)))
    return _described(x, found, entry)


def _far_rows(x: NDArray[np.floating], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Returns the rows of x, (N, D), that are far from all others, the most unusual entry of all rows, and how far these are.

    most:  the number of rows in each column that are not counted as others.

    The tail of each column is extrapolated as a power law from its largest values without as many of the outermost. A row is a
    gross outlier if it lies several times beyond the place where the largest of N values is expected, or beyond the largest of
    the other rows, and beyond what one in `TABLES` clean tables has. So the rule follows heavy tails, such as Cauchy's. In a
    column that is the same in nearly all rows, only the few others tell how far values may lie: ones among zeros are kept, and
    1e6 beside them is not. The lengths of the rows are held to the same rule, each column in units of its own tail.
    """
    total = len(x)
    if total < LEAST_ROWS or not x.shape[1] or not most:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    width = int((x != x[:1]).any(0).sum())  # constant columns are left out later, and must not matter
    powers: list[float] = []
    excess, entry, length = np.zeros(total), np.zeros(total, np.int64), np.zeros(total)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for start, values in _blocks(x):
            centre = np.median(_thinned(values), axis=0)
            distance = np.abs(values - centre)
            tail = _tail(distance, most)
            limit = _limit(tail, _beyond(tail.power, FACTOR_ROWS / total), width, ALONE * np.maximum(np.abs(centre), 1.0))
            ratio = distance / limit
            worst = ratio.argmax(1)
            farthest = ratio[np.arange(total), worst]
            entry[farthest > excess] = worst[farthest > excess] + start
            np.maximum(excess, farthest, out=excess)
            # In these units a value far out in a heavy tail is small, and does not make its row a long one.
            rare = tail.expected * (TABLES * width) ** tail.power
            length += np.square(distance / rare).sum(1)
            powers += tail.power[np.isfinite(rare)].tolist()
        length = np.sqrt(length)
        tail = _tail(length[:, None], most)
        # The lengths of rows with many columns are nearly equal; then few of them tell how far the largest may lie.
        unsure = np.minimum(1.0, 2 * tail.power) if width > 1 else 1.0
        # Sums of many heavy tails look lighter than they are until far out.
        heaviest = np.maximum(tail.power, np.median(powers or [0.0]))
        limit = _limit(tail, _beyond(heaviest, FACTOR_ROWS / total * unsure), 1, np.inf)
        excess = np.maximum(excess, length / limit)
    found = np.flatnonzero(excess > 1)
    return found, entry, excess[found]


def describe_outliers(found: Sequence[Outlier], total: int, labels: Sequence[str], overrule: str) -> str:
    """Returns one line about the rows that were set aside; empty if there are none.

    labels:    what to call each column, as in `Dependence.described`.
    overrule:  how to keep the rows.
    """
    if not found:
        return ""
    they, them = ("it lies", "it") if len(found) == 1 else ("they lie", "them")
    return (
        f"{len(found)} of {total} rows set aside, neither trained nor tested on, because {they} far from all others: "
        f"{_rows_described(found, labels)}; rows are numbered from 0, as `score` numbers them; keep {them} with {overrule}"
    )


def describe_crowd(found: Sequence[Outlier], total: int, labels: Sequence[str], overrule: str) -> str:
    """Returns one line about rows that are too many to be set aside; see `describe_outliers`.

    overrule:  how to leave out this line.
    """
    if not found:
        return ""
    return (
        f"more rows far from all others than can be set aside: {len(found)} of {total} stay in, at the expense of the "
        f"rest: {_rows_described(found, labels)}; rows are numbered from 0; if they are errors, or codes for missing values, "
        f"correct or remove them; if they belong to the data, {overrule} leaves out this note"
    )


def _rows_described(found: Sequence[Outlier], labels: Sequence[str]) -> str:
    shown = [
        f"row {each.row} ({namer(labels)(each.entry)} is {each.value:.4g}, others are in "
        f"[{each.usual[0]:.4g}, {each.usual[1]:.4g}])"
        for each in found[:3]
    ]
    rest = [str(each.row) for each in found[3:10]]
    more = f", row{'s' if len(rest) > 1 else ''} {', '.join(rest)}" if rest else ""
    more += f" and {len(found) - 10:,} more" if len(found) > 10 else ""
    return ", ".join(shown) + more


def _blocks(x: NDArray[np.floating]) -> Iterator[tuple[int, Floats]]:
    """Yields the columns of x in blocks of a bounded size, each after the number of its first column."""
    width = max(1, BLOCK_VALUES // len(x))
    for start in range(0, x.shape[1], width):
        yield start, np.asarray(x[:, start : start + width], np.float64)


def _thinned(values: Floats) -> Floats:
    """Returns about 10,000 of the rows: enough for a median, and a hundredth of the time for a million rows."""
    return values[:: max(1, len(values) // 10_000)]


@dataclass(frozen=True)
class _Tail:
    """The tail of the distances from the centre in each of D columns.

    power:     of the tail without the `most` outermost; 2 where too few rows differ from the centre to tell.
    beside:    (D, most), the power of the tail below each of the largest, from 0 to 1. Where too few rows differ from the centre,
               it is estimated from those few: the closer they are to each other, the smaller it is.
    expected:  the largest distance if the tail goes on as a power law; infinite beyond Cauchy's, which goes on as none.
    largest:   (D, most + 1), in decreasing order.
    smaller:   (D, most), how many distances are smaller than each of these but the last, and not 0.
    """

    power: Floats
    beside: Floats
    expected: Floats
    largest: Floats
    smaller: NDArray[np.int64]


def _tail(distance: Floats, most: int) -> _Tail:
    """Returns the tail of each column.

    Equal values, such as counts, are taken as spread evenly over the step to the next value. Otherwise the tail of a column of
    mostly zeros and ones would seem to end at 1, and a valid 4 would be an outlier.
    """
    total = len(distance)
    inner, outer = max(0, total - 10 * (most + 1)), total - 1 - most
    ordered = np.partition(np.ascontiguousarray(distance.T), (inner, outer), axis=1)
    within, largest = np.sort(ordered[:, inner : outer + 1], axis=1), np.sort(ordered[:, outer:], axis=1)[:, ::-1]
    near, far = within[:, 0], within[:, -1]
    steps = (np.diff(within, axis=1) > ROUNDING * far[:, None]).sum(1)
    step = np.where(steps > 0, (far - near) / np.maximum(steps, 1), far)
    far = far + step * (1 - steps / (outer - inner))  # unchanged if no values are equal
    decades = np.log10((total - inner) / (most + 1))
    power = np.minimum(np.where(near > 0, np.log10(far / near) / decades, 2.0), 2.0)
    expected = np.where(power <= 1, far * (most + 1) ** power, np.inf)
    smaller = np.count_nonzero(distance, axis=0)[:, None] - np.arange(1, most + 1)
    least = np.where(distance > 0, distance, np.inf).min(0)[:, None]
    few = np.log(2 * largest[:, 1:] / least) / np.log(np.maximum(smaller, 1) + 1)
    few = np.where(smaller >= FEW_VALUES, np.minimum(few, 1.0), 1.0)
    return _Tail(power, np.where(near[:, None] > 0, np.minimum(power, 1.0)[:, None], few), expected, largest, smaller)


def _limit(tail: _Tail, beyond: Floats, width: int, alone: Floats | float) -> Floats:
    """Returns the distance where outliers begin: `beyond` times the expected largest, or the largest of those that are none.

    The second holds also where nothing can be extrapolated, because few rows differ from the centre or the tail is too heavy. The
    fewer these rows are, the larger a gap may be by chance.

    width:  the number of columns, any of which may have the largest value of a clean table.
    alone:  (D,), where outliers begin if all other rows are at the centre.
    """
    chance = (TABLES * width) ** (tail.beside / np.maximum(tail.smaller, 1))
    gap = beyond[:, None] * width**tail.beside * chance
    start = np.where(tail.smaller > 0, gap * tail.largest[:, 1:], np.reshape(alone, (-1, 1)))
    after_a_gap = np.where(tail.largest[:, :-1] > start, start, np.inf).min(1)
    limit: Floats = np.minimum(beyond * width ** np.minimum(tail.power, 1.0) * tail.expected, after_a_gap)
    return limit


def _beyond(power: Floats, unsure: Floats | float) -> Floats:
    """Returns how many times as far as the others an outlier must lie: where one table in `TABLES` has a value."""
    beyond: Floats = np.maximum(FACTOR * (1 + unsure), TABLES ** np.minimum(power, 1.0))
    return beyond


def _described(x: NDArray[np.floating], found: NDArray[np.int64], entry: NDArray[np.int64]) -> list[Outlier]:
    """Returns the rows that were found, given the most unusual entry of each row of x."""
    others = np.ones(len(x), bool)
    others[found] = False
    usual: dict[int, tuple[float, float]] = {}
    for index in map(int, np.unique(entry[found])):
        values = x[others, index]
        usual[index] = float(values.min()), float(values.max())
    return [Outlier(int(row), int(entry[row]), float(x[row, entry[row]]), usual[int(entry[row])]) for row in found]

"""Finds columns that are linear functions of others. Their density is infinite on a plane and zero elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from selfnorm.data.labels import namer

Floats = NDArray[np.float64]

FEWEST_ROWS = 5  # fewer agree by chance
LARGEST_RESIDUAL = 1e-6  # of a column given the others, relative to its spread; or what rounding explains
LARGEST_ROUNDING_EXPLAINED = 1e-3
MOST_COLUMNS = 2000  # beyond, only copies are looked for: the factorisation would take minutes
MOST_CONFIRMED = 100
FEWEST_SAMPLED = 2000
SAMPLED_FOR_COPIES = 200  # rows, so that many columns fit into memory
ROUNDS = 4  # of looking for dependences in a sample of the rows and confirming them on all
BLOCK_COLUMNS, BLOCK_VALUES = 64, 1 << 22
QUOTES = ("'", '"')


@dataclass(frozen=True)
class Dependence:
    """A column that equals constant + Σ coefficient·other for the columns in `others`.

    nearly:  whether the difference, at most a millionth of the column's spread, is more than rounding.
    """

    column: int
    others: dict[int, float]
    constant: float
    nearly: bool = False

    def described(self, labels: Sequence[str]) -> str:
        """Returns the dependence as words, such as "column 'b' is 2·'a' + 1".

        labels:  what to call each column: its name in quotes, or "column 3"; if empty, columns are numbered from 1.
        """
        name = namer(labels)
        if len(self.others) > 1 and all(abs(weight + 1) < 1e-3 for weight in self.others.values()):
            listed = _listed([name(index) for index in sorted((self.column, *self.others))])
            return f"{f'columns {listed}' if listed.startswith(QUOTES) else listed} always sum to {self.constant:.4g}"
        of = name(self.column)
        of = f"{f'column {of}' if of.startswith(QUOTES) else of} is{' nearly' if self.nearly else ''}"
        if len(self.others) > 4:
            return f"{of} a linear combination of {_listed([name(other) for other in self.others])}"
        terms = [f"{'-' if weight < 0 else '+'} {_factor(weight)}{name(other)}" for other, weight in self.others.items()]
        if self.constant:
            terms.append(f"{'-' if self.constant < 0 else '+'} {abs(self.constant):.4g}")
        first, *rest = terms
        return f"{of} " + " ".join([first.removeprefix("+ ").replace("- ", "-"), *rest])


def dependent_columns(x: NDArray[np.floating]) -> list[Dependence]:
    """Returns the columns of x, (N, D), that are linear functions of columns before them, up to rounding.

    Each column is projected on those before it in a sample of 2,000 rows, or 2·D if that is more, and the rows with each column's
    extremes; what is found is confirmed on all rows. Cost: O(D³ + N·D). With fewer rows than columns, or with more than 2,000
    columns, only copies are found: columns that are a·(another column) + b. What is left of a column must be below a millionth
    of its spread, or what the last digits of the numbers explain.
    """
    if len(x) < FEWEST_ROWS or not x.shape[1]:
        return []
    columns = _Columns(x)
    found: list[_Found] = []
    for _ in range(ROUNDS):
        found = columns.suspected()[:MOST_CONFIRMED]
        residual, worst = columns.residuals(found)
        wrong = residual > np.array([each.allowed for each in found])
        if not wrong.any():
            break
        columns.sampled = np.union1d(columns.sampled, worst[:, wrong])  # they show what the sample did not
        found = [each for each, differs in zip(found, wrong, strict=True) if not differs]
    found = [each for each in found if columns.holds_typically(each)]
    residual, _ = columns.residuals(found)
    return sorted((columns.told(each, float(left)) for each, left in zip(found, residual, strict=True)), key=lambda d: d.column)


class Told(NamedTuple):
    """Which columns depend on which, as words, what follows from that, and the list of those that could be left out.

    instead:  what else could be done, after a comma; empty if nothing.
    """

    dependences: str
    effect: str
    columns: str
    instead: str


def dependence_fault(x: NDArray[np.floating], labels: Sequence[str]) -> Told | None:
    """Returns what to say about dependent columns; None if there are none."""
    found = dependent_columns(x)
    if not found:
        return None
    told = "; ".join(each.described(labels) for each in found[:5]) + ("; …" if len(found) > 5 else "")
    effect, instead = "likelihood is unbounded", ""
    if all(each.nearly for each in found):
        effect = "difference is at most a millionth of the spread, too little to be learned"
        instead = ", or put that difference in its place"
    return Told(told, effect, ", ".join(map(namer(labels), (each.column for each in found))), instead)


def expect_independent(who: str, x: NDArray[np.floating], labels: Sequence[str], remedy: str) -> None:
    """Raises ValueError that says which columns depend on which, if any does.

    labels:  see `Dependence.described`.
    remedy:  what to do with the columns that it lists, such as "leave out {}".
    """
    if told := dependence_fault(x, labels):
        raise ValueError(
            f"{who}: expected linearly independent columns, got dependent ones in the training rows: {told.dependences}. Their "
            f"{told.effect}: {remedy.format(told.columns)}{told.instead}"
        )


@dataclass(frozen=True)
class _Found:
    """A column that the sample says is a linear function of others, with weights in units of the columns' spreads."""

    column: int
    others: NDArray[np.int64]
    weights: Floats
    rounding: float

    @property
    def allowed(self) -> float:
        return _allowed(self.rounding)


class _Columns:
    """The columns of a table with their centres and spreads, and a sample of the rows."""

    def __init__(self, x: NDArray[np.floating]) -> None:
        self.x = x
        total, width = x.shape
        self.centre, squares = np.zeros(width), np.zeros(width)
        for _, rows in self._blocks():
            self.centre += rows.sum(0) / total
        lowest, highest = np.full(width, np.inf), np.full(width, -np.inf)
        extremes = np.zeros((2, width), np.int64)
        for start, rows in self._blocks():
            squares += np.square(rows - self.centre).sum(0)
            for side, (at, best) in enumerate(((rows.argmin(0), lowest), (rows.argmax(0), highest))):
                values = rows[at, np.arange(width)]
                better = values > best if side else values < best
                extremes[side, better], best[better] = at[better] + start, values[better]
        self.spread = np.where(highest > lowest, np.sqrt(squares / total), 0.0)
        self.varying = np.flatnonzero(self.spread > 0)
        some = SAMPLED_FOR_COPIES if width > MOST_COLUMNS else max(FEWEST_SAMPLED, 2 * width)
        drawn = np.random.RandomState(0).permutation(total)[:some] if total > some else np.arange(total)
        # With the extremes of each column, so that none that is rarely different is constant in the sample.
        self.sampled = np.union1d(drawn, extremes) if width <= MOST_COLUMNS else drawn
        self.rounding = cache(self._rounding)

    def suspected(self) -> list[_Found]:
        """Returns the columns that are linear functions of columns before them in the sampled rows."""
        place = self.varying
        unit = (np.asarray(self.x[self.sampled][:, place], np.float64) - self.centre[place]) / self.spread[place]
        unit -= unit.mean(0)
        combinations = unit.shape[1] <= MOST_COLUMNS and len(unit) > unit.shape[1] + 1
        return list(self._combinations(unit) if combinations else self._copies(unit))

    def residuals(self, found: Sequence[_Found]) -> tuple[Floats, NDArray[np.int64]]:
        """Returns what is left of the columns on all rows, relative to their spread, and 100 rows where most is left of each."""
        total = len(self.x)
        weights = np.zeros((self.x.shape[1], len(found)))
        for at, each in enumerate(found):
            weights[each.others, at] = -each.weights
            weights[each.column, at] = 1
        used = np.flatnonzero(weights.any(1))
        squares = np.zeros(len(found))
        few = min(100, total)
        left, rows_left = np.zeros((0, len(found))), np.zeros((0, len(found)), np.int64)
        for start, rows in self._blocks() if found else ():
            rest = ((rows[:, used] - self.centre[used]) / self.spread[used]) @ weights[used]
            squares += np.square(rest).sum(0)
            left = np.concatenate([left, np.abs(rest)])
            rows_left = np.concatenate([rows_left, np.broadcast_to(np.arange(start, start + len(rows))[:, None], rest.shape)])
            largest = np.argsort(-left, axis=0)[:few]
            left, rows_left = np.take_along_axis(left, largest, 0), np.take_along_axis(rows_left, largest, 0)
        return np.sqrt(squares / total), rows_left

    def holds_typically(self, found: _Found) -> bool:
        """Returns whether little is left of the middle half of the rows, too, and not only relative to a few large values."""
        place = np.append(found.others, found.column)
        some = np.asarray(self.x[:: max(1, len(self.x) // 1000), place], np.float64)
        low, high = np.quantile(some[:, -1], (0.25, 0.75))
        share = (high - low) / 1.349 / self.spread[found.column]
        if share <= 0:
            return True
        unit = (some - self.centre[place]) / self.spread[place]
        left = np.median(np.abs(unit[:, -1] - unit[:, :-1] @ found.weights))
        return bool(left <= share * _allowed(found.rounding / share))

    def told(self, found: _Found, residual: float) -> Dependence:
        """Returns what was found in the units of the columns."""
        slopes = found.weights * self.spread[found.column] / self.spread[found.others]
        constant = float(self.centre[found.column] - slopes @ self.centre[found.others])
        terms = float(np.abs(slopes) @ np.abs(self.centre[found.others]))
        nothing = 10 * max(found.rounding, 1e-9) * self.spread[found.column] + 1e-12 * terms
        others = {int(other): float(slope) for other, slope in zip(found.others, slopes, strict=True)}
        nearly = residual > max(1e-8, 20 * found.rounding)
        return Dependence(found.column, others, constant if abs(constant) > nothing else 0.0, nearly)

    def _combinations(self, unit: Floats) -> Iterator[_Found]:
        """Yields the columns that are combinations of those before them, by projections in blocks."""
        rows, width = unit.shape
        q, r = np.empty((rows, width), order="F"), np.zeros((width, width))
        kept: list[int] = []
        for start in range(0, width, BLOCK_COLUMNS):
            block, before = unit[:, start : start + BLOCK_COLUMNS], len(kept)
            block, outer = _projected(block, q[:, :before])
            for at in range(block.shape[1]):
                known = len(kept)
                rest, inner = (each[:, 0] for each in _projected(block[:, at : at + 1], q[:, before:known]))
                along, size = np.concatenate([outer[:, at], inner]), float(np.sqrt(rest @ rest))
                if size < LARGEST_ROUNDING_EXPLAINED * np.sqrt(rows):
                    weights = solve_triangular(r[:known, :known], along)
                    new = self._explained(unit, start + at, np.array(kept, np.int64), weights, size / np.sqrt(rows))
                    if new:
                        yield new
                        continue
                if size > 0:
                    r[:known, known], r[known, known], q[:, known] = along, size, rest / size
                    kept.append(start + at)

    def _explained(self, unit: Floats, column: int, others: NDArray[np.int64], weights: Floats, residual: float) -> _Found | None:
        """Returns the dependence with as few columns as explain it, if rounding does not forbid it."""
        if not others.size:
            return None
        alone = self._equal(unit, column, int(others[np.abs(unit[:, others].T @ unit[:, column]).argmax()]))
        if alone:
            return alone
        rounding = self._rounding_of(column, others, weights)
        if residual > _allowed(rounding):
            return None
        small = np.argsort(np.abs(weights))
        dropped = small[np.cumsum(np.abs(weights[small])) < _allowed(rounding) / 2]
        used = np.setdiff1d(np.arange(len(others)), dropped)
        return _Found(int(self.varying[column]), self.varying[others[used]], weights[used], rounding) if used.size else None

    def _equal(self, unit: Floats, column: int, other: int) -> _Found | None:
        """Returns the dependence of a column on one other, if there is one."""
        weight = float(unit[:, column] @ unit[:, other] / (unit[:, other] @ unit[:, other]))
        residual = np.sqrt(np.mean(np.square(unit[:, column] - weight * unit[:, other])))
        weights, others = np.array([weight]), np.array([other])
        rounding = self._rounding_of(column, others, weights)
        return (
            _Found(int(self.varying[column]), self.varying[others], weights, rounding) if residual <= _allowed(rounding) else None
        )

    def _copies(self, unit: Floats) -> Iterator[_Found]:
        """Yields the columns that equal one before them up to a factor, found by random projections."""
        rows, width = unit.shape
        views = np.random.RandomState(0).normal(size=(8, rows)) / np.sqrt(rows) @ unit
        views *= np.sign(views[0])
        order = np.argsort(views[0], kind="stable")
        near = min(4 * LARGEST_ROUNDING_EXPLAINED, 8 / width)  # so that few other columns look the same by chance
        found: dict[int, _Found] = {}
        for shift in range(1, min(20, width)):
            one, other = order[:-shift], order[shift:]
            for at in np.flatnonzero((np.abs(views[:, one] - views[:, other]) < near).all(0)):
                earlier, later = sorted((int(one[at]), int(other[at])))
                if (new := self._equal(unit, later, earlier)) and (later not in found or new.others < found[later].others):
                    found[later] = new
        yield from found.values()

    def _rounding_of(self, column: int, others: NDArray[np.int64], weights: Floats) -> float:
        """Returns the spread of the difference between a column and a combination that rounding of the numbers explains."""
        errors = np.array([self.rounding(int(other)) for other in others])
        return float(2 * np.sqrt(self.rounding(column) ** 2 + np.square(weights * errors).sum()))  # 2, as it is an estimate

    def _rounding(self, column: int) -> float:
        place = int(self.varying[column])
        return _last_digit(np.asarray(self.x[:, place], np.float64), self.x.dtype) / float(self.spread[place])

    def _blocks(self) -> Iterator[tuple[int, Floats]]:
        """Yields the rows in blocks of a bounded size, each after the number of its first row."""
        step = max(1, BLOCK_VALUES // self.x.shape[1])
        for start in range(0, len(self.x), step):
            yield start, np.asarray(self.x[start : start + step], np.float64)


def _projected(x: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Returns columns x, (N, n), without their part in the span of the orthonormal columns of q, and that part's coordinates."""
    along = q.T @ x
    rest = x - q @ along
    small = np.square(rest).sum(0) < 0.01 * np.square(x).sum(0)
    if small.any():  # then what rounding left of the span matters
        again = q.T @ rest[..., small]
        rest[..., small] -= q @ again
        along[..., small] += again
    return rest, along


def _allowed(rounding: float) -> float:
    return max(LARGEST_RESIDUAL, min(LARGEST_ROUNDING_EXPLAINED, rounding))


def _last_digit(values: Floats, dtype: np.dtype[np.floating]) -> float:
    """Returns the root mean square of a column's rounding errors: of its type, or of its last digit if it has few."""
    size = np.abs(values)
    largest = float(size.max())
    stored = float(np.finfo(dtype).eps) * largest
    if (values == np.floor(values)).all():  # counts differ by one because they differ
        return stored
    magnitude = 10.0 ** np.floor(np.log10(np.where(size > 0, size, 1.0)))
    for digits in range(3, 9):  # as %.6g writes them, or %.6f
        for unit in (magnitude, np.full_like(magnitude, 10.0 ** np.floor(np.log10(largest)))):
            step = unit * 10.0 ** (1 - digits)
            # A look at a few values spares the others.
            if all(
                (np.abs(values[part] - step[part] * np.round(values[part] / step[part])) <= stored + 1e-12 * largest).all()
                for part in (slice(None, 50), slice(None))
            ):
                return max(stored, float(np.sqrt(np.mean(step**2) / 12)))
    return stored


def _listed(names: Sequence[str]) -> str:
    if all(name.startswith("column ") for name in names):
        names = ["columns " + names[0].removeprefix("column "), *(name.removeprefix("column ") for name in names[1:])]
    return ", ".join(names) if len(names) <= 5 else f"{', '.join(names[:4])}, … ({len(names)} columns)"


def _factor(weight: float) -> str:
    size = abs(weight)
    return "" if f"{size:.4g}" == "1" else f"{size:.4g}·"

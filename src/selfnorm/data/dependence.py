"""Finds columns that are linear functions of others. Their density is infinite on a plane and zero elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FEWEST_ROWS = 5  # fewer agree by chance
LARGEST_RESIDUAL = 1e-6  # of a column given the others, relative to its spread; or what rounding explains
LARGEST_ROUNDING_EXPLAINED = 1e-3
MOST_COLUMNS = 2000  # beyond, only copies are looked for: the factorisation would take minutes


@dataclass(frozen=True)
class Dependence:
    """A column that equals constant + Σ coefficient·other for the columns in `others`."""

    column: int
    others: dict[int, float]
    constant: float

    def __str__(self) -> str:
        return self.described(())

    def described(self, names: Sequence[str]) -> str:
        """Returns the dependence as words, such as "column 'b' is 2·'a' + 1"."""

        def name(index: int) -> str:
            return repr(names[index]) if names else f"column {index}"

        of = f"column {name(self.column)}" if names else name(self.column)
        if len(self.others) > 4:
            listed = ", ".join(name(other) for other in list(self.others)[:4])
            return f"{of} is a linear combination of {listed}, … ({len(self.others)} columns)"
        terms = [f"{'-' if weight < 0 else '+'} {_factor(weight)}{name(other)}" for other, weight in self.others.items()]
        scale = max(abs(weight) for weight in self.others.values())
        if float(f"{abs(self.constant):.4g}") > 1e-5 * scale:
            terms.append(f"{'-' if self.constant < 0 else '+'} {abs(self.constant):.4g}")
        first, *rest = terms
        return f"{of} is " + " ".join([first.removeprefix("+ ").replace("- ", "-"), *rest])


def dependent_columns(x: NDArray[np.floating]) -> list[Dependence]:
    """Returns the columns of x, (N, D), that are linear functions of columns before them, up to rounding.

    Looked for by a QR factorisation of at most 2·D + 100 standardised rows, and confirmed on all rows; the cost is O(D³). With
    fewer rows than columns, or with more than 2000 columns, only columns that equal one other are found. Nearly dependent columns
    are not: the residual must be below a millionth of the spread, or what the last digit of the numbers explains.
    """
    if len(x) < FEWEST_ROWS:
        return []
    some = _sampled_rows(x)
    centre, spread = some.mean(0), some.std(0)
    varying = np.flatnonzero(spread > 0)
    unit = (some[:, varying] - centre[varying]) / spread[varying]
    found: list[Dependence] = []
    kept, copies = _copies(unit)
    for column, other in copies:
        found += _confirmed(x, int(varying[column]), varying[[other]], spread) or []
    rest = unit[:, kept]
    if 2 < rest.shape[1] <= MOST_COLUMNS and len(rest) > rest.shape[1] + 1:
        factor = np.linalg.qr(rest, mode="r")
        small = np.abs(np.diagonal(factor)) < LARGEST_ROUNDING_EXPLAINED * np.sqrt(len(rest))
        independent = [place for place in range(rest.shape[1]) if not small[place]]
        for place in np.flatnonzero(small)[:10]:
            before = [other for other in independent if other < place]
            new = _confirmed(x, int(varying[kept[place]]), varying[kept[before]], spread) if before else None
            found += new or []
    return sorted(found, key=lambda each: each.column)


def expect_independent(who: str, x: NDArray[np.floating], names: Sequence[str]) -> None:
    """Raises ValueError that says which columns depend on which, if any does."""
    found = dependent_columns(x)
    if not found:
        return
    told = "; ".join(each.described(names) for each in found[:5]) + ("; …" if len(found) > 5 else "")
    drop = ", ".join(repr(names[each.column]) if names else str(each.column + 1) for each in found)
    raise ValueError(
        f"{who}: expected columns that do not determine each other, got dependent ones: {told}. Their likelihood has no bound: "
        f"leave out {drop} (`--drop` of `selfnorm fit`{'' if names else ', which counts columns from 1'})"
    )


def _sampled_rows(x: NDArray[np.floating]) -> Floats:
    rows = 2 * min(x.shape[1], MOST_COLUMNS) + 100
    order = np.random.RandomState(0).permutation(len(x))[:rows] if len(x) > rows else slice(None)
    return np.asarray(x[order], np.float64)


def _copies(unit: Floats) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """Returns the columns that equal none before them up to sign, and pairs of a column and the earlier one that it equals."""
    rows, width = unit.shape
    views = np.random.RandomState(0).normal(size=(8, rows)) / np.sqrt(rows) @ unit
    views *= np.sign(views[0])
    order = np.argsort(views[0], kind="stable")
    near = min(4 * LARGEST_ROUNDING_EXPLAINED, 8 / max(1, width))  # so that few other columns look the same by chance
    pairs: dict[int, int] = {}
    for shift in range(1, min(20, width)):
        one, other = order[:-shift], order[shift:]
        for at in np.flatnonzero((np.abs(views[:, one] - views[:, other]) < near).all(0)):
            earlier, later = sorted((int(one[at]), int(other[at])))
            residual = unit[:, later] - np.sign(unit[:, later] @ unit[:, earlier]) * unit[:, earlier]
            if np.sqrt(np.mean(residual**2)) < LARGEST_ROUNDING_EXPLAINED:
                pairs[later] = min(earlier, pairs.get(later, earlier))
    kept = np.array([column for column in range(width) if column not in pairs], np.int64)
    return kept, sorted(pairs.items())


def _confirmed(x: NDArray[np.floating], column: int, others: NDArray[np.int64], spread: Floats) -> list[Dependence]:
    """Returns the column's dependence on the others, if on all rows the residual is what rounding leaves."""
    y, basis = np.asarray(x[:, column], np.float64), np.asarray(x[:, others], np.float64)
    centre = basis.mean(0)
    scaled = (basis - centre) / spread[others]
    weights = np.linalg.lstsq(scaled, (y - y.mean()) / spread[column], rcond=None)[0]
    used = np.flatnonzero(np.abs(weights) > 1e-4)
    residual = (y - y.mean()) / spread[column] - scaled @ weights
    rounding = _last_digit(y, x.dtype) / spread[column]
    rounding += sum(abs(weights[at]) * _last_digit(basis[:, at], x.dtype) / spread[others[at]] for at in used)
    allowed = max(LARGEST_RESIDUAL, min(LARGEST_ROUNDING_EXPLAINED, rounding))
    if not used.size or np.sqrt(np.mean(residual**2)) > allowed:
        return []
    slopes = {int(others[at]): float(weights[at] * spread[column] / spread[others[at]]) for at in used}
    constant = float(y.mean() - sum(slope * basis[:, at].mean() for at, slope in zip(used, slopes.values(), strict=True)))
    return [Dependence(column, slopes, constant)]


def _last_digit(values: Floats, dtype: np.dtype[np.floating]) -> float:
    """Returns the largest rounding error of a column: of its type, or of its last digit if it has few."""
    size = np.abs(values)
    largest = float(size.max())
    stored = float(np.finfo(dtype).eps) * largest
    magnitude = 10.0 ** np.floor(np.log10(np.where(size > 0, size, 1.0)))
    for digits in range(3, 9):  # as %.6g writes them, or %.6f
        for unit in (magnitude, 10.0 ** np.floor(np.log10(largest))):
            step = unit * 10.0 ** (1 - digits)
            if (np.abs(values - step * np.round(values / step)) <= stored + 1e-12 * largest).all():
                return max(stored, float(np.max(step)) / 2)
    return stored


def _factor(weight: float) -> str:
    size = abs(weight)
    return "" if f"{size:.4g}" == "1" else f"{size:.4g}·"

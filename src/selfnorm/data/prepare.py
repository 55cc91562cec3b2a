"""What happens to real-valued examples between a file and training, and what cannot be trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.dataset import Dataset
from selfnorm.data.layout import constant_columns
from selfnorm.data.outliers import Outlier, crowd_of_outliers, gross_outliers
from selfnorm.data.resolution import expect_spread

FEW_EXAMPLES = 30  # the mean of so many has a standard error of about a fifth of their standard deviation
ROWS_PER_COLUMN = 10


@dataclass(frozen=True)
class Prepared:
    """Rows that can be trained and tested on.

    rows:       without outliers and constant columns, in the order of the file.
    parts:      the places of each part in them; the training rows come first.
    outliers:   the rows that were set aside.
    crowd:      the rows that were not, because there are too many of them; numbered as in the file, like the outliers.
    constant:   the columns with one value in all training rows, with that value.
    differing:  how many held-out rows have another value in one of these columns.
    """

    rows: NDArray[Any]
    parts: tuple[NDArray[np.int64], ...]
    outliers: list[Outlier]
    crowd: list[Outlier]
    constant: dict[int, float]
    differing: int

    @property
    def total(self) -> int:
        """The number of rows of the file."""
        return len(self.rows) + len(self.outliers)

    def split(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Returns the parts of the rows, given in any type."""
        return [rows[part] for part in self.parts]


def prepare(
    values: NDArray[np.floating],
    split: Callable[[int], Sequence[NDArray[np.int64]]],
    *,
    set_outliers_aside: bool = True,
    kept: Container[int] | None = None,
) -> Prepared:
    """Sets gross outliers aside, splits the other rows, and leaves out the columns that are constant in the training rows.

    values:  (N, D), or (N, …), of which no entry is left out.
    split:   from a number of rows to the places of the training rows, and of each other part.
    kept:    columns to leave in even if they are constant, so that the caller can refuse them; None leaves all in.
    """
    flat = values.reshape(len(values), -1)
    outliers = gross_outliers(flat) if set_outliers_aside else []
    taken = [each.row for each in outliers]
    rows = np.delete(values, taken, 0) if outliers else values
    places = np.delete(np.arange(len(values)), taken)
    found = crowd_of_outliers(rows.reshape(len(rows), -1)) if set_outliers_aside else []
    crowd = [replace(each, row=int(places[each.row])) for each in found]
    train, *others = split(len(rows))
    if kept is None or values.ndim != 2:
        return Prepared(rows, (train, *others), outliers, crowd, {}, 0)
    constant = {index: value for index, value in constant_columns(rows[train]).items() if index not in kept}
    which = list(constant)
    differing = int((rows[np.concatenate(others)][:, which] != rows[train[0], which]).any(1).sum()) if constant else 0
    rows = np.delete(rows, which, 1) if constant else rows
    return Prepared(rows, (train, *others), outliers, crowd, constant, differing)


def note_on_constants(prepared: Prepared, what: str) -> str:
    """Returns what there is to say about rows that differ in a constant column, or may; usually nothing."""
    told = []
    if prepared.differing:
        held_out = sum(map(len, prepared.parts[1:]))
        told.append(
            f"{prepared.differing} of {held_out} held-out rows differ in {what}, constant in the training rows: their "
            "log-likelihood is −∞, and the validation and test likelihoods are those of the other columns"
        )
    largest = max(map(abs, prepared.constant.values()), default=0.0)
    if largest > 2.0**53:
        told.append(
            f"numbers as large as {largest:.3g}, in {what}, are rounded to multiples of {np.spacing(largest):.3g}, so that "
            "different ones may look the same: subtract a constant before they become floating-point numbers"
        )
    return "; ".join(told)


def expect_float32_spread(dataset: Dataset) -> None:
    """Raises ValueError, naming the columns, if real-valued data has a scale that float32 cannot hold."""
    if dataset.levels is None:
        labels = dataset.table.short_labels if dataset.table is not None else tuple(map(repr, dataset.columns))
        expect_spread(dataset.name, dataset.train, labels)


def with_notes(dataset: Dataset, notes: Sequence[str]) -> Dataset:
    """Returns the data set with those of the notes that are not empty, and one on its size if it is small."""
    return replace(dataset, notes=(*dataset.notes, *filter(None, (*notes, note_on_size(dataset)))))


def note_on_size(dataset: Dataset, tests: bool = True) -> str:
    """Returns a line that says what so few examples can tell, or an empty text if there are enough.

    tests:  whether there is a test part; without, held-out rows only decide when training stops.
    """
    rows, validated, tested = len(dataset.train), len(dataset.validation), len(dataset.test)
    width, tabular = math.prod(dataset.shape), dataset.levels is None
    sizes = f"{rows} examples to train on, {validated} to validate{f', {tested} to test' if tests else ''}"
    columns = f"{width} column{'s' if width != 1 else ''}"
    if tabular and rows <= width:
        return (
            f"{sizes}, for {columns}: with no more rows than columns, each column is a linear function of the others on "
            "these rows, so the likelihood says little; use more rows or fewer columns"
        )
    if tests and (held_out := min(validated, tested)) < FEW_EXAMPLES:
        error = f"{1 / math.sqrt(held_out):.2g} standard deviations of a single example's"
        return (
            f"{sizes}: with so few, the mean log-likelihood has a standard error of about {error}; treat it as a rough "
            "estimate, or use more examples"
        )
    if tabular and rows < ROWS_PER_COLUMN * width:
        return f"{sizes}, for {columns}: expect overfitting; use more rows or fewer columns"
    return ""

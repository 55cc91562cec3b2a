"""Loads your own examples from a path: what is left out of them, how they are split, and what there is to say about both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from selfnorm.data.arrays import as_examples, read_values
from selfnorm.data.dataset import Dataset, permutation
from selfnorm.data.dependence import dependence_fault, expect_independent
from selfnorm.data.labels import entry_label
from selfnorm.data.layout import EVERYTHING, TableLayout, constant_columns, kept_columns
from selfnorm.data.outliers import describe_crowd, describe_outliers
from selfnorm.data.prepare import Prepared, note_on_constants, prepare, with_notes
from selfnorm.data.resolution import as_resolved, expect_distinguishable

KEEP_ROWS = "`--set set_outliers_aside=false`"


@dataclass(frozen=True)
class TableOptions:
    """How to read the columns of a table; see `load_dataset`."""

    header: bool | None = None
    drop: Sequence[str] = ()
    keep: Sequence[str] = ()

    @property
    def keeps_everything(self) -> bool:
        """Whether all columns and all rows are kept."""
        return EVERYTHING in self.keep


def load_own_examples(
    path: Path, levels: int | None, options: TableOptions, *, set_outliers_aside: bool, check_columns: bool
) -> Dataset:
    """Returns the examples of a file or of a folder of images, split 80/10/10; see `load_dataset`."""
    who = str(path)
    values, table = read_values(path, options.header, options.drop, options.keep)
    if levels is not None and (values.ndim < 3 or values.dtype != np.uint8):
        raise ValueError(
            f"{path}: expected no levels for real numbers, got levels={levels}; only integer images have levels: "
            "an image folder, or a uint8 array of shape (N, H, W), (N, C, H, W) or (N, H, W, C)"
        )
    labels = table.short_labels if table else ()
    if check_columns:  # not of a run that was trained on them
        expect_distinguishable(who, values, labels)
    examples = as_examples(who, values, "stored", labels)
    if len(examples) < 4:
        raise ValueError(f"{path}: expected at least 4 examples to split into training, validation and test, got {len(examples)}")
    if examples.dtype == torch.uint8:
        train, validation, test = (examples[torch.from_numpy(part)] for part in _split(len(examples)))
        return with_notes(Dataset(path.resolve().name, train, validation, test, 256 if levels is None else levels), ())
    prepared = prepare(
        examples.numpy(),
        _split,
        set_outliers_aside=set_outliers_aside and not options.keeps_everything,
        kept=None if table is None or options.keeps_everything else kept_columns(who, table, options.keep),
    )
    del values, examples
    labels = _entry_labels(prepared.rows.shape[1:])
    called = table.short_labels if table else labels
    notes = [
        describe_outliers(prepared.outliers, prepared.total, called, KEEP_ROWS),
        describe_crowd(prepared.crowd, prepared.total, called, KEEP_ROWS),
    ]
    if table is not None:
        table = _without_constants(path, table, prepared)
        notes.insert(0, f"{path}: {table.describe()}" if table.has_decisions else "")
        notes.append(note_on_constants(prepared, table.labels([position for position, _ in table.constant])))
        labels = table.short_labels
    if check_columns:
        fitted = prepared.rows[prepared.parts[0]].reshape(len(prepared.parts[0]), -1)
        if table is not None:
            expect_independent(path.name, fitted, labels, "leave out {} (`--drop` of `selfnorm fit`, `drop` in Python)")
        elif told := dependence_fault(fitted, labels):
            notes.append(f"linearly dependent entries: {told.dependences}; their {told.effect}, so compare likelihoods with care")
    train, validation, test = map(torch.from_numpy, prepared.split(as_resolved(prepared.rows)))
    columns = table.columns if table is not None else ()
    return with_notes(Dataset(path.resolve().name, train, validation, test, None, columns, table), notes)


def _split(total: int) -> list[NDArray[np.int64]]:
    held_out = max(1, total // 10)
    return np.split(permutation(total), [total - 2 * held_out, total - held_out])


def _without_constants(path: Path, table: TableLayout, prepared: Prepared) -> TableLayout:
    """Returns the layout without the constant columns; raises ValueError, naming the columns, if that leaves none to train on."""
    count = len(prepared.parts[0])
    if not prepared.rows.shape[1]:
        raise ValueError(f"{path}: expected columns that vary, got only constant ones: all {count} training rows are the same")
    table = table.without(prepared.constant)
    if kept := constant_columns(prepared.rows[prepared.parts[0]]):
        names = table.labels([table.used[index] for index in kept])
        raise ValueError(
            f"{path}: expected columns that vary, got the same value in all {count} training rows of {names}; a constant has no "
            "density: leave it out with drop, or do not keep it"
        )
    return table


def _entry_labels(shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(entry_label(place) for place in np.ndindex(shape))

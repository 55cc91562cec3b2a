"""What happens to real-valued examples between a file and training, and what cannot be trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfnorm.data.dataset import Dataset
from selfnorm.data.dependence import expect_independent
from selfnorm.data.outliers import describe_outliers, gross_outliers
from selfnorm.data.resolution import as_resolved, expect_spread

FEW_EXAMPLES = 30  # whose mean log-likelihood is still off by a fifth of the standard deviation
ROWS_PER_COLUMN = 10
REMEDY = "leave out {} (`--drop` of `selfnorm fit`, `drop` in Python)"


def prepare(examples: Tensor, columns: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Returns the examples without gross outliers, in float32 if that resolves what is left, and lines about what was done.

    Grey levels stay as they are.
    """
    if examples.dtype == torch.uint8:
        return examples, ()
    outliers = gross_outliers(examples.flatten(1).numpy())
    note = describe_outliers(outliers, len(examples), [repr(name) for name in columns])
    if outliers:
        keep = torch.ones(len(examples), dtype=torch.bool)
        keep[[each.row for each in outliers]] = False
        examples = examples[keep]
    return torch.from_numpy(as_resolved(examples.numpy())), (note,) if note else ()


def expect_density(dataset: Dataset) -> None:
    """Raises ValueError, naming the columns, if real-valued data has no density that a flow can learn."""
    if dataset.levels is None:
        expect_spread(dataset.name, dataset.train, dataset.columns)
        labels = dataset.table.short_labels if dataset.table is not None else tuple(map(repr, dataset.columns))
        expect_independent(dataset.name, dataset.train.flatten(1).numpy(), labels, REMEDY)


def with_notes(dataset: Dataset, notes: Sequence[str]) -> Dataset:
    """Returns the data set with these notes, and one on its size if it is small."""
    size = note_on_size(dataset)
    return replace(dataset, notes=(*dataset.notes, *notes, *([size] if size else [])))


def note_on_size(dataset: Dataset) -> str:
    """Returns a line that says what so few examples can tell, or an empty text if there are enough."""
    rows, validated, tested = len(dataset.train), len(dataset.validation), len(dataset.test)
    held_out, width, tabular = min(validated, tested), math.prod(dataset.shape), dataset.levels is None
    sizes = f"{rows} examples to train on, {validated} to validate, {tested} to test"
    if tabular and rows <= width:
        return (
            f"{sizes}, for {width} columns: with fewer rows than columns every column is a combination of the others, so the "
            "likelihood says little; use more rows or fewer columns"
        )
    if held_out < FEW_EXAMPLES:
        error = f"{1 / math.sqrt(held_out):.2g} times the spread of a single one's"
        return f"{sizes}: the mean likelihood of so few has a standard error of about {error}, so trust it little; use more"
    if tabular and rows < ROWS_PER_COLUMN * width:
        return f"{sizes}, for {width} columns: expect overfitting; use more rows or fewer columns"
    return ""

"""Tables of numbers, from .csv, .tsv and .parquet files; a bad cell is named by line and column."""

from __future__ import annotations

import csv
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.locate import require

LARGEST = float(np.finfo(np.float32).max)


def read_csv(path: Path) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """The numbers, and the header's names if the first line has no number in it. Separators: comma, semicolon, tab."""
    try:
        separator = _separator(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((row for row in csv.reader(file, delimiter=separator) if row), [])
            header = tuple(cell.strip() for cell in first) if _is_header(first) else ()
            start = next((line for line in file if line.strip()), "") if header else separator.join(first)
            if not start:
                raise ValueError(f"{path}: expected at least one row of numbers, got none")
            values = _parse(chain([start], file), separator)
        if isinstance(values, ValueError) or not _fits(values) or (header and len(header) != values.shape[1]):
            raise _complaint(path, separator, str(values))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: expected UTF-8 text with numbers between separators, got other bytes ({error})") from error
    return values, header


def read_parquet(path: Path) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """The numbers, and the columns' names; needs pyarrow, the `parquet` extra."""
    arrow = require("pyarrow", str(path), "selfnorm[parquet]")
    parquet = require("pyarrow.parquet", str(path), "selfnorm[parquet]")
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected a Parquet file, got one that cannot be read ({error})") from error
    values = np.empty((table.num_rows, table.num_columns), np.float64)
    for index, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        kind = column.type
        if not any(is_kind(kind) for is_kind in (arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean)):
            raise ValueError(f"{path}: expected columns of numbers, got {kind} in column {name!r}; leave that column out")
        numbers = column.to_numpy()
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise ValueError(f"{path}: expected no empty cells, got {column.null_count}, the first in column {name!r}, row {row}")
        values[:, index] = numbers
        if not (finite := np.abs(values[:, index]) <= LARGEST).all():  # False for NaN too
            row = int(finite.argmin())
            raise ValueError(
                f"{path}: expected finite numbers that float32 can hold, got {numbers[row]} in column {name!r}, row {row}, "
                "counted from 0"
            )
    return values, tuple(table.column_names)


def _separator(path: Path) -> str:
    if path.suffix.lower() == ".tsv":
        return "\t"
    with path.open(encoding="utf-8-sig", newline="") as file:
        line = next((line for line in file if line.strip()), "")
    # A semicolon first: where it separates, commas may be decimal ones.
    return next((separator for separator in ";,\t" if separator in line), ",")


def _parse(lines: chain[str], separator: str) -> NDArray[np.float64] | ValueError:
    """The fast path, in C; it counts rows rather than lines, so that its errors are only a sign to look closer."""
    try:
        return np.loadtxt(lines, np.float64, comments=None, delimiter=separator, quotechar='"', ndmin=2)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        return error


def _fits(values: NDArray[np.float64]) -> bool:
    return bool(values.min() >= -LARGEST and values.max() <= LARGEST)  # False for NaN too


def _is_number(text: str) -> bool:
    """As NumPy reads them, which takes neither 1_000 nor digits of other scripts."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def _is_header(row: list[str]) -> bool:
    return any(cell.strip() for cell in row) and not any(map(_is_number, row))


def _complaint(path: Path, separator: str, otherwise: str) -> ValueError:
    """The first thing wrong with the table, found by a slow second reading."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=separator)
        header: list[str] = []
        width = 0
        for row in rows:
            if not row:
                continue
            if not width:
                width = len(row)
                if _is_header(row):
                    header = row
                    continue
            where = f"{path}, line {rows.line_num}"
            if len(row) != width:
                return ValueError(f"{where}: expected {width} columns, as in the first line, got {len(row)}")
            for column, text in enumerate(row):
                if fault := _fault(text):
                    name = f" ({header[column].strip()})" if header else ""
                    return ValueError(f"{where}, column {column + 1}{name}: expected {fault}, got {text[:40]!r}")
    return ValueError(f"{path}: expected a table of numbers, got one that cannot be read ({otherwise})")


def _fault(text: str) -> str:
    """What the cell should have been, or nothing where it is that."""
    if not text.strip():
        return "a number in every cell; leave out or fill in such rows"
    if not _is_number(text):
        return "a number, with a decimal point; a header has no numbers, a row has nothing else"
    return "" if abs(float(text)) <= LARGEST else "a finite number that float32 can hold"

"""Reads tables of numbers from .csv, .tsv and .parquet files; errors name the line and column of a bad cell."""

from __future__ import annotations

import csv
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.locate import require_module

FLOAT32_MAX = float(np.finfo(np.float32).max)


def read_csv(path: Path) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Returns the numbers, and the column names if the first line contains no number. Separators: comma, semicolon, tab."""
    try:
        separator = _separator(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((row for row in csv.reader(file, delimiter=separator) if row), [])
            header = tuple(cell.strip() for cell in first) if _is_header(first) else ()
            start = next((line for line in file if line.strip()), "") if header else separator.join(first)
            if not start:
                raise ValueError(f"{path}: expected at least one row of numbers, got none")
            values = _parse(chain([start], file), separator)
        if isinstance(values, ValueError) or not _fits_float32(values) or (header and len(header) != values.shape[1]):
            raise _first_error(path, separator, str(values))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: expected UTF-8 text with separated numbers, got other bytes ({error})") from error
    return values, header


def read_parquet(path: Path) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Returns the numbers and the column names; needs pyarrow, the `parquet` extra."""
    arrow = require_module("pyarrow", str(path), "selfnorm[parquet]")
    parquet = require_module("pyarrow.parquet", str(path), "selfnorm[parquet]")
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected a Parquet file, got one that cannot be read ({error})") from error
    values = np.empty((table.num_rows, table.num_columns), np.float64)
    for index, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        kind = column.type
        if not any(is_kind(kind) for is_kind in (arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean)):
            raise ValueError(f"{path}: expected columns of numbers, got {kind} in column {name!r}; remove that column")
        numbers = column.to_numpy()
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise ValueError(
                f"{path}: expected no empty cells, got {column.null_count}, the first in column {name!r}, row {row}, "
                "counted from 0"
            )
        values[:, index] = numbers
        if not (finite := np.abs(values[:, index]) <= FLOAT32_MAX).all():  # False for NaN too
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
    # The semicolon comes first: in files that use it, commas may be decimal commas.
    return next((separator for separator in ";,\t" if separator in line), ",")


def _parse(lines: chain[str], separator: str) -> NDArray[np.float64] | ValueError:
    """Parses the table in C. On failure returns the error, which counts rows, not lines; `_first_error` finds the line."""
    try:
        return np.loadtxt(lines, np.float64, comments=None, delimiter=separator, quotechar='"', ndmin=2)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        return error


def _fits_float32(values: NDArray[np.float64]) -> bool:
    return bool(values.min() >= -FLOAT32_MAX and values.max() <= FLOAT32_MAX)  # False for NaN too


def _is_number(text: str) -> bool:
    """Returns whether NumPy reads the text as a number; unlike Python, it accepts neither 1_000 nor non-ASCII digits."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def _is_header(row: list[str]) -> bool:
    return any(cell.strip() for cell in row) and not any(map(_is_number, row))


def _first_error(path: Path, separator: str, otherwise: str) -> ValueError:
    """Returns the error for the first bad cell or line of the table, found by reading it again, slowly."""
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
                if fault := _expected_instead(text):
                    name = f" ({header[column].strip()})" if header else ""
                    return ValueError(f"{where}, column {column + 1}{name}: expected {fault}, got {text[:40]!r}")
    return ValueError(f"{path}: expected a table of numbers, got one that cannot be read ({otherwise})")


def _expected_instead(text: str) -> str:
    """Returns what was expected in place of a bad cell, or an empty text for a good one."""
    if not text.strip():
        return "a number in every cell; remove rows with empty cells or fill them in"
    if not _is_number(text):
        return "a number, with a decimal point (only a header line may contain text)"
    return "" if abs(float(text)) <= FLOAT32_MAX else "a finite number that float32 can hold"

"""Opens tables: text files, Parquet files and arrays. What their columns mean is decided in `data/layout.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.delimited import FLOAT32_MAX, DelimitedFile, TextError
from selfnorm.data.locate import require_module
from selfnorm.data.resolution import expect_distinguishable
from selfnorm.data.safe_files import STANDARD_INPUT, expect_fits_memory, expect_regular

TEXT_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
TABLE_SUFFIXES = (*TEXT_SUFFIXES, ".parquet")


class Table(Protocol):
    """A table whose columns can be read by position, counted from 0.

    names:           of all columns, empty if the file has none.
    decimal_commas:  whether the numbers that were read had decimal commas.
    """

    names: tuple[str, ...]
    width: int
    decimal_commas: bool

    def numbers(self, positions: Sequence[int]) -> NDArray[Any]:
        """Returns the numbers of some columns, (N, columns); raises ValueError that says where there is none."""

    def texts(self, positions: Sequence[int]) -> list[list[str]]:
        """Returns the cells of some columns as text, a list for each."""

    def texts_among(self, positions: Collection[int]) -> list[int]:
        """Returns which of some columns hold text, in ascending order."""


def open_table(
    path: Path, header: bool | None = None, numeric_names: bool = True, expected: Collection[str] | None = None
) -> Table:
    """Returns the table in a file that ends in one of `TABLE_SUFFIXES`, or in /dev/stdin as text.

    See `DelimitedFile` for the other arguments.
    """
    if path.suffix.lower() == ".parquet":
        return ParquetFile(path, is_measure=expected is None)
    return DelimitedFile(path, header, numeric_names, expected)


def is_table(path: Path) -> bool:
    """Returns whether the name of a file is that of a table, other than an array; /dev/stdin holds one."""
    return path == STANDARD_INPUT or path.name.lower().endswith(TABLE_SUFFIXES)


class ArrayTable:
    """A two-dimensional array as a table without names."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.names: tuple[str, ...] = ()
        self.width = values.shape[1]
        self.decimal_commas = False
        self._values = values

    def numbers(self, positions: Sequence[int]) -> NDArray[Any]:
        return self._values if list(positions) == list(range(self.width)) else self._values[:, list(positions)]

    def texts(self, positions: Sequence[int]) -> list[list[str]]:
        return [[str(value) for value in self._values[:, position].tolist()] for position in positions]

    def texts_among(self, positions: Collection[int]) -> list[int]:
        return []


class ParquetFile:
    """A Parquet table; needs pyarrow, the `parquet` extra.

    is_measure:  whether the spread of its columns is what whole numbers must be resolved at; that of rows to be scored is not.
    """

    def __init__(self, path: Path, is_measure: bool = True) -> None:
        self._arrow = require_module("pyarrow", str(path), "selfnorm[parquet]")
        self._parquet = require_module("pyarrow.parquet", str(path), "selfnorm[parquet]")
        expect_regular(path)
        self.path = path
        self._is_measure = is_measure
        schema, self._rows = self._read(lambda: (self._parquet.read_schema(path), self._parquet.read_metadata(path).num_rows))
        self.names: tuple[str, ...] = tuple(schema.names)
        self._types = list(schema.types)
        self.width = len(self.names)
        self.decimal_commas = False

    def numbers(self, positions: Sequence[int]) -> NDArray[np.floating]:
        expect_fits_memory(self.path, 16 * self._rows * len(positions))  # as stored, and as float64
        for position in positions:
            if not self._is_numeric(self._types[position]):
                raise TextError(
                    f"{self.path}: expected columns of numbers, got {self._types[position]} in column {self.names[position]!r}"
                )
        columns = self._columns(positions)
        narrow = all(self._types[position] in (self._arrow.float16(), self._arrow.float32()) for position in positions)
        values: NDArray[np.floating] = np.empty((self._rows, len(positions)), np.float32 if narrow else np.float64)
        for index, (position, column) in enumerate(zip(positions, columns, strict=True)):
            self._fill(values[:, index], column, f"column {self.names[position]!r}")
        return values

    def texts(self, positions: Sequence[int]) -> list[list[str]]:
        return [["" if value is None else str(value) for value in column.to_pylist()] for column in self._columns(positions)]

    def texts_among(self, positions: Collection[int]) -> list[int]:
        return [position for position in sorted(positions) if self._is_text(self._types[position])]

    def _fill(self, values: NDArray[np.floating], column: Any, name: str) -> None:
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise ValueError(
                f"{self.path}: expected no empty cells, got {column.null_count}, the first in {name}, row {row}, counted from 0"
            )
        numbers = column.to_numpy()
        if self._is_measure and numbers.dtype.kind in "iu":
            expect_distinguishable(str(self.path), numbers, [name])
        values[:] = numbers
        if not (finite := np.abs(values) <= FLOAT32_MAX).all():  # False for NaN too
            row = int(finite.argmin())
            raise ValueError(
                f"{self.path}: expected finite numbers that float32 can hold, got {numbers[row]} in {name}, row {row}, "
                "counted from 0"
            )

    def _columns(self, positions: Sequence[int]) -> list[Any]:
        names = [self.names[position] for position in positions]
        if len(set(self.names)) < self.width:  # then pyarrow cannot read some of them by name
            table = self._read(lambda: self._parquet.ParquetFile(self.path).read())
            return [table.column(position) for position in positions]
        table = self._read(lambda: self._parquet.read_table(self.path, columns=names))
        return [table.column(name) for name in names]

    def _read(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (self._arrow.ArrowException, OSError) as error:
            raise ValueError(f"{self.path}: expected a Parquet file, got one that cannot be read ({error})") from error

    def _is_numeric(self, kind: Any) -> bool:
        types = self._arrow.types
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind))

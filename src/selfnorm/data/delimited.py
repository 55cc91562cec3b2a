"""Reads numbers and texts from .csv and .tsv files, plain or compressed; errors name the line and column of a bad cell."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.headers import COMMA_NUMBER, WHOLE, all_quoted, is_number, read_first_line
from selfnorm.data.labels import listed
from selfnorm.data.safe_files import STANDARD_INPUT, byte_source, expect_fits_memory
from selfnorm.data.separators import separator_of, split_cells, without_ends
from selfnorm.runtime.memory import available_memory

FLOAT32_MAX = float(np.finfo(np.float32).max)
LONGEST_LINE = 1 << 26  # characters
NO_TEXT = "a number, with a decimal point (only a header line may contain text, or a column that is left out)"
SAMPLE_LINES, SAMPLE_CHARACTERS = 1000, 1 << 20  # by which separator, header and columns of text are judged


class TextError(ValueError):
    """Raised for text in a column of numbers."""


class DelimitedFile:
    """A text table that has been looked at, but not read yet. Separators: comma, semicolon, tab.

    A separator at the end of every line is no column. `guess` says how a first line was read that may be names or a row.

    header:         whether to read the first line as names; None to decide by the lines.
    numeric_names:  if False, a line with a number in it is no header, unless it holds the expected names.
    expected:       the names in the training data, or none; a first line that holds them all is a header. None if unknown.
    """

    def __init__(
        self, path: Path, header: bool | None = None, numeric_names: bool = True, expected: Collection[str] | None = None
    ) -> None:
        self._source = byte_source(path)
        self.path = path
        self.decimal_commas = False  # known once the numbers have been read
        with self._opened() as stream:
            lines = _first_lines(path, stream)
            if not lines:
                raise ValueError(f"{path}: expected at least one row of numbers, got none")
            if re.fullmatch('"?sep=."?', mark := lines[0].strip("\r\n")):
                raise ValueError(f"{path}, line 1: expected names or numbers, got {mark!r}, a mark for Excel; remove it")
            is_tsv = path.name.lower().removesuffix(".gz").endswith(".tsv")
            self._separator = "\t" if is_tsv else separator_of([line for line in lines if line.strip()] or lines)
            # A line of tabs alone is a row of empty cells where tabs separate, and blank elsewhere.
            lines = lines if self._separator == "\t" else [line for line in lines if line.strip()]
            if not lines:
                raise ValueError(f"{path}: expected at least one row of numbers, got none")
            records = split_cells(lines, self._separator)
            first, *below = without_ends(records)
            self._has_ends = sum(map(len, records)) > sum(map(len, (first, *below)))
            if path != STANDARD_INPUT and not self._is_packed:  # those are bounded while they are read
                cells_at_most = path.stat().st_size * sum(map(len, (first, *below))) // sum(map(len, lines))
                expect_fits_memory(path, 8 * cells_at_most)
        quoted = len(lines) > 1 and '"' not in lines[1] and all_quoted(lines[0], self._separator)
        cells = [cell.strip() for cell in first]
        self.guess = ""
        guesses = header is None
        if header is None:
            header, is_unsure = read_first_line(
                first, below, quoted=quoted, commas=self._commas, numeric_names=numeric_names, expected=expected
            )
            self.guess = _say_guess(cells, header) if is_unsure else ""
        if header and not below:
            why = f": {self.guess}" if self.guess else ""
            raise ValueError(f"{path}: expected at least one row of numbers, got none{why}")
        if header and all(len(row) == len(first) + 1 for row in below):
            raise ValueError(f"{path}{_expected_names(first, below)}")
        self.names: tuple[str, ...] = tuple(cells) if header else ()
        self._might_have_names = guesses and not header
        self.width = len(first)
        rows = [row for row in (below if header else [first, *below]) if len(row) == self.width]
        self.pairs_of_whole_numbers = not header and self._separator == "," and self.width == 2 and _are_whole_pairs(rows)
        if self.pairs_of_whole_numbers and any(len(decimals) > 1 and decimals[0] == "0" for _, decimals in rows):
            raise ValueError(f"{path}: {_expected_points(first)}")

    def numbers(self, positions: Sequence[int]) -> NDArray[np.float64]:
        """Returns the numbers of some columns, (N, columns)."""
        whole = len(positions) == self.width and not self._has_ends
        used = list(positions)
        for commas in (False, True) if self._commas else (False,):
            for columns in (None,) if whole else (None, used):  # the others may hold text
                values = self._parse(columns, commas)
                if values is None or (columns is not None and not self._has_even_rows()):
                    continue
                if columns is None and used != list(range(self.width)):
                    values = values[:, used]
                if not _fits_float32(values):
                    raise self._first_error(positions)
                self.decimal_commas = commas
                return values
        raise self._first_error(positions)

    def texts(self, positions: Sequence[int]) -> list[list[str]]:
        """Returns the cells of some columns as they are written, a list for each."""
        found: list[list[str]] = [[] for _ in positions]
        with self._rows() as rows:
            for _, row in rows if positions else ():
                for cells, position in zip(found, positions, strict=True):
                    cells.append(row[position].strip())
        return found

    def texts_among(self, positions: Collection[int]) -> list[int]:
        """Returns which of some columns hold text, also only far below."""
        found: set[int] = set()
        with self._rows() as rows:
            for _, row in rows if positions else ():
                found |= {each for each in positions if each not in found and each < len(row) and self._is_text(row[each])}
                if len(found) == len(positions):
                    break
        return sorted(found)

    @property
    def _is_packed(self) -> bool:
        return self.path.suffix.lower() == ".gz"

    @property
    def _commas(self) -> bool:
        """Whether commas may be decimal commas."""
        return self._separator != ","

    def _without_end(self, row: list[str]) -> list[str]:
        return row[:-1] if self._has_ends and len(row) == self.width + 1 and not row[-1].strip() else row

    def _is_text(self, cell: str) -> bool:
        return bool(cell.strip()) and not is_number(cell, self._commas)

    @contextmanager
    def _opened(self) -> Iterator[TextIO]:
        """Yields the file, opened as text; errors of its encoding or compression become a ValueError."""
        try:
            with self._source() as file:
                if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                    raise ValueError(f"{self.path}: expected UTF-8 text with separated numbers, got UTF-16; save it as UTF-8")
                file.seek(0)
                packed = gzip.GzipFile(fileobj=file) if self._is_packed else None
                stream = io.BufferedReader(_Unpacked(self.path, packed)) if packed else file
                with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
                    yield text
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{self.path}: expected UTF-8 text with separated numbers, got other bytes ({error})") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.path}: expected a whole gzip file, got a damaged one ({error})") from error

    @contextmanager
    def _rows(self) -> Iterator[Iterator[tuple[int, list[str]]]]:
        """Yields the rows below the header, each with the number of its last line."""
        with self._opened() as stream:
            reader = csv.reader(stream, delimiter=self._separator, skipinitialspace=True)
            rows = ((reader.line_num, self._without_end(row)) for row in reader if row)
            if self.names:
                next(row for _, row in rows if _is_filled(row))
            yield rows

    def _parse(self, columns: list[int] | None, commas: bool) -> NDArray[np.float64] | None:
        """Parses the table in C; None if that fails, for `_first_error` to find out where."""
        with self._opened() as stream:
            if self.names:
                reader = csv.reader(stream, delimiter=self._separator, skipinitialspace=True)
                next(filter(_is_filled, reader))
            lines = self._with_points(stream, columns) if commas else stream
            try:
                first = next((line for line in lines if line.strip() or self._separator in line), "")
                values = np.loadtxt(
                    chain([first], lines), comments=None, delimiter=self._separator, quotechar='"', ndmin=2, usecols=columns
                )
            except (UnicodeDecodeError, _TooLargeError):
                raise
            except ValueError:
                return None
        return values if columns is not None or values.shape[1] == self.width else None

    def _with_points(self, lines: Iterator[str] | TextIO, columns: list[int] | None) -> Iterator[str]:
        """Yields lines with decimal points in place of commas; a point in a number, for thousands, is an error."""
        for line in lines:
            if "." in line:
                cells = next(csv.reader([line], delimiter=self._separator), [])
                if any("." in cell for index, cell in enumerate(cells) if columns is None or index in columns):
                    raise ValueError
            yield line.replace(",", ".")

    def _has_even_rows(self) -> bool:
        with self._rows() as rows:
            return all(len(row) == self.width for _, row in rows)

    def _first_error(self, positions: Sequence[int]) -> ValueError:
        """Returns the error for the first bad cell or line of the table, found by reading it again, slowly."""
        needed = set(positions)
        for commas in (True, False) if self._commas else (False,):
            with self._rows() as rows:
                for number, (line, row) in enumerate(rows):
                    where = f"{self.path}, line {line}"
                    if self.width == 1 and COMMA_NUMBER.fullmatch(",".join(row)):
                        return ValueError(f"{where}: {_expected_points(row)}")
                    if len(row) != self.width:
                        return ValueError(f"{where}: expected {self.width} columns, as in the first line, got {len(row)}")
                    for column, text in enumerate(row):
                        if column in needed and (fault := _expected_instead(text, commas)):
                            if fault == NO_TEXT and number == 0 and self._might_have_names:
                                fault = "a number, since this line is read as a row (use --header if it holds names)"
                            name = f" ({self.names[column]})" if self.names and self.names[column] else ""
                            is_text = text.strip() and not is_number(text, commas)
                            return (TextError if is_text else ValueError)(
                                f"{where}, column {column + 1}{name}: expected {fault}, got {text[:40]!r}"
                            )
        return ValueError(f"{self.path}: expected a table of numbers, got one that cannot be read")


class _TooLargeError(ValueError):
    pass


class _Unpacked(io.RawIOBase):
    """Reads a compressed file, up to the size whose numbers, eight bytes for a digit and a separator, fit into memory."""

    def __init__(self, path: Path, stream: gzip.GzipFile) -> None:
        available = available_memory()
        self._path, self._stream, self._left = path, stream, None if available is None else available // 4

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise _TooLargeError(f"{self._path}: expected a table that fits into the available memory, got a larger one")
        return len(data)


def _is_filled(row: Sequence[str]) -> bool:
    return any(cell.strip() for cell in row)


def _first_lines(path: Path, stream: TextIO) -> list[str]:
    """Returns the first lines that hold more than spaces, looked for in the first `LONGEST_LINE` characters."""
    lines: list[str] = []
    characters, read = 0, 0
    while read < LONGEST_LINE and (line := stream.readline(LONGEST_LINE)):
        read += len(line)
        if len(line) == LONGEST_LINE:
            raise ValueError(
                f"{path}: expected lines of less than {LONGEST_LINE:,} characters, got a longer one; is this a table?"
            )
        if line.strip(" \r\n"):
            lines.append(line)
            characters += len(line)
            if len(lines) >= SAMPLE_LINES or (len(lines) > 2 and characters > SAMPLE_CHARACTERS):
                break
    return lines


def _say_guess(cells: Sequence[str], header: bool) -> str:
    """Returns the note on a first line that may be names or a row."""
    what, otherwise = ("names", "--no-header if they are a row") if header else ("a row", "--header if they are names")
    return f"the numbers of the first line ({listed([cell for cell in cells if cell])}) are read as {what}: use {otherwise}"


def _expected_names(first: Sequence[str], below: Sequence[Sequence[str]]) -> str:
    """Returns the error for a header that is one cell shorter than all rows."""
    if len(first) == 1 and _are_whole_pairs(below):
        return f": {_expected_points(below[0])}"
    return (
        f", line 2: expected {len(first)} columns, as in the first line, got {len(first) + 1}; if the first column holds names "
        "of rows, as R writes them, put a separator in front of the first line"
    )


def _expected_points(row: Sequence[str]) -> str:
    return (
        f"expected numbers with decimal points, got lines as {','.join(row)}, where the comma may be a decimal comma; write "
        "points, or a line of names if these are two columns"
    )


def _are_whole_pairs(rows: Sequence[Sequence[str]]) -> bool:
    """Returns whether all rows are two whole numbers, which may be one number with a decimal comma."""
    return all(WHOLE.fullmatch(whole) and decimals.isdecimal() for whole, decimals in rows)


def _fits_float32(values: NDArray[np.float64]) -> bool:
    return bool(values.size == 0 or (values.min() >= -FLOAT32_MAX and values.max() <= FLOAT32_MAX))  # False for NaN too


def _expected_instead(text: str, commas: bool) -> str:
    """Returns what was expected in place of a bad cell, or an empty text for a good one."""
    if not text.strip():
        return "a number in every cell; fill in empty cells, or leave out their rows or columns"
    if not is_number(text, commas):
        if text.strip().lower() in ("true", "false"):
            return "a number; write 1 and 0 for true and false"
        if len(text.split()) > 1 and all(is_number(part, commas) for part in text.split()):
            return "a number, and commas, semicolons or tabs between columns"
        return NO_TEXT
    if commas and COMMA_NUMBER.fullmatch(text.strip()):
        text = text.replace(",", ".")
    return "" if abs(float(text)) <= FLOAT32_MAX else "a finite number that float32 can hold"

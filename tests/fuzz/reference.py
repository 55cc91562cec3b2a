"""A slow reader of tables, written from the documents and not from the code that it checks, and a slow density.

The documents leave some files open, such as numbers as the names of columns; then there are several right readings. The density
takes z = f(x) from the flow in float64, its determinant from autograd, and the base density from its formula.
"""

import csv
import gzip
import io
import math
import re
import zlib
from decimal import Decimal, InvalidOperation
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import selfnorm
from fuzz.runner import run_folder

FLOAT32_MAX = float(np.finfo(np.float32).max)
COUNTING_NAMES = ("", "Unnamed: 0")


class Reading(NamedTuple):
    """names: () if the file has none. rows: numbers, (N, columns)."""

    names: tuple[str, ...]
    rows: list[list[float]]


class Readings(NamedTuple):
    """The right readings of a file. refusable: whether an error is right, too; if there is no reading, only an error is."""

    readings: list[Reading]
    refusable: bool


NONE = Readings([], True)


def read_table(content: bytes, name: str, wanted: tuple[str, ...] = ()) -> Readings:
    """Reads .csv, .tsv and .csv.gz. wanted: the columns that a run knows; those must be there, others do not matter."""
    refusable = False
    if name.endswith(".gz"):
        refusable = True
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            return NONE
    text, certain = _text(content)
    if text is None:
        return NONE
    refusable |= not certain
    separator = _separator(text, name)
    try:
        cells = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    except csv.Error:
        return NONE
    spaces = [row for row in cells if len(row) == 1 and row[0] and not row[0].strip()]
    refusable |= bool(spaces)
    cells = [row for row in cells if row and row not in spaces]
    cells, had_ends = _without_ends(cells)
    refusable |= had_ends
    if not cells or len({len(row) for row in cells}) > 1:
        return NONE
    readings = []
    headers, unsure = _headers(cells)
    refusable |= unsure
    for header in headers:
        found, doubtful = _reading(cells[1:] if header else cells, header, separator in ";\t", wanted)
        refusable |= doubtful
        readings += [found] if found else []
    return Readings(readings, refusable or not readings)


def _without_ends(cells: list[list[str]]) -> tuple[list[list[str]], bool]:
    """Returns the cells without an empty last column that has no name, which separators at the end of lines make."""
    width = max(map(len, cells), default=0)
    padded = [row + [""] * (width - len(row)) for row in cells]
    below = {len(row) for row in cells[1:]}
    if width < 2 or len(below) != 1 or len(cells[0]) < width - 1 or any(row[-1].strip() for row in padded):
        return cells, False
    return [row[: width - 1] for row in padded], True


def _text(content: bytes) -> tuple[str | None, bool]:
    """Returns the text, None if it is none, and whether its encoding is one that must be read."""
    for mark, encoding in ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if content.startswith(mark):
            try:
                return content.decode(encoding), False
            except UnicodeDecodeError:
                return None, False
    try:
        return content.decode("utf-8-sig"), True
    except UnicodeDecodeError:
        return content.decode("latin-1"), False


def _separator(text: str, name: str) -> str:
    if ".tsv" in name:
        return "\t"
    lines = [line for line in io.StringIO(text, newline="") if line.strip()]  # also one of tabs, where tabs separate
    present = [separator for separator in ";,\t" if lines and separator in lines[0]]
    return next((separator for separator in present if _is_even(lines, separator)), next(iter(present), ","))


def _is_even(lines: list[str], separator: str) -> bool:
    """Returns whether a separator divides all lines into the same number of cells."""
    try:
        return len({len(row) for row in csv.reader(lines, delimiter=separator)}) == 1
    except csv.Error:
        return False


def _headers(cells: list[list[str]]) -> tuple[list[tuple[str, ...]], bool]:
    """Returns the names that the first line may hold, () if it may be a row of numbers, and whether that is unsure."""
    first = tuple(cell.strip() for cell in cells[0])
    numeric = [number(cell, False) is not None for cell in first]
    if not any(first):
        return [()], True
    if not any(numeric):
        return [first], any(cell.lower() in ("nan", "inf") for cell in first)
    start = 1 if first[0] in COUNTING_NAMES else 0
    if first[start:] == tuple(str(index) for index in range(len(first) - start)):  # as pandas names columns
        kinds = [{re.fullmatch(r"-?\d+", cell.strip()) is None for cell in column} for column in zip(*cells[1:], strict=True)]
        # pandas writes columns of whole numbers, or of numbers that all have a point; others may be three rows of anything
        if start or (any(True in kind for kind in kinds) and (len(kinds) > 2 or all(len(kind) == 1 for kind in kinds))):
            return [first], True
        return [first, ()], True
    if all(numeric):
        distinct_whole_numbers = len(set(first)) == len(first) and all(re.fullmatch(r"[+-]?\d+", cell) for cell in first)
        return ([(), first] if distinct_whole_numbers else [()]), distinct_whole_numbers
    return [first, ()], True


def _reading(
    cells: list[list[str]], header: tuple[str, ...], comma: bool, wanted: tuple[str, ...]
) -> tuple[Reading | None, bool]:
    """Returns the reading, None if there is none, and whether an error is right, too."""
    if not cells:
        return None, True
    columns = list(range(len(cells[0])))
    doubtful = len(set(header)) < len(header)
    if header and header[0] in COUNTING_NAMES:
        unnamed = list(takewhile(lambda column: header[column] in COUNTING_NAMES, columns))
        doubtful |= unnamed == columns or [number(row[0], comma) for row in cells] != list(range(len(cells)))
        index = _index_among(unnamed, cells, comma)
        columns = [column for column in columns if column not in index] or columns
    if wanted and header and set(wanted) <= set(header):
        columns = [header.index(name) for name in wanted]
    elif wanted and header and any(number(name, False) is None for name in header[columns[0] :]):
        return None, True  # other names
    elif wanted:
        doubtful |= bool(header)
        if len(columns) != len(wanted):
            return None, True
    rows = [[number(row[column], comma) for column in columns] for row in cells]
    if any(value is None or not math.isfinite(value) for row in rows for value in row):
        return None, True
    doubtful |= any(abs(value) > FLOAT32_MAX for row in rows for value in row if value is not None)
    doubtful |= any("," in row[column] for row in cells for column in columns)
    names = tuple(header[column] for column in columns) if header else ()
    return Reading(names, [[value for value in row if value is not None] for row in rows]), doubtful


def _index_among(columns: list[int], cells: list[list[str]], comma: bool) -> list[int]:
    """Returns which columns hold distinct whole numbers; all of them if none does alone, but all together do."""
    held = {column: [number(row[column], comma) for row in cells] for column in columns}
    whole = {column: values for column, values in held.items() if all(value is not None and value % 1 == 0 for value in values)}
    alone = [column for column, values in whole.items() if len(set(values)) == len(values)]
    together = len(whole) == len(columns) > 1 and len(set(zip(*whole.values(), strict=True))) == len(cells)
    return alone or (columns if together else [])


def number(text: str, comma: bool) -> float | None:
    """Returns the number that a cell holds; None if it holds none. comma: whether decimal commas are numbers."""
    text = text.strip()
    if comma and re.fullmatch(r"[+-]?\d+,\d+(?:[eE][+-]?\d+)?", text):
        text = text.replace(",", ".")
    if not text.isascii() or "_" in text:
        return None
    try:
        return float(Decimal(text))
    except InvalidOperation:
        pass
    except (OverflowError, ValueError):
        return math.nan
    try:
        return float(text)
    except ValueError:
        return None


@cache
def _flow(kind: str) -> torch.nn.Module:
    return selfnorm.load(run_folder(kind)).double()


def log_density(kind: str, rows: list[list[float]]) -> np.ndarray:
    """Returns log p of each row under a run's flow: the base density of f(x), and the determinant of f's Jacobian by autograd."""
    with torch.enable_grad():
        x = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
        z = _flow(kind).bijection(x)[0].flatten(1)
        jacobian = torch.stack([torch.autograd.grad(z[:, i].sum(), x, retain_graph=True)[0] for i in range(z.shape[1])], 1)
    with np.errstate(over="ignore"):
        squares = (z.detach().numpy() ** 2).sum(1)
    base = -0.5 * squares - 0.5 * z.shape[1] * math.log(2 * math.pi)
    return base + np.linalg.slogdet(jacobian.detach().numpy())[1]


@cache
def training_scores(kind: str) -> np.ndarray:
    return np.sort(np.load(Path(run_folder(kind)) / "training_scores.npy"))

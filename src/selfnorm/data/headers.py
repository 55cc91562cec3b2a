"""Decides whether the first line of a text table names its columns, also where the names are numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import dropwhile, pairwise
from typing import NamedTuple

WHOLE = re.compile(r"[+-]?[0-9]+")
COMMA_NUMBER = re.compile(r"[+-]?[0-9]+,[0-9]+([eE][+-]?[0-9]+)?")
UNNAMED = re.compile(r"(Unnamed: [0-9].*|__index_level_[0-9]+__)?")  # as pandas writes, or reads and writes, an index
MISSING = ("na", "n/a", "#n/a", "null", "none", "missing", "?", "-", "--", ".")  # in lower case; no names beside numbers
LONGEST_NAME = 20  # of a whole number, in characters
RARE, UNUSUAL = 0.01, 0.05  # if a first line is less likely than this as a row, it is read as names, or noted as possible names


def is_number(text: str, commas: bool = False) -> bool:
    """Returns whether NumPy reads the text as a number; unlike Python, it accepts neither 1_000 nor non-ASCII digits.

    commas:  whether 1,5 is a number, too.
    """
    if commas and COMMA_NUMBER.fullmatch(text.strip()):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def is_unnamed(name: str) -> bool:
    """Returns whether a column has no name of its own: none at all, or the one that pandas gives to an index."""
    return UNNAMED.fullmatch(name) is not None


class FirstLine(NamedTuple):
    """How a first line is read: as the header or as a row, and whether that is a guess that the user is told of."""

    is_header: bool
    is_unsure: bool


def read_first_line(
    first: Sequence[str],
    below: Sequence[Sequence[str]],
    *,
    quoted: bool,
    commas: bool,
    numeric_names: bool,
    expected: Collection[str] | None,
) -> FirstLine:
    """Returns how the first line of a table is read, judged by the lines below it.

    quoted, commas:  see `is_header`.
    numeric_names:   if False, a line with a number in it is no header, unless it holds the expected names.
    expected:        the names in the training data, or none; None if nothing is known of the table.
    """
    cells = [cell.strip() for cell in first]
    numeric = [cell for cell in cells if is_number(cell, commas)]
    holds_names = _holds_names(cells, below, numeric, expected or ())
    if holds_names or is_header(first, below, quoted=quoted, commas=commas, is_open=expected is None):
        as_names = bool(holds_names) or numeric_names or not numeric
        return FirstLine(as_names, bool(numeric) and may_be_row(cells, below, commas))
    return FirstLine(False, numeric_names and (holds_names is None or may_be_header(cells, below, commas)))


def is_header(
    first: Sequence[str], below: Sequence[Sequence[str]], *, quoted: bool = False, commas: bool = False, is_open: bool = True
) -> bool:
    """Returns whether the first line of a table is its header, judged by the lines below it.

    A line without any number is one. So is a line that begins with an empty cell, as pandas writes the name of an index, if no
    line below does, and a line of quoted cells above lines without quotes, if all its numbers are whole. Other numbers are names
    only if they are whole, rise from column to column, the values below do not look like a continuation, and no text beside them
    stands for a missing value or is repeated below:

    counting from 0:  three columns or more; fewer only above columns of which each is all whole or all not, and one is not; or
                      two, or one beside text, if `is_open` and hardly any row below has these numbers.
    otherwise:        three columns or more, above numbers that are all not whole.
    beside text:      two numbers that count, or three that rise, if a number is below the text; or as above.

    quoted:   whether every cell of the first line is in quotes and none of the second is.
    commas:   whether numbers may have decimal commas.
    is_open:  whether nothing is known of the table; a file for a run without names more likely has none either.
    """
    cells = [cell.strip() for cell in first]
    numeric = [index for index, cell in enumerate(cells) if is_number(cell, commas)]
    named = [index for index, cell in enumerate(cells) if cell and not is_number(cell, commas)]
    rows = [row for row in below if len(row) == len(cells)]
    if not numeric:
        return bool(named)
    if _begins_unnamed(cells, rows):
        return True
    if not all(WHOLE.fullmatch(cells[index]) for index in numeric):
        return False
    if quoted:
        return True
    if any(len(cells[index]) >= LONGEST_NAME for index in numeric) or not all(cells[1:]):
        return False
    if any(cells[index].lower() in MISSING or any(row[index].strip() == cells[index] for row in rows) for index in named):
        return False
    numbers = [int(cells[index]) for index in numeric]
    counts = all(after == before + 1 for before, after in pairwise(numbers))
    rises = len(numbers) >= 3 and all(cells) and all(after > before for before, after in pairwise(numbers))
    if counts and is_unnamed(cells[0]) and numbers[0] in (0, 1):  # also above rows with missing values
        return True
    if not rows or not (counts or rises):
        return False
    if named and len(numbers) > 1 and any(is_number(row[index].strip(), commas) for row in rows for index in named):
        return True
    kinds = [{WHOLE.fullmatch(row[index].strip()) is not None for row in rows} for index in numeric]
    if _continues([cells, *rows]):
        return False
    if counts and numbers[0] == 0:
        is_alike = {False} in kinds and all(len(kind) == 1 for kind in kinds)
        columns = [[row[index] for row in rows] for index in numeric]
        is_rare = is_open and len(cells) > 1 and _chance(numbers, columns, commas) < RARE
        return len(numbers) >= 3 or is_alike or is_rare
    return len(numbers) >= 3 and all(kind == {False} for kind in kinds)


def may_be_row(first: Sequence[str], below: Sequence[Sequence[str]], commas: bool) -> bool:
    """Returns whether a header may be a row after all: of numbers, texts above other texts, and perhaps without its first number.

    The first number is not missing if the cells below it are an index: distinct texts or whole numbers.
    """
    under = [row[0].strip() for row in below]
    is_index = len(set(under)) == len(under) and not any(is_number(cell, commas) and not WHOLE.fullmatch(cell) for cell in under)
    lacks_first = is_unnamed(first[0].strip()) and not is_index
    with_text = {index for row in below for index, cell in enumerate(row) if cell.strip() and not is_number(cell.strip(), commas)}
    may_be = [is_number(cell.strip(), commas) or (bool(cell.strip()) and index in with_text) for index, cell in enumerate(first)]
    return all(may_be[lacks_first:])


def may_be_header(first: Sequence[str], below: Sequence[Sequence[str]], commas: bool = False) -> bool:
    """Returns whether a first line that is read as a row may hold names after all, judged like `is_header`, but less strictly.

    Those are distinct numbers that count from 0; that count, or three or more that rise or are evenly spaced, if hardly any row
    below does; three or more that rise and lie outside of the values below; or whole ones if hardly any number below is. Columns
    of text do not matter.
    """
    even = [row for row in below if len(row) == len(first)]
    numeric = [index for index, cell in enumerate(first) if is_number(cell.strip(), commas)]
    if not numeric or _continues([first, *even]):
        return False
    cells, *lines = [[row[index].strip().replace(",", ".") for index in numeric] for row in (first, *even)]
    numbers = [float(cell) for cell in cells]
    rows = [[float(cell) for cell in line] for line in lines if all(map(is_number, line))]
    if not rows or len(set(numbers)) < len(numbers):
        return False
    if numbers == list(range(len(numbers))) and all(map(WHOLE.fullmatch, cells)):
        return True
    enough = UNUSUAL if len(numbers) > 2 else RARE
    if any(looks(numbers) and _share(map(looks, rows)) < enough for looks in (_counts, _is_even, _rises)):
        return True
    is_whole = [[WHOLE.fullmatch(cell) is not None for cell in line] for line in (cells, *lines)]
    if all(is_whole[0]) and math.prod(map(_share, zip(*is_whole[1:], strict=True))) < UNUSUAL:
        return True
    columns = zip(numbers, zip(*rows, strict=True), strict=True)
    return _rises(numbers) and all(not min(values) <= number <= max(values) for number, values in columns)


def _counts(numbers: Sequence[float]) -> bool:
    """Returns whether two whole numbers or more follow each other."""
    return len(numbers) >= 2 and numbers[0].is_integer() and all(after == before + 1 for before, after in pairwise(numbers))


def _rises(numbers: Sequence[float]) -> bool:
    """Returns whether three numbers or more rise."""
    return len(numbers) >= 3 and all(after > before for before, after in pairwise(numbers))


def _is_even(numbers: Sequence[float]) -> bool:
    """Returns whether three numbers or more rise or fall by equal steps."""
    steps = [after - before for before, after in pairwise(numbers)]
    return len(steps) >= 2 and steps[0] != 0 and all(math.isclose(step, steps[0], rel_tol=1e-6) for step in steps)


def _share(hold: Iterable[bool]) -> float:
    """Returns an estimate of how often something holds, from some cases; above 0."""
    cases = list(hold)
    return (sum(cases) + 1) / (len(cases) + 1)


def _chance(numbers: Sequence[int], columns: Sequence[Sequence[str]], commas: bool) -> float:
    """Returns about how likely a row has exactly these numbers; 1 if a column goes on rising or falling from its number."""
    chance = 1.0
    for number, column in zip(numbers, columns, strict=True):
        values = [float(cell.replace(",", ".")) for cell in map(str.strip, column) if is_number(cell, commas)]
        steps = [after - before for before, after in pairwise([number, *values])]
        if not values or (min(values) < max(values) and (min(steps) >= 0 or max(steps) <= 0)):
            return 1.0
        chance *= _share(value == number for value in values)
    return chance


def _holds_names(
    cells: Sequence[str], below: Sequence[Sequence[str]], numeric: Sequence[str], names: Collection[str]
) -> bool | None:
    """Returns whether a line holds the names of the training data: all of them, or beside text some that are numbers.

    A row may have such numbers, too. So names that are all numbers must stand in their order, or not be repeated below; None if
    they do neither.
    """
    if not names or not (set(names) <= set(cells) or (numeric and set(numeric) <= set(names) and set(cells) > set(numeric))):
        return False
    rest, known = iter(names), set(names)
    if known - set(numeric) or all(cell in rest for cell in numeric if cell in known):
        return True
    return None if any(cell == other.strip() for row in below for cell, other in zip(cells, row, strict=False)) else True


def _begins_unnamed(cells: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Returns whether first columns without a name, followed by distinct names, hold something in every row."""
    named = list(dropwhile(is_unnamed, cells))
    is_complete = all(named) and len(set(named)) == len(named) < len(cells)
    return is_complete and bool(rows) and all(row[0].strip() for row in rows)


def _continues(lines: Sequence[Sequence[str]]) -> bool:
    """Returns whether three lines or more of whole numbers grow by the same amount from line to line, as 0,1,2 above 3,4,5."""
    if len(lines) < 3 or not all(WHOLE.fullmatch(cell.strip()) and len(cell) < LONGEST_NAME for line in lines for cell in line):
        return False
    numbers = [[int(cell) for cell in line] for line in lines]
    steps = {tuple(after - before for before, after in zip(*pair, strict=True)) for pair in pairwise(numbers)}
    return len(steps) == 1


def all_quoted(line: str, separator: str) -> bool:
    """Returns whether every cell of a line is in quotes."""
    line = line.strip(" \r\n")
    cells = line.split(separator)
    return all(len(cell.strip(" ")) > 1 and cell.strip(" ")[0] == cell.strip(" ")[-1] == '"' for cell in cells)

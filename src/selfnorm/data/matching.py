"""Reads a file to be scored: its columns are matched with those of the training data, and what identifies its rows is kept."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.arrays import is_image_path, open_examples
from selfnorm.data.delimited import DelimitedFile, TextError
from selfnorm.data.headers import is_unnamed
from selfnorm.data.images import image_files
from selfnorm.data.labels import MOST_LISTED, listed, positions_named, value_naming
from selfnorm.data.layout import NARROW, TableLayout
from selfnorm.data.tables import ArrayTable, Table
from selfnorm.runtime.escapes import in_utf8


@dataclass(frozen=True)
class MatchedRows:
    """The rows of a file in the order of the file.

    values:      of the columns that the run was trained on, in their order, (N, used); images, (N, C, H, W).
    carried:     columns that only identify the rows, by name.
    differs:     for each row the names of the columns that were constant in the training data and have another value here; None
                 if there is no such column.
    understood:  what there is to say about how the columns were matched; usually nothing.
    """

    values: NDArray[Any]
    carried: dict[str, list[str]] = field(default_factory=dict)
    differs: list[str] | None = None
    understood: str = ""


def read_matching(
    path: Path, layout: TableLayout, ids: Sequence[str] = (), numeric_names: bool = True, header: bool | None = None
) -> MatchedRows:
    """Returns the rows of a file for a run whose training data had this layout.

    Columns are matched by name where both have names, else by position. Columns that the layout leaves out may be missing. The
    columns `ids`, and columns of text, are carried along; all others are ignored.

    numeric_names:  if False, a line with a number in it is no header, unless it holds the names of the training data.
    header:         whether the first line of a text file holds names; None to decide by what it holds.
    """
    if is_image_path(path):
        if ids:
            raise ValueError(f"{path}: expected a table for --id, got images; their file names identify them")
        names = [str(file.relative_to(path)) for file in image_files(path)] if path.is_dir() else [path.name]
        images = open_examples(path, header)
        assert isinstance(images, np.ndarray)
        return MatchedRows(images, {"file": list(map(in_utf8, names))})
    table = open_examples(path, header, numeric_names=numeric_names, expected=layout.columns)
    if isinstance(table, np.ndarray):
        if ids:
            raise ValueError(f"{path}: expected a table for --id, got an array of shape {table.shape}")
        return MatchedRows(table)
    return _matched(path, table, layout, ids)


def _matched(path: Path, table: Table, layout: TableLayout, ids: Sequence[str]) -> MatchedRows:
    named = list(dropwhile(is_unnamed, table.names))
    only_digits = bool(named) and all(map(str.isdigit, named))  # as pandas gives them
    by_name = bool(table.names and layout.names) and not (only_digits and not any(map(str.isdigit, layout.names)))
    identifying = [_position_of_id(path, table, name) for name in ids]
    places = _places_by_name(path, table, layout) if by_name else _places_beside(path, table, layout, identifying)
    if not places:
        _expect_other_width(path, table, layout)
        rows = MatchedRows(_all_numbers(table, layout))
        if isinstance(table, DelimitedFile) and table.guess:
            raise ValueError(f"{path}: expected the {len(layout.used)} columns of the data, got {table.width}; {table.guess}")
        return rows
    used = [places[position] for position in layout.used if position in places]
    constant = [(position, value) for position, value in layout.constant if position in places]
    needed = [*used, *(places[position] for position, _ in constant)]
    numbers = table.numbers(needed)
    if table.names:
        identifying += table.texts_among(set(range(table.width)) - {*needed, *identifying})
    identifying = list(dict.fromkeys(identifying))
    carried = dict(zip(_names_of(table, identifying), table.texts(identifying), strict=True))
    differs = None
    if constant:
        differs = [""] * len(numbers)
        for (position, value), found in zip(constant, numbers[:, len(used) :].T, strict=True):
            coarse = next((kind for kind in NARROW if kind in (found.dtype.name, layout.stored_in)), None)
            unlike = found.astype(coarse) != np.dtype(coarse).type(value) if coarse else found != value
            for row in np.flatnonzero(unlike):
                name = layout.names[position] if layout.names else str(position + 1)
                differs[row] += f", {name}" if differs[row] else name
    values = numbers[:, : len(used)] if constant else numbers
    return MatchedRows(values, carried, differs, _say(table, layout, by_name, places, {*needed, *identifying}))


def _places_by_name(path: Path, table: Table, layout: TableLayout) -> dict[int, int]:
    """Returns where in the file each column of the layout is, as far as it is needed."""
    where = {name: place for place, name in enumerate(table.names)}
    missing = [position for position in layout.used if layout.names[position] not in where]
    if missing:
        raise ValueError(
            f"{path}: expected the columns of the training data, {_list(_called(layout.names, layout.used))}, got "
            f"{_list(_called(table.names, range(table.width)))}, without {_list(_called(layout.names, missing))}"
        )
    places = {position: where[layout.names[position]] for position in layout.written if layout.names[position] in where}
    times = Counter(table.names)
    if twice := [position for position in places if times[layout.names[position]] > 1]:
        raise ValueError(
            f"{path}: expected each column once, got {_list(_called(layout.names, twice))} more than once; rename them"
        )
    return places


def _places_beside(path: Path, table: Table, layout: TableLayout, ids: Collection[int]) -> dict[int, int]:
    """Returns the same for a file without names that has the columns `ids` beside those of the data, or among them.

    Raises ValueError if both are possible, unless the file has exactly the columns of the training data.
    """
    whole = range(table.width)
    among, beside = (_places_by_position(table, layout, each) for each in (whole, [each for each in whole if each not in ids]))
    if among and beside and among != beside and table.width != layout.width:
        unsure = _list([f"column {place + 1}" for place in ids])
        raise ValueError(
            f"{path}: expected names of the columns, got none, and {unsure} may be data or only identify the rows; add a header, "
            "or remove the columns that are not data"
        )
    return among if table.width == layout.width else beside or among


def _places_by_position(table: Table, layout: TableLayout, among: Sequence[int]) -> dict[int, int]:
    """Returns where in a file without names each column of the layout is, among some columns of the file.

    They are all columns, or those of samples, or only the data. Any of them may follow first columns without a name, such as an
    index. Such a column is only read as one of the training data if that had no name either, while others had. Empty if the
    columns do not fit.
    """
    choices = (tuple(range(layout.width)), layout.written, layout.used)
    unnamed = len(list(takewhile(is_unnamed, table.names)))
    tried = [(positions, start) for start in dict.fromkeys((0, unnamed)) for positions in choices]
    wanted = set(layout.written)
    named = {position for position in wanted if not (layout.names and is_unnamed(layout.names[position]))}
    for positions, start in tried:
        data = dict(zip(positions, among[start:], strict=False))
        is_index_data = any(place < unnamed and position in named for position, place in data.items())
        if len(positions) + start == len(among) and not is_index_data:
            return {position: place for position, place in data.items() if position in wanted}
    return {}


def _all_numbers(table: Table, layout: TableLayout) -> NDArray[Any]:
    """Returns all columns of a table that has others than the data; raises ValueError, with what to do, if one holds text."""
    try:
        return table.numbers(range(table.width))
    except TextError as error:
        texts = table.texts_among(range(table.width))
        if table.width - len(texts) != len(layout.used):
            raise
        options = " ".join(f"--id {shlex.quote(value_naming(table.names, position))}" for position in texts)
        what = "it only identifies" if len(texts) == 1 else "they only identify"
        raise ValueError(f"{error}; use {options} if {what} the rows") from None


def _expect_other_width(path: Path, table: Table, layout: TableLayout) -> None:
    """Raises ValueError if a file whose columns do not fit has as many as the data; the caller refuses other numbers."""
    if table.width == len(layout.used):
        unnamed = [place for place, name in enumerate(table.names) if is_unnamed(name)]
        which = "column 1 has no name, as an index has none: name it if it is data"
        if len(unnamed) > 1:
            which = f"the first {len(unnamed)} columns have no names, as indices have none: name them if they are data"
        raise ValueError(
            f"{path}: expected {table.width} columns of data, {_list(_called(layout.names, layout.used))}, got "
            f"{_list(_called(table.names, range(table.width)))}; {which}"
        )


def _list(names: Sequence[str]) -> str:
    return listed(names, MOST_LISTED)


def _called(names: Sequence[str], positions: Iterable[int]) -> list[str]:
    """Returns what a list in a message calls columns: their names, or their numbers where they have none."""
    return [repr(names[position]) if names and names[position] else f"column {position + 1}" for position in positions]


def _position_of_id(path: Path, table: Table, name: str) -> int:
    found = positions_named(table.names, table.width, name)
    if len(found) > 1:
        numbers = ", ".join(str(position + 1) for position in found)
        raise ValueError(f"{path}: expected --id to name one column, got {name!r}, the name of columns {numbers}; rename them")
    if found:
        return found[0]
    known = _list(_called(table.names, range(table.width))) if table.names else f"a number from 1 to {table.width}"
    raise ValueError(f"{path}: expected --id to name a column, {known}, got {name!r}")


def _names_of(table: Table, positions: Sequence[int]) -> list[str]:
    """Returns what the output calls the columns: their names, with their numbers where they have none or share one."""
    times = Counter(table.names[position] for position in positions) if table.names else Counter[str]()
    names = [table.names[position] if table.names else "" for position in positions]
    return [
        name if name and times[name] == 1 else f"{name} (column {position + 1})" if name else f"column {position + 1}"
        for name, position in zip(names, positions, strict=True)
    ]


def _say(table: Table, layout: TableLayout, by_name: bool, places: dict[int, int], needed: set[int]) -> str:
    parts = []
    if isinstance(table, DelimitedFile) and table.guess:
        parts.append(table.guess)
    if not by_name and layout.names and not isinstance(table, ArrayTable):  # arrays never have names
        parts.append("columns matched by position, not by name")
    if table.names and not by_name and (first := set(range(min(places.values()))) - needed):  # without a name
        parts.append(f"ignored: {_list(_called(table.names, sorted(first)))}")
    if by_name:
        left_out = {layout.names[position] for position, _ in layout.left_out}
        extra = [place for place, name in enumerate(table.names) if place not in needed and name not in left_out]
        if extra:
            parts.append(f"ignored: {_list(_called(table.names, extra))}")
        if absent := [position for position, _ in layout.constant if position not in places]:
            parts.append(f"constant in the training data and not in this file: {layout.labels(absent)}")
    if table.decimal_commas:
        parts.append("decimal commas")
    return "; ".join(parts)

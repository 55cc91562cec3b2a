"""`TableLayout`: how the columns of a table were understood, and what of it a run stores."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.delimited import DelimitedFile, TextError
from selfnorm.data.headers import is_unnamed
from selfnorm.data.labels import MOST_LISTED, MOST_NAMED, listed, positions_named, value_naming
from selfnorm.data.tables import Table
from selfnorm.runtime.checks import did_you_mean

EVERYTHING = "*"  # in `keep`: every column, and every line with a number in it
NARROW = ("float16", "float32")
BLOCK_VALUES = 1 << 24  # to sort at once
ROUNDED = 0.01  # by which a step of an even column may differ, as it is written with few digits
# Reasons to leave out a column.
COUNTS, INDEX, DROPPED = "counts the rows", "holds distinct whole numbers, as an index does", "dropped"
JOINT = "together hold distinct whole numbers, as an index does"
# Reasons to point out a column that is kept.
REPEATS, EVEN = "holds whole numbers that repeat", "rises evenly, as an index does,"
PLURALS = {COUNTS: "count the rows", INDEX: INDEX.replace("holds", "each hold"), REPEATS: REPEATS.replace("holds", "hold")}
PLURALS[EVEN] = EVEN.replace("rises", "rise")


@dataclass(frozen=True)
class TableLayout:
    """How the columns of a table were understood. Positions count from 0.

    names:     of all columns; empty for a table without a header.
    width:     the number of all columns.
    left_out:  the positions of columns that are no data, with the reason.
    constant:  the positions of columns that have one value in all rows, with that value; left out as well.
    stored_in: the type of the numbers, if it is a narrower one than float64; constants are compared in the coarser of two.
    notes:     what else there is to say about the file; not stored.
    """

    names: tuple[str, ...]
    width: int
    left_out: tuple[tuple[int, str], ...] = ()
    constant: tuple[tuple[int, float], ...] = ()
    notes: tuple[str, ...] = ()
    stored_in: str = "float64"

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The positions of the columns that are data."""
        others = {position for position, _ in (*self.left_out, *self.constant)}
        return tuple(position for position in range(self.width) if position not in others)

    @property
    def has_decisions(self) -> bool:
        """Whether there is more to say than which header there is, and how many columns."""
        return bool(self.left_out or self.constant or self.notes)

    @property
    def written(self) -> tuple[int, ...]:
        """The positions of the columns that samples have: those that are data, and the constant ones."""
        return tuple(sorted((*self.used, *(position for position, _ in self.constant))))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are data."""
        return self.names_of(self.used)

    @property
    def short_labels(self) -> tuple[str, ...]:
        """What a list in a message calls each column of the data: its name in quotes, or "column 3", the number in the file."""
        return tuple(repr(name) if (name := (*self.names, *[""] * self.width)[at]) else f"column {at + 1}" for at in self.used)

    def names_of(self, positions: Iterable[int]) -> tuple[str, ...]:
        """Returns the names at some positions, if there are names."""
        return tuple(self.names[position] for position in positions) if self.names else ()

    def label(self, index: int) -> str:
        """Returns what a message calls a column of the data, counted from 0 among those that are used."""
        return self._label(self.used[index])

    def labels(self, positions: Sequence[int]) -> str:
        """Returns what a message calls columns at some positions, with the number of those that it does not list."""
        if self.names and len(positions) == 1:
            return self._label(positions[0])
        names = [self._name(position) if self.names else str(position + 1) for position in positions]
        return _column_or_columns(positions) + listed(names)

    def without(self, constant: Mapping[int, float]) -> TableLayout:
        """Returns the layout in which columns of the data, counted among those that are used, are left out as constant."""
        used = self.used
        return replace(self, constant=tuple((used[index], value) for index, value in constant.items())) if constant else self

    def completed(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns rows of the data (N, used) with the constant columns inserted, (N, written)."""
        if not self.constant:
            return values
        # A constant is written as it was stored, so that a score finds it again: 0.1 in float64 if float32 would round it.
        rounded = any(float(values.dtype.type(value)) != value for _, value in self.constant)
        whole = np.empty((len(values), self.width), np.float64 if rounded else values.dtype)
        whole[:, list(self.used)] = values
        for position, value in self.constant:
            whole[:, position] = value
        return whole[:, list(self.written)]

    def describe(self) -> str:
        """Returns one line that says how the table was understood."""
        count = len(self.used)
        parts = [f"header: {'yes' if self.names else 'no'}, {count} column{'s' if count != 1 else ''}"]
        for reason in (COUNTS, INDEX, JOINT, DROPPED):
            if positions := [position for position, why in self.left_out if why == reason]:
                verb = reason if len(positions) == 1 else PLURALS.get(reason, reason)
                one = reason == INDEX and len(positions) == 1
                keep = f"; keep it with --keep {shlex.quote(value_naming(self.names, positions[0]))}" if one else ""
                parts.append(f"{self.labels(positions)} {verb}: left out{keep}")
        if len(self.constant) == 1:
            ((position, value),) = self.constant
            parts.append(f"{self._label(position)} is {value:g} in all training rows: left out")
        elif self.constant:
            parts.append(
                f"{self.labels([position for position, _ in self.constant])} have the same value in all training rows: left out"
            )
        return "; ".join([*parts, *self.notes])

    def facts(self) -> dict[str, Any]:
        """Returns what a checkpoint stores, as JSON can hold it."""
        facts = {"names": self.names, "width": self.width, "left_out": self.left_out, "constant": self.constant}
        return facts | {"stored_in": self.stored_in} if self.stored_in in NARROW else facts

    @classmethod
    def of_facts(cls, stored: dict[str, Any], used: int) -> TableLayout:
        """Inverse of `facts`; raises ValueError if they are damaged, contradict each other, or do not leave `used` columns."""
        try:
            layout = cls(
                tuple(map(str, stored["names"])),
                int(stored["width"]),
                tuple((int(position), str(reason)) for position, reason in stored["left_out"]),
                tuple((int(position), float(value)) for position, value in stored["constant"]),
                stored_in=next((name for name in NARROW if name == stored.get("stored_in")), "float64"),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"expected the layout of a table, got a damaged one ({error})") from None
        others = [position for position, _ in (*layout.left_out, *layout.constant)]
        if len(set(others)) < len(others) or not all(0 <= position < layout.width for position in others):
            raise ValueError(f"expected distinct columns below {layout.width} in the layout of the table, got {others}")
        if layout.width - len(others) != used:
            raise ValueError(f"expected {used} columns of data in the layout of the table, got {layout.width - len(others)}")
        if layout.names and len(layout.names) != layout.width:
            raise ValueError(f"expected {layout.width} names in the layout of the table, got {len(layout.names)}")
        return layout

    def _label(self, position: int) -> str:
        if not self.names:
            return f"column {position + 1}"
        return f"unnamed column {position + 1}" if is_unnamed(self.names[position]) else f"column {self.names[position]!r}"

    def _name(self, position: int) -> str:
        return repr(self.names[position]) if self.names[position] else str(position + 1)


def understand(
    who: str, table: Table, drop: Collection[str] = (), keep: Collection[str] = ()
) -> tuple[NDArray[Any], TableLayout]:
    """Returns the numbers of a table, (N, used), and its layout.

    drop:  columns to leave out, each by its name, or by its number, from 1, if it has none.
    keep:  columns to keep that would be left out: an index without a name.
    """
    layout = TableLayout(table.names, table.width)
    dropped, kept = (
        {position for name in names if name != EVERYTHING for position in _positions_of(who, layout, option, name)}
        for option, names in (("drop", drop), ("keep", keep))
    )
    if both := kept & dropped:
        raise ValueError(f"{who}: expected each column in drop or in keep, got {layout.labels(sorted(both))} in both")
    layout = replace(layout, left_out=tuple((position, DROPPED) for position in sorted(dropped)))
    if dropped and not layout.used:
        raise ValueError(f"{who}: expected at least one column to use, got none: all of them are dropped")
    try:
        values = table.numbers(layout.used)
    except TextError as error:
        raise ValueError(f"{error}{_leave_out(layout, table.texts_among(layout.used))}") from None
    notes = ["decimal commas"] if table.decimal_commas else []
    if isinstance(table, DelimitedFile) and table.guess:
        notes.append(table.guess)
    if isinstance(table, DelimitedFile) and table.pairs_of_whole_numbers:
        notes.append("if a line such as 12,5 is one number with a decimal comma, write 12.5")
    if len(values) and EVERYTHING not in keep:
        values, layout, on_index = _without_index(values, layout, kept)
        notes += on_index
    _expect_distinct_names(who, layout)
    stored_in = values.dtype.name if values.dtype.name in NARROW else "float64"
    return values, replace(layout, notes=tuple(notes), stored_in=stored_in)


def _without_index(
    values: NDArray[Any], layout: TableLayout, kept: Collection[int]
) -> tuple[NDArray[Any], TableLayout, list[str]]:
    """Returns numbers and layout without the columns that are an index, and notes on those that may be one."""
    place = {position: at for at, position in enumerate(layout.used)}
    unnamed = {each: values[:, place[each]] for each in _unnamed_first(layout) if each not in kept}
    index = {each: reason for each, column in unnamed.items() if (reason := _as_index(column))}
    like = {each: what for each, column in unnamed.items() if each not in index and (what := _like_index(column))}
    if not index and _are_index(list(unnamed.values())):
        index, like = dict.fromkeys(unnamed, JOINT), {}
    if 0 < len(index) < len(place):
        values = values[:, [at for position, at in place.items() if position not in index]]
        layout = replace(layout, left_out=tuple(sorted([*layout.left_out, *index.items()])))
    like |= {layout.used[at]: COUNTS for at in _counting(values) if layout.used[at] not in kept}
    reasons = dict.fromkeys(like.values())
    return values, layout, [_kept_index(layout, [each for each in like if like[each] == what], what) for what in reasons]


def _expect_distinct_names(who: str, layout: TableLayout) -> None:
    unnamed = [position for position in layout.used if layout.names and not layout.names[position]]
    if len(unnamed) > 1:
        raise ValueError(
            f"{who}: expected distinct column names, got none for {layout.labels(unnamed)}; name them, or leave them out with "
            f"{_drop_options(layout, unnamed)}"
        )
    if twice := [name for name, times in Counter(layout.columns).items() if times > 1]:
        named = listed([repr(name) for name in sorted(twice)])
        raise ValueError(f"{who}: expected distinct column names, got {named} more than once; rename them")


def kept_columns(who: str, layout: TableLayout, keep: Collection[str]) -> set[int]:
    """Returns the columns of the data, counted among those that are used, that `keep` names."""
    used = layout.used
    named = {position for name in keep if name != EVERYTHING for position in _positions_of(who, layout, "keep", name)}
    return {index for index, position in enumerate(used) if position in named}


def constant_columns(values: NDArray[Any]) -> dict[int, float]:
    """Returns the columns of a table (N, D) that have one value in all rows, with that value."""
    few = np.flatnonzero((values[:3] == values[:1]).all(0))  # a look at three rows spares most of a large table
    constant = few[(values[:, few] == values[:1, few]).all(0)]
    # A constant of 0.1 in float32 is 0.1, and not what it was rounded to.
    return {int(index): float(str(values[0, index])) for index in constant}


def discrete_columns(values: NDArray[Any]) -> dict[int, int]:
    """Returns the columns of a table (N, D) that take fewer different values than a twentieth of the rows, and how many."""
    found: dict[int, int] = {}
    block = max(1, BLOCK_VALUES // max(1, len(values)))
    for start in range(0, values.shape[1] if len(values) >= 50 else 0, block):
        ordered = np.sort(values[:, start : start + block], axis=0)
        different = 1 + (ordered[1:] != ordered[:-1]).sum(0)
        found |= {start + int(index): int(different[index]) for index in np.flatnonzero(different < 0.05 * len(values))}
    return found


def _counting(values: NDArray[Any]) -> list[int]:
    """Returns the columns that grow by one from row to row."""
    if len(values) < 3:
        return []
    start = values[:3].astype(np.float64)
    few = np.flatnonzero((np.diff(start, axis=0) == 1).all(0) & (start[0] == np.floor(start[0])))
    return [int(index) for index in few if (np.diff(values[:, index].astype(np.float64)) == 1).all()]


def _as_index(column: NDArray[Any]) -> str:
    """Returns why a column is taken for an index, possibly one of filtered or shuffled rows; empty if it is not."""
    if not (column == np.floor(column)).all() or len(np.unique(column)) < len(column):
        return ""
    return COUNTS if column[0] in (0, 1) and (np.diff(column) == 1).all() else INDEX


def _are_index(columns: Sequence[NDArray[Any]]) -> bool:
    """Returns whether several columns of whole numbers differ in every row, as an index of several levels does."""
    if len(columns) < 2 or not all((column == np.floor(column)).all() for column in columns):
        return False
    return len(np.unique(np.stack(columns, 1), axis=0)) == len(columns[0])


def _like_index(column: NDArray[Any]) -> str:
    """Returns why a column that is kept may yet be an index; empty if it may not."""
    steps = np.diff(column.astype(np.float64))
    if not steps.any():
        return ""
    if (column == np.floor(column)).all():
        return REPEATS
    return EVEN if len(steps) > 1 and (np.abs(steps - steps.mean()) <= ROUNDED * steps.mean()).all() else ""


def _kept_index(layout: TableLayout, positions: Sequence[int], what: str) -> str:
    """Returns the note on columns that are kept and may be an index."""
    drop = _drop_options(layout, positions)
    if len(positions) == 1:
        return f"{layout.labels(positions)} {what} and is kept: use {drop} if it is only an index"
    return f"{layout.labels(positions)} {PLURALS[what]} and are kept: use {drop} if they are only indices"


def _leave_out(layout: TableLayout, positions: Sequence[int]) -> str:
    """Returns what to do about columns of text."""
    if len(positions) == len(layout.used):
        return ""
    if not positions:  # a kind of column, or of number, that is not read
        return "; leave that column out with drop"
    which = "that column" if len(positions) == 1 else layout.labels(positions)
    return f"; leave {which} out with {_drop_options(layout, positions)}"


def _drop_options(layout: TableLayout, positions: Sequence[int]) -> str:
    values = list(dict.fromkeys(value_naming(layout.names, position) for position in positions))
    return " ".join(f"--drop {shlex.quote(value)}" for value in values[:MOST_NAMED]) + (" …" if len(values) > MOST_NAMED else "")


def _unnamed_first(layout: TableLayout) -> list[int]:
    """Returns the used columns without a name of their own that are before all others or come from an index."""
    found: list[int] = []
    before = True
    for position in layout.used if layout.names else ():
        name = layout.names[position]
        before = before and is_unnamed(name)
        if before or (name.startswith("__index_level_") and is_unnamed(name)):
            found.append(position)
    return found


def _positions_of(who: str, layout: TableLayout, option: str, name: str) -> list[int]:
    """Returns what `positions_named` finds; raises ValueError if that is nothing."""
    if found := positions_named(layout.names, layout.width, name):
        return found
    names = listed([repr(known) for known in layout.names], MOST_LISTED)
    known = names or f"a number from 1 to {layout.width} without a header"
    raise ValueError(f"{who}: expected {option} to name a column, {known}, got {name!r}{did_you_mean(name, layout.names)}")


def _column_or_columns(positions: Sequence[int]) -> str:
    return "column " if len(positions) == 1 else "columns "

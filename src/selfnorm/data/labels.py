"""What messages call columns, and which columns a user names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from selfnorm.data.headers import is_unnamed

MOST_NAMED = 5  # columns in a message
MOST_LISTED = 20  # columns in one that says what there is to choose from


def listed(names: Sequence[str], most: int = MOST_NAMED) -> str:
    """Returns the first names, and the number of those that are not listed."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def namer(labels: Sequence[str]) -> Callable[[int], str]:
    """Returns what a message calls a column: its label, or its number, from 1, if there are no labels."""
    return lambda index: labels[index] if labels else f"column {index + 1}"


def entry_label(place: Iterable[int]) -> str:
    """Returns what a message calls an entry of an array, counted from 1 along each axis."""
    return f"entry ({', '.join(str(at + 1) for at in place)})"


def positions_named(names: Sequence[str], width: int, name: str) -> list[int]:
    """Returns the positions of the columns of that name, or of the column without a name that has this number, from 1.

    names:  of all columns; empty if they have none.
    """
    if found := [position for position, known in enumerate(names) if known == name]:
        return found
    number = int(name) - 1 if name.isascii() and name.isdecimal() and len(name) < 10 else -1
    return [number] if 0 <= number < width and (not names or is_unnamed(names[number])) else []


def value_naming(names: Sequence[str], position: int) -> str:
    """Returns what names a column in an option, so that `positions_named` finds it: its name, or its number if it has none.

    A number that is the name of another column would name that one; then the column keeps the name that it has, such as "".
    """
    name = names[position] if names else ""
    number = str(position + 1)
    return number if is_unnamed(name) and number not in names else name

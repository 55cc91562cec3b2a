"""What messages call columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_NAMED = 5  # columns in a message


def listed(names: Sequence[str], most: int = MOST_NAMED) -> str:
    """Returns the first names, and the number of those that are not listed."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def namer(labels: Sequence[str]) -> Callable[[int], str]:
    """Returns what a message calls a column: its label, or its number, from 1, if there are no labels."""
    return lambda index: labels[index] if labels else f"column {index + 1}"

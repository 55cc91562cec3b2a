"""Reads the log of a run, of which a damaged part costs a point in a figure and never the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from selfnorm.train.settings import has_type

TEXTS = {"kind", "reason", "message"}
# By layer; logs of earlier versions have `weight` for λ. Every other field is one number.
LISTS = {"reconstruction", "reconstruction_weight", "weight", "inverse_error", "stability_ratio"}
MAX_NUMBER = 3.5e38  # just above the largest of float32, in which training computes


def parse_records(text: str) -> list[dict[str, Any]]:
    """Returns the records in JSON lines: dicts whose `kind` is text, and whose other fields are of the kinds that runs log.

    Numbers are finite, and times not negative; None where the log has null. Damaged lines, and damaged fields of a record, are
    left out.
    """
    records = []
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number with thousands of digits
            continue
        if isinstance(found, dict) and isinstance(found.get("kind"), str):
            records.append(dict(_sound_fields(found)))
    return records


def _sound_fields(record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if key in TEXTS:
            sound = isinstance(value, str)
        elif key in LISTS:
            sound = isinstance(value, list) and all(map(is_finite_number, value))
        else:
            sound = is_finite_number(value) and not (value and key.endswith("seconds") and value < 0)
        if sound:
            yield key, value


def is_sound(value: Any, kind: Any) -> bool:
    """Returns whether a value has a type, see `has_type`, and is finite if it is a number."""
    return has_type(value, kind) and (not isinstance(value, int | float) or abs(value) <= MAX_NUMBER)


def is_finite_number(value: Any) -> bool:
    """Returns whether a value is None, or a finite number that can be computed with."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER)

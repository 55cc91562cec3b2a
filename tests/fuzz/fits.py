"""What `fit` must have understood of a table."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fuzz.cases import Outcome
from fuzz.reference import Reading
from selfnorm.train.checkpoint import read_checkpoint


def right_fit(readings: list[Reading], folder: str = "new") -> Callable[[Outcome], Iterator[str]]:
    """Returns the check of a call of `fit`: the run has the columns of the table that vary, by name, and all rows."""

    def check(outcome: Outcome) -> Iterator[str]:
        if not readings:
            yield "accepted: expected an error, got a run"
            return
        content = outcome.made[f"{folder}/best.safetensors"]
        with tempfile.TemporaryDirectory() as place:
            file = Path(place, "best.safetensors")
            file.write_bytes(content or b"")
            checkpoint = read_checkpoint(file)
        result = json.loads(outcome.made[f"{folder}/result.json"] or b"")
        why = [_difference(reading, checkpoint.shape, checkpoint.columns, result["test"]["examples"]) for reading in readings]
        if all(why):
            yield f"other fit: {why[0]}"
        yield from _unsaid(readings[0], checkpoint.shape, outcome)

    return check


def _difference(reading: Reading, shape: tuple[int, ...], columns: tuple[str, ...], tested: int) -> str:
    rows = np.array(reading.rows)
    aside = _extreme(rows)
    expected = max(1, len(rows) // 10)
    if tested not in (expected, max(1, (len(rows) - aside) // 10)):
        return f"expected {expected} of {len(rows)} rows for the test, got {tested}"
    varying = [index for index in range(rows.shape[1]) if np.ptp(rows[:, index]) > 0]
    if not len(varying) <= shape[0] <= rows.shape[1]:  # one that varies only outside the training rows may be left out or not
        nearly = sum(len(np.unique(rows[:, index])) > 2 for index in range(rows.shape[1]))
        if not nearly <= shape[0] <= rows.shape[1]:
            return f"expected {len(varying)} columns, got {shape}"
    if columns and reading.names and not set(columns) <= set(reading.names):
        return f"expected columns named {reading.names}, got {columns}"
    return ""


def _extreme(rows: np.ndarray) -> int:
    """Returns how many rows may be set aside: with an entry that is a hundred times as far from the median as all but a few."""
    few = max(len(rows) // 100, min(3, len(rows) // 20))
    with np.errstate(all="ignore"):
        distance = np.abs(rows - np.median(rows, axis=0))
    usual = np.sort(distance, axis=0)[-1 - few]
    return min(few, int((distance > 100 * usual).any(1).sum()))


def _unsaid(reading: Reading, shape: tuple[int, ...], outcome: Outcome) -> Iterator[str]:
    """Yields what should have been said: that columns depend on each other."""
    rows = np.array(reading.rows)
    if len(rows) < 20 or shape[0] < rows.shape[1]:
        return
    with np.errstate(all="ignore"):
        standard = (rows - rows.mean(0)) / rows.std(0)
    said = re.search("depend|duplicat|combination|multiple|equal", outcome.stderr)
    if not said and np.isfinite(standard).all() and np.linalg.matrix_rank(standard, tol=1e-9) < rows.shape[1]:
        yield f"unsaid: columns depend on each other: {outcome.stderr[-200:]!r}"

"""Reads what `score` printed or wrote, and compares it with the reference."""

import csv
import io
import json
from collections.abc import Callable, Iterator

import numpy as np

from fuzz.cases import Outcome
from fuzz.reference import Reading, log_density, training_scores

ABSOLUTE, RELATIVE = 0.02, 1e-3  # nats; x is rounded to float32 somewhere


def scored_rows(outcome: Outcome, output: str | None, as_json: bool) -> list[dict[str, str]]:
    """Returns the rows that a call of `score` printed, or wrote to the file `output`."""
    if as_json:
        return [json.loads(line) for line in outcome.stdout.splitlines()]
    content = outcome.made.get(output) if output else None
    if output and output.endswith(".npy") and content:
        table = np.load(io.BytesIO(content))
        return [{name: row[name] for name in table.dtype.names} for row in table]
    if output and output.endswith(".parquet") and content:
        from pyarrow import parquet

        return parquet.read_table(io.BytesIO(content)).to_pylist()
    text = content.decode() if content is not None else outcome.stdout
    return list(csv.DictReader(io.StringIO(text)))


def right_scores(
    kind: str, readings: list[Reading], output: str | None = None, as_json: bool = False
) -> Callable[[Outcome], Iterator[str]]:
    """Returns the check of a call of `score`: one row for each of the file's, with its likelihood, rank and percentile."""

    def check(outcome: Outcome) -> Iterator[str]:
        if output and output not in outcome.made:
            yield f"other result: expected {output}, got {sorted(outcome.made)}"
            return
        rows = scored_rows(outcome, output, as_json)
        if not rows or "log_likelihood" not in rows[0]:
            yield f"other result: expected rows with a log_likelihood, got {rows[:1]}"
            return
        got = np.array([-np.inf if row["log_likelihood"] in (None, "") else float(row["log_likelihood"]) for row in rows])
        if np.isnan(got).any() or (got == np.inf).any():
            yield f"other result: expected finite numbers or −inf, got {got}"
            return
        yield from _wrong_places(kind, got, rows)
        if not readings:
            yield f"accepted: expected an error, got {len(rows)} rows {rows[:2]}"
            return
        why = [_difference(kind, reading, got) for reading in readings]
        if all(why):
            yield f"other result: {why[0]}"

    return check


def _difference(kind: str, reading: Reading, got: np.ndarray) -> str:
    if len(got) != len(reading.rows):
        return f"expected {len(reading.rows)} rows, got {len(got)}"
    expected = log_density(kind, reading.rows)
    with np.errstate(invalid="ignore"):
        close = (np.abs(got - expected) <= ABSOLUTE + RELATIVE * np.abs(expected)) | (got == expected)
    # Beyond float32's range, −inf is the nearest number.
    close |= (got == -np.inf) & ~(expected > -1e30)
    if close.all():
        return ""
    row = int(close.argmin())
    return f"expected log p = {expected[row]:.6g} of {reading.rows[row]}, got {got[row]:.6g}"


def _wrong_places(kind: str, got: np.ndarray, rows: list[dict[str, str]]) -> Iterator[str]:
    if "rank" in rows[0]:
        rank = np.array([int(row["rank"]) for row in rows])
        order = np.argsort(rank)
        if sorted(rank) != list(range(1, len(rows) + 1)) or (got[order][1:] < got[order][:-1]).any():
            yield f"other result: expected ranks by likelihood, got {rank} for {got}"
    if "percentile" in rows[0]:
        percentile = np.array([float(row["percentile"]) for row in rows])
        training = training_scores(kind)
        if (np.abs(percentile - 100 * np.searchsorted(training, got) / len(training)) > 100 / len(training) + 1e-9).any():
            yield f"other result: expected percentiles among the training data, got {percentile}"

"""Writes scores to files, in the format that the name asks for."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from selfnorm.data.locate import require_module
from selfnorm.runtime.files import written_output

SCORE_ENDINGS = (".csv", ".npy", ".parquet")


def expect_score_format(path: Path) -> None:
    """Raises ValueError if the file's format needs a module that is not installed."""
    if path.suffix.lower() == ".parquet":
        require_module("pyarrow.parquet", str(path), "selfnorm[parquet]")


def write_scores(path: Path, rows: Sequence[dict[str, Any]], *, is_new: bool = False) -> None:
    """Writes rows with the same keys, which become columns: a table (.csv, .parquet), or a structured array (.npy)."""
    suffix = path.suffix.lower()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    with written_output(path, is_new=is_new) as file:
        if suffix == ".parquet":
            arrow = require_module("pyarrow", str(path), "selfnorm[parquet]")
            require_module("pyarrow.parquet", str(path), "selfnorm[parquet]").write_table(arrow.table(columns), file)
        elif suffix == ".npy":
            arrays = {name: np.array(values) for name, values in columns.items()}
            table = np.empty(len(rows), [(name, values.dtype) for name, values in arrays.items()])
            for name, values in arrays.items():
                table[name] = values
            buffer = io.BytesIO()  # np.save cannot write to a pipe
            np.save(buffer, table, allow_pickle=False)
            file.write(buffer.getbuffer())
        else:
            file.write(scores_csv(rows).encode())


def scores_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as CSV, with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()

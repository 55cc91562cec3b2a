"""The verb `score`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from selfnorm.cli.application import command
from selfnorm.cli.console import OUT, print_json
from selfnorm.cli.options import Debug, Device, Json, Output, RunPath, Seed, resolve_device
from selfnorm.runtime.files import replacing
from selfnorm.train.trained import Trained


@command("score", "selfnorm score runs/fit-measurements new.csv", "selfnorm score runs/fit-measurements new.csv -o scores.csv")
def score(
    run: RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Data with the same columns or image size as the run's.")],
    output: Output = None,
    samples: Annotated[int, typer.Option(min=1, help="Dequantisation samples, for images.")] = 1,
    seed: Seed = 0,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute the exact log-likelihood of each row, to find outliers.

    Rank 1 is the least likely row of the file. Percentile is the percentage of training data that is less likely than the row.
    """
    if not file.exists():
        raise ValueError(f"{file}: expected a file or a folder of images, got a path that does not exist")
    if json and output:
        raise ValueError("--json: expected no -o with it, got both; JSON goes to stdout, -o writes CSV")
    rows = Trained.open(run, resolve_device(device)).score(file, samples, seed).rows()
    if json:
        for row in rows:
            print_json(row)
    elif output is None:
        _write_csv(sys.stdout, rows)
    else:
        with replacing(output) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            _write_csv(stream, rows)
        OUT.print(f"wrote {len(rows)} rows to {output}")


def _write_csv(stream: TextIO, rows: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(stream, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)

"""The verb `score`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from selfnorm.cli.application import command
from selfnorm.cli.console import ERR, OUT, print_json
from selfnorm.cli.options import ConstantsChoice, Debug, Device, Force, Header, Json, Output, RunPath, Seed, resolve_device
from selfnorm.cli.outputs import check_output, expect_not_data, files_of
from selfnorm.data.safe_files import STANDARD_INPUT
from selfnorm.runtime.escapes import escaped
from selfnorm.runtime.files import is_stream
from selfnorm.train.score_files import SCORE_ENDINGS, expect_score_format, scores_csv, write_scores
from selfnorm.train.trained import Trained


@command("score", "selfnorm score runs/fit-measurements new.csv", "selfnorm score runs/fit-measurements new.csv -o scores.csv")
def score(
    run: RunPath,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Data with the run's columns or image size; - is a table from standard input.")
    ],
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            metavar="COLUMN",
            help="Copy this column to the output; repeatable. Text columns of a file with a header are always copied.",
        ),
    ] = None,
    header: Header = None,
    constant_columns: Annotated[
        ConstantsChoice,
        typer.Option(
            help="How to score a row that differs from a constant training column: `impossible` gives −inf, `flag` only names "
            "the column."
        ),
    ] = ConstantsChoice.impossible,
    output: Output = None,
    force: Force = False,
    samples: Annotated[int, typer.Option(min=1, help="Dequantisation samples, for images.")] = 1,
    seed: Seed = 0,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute the exact log-likelihood of each row, to find outliers. `-o` writes .csv, .npy or .parquet.

    Rank 1 is the least likely row of the file. Percentile is the percentage of training data that is less likely than the row.
    Columns are matched by name. `differs` names the columns whose value differs from their constant training value.
    """
    if str(file) == "-":
        file = STANDARD_INPUT
    if not file.exists():
        raise ValueError(f"{file}: expected a file or a folder of images, got a path that does not exist")
    if json and output:
        raise ValueError("--json: expected no -o with it, got both; JSON goes to stdout, -o writes a file")
    if output:
        check_output(output, SCORE_ENDINGS, force, [file, *files_of(run)])
        expect_score_format(output)
    trained = Trained.open(run, resolve_device(device))
    if output:
        expect_not_data(output, trained)
    impossible = constant_columns is ConstantsChoice.impossible
    scores = trained.score(file, samples, seed, ids=ids or (), constants_count=impossible, header=header)
    if scores.understood:
        ERR.print(f"selfnorm: {file}: {scores.understood}")
    rows = scores.rows()
    if json:
        for row in rows:
            print_json(row)
    elif output is None:
        text = scores_csv(rows)  # as it is for a program; what identifies a row may hold anything
        sys.stdout.write(escaped(text) if sys.stdout.isatty() else text)
    else:
        write_scores(output, rows, is_new=not force)
        (ERR if is_stream(output) else OUT).print(f"wrote {len(rows)} rows to {output}")

"""The verb `sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfnorm.cli.application import command
from selfnorm.cli.console import ERR, OUT
from selfnorm.cli.options import (
    Debug,
    Device,
    Force,
    InverseChoice,
    Output,
    RunPath,
    Seed,
    resolve_device,
)
from selfnorm.cli.outputs import check_output, expect_ending, expect_not_data, files_of
from selfnorm.runtime.files import is_stream
from selfnorm.train.run import free_path
from selfnorm.train.sample_files import SAMPLE_ENDINGS, expect_room, sample_endings, write_samples
from selfnorm.train.trained import Trained


@command(
    "sample",
    "selfnorm sample runs/digits-fc-snf -n 64 -o samples.png",
    "selfnorm sample runs/fit-measurements -n 1000 --inverse exact -o samples.csv",
)
def sample(
    run: RunPath,
    n: Annotated[int, typer.Option("-n", min=1, help="Number of samples.")] = 64,
    inverse: Annotated[
        InverseChoice,
        typer.Option(
            help="auto, exact and refined follow the density; learned is fastest, but only as accurate as the learned inverse."
        ),
    ] = InverseChoice.auto,
    output: Output = None,
    force: Force = False,
    seed: Seed = 0,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Draw samples into a file: .png for images, .csv or .npy for any data."""
    if output:
        check_output(output, SAMPLE_ENDINGS, force, files_of(run))
    trained = Trained.open(run, resolve_device(device))
    shape, levels, columns = trained.checkpoint.shape, trained.checkpoint.levels, trained.checkpoint.columns
    if layout := trained.checkpoint.table:
        shape, columns = (len(layout.written),), layout.names_of(layout.written)
    endings = sample_endings(shape, levels)
    if output:
        expect_ending(output, endings)
    else:
        output = free_path(Path(f"samples{endings[0]}"))
    expect_not_data(output, trained)
    expect_room(output, n, shape, levels)
    batches = map(trained.completed, trained.sample_batches(n, inverse.value, seed))
    write_samples(output, batches, n, shape, levels, columns, is_new=not force)
    out = ERR if is_stream(output) else OUT
    out.print(f"wrote {n} samples to {output}\nused the {trained.flow.inverse_used}")

"""The verb `sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfnorm.cli.application import command
from selfnorm.cli.console import OUT
from selfnorm.cli.options import (
    Debug,
    Device,
    InverseChoice,
    Output,
    RunPath,
    Seed,
    resolve_device,
)
from selfnorm.data.dataset import is_image
from selfnorm.train.run import free_path
from selfnorm.train.sample_files import write_samples
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
    seed: Seed = 0,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Draw samples into a file: .png for images, .csv or .npy for any data."""
    trained = Trained.open(run, resolve_device(device))
    checkpoint = trained.checkpoint
    image = is_image(checkpoint.shape, checkpoint.levels)
    output = output or free_path(Path("samples.png" if image else "samples.csv"))
    write_samples(output, trained.sample(n, inverse.value, seed), checkpoint.levels, checkpoint.columns)
    OUT.print(f"wrote {n} samples to {output}\nused the {trained.flow.inverse_used}")

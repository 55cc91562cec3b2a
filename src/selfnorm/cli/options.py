"""The options that several verbs share, and what their values mean."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from selfnorm.runtime.device import available_device


class InverseChoice(StrEnum):
    auto = "auto"
    learned = "learned"
    exact = "exact"
    refined = "refined"


class DivergenceChoice(StrEnum):
    stop = "stop"
    rollback = "rollback"


class PartChoice(StrEnum):
    train = "train"
    validation = "validation"
    test = "test"


class ConstantsChoice(StrEnum):
    impossible = "impossible"
    flag = "flag"


class PrecisionChoice(StrEnum):
    float32 = "float32"
    tf32 = "tf32"
    bf16 = "bf16"


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")]
DataDir = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Folder with the data set's files; default $SELFNORM_DATA.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, …; auto uses an accelerator if there is one.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress: print only notes, warnings and the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace output files that exist.")]
Seed = Annotated[int, typer.Option(help="Seed of all random draws.")]
Header = Annotated[
    bool | None, typer.Option("--header/--no-header", help="Whether the first line holds names; detected by default.")
]
OnDivergence = Annotated[
    DivergenceChoice | None,
    typer.Option(help="stop, or return to the best checkpoint with λ raised tenfold, up to 3 times."),
]
RunFolderOption = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Folder for the run; default a new one under runs/.")
]


def resolve_device(name: str) -> torch.device:
    """Returns the device that `--device` names. Raises ValueError if this machine does not have it."""
    return available_device("--device", name)


def absolute_folder(path: Path | None) -> str | None:
    """Returns the folder that `--data` names as an absolute path, so that a run can be resumed from any directory."""
    return None if path is None else str(path.expanduser().resolve())

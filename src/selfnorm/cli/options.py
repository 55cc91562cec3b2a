"""What all verbs of the command share: the application, its options, and one line instead of a traceback."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from selfnorm.cli.display import ERR
from selfnorm.train.stopping import DivergedError, StoppedError

# Large tensors in large pages, where Linux lets programs ask for them: gradients of large weights are new memory at each step,
# and the kernel hands it out page by page. torch reads this when it first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

app = typer.Typer(
    help="Self normalizing flows: train, evaluate, sample, and score with flows that learn their own inverse.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class InverseKind(StrEnum):
    learned = "learned"
    exact = "exact"
    refined = "refined"


class DivergenceKind(StrEnum):
    stop = "stop"
    rollback = "rollback"


class Part(StrEnum):
    train = "train"
    validation = "validation"
    test = "test"


class Rounding(StrEnum):
    float32 = "float32"
    tf32 = "tf32"
    bf16 = "bf16"


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")]
DataDir = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Where its files are; else $SELFNORM_DATA.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, …; auto takes an accelerator if there is one.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines instead.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write.")]
Seed = Annotated[int, typer.Option(help="Of all random draws.")]
OnDivergence = Annotated[
    DivergenceKind | None, typer.Option(help="stop, or go back to the best checkpoint and raise λ tenfold, up to 3 times.")
]
RunFolderOption = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="The run's folder; else a new one under runs/.")
]


def command(name: str, *examples: str, of: typer.Typer = app) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a verb with examples under its help, and turn what goes wrong in it into one line and an exit status.

    of: the part of the application that it belongs to.
    """

    def register(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def guarded(*args: Any, debug: bool = False, **options: Any) -> None:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(errors="replace")  # where the terminal has no ± or λ, show a ? rather than fail
            try:
                verb(*args, debug=debug, **options)
            except (typer.Exit, typer.Abort):
                raise
            except StoppedError as error:
                ERR.print(f"selfnorm: {error}")
                raise typer.Exit(128 + error.number) from None
            except KeyboardInterrupt:
                ERR.print("selfnorm: stopped")
                raise typer.Exit(130) from None
            except (BrokenPipeError, SystemExit):  # the reader of our output has gone, as `| head` does; rich makes it an exit
                sys.stderr.close()
                raise typer.Exit(0) from None
            except Exception as error:
                if debug:
                    raise
                known = isinstance(error, ValueError | OSError | DivergedError | MemoryError | torch.OutOfMemoryError)
                line = " ".join((str(error) or type(error).__name__).split())
                hint = "" if known else f" ({type(error).__name__}; --debug shows where)"
                ERR.print(f"selfnorm: {line}{hint}")
                raise typer.Exit(3 if isinstance(error, DivergedError) else 1) from None

        epilog = "Examples:\n\n" + "\n\n".join(f"`{example}`" for example in examples)
        of.command(name, epilog=epilog)(guarded)
        return guarded

    return register


def the_device(name: str) -> torch.device:
    """The device that `--device` means."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # read back, which "meta" cannot
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device: expected a device of this machine, got {name!r}; auto takes what there is") from None
    return device


def the_folder(path: Path | None) -> str | None:
    """The data folder that `--data` means, wherever the run is gone on with."""
    return None if path is None else str(path.expanduser().resolve())

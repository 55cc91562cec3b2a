"""The application object, and the decorator that makes a function one of its verbs."""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperCommand, TyperGroup

import selfnorm
from selfnorm.cli.console import ERR, OUT
from selfnorm.runtime.checks import one_line
from selfnorm.runtime.signals import TerminatedError, signals_raise
from selfnorm.runtime.standard_output import discard_unwritten
from selfnorm.train.stopping import USER_ERRORS, DivergedError, StoppedError

# Put large tensors in large pages, where Linux lets programs ask for them: the gradients of large weights are new memory at each
# step, which the kernel otherwise hands out page by page. torch reads this at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class FlagsWithoutType:
    """Part of a command whose help shows a flag by its names alone, without the type <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class FlaggedCommand(FlagsWithoutType, TyperCommand):
    """A verb."""


class FlaggedGroup(FlagsWithoutType, TyperGroup):
    """A group of verbs."""


app = typer.Typer(
    cls=FlaggedGroup,
    help="Train, evaluate, sample and score with self normalizing flows, which learn their own inverse.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(name: str, *examples: str, group: typer.Typer = app) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that registers a verb with examples in its help, and turns exceptions into one line and an exit status.

    The verb must have a parameter `debug: Debug = False`, which shows a traceback instead of the line.
    Exit statuses: 1 for an error, 3 for divergence, 128 + number for a signal.
    """

    def register(verb: Callable[..., None]) -> Callable[..., None]:
        if "debug" not in inspect.signature(verb).parameters:
            raise TypeError(f"command {name}: expected a parameter `debug: Debug = False`, got none")

        @functools.wraps(verb)
        def guarded(*args: Any, debug: bool = False, **options: Any) -> None:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(errors="replace")  # prints ? for ± or λ if the terminal lacks them
            try:
                with signals_raise(), warnings.catch_warnings():
                    warnings.showwarning = functools.partial(_show_warning, set())
                    verb(*args, debug=debug, **options)
                    sys.stdout.flush()  # not at exit, where an error could no longer be told
            except (typer.Exit, typer.Abort):
                raise
            except StoppedError as error:
                ERR.print(f"selfnorm: {error}")
                raise typer.Exit(128 + error.number) from None
            except KeyboardInterrupt:
                ERR.print("selfnorm: stopped")
                raise typer.Exit(130) from None
            except TerminatedError:
                ERR.print("selfnorm: stopped by SIGTERM")
                raise typer.Exit(143) from None
            except BrokenPipeError:  # the reader of our output has left, as `| head` does
                discard_unwritten(sys.stdout, sys.stderr)
                raise typer.Exit(0) from None
            except Exception as error:
                if debug:
                    raise
                line = one_line(error)
                known = isinstance(error, (*USER_ERRORS, DivergedError))
                hint = "" if known else f" ({type(error).__name__}; use --debug to see where)"
                ERR.print(f"selfnorm: {line}{hint}")
                raise typer.Exit(3 if isinstance(error, DivergedError) else 1) from None

        epilog = "Examples:\n\n" + "\n\n".join(f"`{example}`" for example in examples)
        group.command(name, cls=FlaggedCommand, epilog=epilog)(guarded)
        return guarded

    return register


def _show_warning(shown: set[str], message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Prints a warning as one line, without the place in the source that issued it, unless it was shown before."""
    line = one_line(message if isinstance(message, Warning) else category(message))
    if line not in shown:
        shown.add(line)
        ERR.print(f"selfnorm: {line}", style="yellow")


@app.callback(invoke_without_command=True)
def show_version(show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if show:
        OUT.print(f"selfnorm {selfnorm.__version__}, torch {torch.__version__}")
        raise typer.Exit

"""Progress of the command: a live line on a terminal, plain lines in a log, JSON lines for programs."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn

from selfnorm.cli.console import ERR, print_json
from selfnorm.compare.plan import PlannedRun
from selfnorm.train.loop import Report
from selfnorm.train.recipe import Recipe
from selfnorm.train.stopping import DivergedError, StoppedError


class TrainingDisplay:
    """Shows a run's records as they arrive. Use it as the trainer's `report`, inside `with`.

    name:   the label of one run among several, which is shown even on a narrow terminal; by default the recipe's name, on a wide
            terminal only.
    below:  the display of another run that trains at the same time, to share its screen.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        name: str | None = None,
        quiet: bool = False,
        as_json: bool = False,
        below: TrainingDisplay | None = None,
    ) -> None:
        self.recipe, self.quiet, self.as_json, self._below = recipe, quiet, as_json, below
        self.name, self._is_one_of_several = name or recipe.name, name is not None
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._shown: dict[str, Any] = {"epoch": "0", "loss": "–", "nll": "–", "error": "–"}
        self._line_at = -math.inf

    def __enter__(self) -> TrainingDisplay:
        if self._below is not None:
            self._live = self._below._live
            if self._live:
                self._task = self._live.add_task(self.name, total=None, **self._shown)
        elif not self.quiet and not self.as_json and ERR.is_terminal:
            wide = ERR.width >= 110
            columns: list[ProgressColumn] = []
            columns += [TextColumn("[bold]{task.description}[/]")] if wide or self._is_one_of_several else []
            columns += [BarColumn(bar_width=20)] if wide else []
            line = "epoch {task.fields[epoch]}  exact NLL {task.fields[nll]}"
            if ERR.width >= 75:
                line += "  loss {task.fields[loss]}  recon {task.fields[error]}"
            self._live = Progress(*columns, TextColumn(line), TimeRemainingColumn(), TextColumn("left"), console=ERR)
            self._task = self._live.add_task(self.name, total=None, **self._shown)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self._below is None:
            self._live.stop()

    def __call__(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if self.as_json:
            if kind != "step":
                print_json(record)
            return
        if kind == "note" and self._below is None:  # even if quiet: it says what is not in the result
            ERR.print(f"selfnorm: {record['message']}", style="yellow")
        if self.quiet:
            return
        if kind == "epoch":
            self._shown |= {"epoch": f"{record['epoch']}/{self.recipe.optimiser.epochs}", "loss": f"{record['surrogate']:.2f}"}
            if record["reconstruction"]:
                self._shown["error"] = f"{max(record['reconstruction']):.1e}"
        elif kind == "validation":
            behind = record["nll"] > record["best"]
            self._shown["nll"] = f"{record['nll']:.2f}" + (f" (best {record['best']:.2f})" if behind else "")
        elif kind == "rollback":
            raised = max(record.get("reconstruction_weight", record.get("weight", [])), default=0.0)
            ERR.print(f"rolled back to epoch {record['epoch']}, λ raised to {raised:g}: {record['reason']}", style="yellow")
        elif kind == "warning":
            ERR.print(f"{self.name}, epoch {record['epoch']}: {record['message']}", style="yellow")
        if self._live:
            if kind == "step":
                self._live.update(self._task, total=record["total"], completed=record["step"], **self._shown)
        elif kind == "validation" and time.monotonic() - self._line_at > 5:
            self._line_at = time.monotonic()
            epoch, loss, nll, error = self._shown.values()
            seconds = record["seconds"]
            ERR.print(f"{self.name}: epoch {epoch}, loss {loss}, exact NLL {nll}, reconstruction error {error}, {seconds:.0f} s")


@contextmanager
def show_transfers(quiet: bool) -> Iterator[Any]:
    """Context manager that yields on_progress(what, done, total) for downloads and conversions, or None without a terminal."""
    if quiet or not ERR.is_terminal:
        yield None
        return
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn(), console=ERR, transient=True
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        yield show


@contextmanager
def show_run(recipe: Recipe, folder: Path, quiet: bool, as_json: bool) -> Iterator[TrainingDisplay]:
    """Context manager that yields the display of a run. An exception that ends the run also says what was saved and how to
    continue."""
    try:
        with TrainingDisplay(recipe, quiet=quiet, as_json=as_json) as display:
            yield display
    except StoppedError as error:
        error.args = (f"{error}, all saved; continue with: selfnorm train --resume {shlex.quote(str(folder))}",)
        raise
    except DivergedError as error:
        error.args = (f"{error}. The best and the last good checkpoint are in {folder}",)
        raise


@contextmanager
def show_runs(recipes: Sequence[Recipe], folders: Sequence[Path], quiet: bool, as_json: bool) -> Iterator[list[Report]]:
    """Context manager that yields the displays of runs that train at the same time, one below the other."""

    again = "selfnorm train " + " ".join(f"--resume {shlex.quote(str(folder))}" for folder in folders)
    with ExitStack() as stack:
        displays: list[TrainingDisplay] = []
        for recipe in recipes:
            name = f"seed {recipe.optimiser.seed}"
            display = TrainingDisplay(recipe, name=name, quiet=quiet or as_json, below=displays[0] if displays else None)
            displays.append(stack.enter_context(display))
        try:
            yield [_json_report(folder) for folder in folders] if as_json else list(displays)
        except StoppedError as error:
            error.args = (f"{error}, all saved; continue with: {again}",)
            raise
        except OSError as error:
            error.args = (f"{error}; this ended all runs, and the others were saved where possible. Continue with: {again}",)
            raise


@contextmanager
def show_planned_run(run: PlannedRun, quiet: bool, as_json: bool) -> Iterator[Report]:
    """Context manager that yields the display of one run of a comparison."""
    if as_json:
        yield _json_report(run.path)
        return
    with TrainingDisplay(run.recipe, name=f"{run.place} {run.name}", quiet=quiet) as display:
        yield display


def _json_report(folder: Path) -> Report:
    """Prints each record with the run's folder, for several runs in one output."""
    return lambda record: None if record["kind"] == "step" else print_json({"run": str(folder), **record})

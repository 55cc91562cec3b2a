"""What the command shows while it works: a live line for people, plain lines for logs, JSON lines for programs."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from selfnorm.compare.plan import PlannedRun
from selfnorm.compare.table import ComparedRun, Comparison
from selfnorm.evaluate.health import FlowHealth
from selfnorm.runtime.files import json_text
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Report
from selfnorm.train.profile import Piece
from selfnorm.train.recipe import Recipe
from selfnorm.train.run import Result
from selfnorm.train.stopping import DivergedError, StoppedError

# Results go to stdout, all else to stderr, so that the former can be piped. No markup: a path may have brackets in it.
OUT = Console(soft_wrap=True, highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 160)
ERR = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_json(record: Any) -> None:
    """One line of JSON on stdout. A reader that has left, as `| head` does, is no reason to end a run: the rest goes nowhere."""
    try:
        print(json_text(record), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A plain table; the first column is never cut."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, no_wrap=index == 0)
    for row in rows:
        made.add_row(*row)
    return made


class TrainingDisplay:
    """Shows a run's records as they come. Use it as the loop's `report`, inside `with`.

    name:    what to call the run, if other than its recipe; one of several is named even where there is little room.
    beside:  the display of another run that is under way at the same time.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        name: str | None = None,
        quiet: bool = False,
        as_json: bool = False,
        beside: TrainingDisplay | None = None,
    ) -> None:
        self.recipe, self.quiet, self.as_json, self._beside = recipe, quiet, as_json, beside
        self.name, self._is_one_of_several = name or recipe.name, name is not None
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._shown: dict[str, Any] = {"epoch": "0", "loss": "–", "nll": "–", "error": "–"}
        self._line_at = -math.inf

    def __enter__(self) -> TrainingDisplay:
        if self._beside is not None:
            self._live = self._beside._live
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
        if self._live and self._beside is None:
            self._live.stop()

    def __call__(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if self.as_json:
            if kind != "step":
                print_json(record)
            return
        if self.quiet:
            return
        if kind == "epoch":
            self._shown |= {"epoch": f"{record['epoch']}/{self.recipe.epochs}", "loss": f"{record['surrogate']:.2f}"}
            if record["reconstruction"]:
                self._shown["error"] = f"{max(record['reconstruction']):.1e}"
        elif kind == "validation":
            behind = record["nll"] > record["best"]
            self._shown["nll"] = f"{record['nll']:.2f}" + (f" (best {record['best']:.2f})" if behind else "")
        elif kind == "rollback":
            raised = max(record["weight"], default=0.0)
            ERR.print(f"rolled back to epoch {record['epoch']}, λ raised to {raised:g}: {record['reason']}", style="yellow")
        if self._live:
            if kind == "step":
                self._live.update(self._task, total=record["total"], completed=record["step"], **self._shown)
        elif kind == "validation" and time.monotonic() - self._line_at > 5:
            self._line_at = time.monotonic()
            epoch, loss, nll, error = self._shown.values()
            seconds = record["seconds"]
            ERR.print(f"{self.name}: epoch {epoch}, loss {loss}, exact NLL {nll}, reconstruction error {error}, {seconds:.0f} s")


@contextmanager
def transfers(quiet: bool) -> Iterator[Any]:
    """A callback that shows downloads and conversions, on_progress(what, done, total)."""
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
def showing(recipe: Recipe, folder: Path, quiet: bool, as_json: bool) -> Iterator[TrainingDisplay]:
    """A display for a run in a folder; errors that end the run say what is left of it and how to go on."""
    try:
        with TrainingDisplay(recipe, quiet=quiet, as_json=as_json) as display:
            yield display
    except StoppedError as error:
        error.args = (f"{error}, all saved; go on with: selfnorm train --resume {shlex.quote(str(folder))}",)
        raise
    except DivergedError as error:
        error.args = (f"{error}. The best and the last good checkpoint are in {folder}",)
        raise


@contextmanager
def showing_together(recipes: Sequence[Recipe], folders: Sequence[Path], quiet: bool, as_json: bool) -> Iterator[list[Report]]:
    """Displays for runs that train at the same time."""

    again = "selfnorm train " + " ".join(f"--resume {shlex.quote(str(folder))}" for folder in folders)

    def tagged(folder: Path) -> Report:
        return lambda record: None if record["kind"] == "step" else print_json({"run": str(folder), **record})

    with ExitStack() as stack:
        displays: list[TrainingDisplay] = []
        for recipe in recipes:
            name = f"seed {recipe.seed}"
            display = TrainingDisplay(recipe, name=name, quiet=quiet or as_json, beside=displays[0] if displays else None)
            displays.append(stack.enter_context(display))
        try:
            yield [tagged(folder) for folder in folders] if as_json else list(displays)
        except StoppedError as error:
            error.args = (f"{error}, all saved; go on with: {again}",)
            raise
        except OSError as error:
            error.args = (f"{error}; all runs ended with that, the others saved where possible. Go on with: {again}",)
            raise


def print_together(runs: Mapping[Path, tuple[Recipe, Result | DivergedError]], as_json: bool) -> None:
    """What runs that trained at once came to, each by its folder; and their mean, if they differ in nothing but the seed."""
    if not as_json:
        for path, (recipe, result) in runs.items():
            OUT.print(f"seed {recipe.seed}")
            if isinstance(result, Result):
                print_result(path, result, as_json)
            else:
                OUT.print(f"  {result}. The best and the last good checkpoint are in {path}")
        OUT.print(f"times are those of {len(runs)} runs that shared the machine")
    recipes = [recipe for recipe, _ in runs.values()]
    seeds = {recipe.seed for recipe in recipes}
    if len(seeds) == len(runs) and all(replace(recipe, seed=recipes[0].seed) == recipes[0] for recipe in recipes):
        _print_seeds({recipe.seed: result for recipe, result in runs.values()}, as_json)


def _print_seeds(runs: Mapping[int, Result | DivergedError], as_json: bool) -> None:
    results = {seed: result.test.nll for seed, result in runs.items() if isinstance(result, Result)}
    nlls = list(results.values())
    mean = statistics.mean(nlls) if nlls else None
    error = statistics.stdev(nlls) / math.sqrt(len(nlls)) if len(nlls) > 1 else None
    if as_json:
        lost = [seed for seed in runs if seed not in results]
        print_json({"kind": "seeds", "mean": mean, "standard_error": error, "nll": results, "diverged": lost})
        return
    if mean is None:
        return
    said = f"test NLL {mean:.2f}" + ("" if error is None else f" ± {error:.2f}") + " nats: exact, "
    said += f"mean{' and standard error' if error is not None else ''} over {len(nlls)} of {len(runs)} seeds"
    OUT.print(said + f" ({', '.join(f'{nll:.2f}' for nll in nlls)})")


def print_profile(pieces: Sequence[Piece], as_json: bool) -> None:
    """Where a step's time goes: by layer, then by kind of layer, then by what else there is."""
    if as_json:
        print_json({"kind": "profile", "pieces": [piece._asdict() for piece in pieces]})
        return
    total = sum(piece.forward + piece.backward for piece in pieces)

    def row(name: str, some: Sequence[Piece], of: str = "") -> tuple[str, ...]:
        there, back = sum(piece.forward for piece in some), sum(piece.backward for piece in some)
        way_back = f"{1e6 * back:.1f}" if back else "–"
        return name, of, f"{1e6 * there:.1f}", way_back, f"{100 * (there + back) / total:.1f} %"

    layers, rest = [piece for piece in pieces if piece.kind], [piece for piece in pieces if not piece.kind]
    kinds = sorted({piece.kind for piece in layers})
    rows = [row(f"layer {piece.place}", [piece], piece.kind) for piece in layers]
    gap = ("",) * 5
    rows += [
        gap,
        *(row(f"all {kind}", some, f"× {len(some)}") for kind in kinds if (some := [p for p in layers if p.kind == kind])),
    ]
    rows += [gap, *(row(piece.place, [piece]) for piece in rest), gap, row("a step", pieces)]
    OUT.print(table("Where a step's time goes", ("", "kind", "forward µs", "backward µs", "share"), rows))


def print_result(folder: Path, result: Result, as_json: bool) -> None:
    """The exact test likelihood, and where everything is."""
    if as_json:
        return  # it came as the last record
    OUT.print(Text.assemble((result.recipe, "bold"), f": test NLL {result.test}"))
    cost = f"{result.epochs} epoch{'s' * (result.epochs != 1)} in {result.seconds:.0f} s"
    cost += "" if result.step_seconds is None else f", {_short(1e3 * result.step_seconds)} ms a step"
    cost += "" if result.peak_memory is None else f", {result.peak_memory:.0f} MiB"
    OUT.print(f"  {cost}; best at epoch {result.best_epoch} by exact validation NLL")
    files = RunFolder(folder)
    for what, path in (("samples", files.samples), ("curves", files.curves), ("checkpoint", files.best)):
        OUT.print(f"  {what:<10} {path}")


def print_comparison(result: Result, twin: Result) -> None:
    """A run beside its exact-gradient twin."""
    rows = [
        (each.recipe, f"{each.test.nll:.2f} ± {each.test.standard_error:.2f}", f"{each.seconds:.0f}") for each in (result, twin)
    ]
    OUT.print(table("Exact test NLL", ("", "nats", "seconds"), rows))
    OUT.print(f"difference {result.test.nll - twin.test.nll:+.2f} nats")


@contextmanager
def following(run: PlannedRun, quiet: bool, as_json: bool) -> Iterator[Report]:
    """A display for one run of several, which trains in another process."""
    if as_json:
        yield lambda record: None if record["kind"] == "step" else print_json({"run": str(run.path), **record})
        return
    with TrainingDisplay(run.recipe, name=f"{run.place} {run.name}", quiet=quiet) as display:
        yield display


def print_compared(run: ComparedRun, as_json: bool) -> None:
    """A run of several, when it is done."""
    planned = run.planned
    if not as_json:
        ERR.print(f"{planned.place} {planned.name}: {run.failure or (run.result and f'test NLL {run.result.test}')}")
    elif run.failure:
        print_json({"run": str(planned.path), "kind": "failure", "diverged": run.diverged, "reason": run.failure})


def print_table(comparison: Comparison) -> None:
    """All runs in one table."""
    columns = ("", "test NLL", "ms/step", "seconds", "MiB", "parameters", "inverse error", "ms/sample")
    rows = [
        (
            f"{row.recipe} ({row.note})" if row.note else row.recipe,
            _with_error(row.nll, row.standard_error),
            _short(row.step_ms),
            _short(row.seconds),
            "–" if row.peak_memory is None else f"{row.peak_memory:.0f}",
            "–" if row.parameters is None else f"{row.parameters:,.0f}",
            "–" if row.inverse_error is None else f"{row.inverse_error:.1e}",
            _short(row.sample_ms),
        )
        for row in comparison.rows()
    ]
    # Wider than a narrow terminal, whose own line breaks lose less than cut cells.
    OUT.print(table(comparison.title, columns, rows), width=max(OUT.width, 110), crop=False)
    OUT.print(comparison.about)
    for failure in comparison.failures():
        OUT.print(failure)


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" + (f" ± {error:.2f}" if error is not None and math.isfinite(error) else "")


def _short(value: float | None) -> str:
    """Three digits, more only if they stand before the point."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def print_health(health: FlowHealth, as_json: bool) -> None:
    """What `examine` found."""
    if as_json:
        print_json(asdict(health))
        return
    columns = (
        "layer",
        "D",
        "‖RW−I‖/√D",
        "cond W",
        "data error",
        "noise error",
        "log-det angle",
        "gradient angle",
        "gradient size",
    )
    rows = [
        (
            f"{layer.name} {layer.layer.split('(')[0]}",
            f"{layer.dimensions}",
            f"{layer.distance:.2e}",
            "–" if layer.condition is None else f"{layer.condition:.1f}",
            f"{layer.data_reconstruction:.1e}",
            f"{layer.noise_reconstruction:.1e}",
            f"{layer.log_det_angle:.2f}°",
            f"{layer.angle:.2f}°",
            f"{layer.gradient_size:.1e}",
        )
        for layer in health.layers
    ]
    OUT.print(table("Kept inverses", columns, rows) if rows else "No layer keeps an inverse.")
    trips = ", ".join(f"{inverse} {error:.1e}" for inverse, error in health.round_trip.items())
    OUT.print(f"round trip of prior samples, ‖f(g(z)) − z‖/‖z‖: {trips}")
    for note in health.notes:
        OUT.print(f"note: {note}")

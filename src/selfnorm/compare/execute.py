"""Trains the runs of a comparison one after another, each in its own process, and measures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from selfnorm.compare.measure import is_finished, measure_run
from selfnorm.compare.plan import PlannedRun
from selfnorm.compare.table import ComparedRun, Comparison
from selfnorm.compare.worker import ForwardedStops, run_in_worker
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Report
from selfnorm.train.recipe import Recipe
from selfnorm.train.run import resume_run, start_run

Watch = Callable[[PlannedRun], AbstractContextManager[Report]]


def run_comparison(
    runs: Sequence[PlannedRun],
    *,
    command: str,
    device: torch.device | str = "cpu",
    watch: Watch,
    done: Callable[[ComparedRun], None] = lambda run: None,
) -> Comparison:
    """Trains the runs that are not finished, measures all of them, and returns the comparison.

    watch:  returns a context manager for each run that trains, which yields the function to call with its records.
    done:   is called with each run when it has been measured.

    A run that fails is part of the comparison and does not affect the others. Raises `StoppedError` after SIGINT or SIGTERM, once
    the current run has saved itself.
    """
    device = torch.device(device)
    compared = []
    with ForwardedStops() as stop:
        for run in runs:
            stop.check()
            compared.append(measure_run(run, device) if is_finished(run) else _train_and_measure(run, device, watch, stop))
            stop.check()
            done(compared[-1])
    return Comparison(tuple(compared), command, device)


def _train_and_measure(run: PlannedRun, device: torch.device, watch: Watch, stop: ForwardedStops) -> ComparedRun:
    with watch(run) as report:
        outcome = run_in_worker(partial(train_or_resume, run.recipe, run.path, str(device)), report, stop)
    stop.check()
    if outcome.kind == "finished":
        return measure_run(run, device)
    diverged = outcome.kind == "diverged"
    where = f". The best and the last good checkpoint are in {run.path}" if diverged else ""
    return ComparedRun(run, failure=outcome.reason + where, diverged=diverged)


def train_or_resume(recipe: Recipe, path: Path, device: str, report: Report) -> None:
    """Trains the recipe into the folder, or continues the run that the folder already holds."""
    if RunFolder(path).recipe.exists():
        resume_run(path, device=device, report=report)
    else:
        start_run(recipe, path, device=device, report=report)

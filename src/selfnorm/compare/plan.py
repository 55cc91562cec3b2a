"""Train several recipes on the same data, seeds and noise, and measure what they come to.

Each run has a process of its own, so that its time and its memory are its own, and one that fails costs the others nothing.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from selfnorm.compare.table import Compared, Comparison, Planned
from selfnorm.data.batches import generator_for
from selfnorm.data.dataset import Dataset
from selfnorm.evaluate.health import SAMPLES, round_trip
from selfnorm.evaluate.likelihood import evaluating
from selfnorm.flow import Flow
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.build import build_flow, build_loss
from selfnorm.train.experiments import RECIPES, find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Report
from selfnorm.train.recipe import Recipe
from selfnorm.train.run import Result, with_absolute_data_path
from selfnorm.train.settings import override
from selfnorm.train.stopping import PARENT, StopRequests
from selfnorm.train.trained import Trained

# What decides the batches, beside the seed.
SAME = ("data.source", "data.folder", "data.levels", "optimiser.batch_size", "data.flip", "data.jitter")
WARM_UP, CALLS = 5, 30  # of flow.sample(1)
DIVERGED = 3  # the exit status of `train` that says so
Watch = Callable[[Planned], AbstractContextManager[Report]]


def plan(
    names: Iterable[str], settings: Sequence[str], folder: Path, *, seeds: int = 1, data_dir: str | None = None
) -> tuple[Planned, ...]:
    """The runs of a comparison, seed by seed, each in a folder of its own; refused where they would not see the same batches.

    names: of recipes, or patterns such as "digits-fc-*".
    """
    settings = [*settings, *([f"data_dir={data_dir}"] if data_dir else [])]
    recipes = [with_absolute_data_path(override(recipe, settings)) for recipe in _chosen(names)]
    alike: dict[Recipe, str] = {}
    for recipe in recipes:
        other = alike.setdefault(recipe.changed(name="", paper=""), recipe.name)
        if other != recipe.name:
            raise ValueError(f"compare: expected recipes that differ, got {other} and {recipe.name}, which --set makes the same")
    for key in SAME:
        found: dict[Any, str] = {}
        for recipe in recipes:
            found.setdefault(recipe.by_path()[key], recipe.name)
        if len(found) > 1:
            values = ", ".join(f"{value} of {name}" for value, name in found.items())
            raise ValueError(f"compare: expected recipes that see the same batches, got {key} {values}; --set can make it one")
    runs: list[Planned] = []
    # Seed by seed, so that a comparison that is stopped early has whole ones.
    for seed in range(seeds):
        for recipe in recipes:
            recipe = recipe.changed(seed=recipe.optimiser.seed + seed)
            # The first seed's folder is the same for one seed as for several, so that more can be added.
            path = folder / (f"{recipe.name}-seed{recipe.optimiser.seed}" if seed else recipe.name)
            name = f"{recipe.name}, seed {recipe.optimiser.seed}" if seeds > 1 else recipe.name
            runs.append(Planned(recipe, path, tuple(settings), name, f"{len(runs) + 1}/{seeds * len(recipes)}"))
    return tuple(runs)


def check(runs: Sequence[Planned], dataset: Dataset) -> None:
    """Refuse, before hours of training, what cannot be built for the data, and folders that hold something else."""
    for run in runs:
        build_loss(run.recipe, build_flow(run.recipe, dataset.shape, dataset.levels))
        folder = RunFolder(run.path)
        if folder.recipe.exists():
            stored = folder.read_recipe()
            with folder.locked():  # or say that another process is at it
                pass
            if other := stored.differences(run.recipe):
                raise ValueError(
                    f"{run.path}: expected a run of {run.recipe.name} as asked for, got one with another {', '.join(other)}; "
                    "name another folder by --run"
                )
        elif run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
            raise ValueError(f"{run.path}: expected a run's folder or none, got something else; name another folder by --run")
    folder_of_all = runs[0].path.parent
    try:
        folder_of_all.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder_of_all):
            pass
    except OSError as error:
        raise ValueError(f"{folder_of_all}: expected a folder to write to, got {error.strerror}; name another by --run") from None


def compare(
    runs: Sequence[Planned],
    *,
    command: str,
    device: torch.device | str = "cpu",
    watch: Watch,
    done: Callable[[Compared], None] = lambda run: None,
) -> Comparison:
    """Train what is not finished, measure all, one after another.

    watch:  is entered for each run that trains, and gives what is called with its records.
    done:   is called with each run after it.
    Raises `StoppedError` after SIGINT or SIGTERM, when the run under way has saved itself.
    """
    device = torch.device(device)
    compared, stop = [], _PassOn()
    with stop:
        for run in runs:
            stop.check()
            compared.append(_measured(run, device) if _is_finished(run) else _train(run, device, watch, stop))
            stop.check()
            done(compared[-1])
    return Comparison(tuple(compared), command, device)


class _PassOn(StopRequests):
    """Passes the first signal on to the process that trains, which saves its run."""

    process: subprocess.Popen[str] | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        super()._note(number, frame)
        self.pass_on()

    def pass_on(self) -> None:
        # Elsewhere a Ctrl-C reaches all processes of the terminal by itself.
        if self.process and self._requested is not None and os.name == "posix":
            self.process.send_signal(self._requested)


def _train(run: Planned, device: torch.device, watch: Watch, stop: _PassOn) -> Compared:
    """Train or resume a run in a process of its own, then measure it here."""
    if RunFolder(run.path).recipe.exists():
        words = ["--resume", str(run.path)]
    else:
        settings = [word for setting in run.settings for word in ("--set", setting)]
        words = [run.recipe.name, *settings, "--seed", str(run.recipe.optimiser.seed), "--run", str(run.path)]
    command = [sys.executable, "-m", "selfnorm", "train", *words, "--device", str(device), "--json"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors, watch(run) as report:
        # A process group of its own: a terminal's Ctrl-C would else come twice, and the second ends a run without saving it.
        # Should this process be killed, the other saves its run and stops: nobody would know of it.
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            process_group=0 if os.name == "posix" else None,
            env={**os.environ, **({PARENT: str(os.getpid())} if os.name == "posix" else {})},
        ) as process:
            stop.process = process
            stop.pass_on()  # what came a moment before there was one
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    with suppress(json.JSONDecodeError):  # of a process that was killed in mid-line
                        report(_with_nan(json.loads(line)))
            except BaseException:
                process.terminate()
                raise
            finally:
                stop.process = None
        code = process.wait()
        errors.seek(0)
        said = errors.read()
    stop.check()
    if code == 0:
        return _measured(run, device)
    return Compared(run, failure=_reason(code, said), diverged=code == DIVERGED)


def _with_nan(value: Any) -> Any:
    """A record as it was before JSON, which has no word for NaN but null."""
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value


def _reason(code: int, said: str) -> str:
    """One line from a process that failed."""
    lines = said.strip().splitlines() or ["no message"]
    if code < 0:
        lines[-1] = f"killed by {signal.Signals(-code).name}"
    elif code in (128 + number for number in StopRequests.SIGNALS):
        lines[-1] = "stopped by a signal, all saved; the same comparison goes on with it"
    return lines[-1].removeprefix("selfnorm: ")


def _is_finished(run: Planned) -> bool:
    try:
        Result.read(RunFolder(run.path).result)
    except ValueError:
        return False
    return True


def _measured(run: Planned, device: torch.device) -> Compared:
    try:
        result, trained = Result.read(RunFolder(run.path).result), Trained.open(run.path, device)
    except ValueError as error:
        return Compared(run, failure=str(error))
    generator = generator_for(device, run.recipe.optimiser.seed, "compare")
    with cpu_threads(run.recipe.optimiser.threads), evaluating(trained.flow):
        z: Tensor = trained.flow.base.sample(SAMPLES, generator=generator)  # type: ignore[operator]
        compared = Compared(run, result, round_trip(trained.flow, z), _sample_seconds(trained.flow, device, generator))
    del trained
    if device.type != "cpu":
        torch.accelerator.empty_cache()  # the next run may need all there is
    return compared


def _sample_seconds(flow: Flow, device: torch.device, generator: torch.Generator) -> float | None:
    """The median time of drawing one sample."""
    times = []
    try:
        for _ in range(WARM_UP + CALLS):
            began = time.perf_counter()
            flow.sample(1, generator=generator)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - began)
    except ValueError:  # what the learned inverse made was not finite
        return None
    return statistics.median(times[WARM_UP:])


def _chosen(names: Iterable[str]) -> list[Recipe]:
    chosen: list[str] = []
    for name in names:
        if any(mark in name for mark in "*?["):
            matches = [known for known in RECIPES if fnmatchcase(known, name)]
            if not matches:
                raise ValueError(f"compare: expected a pattern that one of {', '.join(RECIPES)} matches, got {name!r}")
        else:
            matches = [find_recipe(name).name]
        for match in matches:
            if match in chosen:
                raise ValueError(f"compare: expected each recipe once, got {match} twice; --seeds trains it several times")
            chosen.append(match)
    return [RECIPES[name] for name in chosen]

"""Lists the runs of a comparison, and checks them before any of them trains."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from selfnorm.compare.files import expect_own_files
from selfnorm.data.dataset import Dataset
from selfnorm.runtime.locks import locking
from selfnorm.train.build import build_flow, build_loss
from selfnorm.train.experiments import RECIPES, find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.recipe import Recipe
from selfnorm.train.settings import override
from selfnorm.train.source import with_absolute_data_path
from selfnorm.train.starts import is_unused

# These and the seed determine the batches.
BATCH_SETTINGS = ("data.source", "data.folder", "data.levels", "optimiser.batch_size", "data.flip", "data.jitter")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison."""

    recipe: Recipe
    path: Path
    name: str  # the recipe's, with the seed if there are several
    place: str  # its number and the number of all runs, such as "1/4"


def plan_runs(
    names: Iterable[str], settings: Sequence[str], folder: Path, *, seeds: int = 1, data_dir: str | None = None
) -> tuple[PlannedRun, ...]:
    """Returns the runs of a comparison, seed by seed, each in its own folder.

    names:  of recipes, or patterns such as "digits-fc-*".

    Raises ValueError if the settings make two recipes equal, or if the recipes would not see the same batches.
    """
    settings = [*settings, *([f"data_dir={data_dir}"] if data_dir else [])]
    recipes = [with_absolute_data_path(override(recipe, settings)) for recipe in _chosen(names)]
    _expect_different(recipes)
    _expect_same_batches(recipes)
    runs: list[PlannedRun] = []
    # Seed by seed: a comparison that is stopped early has complete seeds.
    for seed in range(seeds):
        for recipe in recipes:
            recipe = recipe.changed(seed=recipe.optimiser.seed + seed)
            # The first seed's folder does not depend on the number of seeds, so that seeds can be added later.
            path = folder / (f"{recipe.name}-seed{recipe.optimiser.seed}" if seed else recipe.name)
            name = f"{recipe.name}, seed {recipe.optimiser.seed}" if seeds > 1 else recipe.name
            runs.append(PlannedRun(recipe, path, name, f"{len(runs) + 1}/{seeds * len(recipes)}"))
    return tuple(runs)


@contextmanager
def checked_runs(runs: Sequence[PlannedRun], dataset: Dataset) -> Iterator[None]:
    """Context manager that locks the folder of a comparison against other processes, and creates it if it is missing.

    Raises ValueError, before hours of training, if a flow cannot be built for the data, or if a folder cannot be used or
    has files that the comparison would replace.
    """
    for run in runs:
        build_loss(run.recipe, build_flow(run.recipe, dataset.shape, dataset.levels))
    parent = runs[0].path.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ValueError(f"{parent}: expected a folder to write to, got {error.strerror}; choose another with --run") from None
    with locking(parent, f"{parent}: expected an idle comparison, got one under way; wait for it, or choose another with --run"):
        expect_own_files(parent)
        for run in runs:
            _expect_usable(run)
        yield


def _expect_different(recipes: Sequence[Recipe]) -> None:
    found: dict[Recipe, str] = {}
    for recipe in recipes:
        other = found.setdefault(recipe.changed(name="", paper=""), recipe.name)
        if other != recipe.name:
            raise ValueError(f"compare: expected recipes that differ, got {other} and {recipe.name}, which --set makes equal")


def _expect_same_batches(recipes: Sequence[Recipe]) -> None:
    for key in BATCH_SETTINGS:
        found: dict[Any, str] = {}
        for recipe in recipes:
            found.setdefault(recipe.by_path()[key], recipe.name)
        if len(found) > 1:
            values = ", ".join(f"{value} of {name}" for value, name in found.items())
            raise ValueError(
                f"compare: expected recipes that see the same batches, got {key} {values}; give all the same with --set {key}=…"
            )


def _expect_usable(run: PlannedRun) -> None:
    """Raises ValueError unless the run's folder is new, empty or holds this run, and no other process is training it."""
    folder = RunFolder(run.path)
    if folder.recipe.exists():
        stored = folder.read_recipe()
        with folder.locked():  # raises if another process is training it
            pass
        if changed := stored.differences(run.recipe):
            raise ValueError(
                f"{run.path}: expected a run of {run.recipe.name} with the same settings, got a different {', '.join(changed)}; "
                "choose another folder with --run"
            )
    elif not is_unused(folder, run.recipe):
        raise ValueError(f"{run.path}: expected a run or an empty folder, got something else; choose another folder with --run")


def _chosen(names: Iterable[str]) -> list[Recipe]:
    """Returns the recipes of names and patterns, in order."""
    chosen: list[str] = []
    for name in names:
        if any(mark in name for mark in "*?["):
            matches = [known for known in RECIPES if fnmatchcase(known, name)]
            if not matches:
                raise ValueError(f"compare: expected a pattern that matches one of {', '.join(RECIPES)}, got {name!r}")
        else:
            matches = [find_recipe(name).name]
        for match in matches:
            if match in chosen:
                raise ValueError(f"compare: expected each recipe once, got {match} twice; use --seeds to train it several times")
            chosen.append(match)
    return [RECIPES[name] for name in chosen]

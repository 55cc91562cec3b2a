"""The verbs of `selfnorm` that train: train, compare, fit."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from selfnorm.cli.display import (
    ERR,
    OUT,
    following,
    print_compared,
    print_comparison,
    print_json,
    print_profile,
    print_result,
    print_table,
    print_together,
    showing,
    showing_together,
    transfers,
)
from selfnorm.cli.options import (
    DataDir,
    Debug,
    Device,
    DivergenceKind,
    Json,
    OnDivergence,
    Quiet,
    RunFolderOption,
    Settings,
    command,
    the_device,
    the_folder,
)
from selfnorm.compare.execute import run_comparison
from selfnorm.compare.plan import check_runs, plan_runs
from selfnorm.data import load_dataset
from selfnorm.data.dataset import Dataset
from selfnorm.train.folder import RunFolder
from selfnorm.train.recipe import Recipe, override
from selfnorm.train.recipes import DEFAULT, TWINS, find_recipe, idle_settings, recipe_for
from selfnorm.train.run import Result, dataset_of, free_path, resume_run, resume_runs, start_run, start_runs
from selfnorm.train.stopping import DivergedError, StoppedError


@command(
    "train",
    "selfnorm train",
    "selfnorm train digits-fc-snf --twin",
    "selfnorm train mnist-fc-snf --set epochs=500 --set weight=10 --data ~/data",
    "selfnorm train mnist-fc-snf --seeds 3",
    "selfnorm train mnist-conv-snf --profile",
    "selfnorm train --resume runs/mnist-fc-snf",
)
def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help=f"By name, see `selfnorm recipes`; default {DEFAULT}.")
    ] = None,
    settings: Settings = None,
    run: RunFolderOption = None,
    resume: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Go on with this run instead; given several times, with all at once.")
    ] = None,
    twin: Annotated[bool, typer.Option("--twin", help="Then train the exact-gradient twin too, and compare.")] = False,
    data: DataDir = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=…")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Train so many at once, from the recipe's seed on, each in its own run.")] = 1,
    profile: Annotated[
        bool, typer.Option("--profile", help="First tell where a step's time goes, by layer and by kind.")
    ] = False,
    device: Device = "auto",
    on_divergence: OnDivergence = None,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a recipe, watch it, and get its exact test likelihood, samples and curves. Stop it any time; `--resume` goes on."""
    if resume:
        if recipe or settings or run or twin or profile or seed is not None or seeds > 1:
            raise ValueError(
                "--resume: expected no recipe, --set, --run, --twin, --profile, --seed or --seeds beside it; a run goes on as it "
                "began"
            )
        _resume(resume, the_folder(data), on_divergence, device, quiet, json)
        return
    chosen = override(find_recipe(recipe or DEFAULT), settings or [])
    chosen = _adjusted(chosen, data_dir=the_folder(data), seed=seed, on_divergence=on_divergence and on_divergence.value)
    if twin and chosen.kind not in TWINS:
        what = "which is an exact twin itself" if chosen.kind == "exact" else "whose map is another than an exact layer's"
        raise ValueError(f"--twin: expected a recipe of kind {', '.join(TWINS)}, got {chosen.name} ({chosen.kind}), {what}")
    if idle := idle_settings(chosen):
        ERR.print(f"selfnorm: {', '.join(idle)} will do nothing: no layer of {chosen.name} learns its inverse")
    folder = run or free_path(Path("runs") / chosen.name)
    if seeds > 1 and run is None:
        folder = _free_with_seeds(folder)
    if seeds > 1:
        if twin or profile:
            raise ValueError(
                "--seeds: expected no --twin or --profile beside it; `selfnorm compare RECIPE TWIN --seeds N` trains both, and a "
                "run of one seed can be profiled"
            )
        _train_seeds(chosen, seeds, folder, device, quiet, json)
        return
    result = _train(chosen, folder, device, quiet, json, profile)
    if not twin:
        return
    named = folder if folder.name else folder.resolve()  # "." has no name
    exact = replace(chosen, name=f"{chosen.name}-twin", kind="exact", inverse_kernel_size=None)
    other = _train(exact, free_path(named.with_name(f"{named.name}-twin")), device, quiet, json)
    if not json:
        print_comparison(result, other)


@command(
    "compare",
    "selfnorm compare digits-fc-snf digits-fc-exact --set epochs=200",
    "selfnorm compare 'mnist-fc-*' --seeds 3 --data ~/data --run runs/mnist-fc",
)
def compare(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE", help="By name, or by a pattern such as 'digits-fc-*'.")],
    settings: Settings = None,
    seeds: Annotated[int, typer.Option(min=1, help="Train each with so many seeds, from its own on.")] = 1,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The folder of all runs, new or to go on with; else a new one.")
    ] = None,
    data: DataDir = None,
    device: Device = "auto",
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train several recipes on the same data, seeds and noise, each run in a process of its own, and compare them in one table:
    exact test likelihood, time, memory, parameters, and how good and how fast their inverses are.

    The folder also gets the table as comparison.json, every run as a line of comparison.csv, and the course of exact validation
    as comparison.png. Stop it any time; the same command with `--run` goes on, and keeps what is finished. With `--json` each
    record of training is a line that names its run's folder, and the last line, of kind comparison, has the table and all runs.
    """
    settings, folder, where = settings or [], run or free_path(Path("runs") / "compare"), the_device(device)
    planned = plan_runs(recipes, settings, folder, seeds=seeds, data_dir=the_folder(data))
    with transfers(quiet or json) as on_progress:
        check_runs(planned, dataset_of(planned[0].recipe, on_progress))
    words = ["selfnorm", "compare", *recipes, *(word for setting in settings for word in ("--set", setting))]
    words += ["--seeds", f"{seeds}"] if seeds > 1 else []
    words += ["--data", f"{data}"] if data else []
    words += ["--device", device] if device != "auto" else []
    try:
        compared = run_comparison(
            planned,
            command=shlex.join(words),
            device=where,
            watch=lambda each: following(each, quiet, json),
            done=lambda each: None if quiet else print_compared(each, json),
        )
    except StoppedError as error:
        error.args = (f"{error}, all saved; go on with: {shlex.join([*words, '--run', str(folder)])}",)
        raise
    # First, since what can go wrong with a file must not cost the figures.
    if json:
        runs = [each.row() for each in compared.runs]
        print_json({"kind": "comparison", "folder": str(folder), **compared.report(), "runs": runs})
    else:
        print_table(compared)
    for path in compared.write(folder):
        if not json:
            OUT.print(f"  {path}")
    if compared.failures():
        raise typer.Exit(3)


@command(
    "fit",
    "selfnorm fit measurements.csv",
    "selfnorm fit images/ --set epochs=50 --run runs/images",
    "selfnorm fit table.npy --set layers=8 --set patience=20",
)
def fit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=".csv, .npy, .npz, .parquet, or a folder of images.")],
    settings: Settings = None,
    run: RunFolderOption = None,
    device: Device = "auto",
    on_divergence: OnDivergence = None,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fit a density to your own data: picks a model by its shape, standardises, holds out 10 % each to stop early and to test."""
    if not file.exists():
        raise ValueError(f"{file}: expected a file or a folder of images, got nothing there")
    path = str(file.resolve())
    dataset = load_dataset(path)
    chosen = replace(recipe_for(path, dataset.shape, len(dataset.train)), name=f"fit-{file.resolve().stem}")
    _warn_of_spikes(dataset)
    del dataset  # the run loads it again, in the way that the settings ask for
    chosen = _adjusted(override(chosen, settings or []), on_divergence=on_divergence and on_divergence.value)
    _train(chosen, run or free_path(Path("runs") / chosen.name), device, quiet, json)


def _train(recipe: Recipe, folder: Path, device: str, quiet: bool, as_json: bool, profile: bool = False) -> Result:
    with showing(recipe, folder, quiet, as_json) as display, transfers(quiet or as_json) as on_progress:
        result = start_run(
            recipe,
            folder,
            device=the_device(device),
            report=display,
            on_progress=on_progress,
            on_profile=partial(print_profile, as_json=as_json) if profile else None,
        )
    print_result(folder, result, as_json)
    return result


def _train_seeds(recipe: Recipe, seeds: int, folder: Path, device: str, quiet: bool, as_json: bool) -> None:
    recipes = [replace(recipe, seed=recipe.seed + index) for index in range(seeds)]
    folders = _seed_folders(folder, [each.seed for each in recipes])
    with showing_together(recipes, folders, quiet, as_json) as reports, transfers(quiet or as_json) as on_progress:
        found = start_runs(recipes, folders, device=the_device(device), reports=reports, on_progress=on_progress)
    _tell_together(folders, recipes, found, as_json)


def _resume(
    folders: list[Path], data: str | None, on_divergence: DivergenceKind | None, device: str, quiet: bool, as_json: bool
) -> None:
    recipes = [RunFolder(folder).read_recipe() for folder in folders]
    options: Any = {"data_dir": data, "on_divergence": on_divergence and on_divergence.value, "device": the_device(device)}
    if len(folders) == 1:
        with showing(recipes[0], folders[0], quiet, as_json) as display, transfers(quiet or as_json) as on_progress:
            result = resume_run(folders[0], **options, report=display, on_progress=on_progress)
        print_result(folders[0], result, as_json)
        return
    with showing_together(recipes, folders, quiet, as_json) as reports, transfers(quiet or as_json) as on_progress:
        found = resume_runs(folders, **options, reports=reports, on_progress=on_progress)
    _tell_together(folders, recipes, found, as_json)


def _tell_together(folders: list[Path], recipes: list[Recipe], found: list[Result | DivergedError], as_json: bool) -> None:
    print_together(dict(zip(folders, zip(recipes, found, strict=True), strict=True)), as_json)
    diverged = [str(folder) for folder, each in zip(folders, found, strict=True) if not isinstance(each, Result)]
    if diverged:
        raise DivergedError(f"{', '.join(diverged)}: {len(diverged)} of {len(folders)} runs diverged")


def _seed_folders(folder: Path, seeds: list[int]) -> list[Path]:
    """The folder itself for the first seed; for the others, with their seed behind its name."""
    named = folder if folder.name else folder.resolve()  # "." has no name
    return [folder, *(named.with_name(f"{named.name}-seed{seed}") for seed in seeds[1:])]


def _free_with_seeds(folder: Path) -> Path:
    """The folder, or the first with a number behind its name, that is free and has no folders of seeds beside it."""
    while any(folder.parent.glob(f"{folder.name}-seed*")) or folder.exists():
        stem, _, number = folder.name.rpartition("-")
        folder = folder.with_name(f"{stem}-{int(number) + 1}" if number.isdigit() else f"{folder.name}-2")
    return folder


def _warn_of_spikes(dataset: Dataset) -> None:
    """A column with few different values has no density: a flow will make it a row of ever narrower spikes."""
    if dataset.train.dim() == 2 and len(dataset.train) >= 50:
        for index, column in enumerate(dataset.train.T):
            values = len(column.unique())
            if values < 0.05 * len(column):
                name = dataset.columns[index] if dataset.columns else index
                ERR.print(f"selfnorm: column {name} takes {values} different values only: it has no density, best leave it out")


def _adjusted(recipe: Recipe, **options: Any) -> Recipe:
    """The recipe with the options that were given."""
    return replace(recipe, **{name: value for name, value in options.items() if value is not None})

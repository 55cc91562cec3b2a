"""The verbs `train` and `fit`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from selfnorm.cli.application import command
from selfnorm.cli.console import ERR
from selfnorm.cli.display import print_profile, print_result, print_seed_runs, print_twins
from selfnorm.cli.options import (
    DataDir,
    Debug,
    Device,
    DivergenceChoice,
    Header,
    Json,
    OnDivergence,
    Quiet,
    RunFolderOption,
    Settings,
    absolute_folder,
    resolve_device,
)
from selfnorm.cli.progress import show_run, show_runs, show_transfers
from selfnorm.data.labels import MOST_NAMED
from selfnorm.data.layout import TableLayout, discrete_columns
from selfnorm.data.safe_files import STANDARD_INPUT
from selfnorm.train.experiments import DEFAULT, TWINS, find_recipe, recipe_for
from selfnorm.train.folder import RunFolder
from selfnorm.train.recipe import Recipe
from selfnorm.train.result import Result
from selfnorm.train.run import free_path, resume_run, resume_runs, start_run, start_runs
from selfnorm.train.settings import override
from selfnorm.train.source import dataset_of, expect_storable
from selfnorm.train.stopping import DivergedError


@command(
    "train",
    "selfnorm train",
    "selfnorm train digits-fc-snf --twin",
    "selfnorm train mnist-fc-snf --set epochs=500 --set reconstruction_weight=10 --data ~/data",
    "selfnorm train mnist-fc-snf --seeds 3",
    "selfnorm train mnist-conv-snf --profile",
    "selfnorm train --resume runs/mnist-fc-snf",
)
def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help=f"Name of a recipe, see `selfnorm recipes`; default {DEFAULT}.")
    ] = None,
    settings: Settings = None,
    run: RunFolderOption = None,
    resume: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Continue this run; repeat to continue several at once.")
    ] = None,
    twin: Annotated[bool, typer.Option("--twin", help="Also train the exact-gradient twin, and compare.")] = False,
    data: DataDir = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=…")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs to train at once, with consecutive seeds, each in its own folder.")
    ] = 1,
    profile: Annotated[bool, typer.Option("--profile", help="First show where a step's time goes, layer by layer.")] = False,
    device: Device = "auto",
    on_divergence: OnDivergence = None,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a recipe, and get its exact test likelihood, samples and learning curves.

    You can stop it at any time with Ctrl-C; `--resume` continues where it stopped.
    """
    if resume:
        if recipe or settings or run or twin or profile or seed is not None or seeds > 1:
            raise ValueError(
                "--resume: expected no recipe, --set, --run, --twin, --profile, --seed or --seeds with it; a run continues with "
                "the settings that it started with"
            )
        _resume_runs(resume, absolute_folder(data), on_divergence, device, quiet, json)
        return
    chosen = override(find_recipe(recipe or DEFAULT), settings or [])
    chosen = _with_options(chosen, data_dir=absolute_folder(data), seed=seed, on_divergence=on_divergence and on_divergence.value)
    kind = chosen.architecture.kind
    if twin and kind not in TWINS:
        why = "which is an exact twin itself" if kind == "exact" else "which has no exact twin"
        raise ValueError(f"--twin: expected a recipe of kind {', '.join(TWINS)}, got {chosen.name} ({kind}), {why}")
    if idle := chosen.without_effect():
        ERR.print(f"selfnorm: {', '.join(idle)} will have no effect: no layer of {chosen.name} learns its inverse")
    folder = run or free_path(Path("runs") / chosen.name)
    if seeds > 1 and run is None:
        folder = _free_with_seeds(folder)
    if seeds > 1:
        if twin or profile:
            raise ValueError(
                "--seeds: expected no --twin or --profile with it; use `selfnorm compare RECIPE TWIN --seeds N` to train both, "
                "and --profile with a single seed"
            )
        _train_seeds(chosen, seeds, folder, device, quiet, json)
        return
    result = _train_recipe(chosen, folder, device, quiet, json, profile)
    if not twin:
        return
    named = folder if folder.name else folder.resolve()  # "." has no name
    exact = chosen.changed(name=f"{chosen.name}-twin", kind="exact", inverse_kernel_size=None)
    other = _train_recipe(exact, free_path(named.with_name(f"{named.name}-twin")), device, quiet, json)
    if not json:
        print_twins(result, other)


@command(
    "fit",
    "selfnorm fit measurements.csv",
    "selfnorm fit images/ --set epochs=50 --run runs/images",
    "selfnorm fit table.npy --set layers=8 --set patience=20",
)
def fit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help=".csv or .tsv, also as .gz; .npy, .npz, .parquet, or a folder of images.")
    ],
    settings: Settings = None,
    header: Header = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Leave out a column: its name, or number where there are no names; repeatable."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Keep a column that would be left out, such as an index; repeatable."),
    ] = None,
    run: RunFolderOption = None,
    device: Device = "auto",
    on_divergence: OnDivergence = None,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fit a density to your own data.

    Chooses a model by the data's shape, standardises the data, and holds out 10 % for early stopping and 10 % for the test.
    """
    if str(file) == "-" or (file == STANDARD_INPUT and not file.is_file()):  # redirected, it is a file with a name
        raise ValueError(
            f"{file}: expected a file, which a resumed run can read again, got standard input; save the data in a file first"
        )
    if not file.exists():
        raise ValueError(f"{file}: expected a file or a folder of images, got a path that does not exist")
    whole = file.resolve()  # "." has no name
    expect_storable(str(whole))
    path, name = str(whole), f"fit-{whole.name.removesuffix('.gz').rpartition('.')[0] or whole.name}"
    options = {"header": header, "drop": tuple(drop or ()) or None, "keep": tuple(keep or ()) or None}
    dataset = dataset_of(_with_options(override(Recipe(name), settings or []), **options).changed(source=path))
    chosen = recipe_for(path, dataset.shape, len(dataset.train)).changed(name=name)
    chosen = _with_options(override(chosen, settings or []), **options, on_divergence=on_divergence and on_divergence.value)
    if layout := dataset.table:
        if not quiet and not layout.has_decisions:  # those are among the notes, which are shown when training starts
            ERR.print(f"selfnorm: {file}: {layout.describe()}")
        _warn_of_discrete_columns(dataset.train, layout)
    del dataset, layout  # the run loads it again
    _train_recipe(chosen, run or free_path(Path("runs") / chosen.name), device, quiet, json)


def _train_recipe(recipe: Recipe, folder: Path, device: str, quiet: bool, as_json: bool, profile: bool = False) -> Result:
    with show_run(recipe, folder, quiet, as_json) as display, show_transfers(quiet or as_json) as on_progress:
        result = start_run(
            recipe,
            folder,
            device=resolve_device(device),
            report=display,
            on_progress=on_progress,
            on_profile=partial(print_profile, as_json=as_json) if profile else None,
        )
    print_result(folder, result, as_json)
    return result


def _train_seeds(recipe: Recipe, seeds: int, folder: Path, device: str, quiet: bool, as_json: bool) -> None:
    recipes = [recipe.changed(seed=recipe.optimiser.seed + index) for index in range(seeds)]
    folders = _seed_folders(folder, [each.optimiser.seed for each in recipes])
    with show_runs(recipes, folders, quiet, as_json) as reports, show_transfers(quiet or as_json) as on_progress:
        outcomes = start_runs(recipes, folders, device=resolve_device(device), reports=reports, on_progress=on_progress)
    _print_outcomes(folders, recipes, outcomes, as_json)


def _resume_runs(
    folders: list[Path], data: str | None, on_divergence: DivergenceChoice | None, device: str, quiet: bool, as_json: bool
) -> None:
    recipes = [RunFolder(folder).read_recipe() for folder in folders]
    options: Any = {"data_dir": data, "on_divergence": on_divergence and on_divergence.value, "device": resolve_device(device)}
    if len(folders) == 1:
        with show_run(recipes[0], folders[0], quiet, as_json) as display, show_transfers(quiet or as_json) as on_progress:
            result = resume_run(folders[0], **options, report=display, on_progress=on_progress)
        print_result(folders[0], result, as_json)
        return
    with show_runs(recipes, folders, quiet, as_json) as reports, show_transfers(quiet or as_json) as on_progress:
        outcomes = resume_runs(folders, **options, reports=reports, on_progress=on_progress)
    _print_outcomes(folders, recipes, outcomes, as_json)


def _print_outcomes(folders: list[Path], recipes: list[Recipe], outcomes: list[Result | DivergedError], as_json: bool) -> None:
    """Prints the runs, then raises `DivergedError` if any of them diverged."""
    print_seed_runs(dict(zip(folders, zip(recipes, outcomes, strict=True), strict=True)), as_json)
    diverged = [str(folder) for folder, each in zip(folders, outcomes, strict=True) if not isinstance(each, Result)]
    if diverged:
        raise DivergedError(f"{', '.join(diverged)}: {len(diverged)} of {len(folders)} runs diverged")


def _seed_folders(folder: Path, seeds: list[int]) -> list[Path]:
    """Returns the folder itself for the first seed; for the others, the folder with their seed appended to its name."""
    named = folder if folder.name else folder.resolve()  # "." has no name
    return [folder, *(named.with_name(f"{named.name}-seed{seed}") for seed in seeds[1:])]


def _free_with_seeds(folder: Path) -> Path:
    """Returns the folder, with a number appended if it, or a seed folder next to it, exists already."""
    while any(folder.parent.glob(f"{folder.name}-seed*")) or folder.exists():
        stem, _, number = folder.name.rpartition("-")
        folder = folder.with_name(f"{stem}-{int(number) + 1}" if number.isdigit() else f"{folder.name}-2")
    return folder


def _warn_of_discrete_columns(train: Tensor, layout: TableLayout) -> None:
    """Warns of columns with few different values: they have no density, and a flow fits ever narrower spikes to them."""
    found = discrete_columns(train.numpy())
    for index, values in found.items() if len(found) <= MOST_NAMED else ():
        ERR.print(f"selfnorm: {layout.label(index)} takes {values} different values: it has no density, consider dropping it")
    if len(found) > MOST_NAMED:
        names = layout.labels([layout.used[index] for index in found])
        ERR.print(f"selfnorm: {names} take few different values: they have no density, consider dropping them")


def _with_options(recipe: Recipe, **options: Any) -> Recipe:
    """Returns the recipe with the options that are not None."""
    return recipe.changed(**{name: value for name, value in options.items() if value is not None})

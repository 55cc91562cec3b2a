"""The verb `compare`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from selfnorm.cli.application import command
from selfnorm.cli.console import OUT, print_json
from selfnorm.cli.display import print_compared_run, print_comparison
from selfnorm.cli.options import DataDir, Debug, Device, Json, Quiet, Settings, absolute_folder, resolve_device
from selfnorm.cli.progress import show_planned_run, show_transfers
from selfnorm.compare.execute import run_comparison
from selfnorm.compare.plan import checked_runs, plan_runs
from selfnorm.train.folder import RunFolder
from selfnorm.train.run import free_path
from selfnorm.train.source import dataset_of
from selfnorm.train.stopping import StoppedError


@command(
    "compare",
    "selfnorm compare digits-fc-snf digits-fc-exact --set epochs=200",
    "selfnorm compare 'mnist-fc-*' --seeds 3 --data ~/data --run runs/mnist-fc",
)
def compare(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE", help="Names, or patterns such as 'digits-fc-*'.")],
    settings: Settings = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of consecutive seeds to train each recipe with.")] = 1,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="Folder for all runs, new or to continue; default a new one.")
    ] = None,
    data: DataDir = None,
    device: Device = "auto",
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train several recipes on the same data, seeds and noise, and compare them in one table.

    The table has exact test likelihood, time, memory, parameters, and the error and speed of each flow's inverse. Every run
    trains in its own process; if one fails, the others continue.

    The folder gets the table (comparison.json), one line for each run (comparison.csv) and the exact validation curves
    (comparison.png). You can stop at any time; the same command with `--run` continues and keeps finished runs. With `--json`,
    each training record is a line with its run's folder, and the last line, of kind comparison, has the table and all runs.
    """
    settings, folder, where = settings or [], run or free_path(Path("runs") / "compare"), resolve_device(device)
    planned = plan_runs(recipes, settings, folder, seeds=seeds, data_dir=absolute_folder(data))
    with show_transfers(quiet or json) as on_progress:
        is_new = not all(RunFolder(each.path).recipe.exists() for each in planned)
        dataset = dataset_of(planned[0].recipe, on_progress, is_new=is_new)
    words = ["selfnorm", "compare", *recipes, *(word for setting in settings for word in ("--set", setting))]
    words += ["--seeds", f"{seeds}"] if seeds > 1 else []
    words += ["--data", f"{data}"] if data else []
    words += ["--device", device] if device != "auto" else []
    with checked_runs(planned, dataset):
        del dataset  # each run loads it again, in its own process
        try:
            compared = run_comparison(
                planned,
                command=shlex.join(words),
                device=where,
                watch=lambda each: show_planned_run(each, quiet, json),
                done=lambda each: None if quiet else print_compared_run(each, json),
            )
        except StoppedError as error:
            error.args = (f"{error}, all saved; continue with: {shlex.join([*words, '--run', str(folder)])}",)
            raise
        # Print first: a file that cannot be written must not lose the results.
        if json:
            runs = [each.row() for each in compared.runs]
            print_json({"kind": "comparison", "folder": str(folder), **compared.report(), "runs": runs})
        else:
            print_comparison(compared)
        for path in compared.write(folder):
            if not json:
                OUT.print(f"  {path}")
    if compared.failures():
        raise typer.Exit(3)

"""The verbs that use a run: eval, sample, score, recipes, doctor."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer

import selfnorm
import selfnorm.cli.train  # registers its verbs
from selfnorm.cli.bench import bench
from selfnorm.cli.display import (
    ERR,
    OUT,
    print_health,
    print_json,
    table,
)
from selfnorm.cli.options import (
    DataDir,
    Debug,
    Device,
    InverseKind,
    Json,
    Output,
    Part,
    Rounding,
    RunPath,
    Seed,
    app,
    command,
    the_device,
    the_folder,
)
from selfnorm.data.dataset import is_image
from selfnorm.evaluate.health import examine, repair
from selfnorm.runtime.files import replacing
from selfnorm.train.checkpoint import save_checkpoint
from selfnorm.train.experiments import RECIPES, find_recipe
from selfnorm.train.recipe import Recipe
from selfnorm.train.run import free_path
from selfnorm.train.settings import to_toml
from selfnorm.train.trained import Trained, write_samples

app.add_typer(bench, name="bench")


@command(
    "eval",
    "selfnorm eval runs/digits-fc-snf",
    "selfnorm eval runs/mnist-fc-snf --samples 20 --data ~/data --json",
    "selfnorm eval runs/mnist-glow-snf --precision bf16",
)
def evaluate(
    run: RunPath,
    part: Annotated[Part, typer.Option(help="Which part of the run's data.")] = Part.test,
    samples: Annotated[int | None, typer.Option(min=1, help="Dequantisation samples; by default the recipe's.")] = None,
    precision: Annotated[
        Rounding, typer.Option(help="Of the products, on a GPU: to see what training in another one costs.")
    ] = Rounding.float32,
    data: DataDir = None,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """The exact likelihood of a run's best weights on its data."""
    trained = Trained.open(run, the_device(device))
    found = trained.evaluate(part.value, samples, the_folder(data), precision.value)
    if json:
        print_json({"run": str(run), "part": part.value, "precision": precision.value, **asdict(found)})
    else:
        rounded = "" if precision is Rounding.float32 else f", products in {precision.value}"
        OUT.print(f"{trained.checkpoint.recipe.name}, {part.value}{rounded}: {found}")


@command(
    "sample",
    "selfnorm sample runs/digits-fc-snf -n 64 -o samples.png",
    "selfnorm sample runs/fit-measurements -n 1000 --inverse exact -o samples.csv",
)
def sample(
    run: RunPath,
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 64,
    inverse: Annotated[
        InverseKind, typer.Option(help="learned is fastest; exact and refined follow the model's density.")
    ] = InverseKind.learned,
    output: Output = None,
    seed: Seed = 0,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Draw samples into a file: .png for images, .csv or .npy for any."""
    trained = Trained.open(run, the_device(device))
    checkpoint = trained.checkpoint
    image = is_image(checkpoint.shape, checkpoint.levels)
    output = output or free_path(Path("samples.png" if image else "samples.csv"))
    write_samples(output, trained.sample(n, inverse.value, seed), checkpoint.levels, checkpoint.columns)
    OUT.print(f"{n} samples by the {inverse.value} inverse in {output}")


@command("score", "selfnorm score runs/fit-measurements new.csv", "selfnorm score runs/fit-measurements new.csv -o scores.csv")
def score(
    run: RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Data like that of the run.")],
    output: Output = None,
    samples: Annotated[int, typer.Option(min=1, help="Dequantisation samples, for images.")] = 1,
    seed: Seed = 0,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """The exact log-likelihood of each row, to find outliers: rank 1 is the least likely row of the file, and percentile says how
    many per cent of the training data are less likely still."""
    if not file.exists():
        raise ValueError(f"{file}: expected a file or a folder of images, got nothing there")
    if json and output:
        raise ValueError("--json: expected no -o beside it; JSON goes to stdout, and -o is for CSV")
    rows = Trained.open(run, the_device(device)).score(file, samples, seed).rows()
    if json:
        for row in rows:
            print_json(row)
    elif output is None:
        _write_csv(sys.stdout, rows)
    else:
        with replacing(output) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            _write_csv(stream, rows)
        OUT.print(f"{len(rows)} rows in {output}")


@command("recipes", "selfnorm recipes", "selfnorm recipes mnist-glow-snf")
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Show all settings of one.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the recipes, or show one with all its settings."""
    if name is not None:
        chosen = find_recipe(name)
        if json:
            print_json(chosen.flat())
        else:
            OUT.print(to_toml(chosen), end="")
        return
    if json:
        for each in RECIPES.values():
            print_json(each.flat())
        return
    rows = [(each.name, each.data.source, _model(each), f"{each.optimiser.epochs}", each.paper) for each in RECIPES.values()]
    OUT.print(table("Recipes", ("name", "data", "model", "epochs", "the paper has"), rows))


@command("doctor", "selfnorm doctor runs/digits-fc-snf", "selfnorm doctor runs/digits-fc-snf --repair")
def doctor(
    run: RunPath,
    repair_: Annotated[bool, typer.Option("--repair", help="Write a new checkpoint with every learned inverse mended.")] = False,
    output: Output = None,
    examples: Annotated[int, typer.Option(min=2, help="How many training examples to look at.")] = 200,
    data: DataDir = None,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """How good the learned inverses are, layer by layer, and what that does to gradients and samples.

    `--repair` writes a new checkpoint, repaired.safetensors beside the old one unless `-o` names another: exact inverses for
    linear layers and 1×1 kernels, least squares for larger ones, where that improves on what was learned.
    """
    trained = Trained.open(run, the_device(device))
    x = trained.examples("train", the_folder(data)).spread(examples, seed=0)
    print_health(examine(trained.flow, x), json)
    if not repair_:
        return
    mended = repair(trained.flow, x)
    if not mended:
        ERR.print("nothing to mend, nothing written")
        return
    output = output or trained.path.with_name("repaired.safetensors")
    tensors = {f"loss.flow.{name}": value for name, value in trained.flow.state_dict().items()}
    save_checkpoint(output, replace(trained.checkpoint, tensors=tensors))
    if not json:
        OUT.print(f"\nmended {', '.join(mended)}; written to {output}")
    print_health(examine(trained.flow, x), json)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if show:
        OUT.print(f"selfnorm {selfnorm.__version__}, torch {torch.__version__}")
        raise typer.Exit


def _write_csv(stream: TextIO, rows: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(stream, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _model(recipe: Recipe) -> str:
    chosen = recipe.architecture
    depth = {"fc": f"{chosen.layers} layers", "conv": f"{chosen.blocks}×{chosen.layers_per_block} layers"}
    size = depth.get(chosen.model, f"{chosen.blocks}L-{chosen.steps_per_block}K")
    return f"{chosen.model} {size}, {chosen.kind}"

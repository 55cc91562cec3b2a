"""The verbs that use a run or the recipes: eval, sample, score, recipes, doctor."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from selfnorm.cli.application import command
from selfnorm.cli.console import ERR, OUT, build_table, print_json
from selfnorm.cli.display import print_health
from selfnorm.cli.options import (
    DataDir,
    Debug,
    Device,
    InverseChoice,
    Json,
    Output,
    PartChoice,
    PrecisionChoice,
    RunPath,
    Seed,
    absolute_folder,
    resolve_device,
)
from selfnorm.data.dataset import is_image
from selfnorm.evaluate.health import repair
from selfnorm.runtime.files import replacing
from selfnorm.train.checkpoint import save_checkpoint
from selfnorm.train.experiments import RECIPES, find_recipe
from selfnorm.train.recipe import Recipe
from selfnorm.train.run import free_path
from selfnorm.train.settings import to_toml
from selfnorm.train.trained import Trained, write_samples


@command(
    "eval",
    "selfnorm eval runs/digits-fc-snf",
    "selfnorm eval runs/mnist-fc-snf --samples 20 --data ~/data --json",
    "selfnorm eval runs/mnist-glow-snf --precision bf16",
)
def evaluate(
    run: RunPath,
    part: Annotated[PartChoice, typer.Option(help="Part of the run's data to use.")] = PartChoice.test,
    samples: Annotated[int | None, typer.Option(min=1, help="Dequantisation samples; default the recipe's.")] = None,
    precision: Annotated[
        PrecisionChoice, typer.Option(help="Precision of matrix products on a GPU, to see what a lower one costs.")
    ] = PrecisionChoice.float32,
    data: DataDir = None,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute the exact likelihood of a run's best weights on its data."""
    trained = Trained.open(run, resolve_device(device))
    found = trained.evaluate(part.value, samples, absolute_folder(data), precision.value)
    if json:
        print_json({"run": str(run), "part": part.value, "precision": precision.value, **asdict(found)})
    else:
        precision_note = "" if precision is PrecisionChoice.float32 else f", products in {precision.value}"
        OUT.print(f"{trained.checkpoint.recipe.name}, {part.value}{precision_note}: {found}")


@command(
    "sample",
    "selfnorm sample runs/digits-fc-snf -n 64 -o samples.png",
    "selfnorm sample runs/fit-measurements -n 1000 --inverse exact -o samples.csv",
)
def sample(
    run: RunPath,
    n: Annotated[int, typer.Option("-n", min=1, help="Number of samples.")] = 64,
    inverse: Annotated[
        InverseChoice,
        typer.Option(
            help="auto, exact and refined follow the density; learned is fastest, but only as accurate as the learned inverse."
        ),
    ] = InverseChoice.auto,
    output: Output = None,
    seed: Seed = 0,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Draw samples into a file: .png for images, .csv or .npy for any data."""
    trained = Trained.open(run, resolve_device(device))
    checkpoint = trained.checkpoint
    image = is_image(checkpoint.shape, checkpoint.levels)
    output = output or free_path(Path("samples.png" if image else "samples.csv"))
    write_samples(output, trained.sample(n, inverse.value, seed), checkpoint.levels, checkpoint.columns)
    OUT.print(f"wrote {n} samples to {output}\nused the {trained.flow.inverse_used}")


@command("score", "selfnorm score runs/fit-measurements new.csv", "selfnorm score runs/fit-measurements new.csv -o scores.csv")
def score(
    run: RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Data with the same columns or image size as the run's.")],
    output: Output = None,
    samples: Annotated[int, typer.Option(min=1, help="Dequantisation samples, for images.")] = 1,
    seed: Seed = 0,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute the exact log-likelihood of each row, to find outliers.

    Rank 1 is the least likely row of the file. Percentile is the percentage of training data that is less likely than the row.
    """
    if not file.exists():
        raise ValueError(f"{file}: expected a file or a folder of images, got a path that does not exist")
    if json and output:
        raise ValueError("--json: expected no -o with it, got both; JSON goes to stdout, -o writes CSV")
    rows = Trained.open(run, resolve_device(device)).score(file, samples, seed).rows()
    if json:
        for row in rows:
            print_json(row)
    elif output is None:
        _write_csv(sys.stdout, rows)
    else:
        with replacing(output) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            _write_csv(stream, rows)
        OUT.print(f"wrote {len(rows)} rows to {output}")


@command("recipes", "selfnorm recipes", "selfnorm recipes mnist-glow-snf")
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Show all settings of this one.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the recipes, or show all settings of one."""
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
    rows = [
        (each.name, each.data.source, _describe_model(each), f"{each.optimiser.epochs}", each.paper) for each in RECIPES.values()
    ]
    OUT.print(build_table("Recipes", ("name", "data", "model", "epochs", "in the paper"), rows))


@command("doctor", "selfnorm doctor runs/digits-fc-snf", "selfnorm doctor runs/digits-fc-snf --repair")
def doctor(
    run: RunPath,
    repair_inverses: Annotated[bool, typer.Option("--repair", help="Also write a checkpoint with repaired inverses.")] = False,
    output: Output = None,
    examples: Annotated[int, typer.Option(min=2, help="Number of training examples to use.")] = 200,
    data: DataDir = None,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check how good the learned inverses are, layer by layer, and how that affects gradients and samples.

    `--repair` also writes a new checkpoint, repaired.safetensors next to the old one or the file given by `-o`. It computes exact
    inverses for linear layers and 1×1 kernels, and least-squares ones for larger kernels where that improves on the learned one.
    """
    trained = Trained.open(run, resolve_device(device))
    train = trained.examples("train", absolute_folder(data))
    x = train.random_examples(examples, seed=0)
    print_health(trained.health(x, train), json)
    if not repair_inverses:
        return
    repaired = repair(trained.flow, x)
    if not repaired:
        ERR.print("nothing to repair; no file was written")
        return
    output = output or trained.path.with_name("repaired.safetensors")
    tensors = {f"loss.flow.{name}": value for name, value in trained.flow.state_dict().items()}
    tensors |= {f"loss.penalty.{name}": value for name, value in trained.checkpoint.part("loss.penalty.").items()}
    save_checkpoint(output, replace(trained.checkpoint, tensors=tensors))
    if not json:
        OUT.print(f"\nrepaired {', '.join(repaired)}; written to {output}")
    print_health(trained.health(x, train), json)


def _write_csv(stream: TextIO, rows: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(stream, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _describe_model(recipe: Recipe) -> str:
    chosen = recipe.architecture
    depth = {"fc": f"{chosen.layers} layers", "conv": f"{chosen.blocks}×{chosen.layers_per_block} layers"}
    size = depth.get(chosen.model, f"{chosen.blocks}L-{chosen.steps_per_block}K")
    return f"{chosen.model} {size}, {chosen.kind}"

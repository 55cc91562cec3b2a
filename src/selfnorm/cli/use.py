"""The verbs that look at a run or at the recipes: eval, recipes, doctor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from selfnorm.cli.application import command
from selfnorm.cli.console import ERR, OUT, build_table, print_json
from selfnorm.cli.display import print_health
from selfnorm.cli.options import (
    DataDir,
    Debug,
    Device,
    Force,
    Json,
    Output,
    PartChoice,
    PrecisionChoice,
    RunPath,
    absolute_folder,
    resolve_device,
)
from selfnorm.cli.outputs import check_output, expect_not_data, files_of
from selfnorm.evaluate.health import repair
from selfnorm.train.checkpoint import checkpoint_path, save_checkpoint
from selfnorm.train.experiments import RECIPES, find_recipe
from selfnorm.train.recipe import Recipe
from selfnorm.train.settings import to_toml
from selfnorm.train.trained import Trained


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
    force: Force = False,
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
    if output and not repair_inverses:
        raise ValueError(f"-o: expected --repair with it, got only {output}; without --repair no file is written")
    if repair_inverses:
        output = output or checkpoint_path(run).with_name("repaired.safetensors")
        check_output(output, (".safetensors",), force, files_of(run))
    trained = Trained.open(run, resolve_device(device))
    if output:
        expect_not_data(output, trained, absolute_folder(data))
    train = trained.examples("train", absolute_folder(data))
    x = train.random_examples(examples, seed=0)
    print_health(trained.health(x, train), json)
    if output is None:
        return
    repaired = repair(trained.flow, x)
    if not repaired:
        ERR.print("nothing to repair; no file was written")
        return
    save_checkpoint(output, trained.checkpoint.with_weights(trained.flow), is_new=not force)
    if not json:
        OUT.print(f"\nrepaired {', '.join(repaired)}; written to {output}")
    print_health(trained.health(x, train), json)


def _describe_model(recipe: Recipe) -> str:
    chosen = recipe.architecture
    depth = {"fc": f"{chosen.layers} layers", "conv": f"{chosen.blocks}×{chosen.layers_per_block} layers"}
    size = depth.get(chosen.model, f"{chosen.blocks}L-{chosen.steps_per_block}K")
    return f"{chosen.model} {size}, {chosen.kind}"

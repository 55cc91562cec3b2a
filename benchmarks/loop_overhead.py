"""Measures the overhead of the training loop: its time per step against a bare step written by hand.

    python benchmarks/loop_overhead.py [--rounds 40] [--json results/loop_overhead-cpu.json]

bare:  batch, loss, backward, fused Adam; the same functions on the same batches.
step:  `EagerStep`, which adds the norm of the gradient, a check that all is finite, and the learning rate.
loop:  `Trainer` with a folder, which adds sums, metrics and reports. Validation and checkpoints are left out; the time of a
       checkpoint has its own column.

The three take turns within each round, in changing order, each from fresh weights. An overhead is the median of the ratios per
round. Rounds are short and use one thread, since other load on the machine disturbs two threads far more. About three minutes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from record import Cell, at_least, parser, record
from selfnorm.data import load_dataset
from selfnorm.data.dataset import Dataset
from selfnorm.report.provenance import provenance
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.adam import make_adam
from selfnorm.train.experiments import find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Trainer
from selfnorm.train.recipe import Recipe
from selfnorm.train.step import EagerStep

TARGET = 10.0  # per cent


def fresh(recipe: Recipe, dataset: Dataset, folder: RunFolder | None = None) -> Trainer:
    trainer = Trainer(recipe, dataset, folder=folder)
    trainer.start()
    return trainer


def time_calls(trainer: Trainer, call: Callable[[int, int], object]) -> float:
    """Returns the seconds per step, without the first."""
    started = 0.0
    with cpu_threads(trainer.recipe.optimiser.threads):
        for step in range(trainer.total):
            call(*divmod(step, trainer.batches.steps_per_epoch))
            started = started or time.perf_counter()
        return (time.perf_counter() - started) / (trainer.total - 1)


def time_bare(recipe: Recipe, dataset: Dataset) -> float:
    trainer = fresh(recipe, dataset)
    loss, batches, optimizer = trainer.loss, trainer.batches, make_adam(trainer.loss)
    optimizer.param_groups[0]["lr"] = recipe.optimiser.learning_rate / 10

    def call(epoch: int, index: int) -> None:
        x = batches.batch(epoch, index)
        optimizer.zero_grad(set_to_none=True)
        value, _ = loss(x)
        value.backward()
        optimizer.step()

    return time_calls(trainer, call)


def time_step(recipe: Recipe, dataset: Dataset) -> float:
    trainer = fresh(recipe, dataset)
    step = EagerStep(trainer.loss, trainer.optimizer, trainer.batches, recipe.optimiser.clip)
    return time_calls(trainer, lambda epoch, index: step(epoch, index, recipe.optimiser.learning_rate / 10))


def time_loop(recipe: Recipe, dataset: Dataset, saves: list[float]) -> float:
    """Returns the seconds per step, from the report of the first step to that of the last epoch, before the final validation."""
    moments: list[float] = []
    first: dict[str, int] = {}

    def report(event: dict[str, Any]) -> None:
        if (event["kind"] == "step" and not moments) or event["kind"] == "epoch":
            moments.append(time.perf_counter())
            first.setdefault("step", event["step"])

    with tempfile.TemporaryDirectory() as path:
        trainer = Trainer(recipe, dataset, folder=RunFolder(Path(path)), report=report, save_every=1e9)
        trainer.start()
        trainer.run()
        started = time.perf_counter()
        trainer.save()
        saves.append(time.perf_counter() - started)
    return (moments[-1] - moments[0]) / (trainer.total - first["step"])


def compare(name: str, recipe: Recipe, dataset: Dataset, rounds: int) -> list[Cell]:
    saves: list[float] = []
    candidates: dict[str, Callable[[], float]] = {
        "bare": lambda: time_bare(recipe, dataset),
        "step": lambda: time_step(recipe, dataset),
        "loop": lambda: time_loop(recipe, dataset, saves),
    }
    times: dict[str, list[float]] = {key: [] for key in candidates}
    for round_ in range(rounds + 1):
        order = list(candidates)[round_ % 3 :] + list(candidates)[: round_ % 3]
        found = {key: 1e3 * candidates[key]() for key in order}
        print(f"{name}, round {round_}: " + ", ".join(f"{key} {found[key]:.3f} ms" for key in candidates), flush=True)
        if round_:  # the first is a warm-up
            for key, value in found.items():
                times[key].append(value)
    percent = {
        key: 100 * (statistics.median(t / bare for t, bare in zip(times[key], times["bare"], strict=True)) - 1)
        for key in ("step", "loop")
    }
    medians = [round(statistics.median(values), 3) for values in times.values()]
    return [name, *medians, round(percent["step"], 1), round(percent["loop"], 1), round(1e3 * statistics.median(saves), 1)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=at_least(1), default=40)
    chosen = options.parse_args()
    digits = find_recipe("digits-fc-snf").changed(epochs=20)
    mnist = find_recipe("mnist-fc-snf").changed(epochs=1, threads=1)
    made_up = torch.randint(256, (2000, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = Dataset("made up", made_up, made_up[:100], made_up[:100], levels=256)
    rows = [
        compare("digits-fc-snf", digits, load_dataset("digits"), chosen.rounds),
        compare("mnist-fc-snf", mnist, images, chosen.rounds),
    ]
    with cpu_threads(1):
        source = provenance(command=f"python benchmarks/loop_overhead.py --rounds {chosen.rounds}")
    record(
        chosen.json,
        title="Overhead of the training loop",
        about=(
            "Milliseconds per step of a bare hand-written step, of the library's step (with the norm of the gradient and a check "
            "that all is finite), and of the whole loop with its metrics, without validation and checkpoints; overhead in per "
            f"cent of the bare step, as medians of the ratios per round. The target for the loop is at most {TARGET:g}. The last "
            "column is one checkpoint, last and best, in milliseconds; one is written every 30 s. The MNIST data is random."
        ),
        columns=["recipe", "bare ms", "step ms", "loop ms", "step %", "loop %", "checkpoint ms"],
        rows=rows,
        provenance=source,
    )


if __name__ == "__main__":
    main()

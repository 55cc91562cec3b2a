"""Writes the validation histories of finished runs of one recipe, with different seeds, as a results file.

    selfnorm train mnist-fc-snf --seeds 3 --run runs/fc
    python benchmarks/full_run.py runs/fc runs/fc-seed1 runs/fc-seed2 --json results/mnist-fc-snf-h200.json

The table shows some of the epochs. The file also holds all validations of all seeds, under "metrics", and the figures of
`selfnorm doctor` for the best weights of each seed. The sample sheet of the first run is copied next to it. Command, commit,
machine and date are those of the first run.
"""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path
from typing import Any

from record import Cell, parser, record, run
from selfnorm.cli.options import resolve_device
from selfnorm.train.experiments import RECIPES
from selfnorm.train.folder import RunFolder
from selfnorm.train.result import Result
from selfnorm.train.trained import Trained

SHOWN = 12
TIMES = ("step_ms", "seconds")
SETTLED = 100  # the epoch after which the error of a learned inverse is reported


def history(records: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Returns each validation together with the training metrics of its epoch."""
    epochs = {each["epoch"]: each for each in records if each["kind"] == "epoch"}
    return [
        {
            "seed": seed,
            "epoch": each["epoch"],
            "nll": round(each["nll"], 3),
            "standard_error": round(each["standard_error"], 3),
            "surrogate": round(epochs[each["epoch"]]["surrogate"], 3),
            **{
                key: [_rounded(value) for value in values]
                for key in ("reconstruction", "inverse_error", "stability_ratio")
                if (values := epochs[each["epoch"]].get(key) or each.get(key))
            },
            "step_ms": _milliseconds(epochs[each["epoch"]]["step_seconds"]),
            "seconds": round(each["seconds"], 1),
        }
        for each in records
        if each["kind"] == "validation"
    ]


def worst(metrics: list[dict[str, Any]]) -> float | None:
    """Returns the largest error of a learned inverse among validations; None if there are none. A number that is not finite is
    null in a log."""
    return max(
        (math.inf if error is None else error for each in metrics for error in each.get("inverse_error", [])), default=None
    )


def mean_and_deviation(values: list[float]) -> str:
    """Returns the mean, and the standard deviation of several values."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def inverses(health: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> str:
    """Returns a sentence on the learned inverses, or nothing if there are none."""
    if worst(metrics) is None:
        return ""
    best = max(distance for each in health for distance in each["distance"])
    last = max(each["epoch"] for each in metrics)
    end = worst([each for each in metrics if each["epoch"] == last])
    trips = ", ".join(f"{each['round_trip']:.2g}" for each in health)
    settled = worst([each for each in metrics if each["epoch"] > SETTLED])
    during = f" and at most {settled:.2g} after epoch {SETTLED}" if settled is not None else ""
    return (
        f" Largest ‖RW − I‖/√D of a layer: {best:.2g} with the best weights; as validations measured it, {end:.2g} at the "
        f"end{during}. Round trip of prior samples by the learned inverse, median of ‖f(g(z)) − z‖/‖z‖: {trips}."
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("runs", type=Path, nargs="+")
    options.add_argument("--data", help="folder of the data set, if it is not where the runs found it")
    options.add_argument("--device", default="auto")
    options.add_argument("--without-times", action="store_true", help="leave out times, if other work shared the machine")
    chosen = options.parse_args()
    folders = [RunFolder(path) for path in chosen.runs]
    results = [Result.read(folder.result) for folder in folders]
    recipes = [folder.read_recipe() for folder in folders]
    seeds = [recipe.optimiser.seed for recipe in recipes]
    if any(recipe.changed(seed=seeds[0], folder=None) != recipes[0].changed(folder=None) for recipe in recipes):
        raise ValueError(f"expected runs of one recipe, got {', '.join(str(path) for path in chosen.runs)} of different ones")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"expected different seeds, got {', '.join(map(str, seeds))}")

    by_seed = [history(folder.read_log(), seed) for folder, seed in zip(folders, seeds, strict=True)]
    if chosen.without_times:
        by_seed = [[{key: each[key] for key in each if key not in TIMES} for each in runs] for runs in by_seed]
    metrics = [each for runs in by_seed for each in runs]
    device = resolve_device(chosen.device)
    health = []
    for folder, seed in zip(folders, seeds, strict=True):
        trained = Trained.open(folder.path, device)
        train = trained.examples("train", chosen.data)
        found = trained.health(train.random_examples(200, seed=0), train)
        figures = {
            "distance": [layer.distance for layer in found.layers],
            "condition": [layer.condition for layer in found.layers],
        }
        health.append({"seed": seed, **figures, "round_trip": found.round_trip["learned"], "sample_error": found.sample_error})

    common = min(map(len, by_seed))
    shown = sorted({round((common - 1) * (part / SHOWN) ** 2) for part in range(SHOWN + 1)})
    rows: list[list[Cell]] = []
    for at in shown:
        some = [runs[at] for runs in by_seed]
        rows.append([some[0]["epoch"], round(statistics.mean(each["nll"] for each in some), 2), worst(some)])
        if not chosen.without_times:
            times = [each["step_ms"] for each in some if each["step_ms"] is not None]
            rows[-1] += [
                statistics.median(times) if times else None,
                round(max(each["seconds"] for each in some) / 60, 2),
            ]
    first, several = results[0], len(results) > 1
    paper = RECIPES[first.recipe].paper if first.recipe in RECIPES else ""
    tests = [result.test.nll for result in results]
    sharing = f" while {len(results)} runs share the machine" if several else ""
    record(
        chosen.json,
        title=f"{first.recipe}, {first.epochs:,} epochs{f', {len(results)} seeds' if several else ''}",
        about=(
            f"Test NLL {mean_and_deviation(tests)} nats"
            + (f", mean and standard deviation over seeds ({_each(tests)})" if several else "")
            + f": exact, {first.test.examples:,} examples × {first.test.samples} dequantisation samples, of the best weights by "
            f"validation, at epoch {', '.join(f'{result.best_epoch:,}' for result in results)}"
            + (f" (the paper, {paper})." if paper else ".")
            + inverses(health, metrics)
            + f" Below: mean exact validation NLL in nats, largest ‖RW − I‖/√D of a layer{' and seed' if several else ''}"
            + ("." if chosen.without_times else f", milliseconds per step{sharing}, minutes so far.")
        ),
        columns=["epoch", "validation NLL", "‖RW − I‖/√D", *([] if chosen.without_times else ["ms per step", "minutes"])],
        rows=rows,
        provenance=first.provenance | {"epochs": ", ".join(str(result.epochs) for result in results)},
        metrics=[*health, *metrics],
    )
    if chosen.json and folders[0].samples.exists():
        shutil.copyfile(folders[0].samples, chosen.json.with_suffix(".png"))


def _milliseconds(seconds: float | None) -> float | None:
    """Returns the time of a step; None for an epoch that was resumed in its middle."""
    return None if seconds is None else round(1e3 * seconds, 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _each(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


if __name__ == "__main__":
    run(main)

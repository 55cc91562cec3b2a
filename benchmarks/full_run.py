"""Writes the validation history of a finished run as a results file.

    selfnorm train mnist-fc-snf --run runs/fc
    python benchmarks/full_run.py runs/fc --json results/mnist-fc-snf-h200.json

The table shows some of the epochs; the file also holds all validations, under "metrics". Command, commit, machine and date are
those of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from record import Cell, parser, record, run
from selfnorm.train.experiments import RECIPES
from selfnorm.train.folder import RunFolder
from selfnorm.train.run import Result

SHOWN = 12


def course(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns each validation together with the training metrics of its epoch."""
    epochs = {each["epoch"]: each for each in records if each["kind"] == "epoch"}
    return [
        {
            "epoch": each["epoch"],
            "nll": round(each["nll"], 3),
            "standard_error": round(each["standard_error"], 3),
            "surrogate": round(epochs[each["epoch"]]["surrogate"], 3),
            "reconstruction": [float(f"{error:.3g}") for error in epochs[each["epoch"]]["reconstruction"]],
            "step_ms": round(1e3 * epochs[each["epoch"]]["step_seconds"], 4),
            "seconds": round(each["seconds"], 1),
        }
        for each in records
        if each["kind"] == "validation"
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("run", type=Path)
    chosen = options.parse_args()
    folder = RunFolder(chosen.run)
    result, metrics = Result.read(folder.result), course(folder.read_log())
    best = min(range(len(metrics)), key=lambda index: metrics[index]["nll"])
    shown = sorted({round((len(metrics) - 1) * (part / SHOWN) ** 2) for part in range(SHOWN + 1)} | {best})
    rows: list[list[Cell]] = [
        [
            metrics[at]["epoch"],
            metrics[at]["nll"],
            max(metrics[at]["reconstruction"], default=None),
            metrics[at]["step_ms"],
            round(metrics[at]["seconds"] / 60, 2),
        ]
        for at in shown
    ]
    paper = RECIPES[result.recipe].paper if result.recipe in RECIPES else ""
    record(
        chosen.json,
        title=f"{result.recipe}, {result.epochs:,} epochs",
        about=(
            f"Test NLL {result.test} of the best weights by validation, those of epoch {result.best_epoch:,}"
            f"{f' (the paper, {paper})' if paper else ''}; {result.seconds / 60:.1f} minutes of training and validation. Below: "
            "exact validation NLL in nats, largest squared reconstruction error of a layer, ms per step, minutes so far."
        ),
        columns=["epoch", "validation NLL", "reconstruction", "ms a step", "minutes"],
        rows=rows,
        provenance=result.provenance | {"epochs": str(result.epochs)},
        metrics=metrics,
    )


if __name__ == "__main__":
    run(main)

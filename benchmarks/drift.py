"""Trains the digits flow for long, with the paper's objective and with what prevents the drift of its learned inverse.

    python benchmarks/drift.py [--epochs 8000] [--workers 2] [--only NAME …] [--json results/drift-cpu.json]

The setting is the paper's for MNIST, applied to digits: λ = 1, no standardisation, no decay of the learning rate. The table
shows ‖RW − I‖_F/√D of the worst layer, as `selfnorm doctor` measures it. About 2 minutes per run, `--workers` runs at a time.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from record import Cell, at_least, parser, record
from selfnorm.data import load_dataset
from selfnorm.evaluate.health import examine
from selfnorm.report.provenance import provenance
from selfnorm.train.experiments import find_recipe
from selfnorm.train.loop import Trainer
from selfnorm.train.settings import override

COMMON = ("standardize=false", "weight=1", "decay=0")
PAPER = "inverse_likelihood=true"
VARIANTS: dict[str, tuple[str, ...]] = {
    "the paper's objective": (PAPER,),
    "the paper's objective, 8 probes": (PAPER, "probes=8"),
    "the paper's objective, GECO": (PAPER, "penalty=geco", "weight=1e4"),
    "the paper's objective, standardisation, λ = 5": (PAPER, "standardize=true", "weight=5"),
    "one-sided": (),
    "one-sided, λ = 0.1": ("weight=0.1",),
    "one-sided, λ = 0.1, 8 probes": ("weight=0.1", "probes=8"),
    "one-sided, standardisation, λ = 0.3": ("standardize=true", "weight=0.3"),
    "tracked by Newton–Schulz": ("kind=tracked",),
}
MEASUREMENTS = 8


def run(variant: str, epochs: int) -> dict[str, Any]:
    """Returns the distance of the worst layer at each measurement, the largest log-determinant angle, and the exact NLLs."""
    every = epochs // MEASUREMENTS
    recipe = override(find_recipe("digits-fc-snf"), [f"epochs={epochs}", *COMMON, f"validate_every={every}", *VARIANTS[variant]])
    found: dict[str, Any] = {"distance": [], "nll": []}

    def measure(event: dict[str, Any]) -> None:
        if event["kind"] == "validation" and event["epoch"]:
            health = examine(trainer.flow, trainer.train.random_examples(200, seed=0))
            found["distance"].append(max(layer.distance for layer in health.layers))
            found["angle"] = max(layer.log_det_angle for layer in health.layers)
            found["nll"].append(event["nll"])
            found["seconds"] = event["seconds"]

    trainer = Trainer(recipe, load_dataset(recipe.data.source), report=measure)
    trainer.start()
    trainer.run()
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--epochs", type=at_least(MEASUREMENTS), default=8000)
    options.add_argument("--workers", type=at_least(1), default=2)
    options.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    chosen = options.parse_args()
    with ProcessPoolExecutor(chosen.workers, get_context("spawn")) as pool:
        results = list(pool.map(run, chosen.only, [chosen.epochs] * len(chosen.only)))
    epochs_measured = [chosen.epochs // MEASUREMENTS * number for number in range(1, MEASUREMENTS + 1)]
    rows: list[list[Cell]] = [
        [
            variant,
            *(float(f"{distance:.2g}") for distance in result["distance"][1::2]),
            round(result["angle"], 2),
            round(result["nll"][-1], 2),
            round(result["seconds"]),
        ]
        for variant, result in zip(chosen.only, results, strict=True)
    ]
    record(
        chosen.json,
        title="Digits, a long run: does the learned inverse drift?",
        about=(
            "‖RW − I‖_F/√D of the worst layer at some epochs, then at the end the angle between Rᵀ and W⁻ᵀ in the layer where it "
            "is largest, and the exact validation NLL in nats. The paper's setting for MNIST, on digits: λ = 1, no "
            "standardisation, no decay, except where the row says otherwise."
        ),
        columns=["R is held by", *(f"epoch {epoch}" for epoch in epochs_measured[1::2]), "log-det angle, °", "NLL", "seconds"],
        rows=rows,
        provenance=provenance(command=f"python benchmarks/drift.py --epochs {chosen.epochs} --workers {chosen.workers}")
        | {"epochs": f"{chosen.epochs}"},
    )


if __name__ == "__main__":
    main()

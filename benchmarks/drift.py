"""Trains the digits flow for long, with the paper's objective and with what prevents the drift of its learned inverse.

    python benchmarks/drift.py [--epochs 8000] [--workers 2] [--only NAME …] [--json results/drift-cpu.json]

The setting is the paper's for MNIST, applied to digits: λ = 1, no standardisation, no decay of the learning rate. The table
shows ‖RW − I‖_F/√D of the worst layer, as `selfnorm doctor` measures it, and the figure next to the file what the runs logged:
the same error, estimated, and the stability ratio of the paper's objective. About 3 minutes per run, `--workers` at a time.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from record import Cell, at_least, parser, record
from selfnorm.data import load_dataset
from selfnorm.evaluate.health import examine
from selfnorm.report.canvas import new_figure, png_bytes, rendered, write_png
from selfnorm.report.provenance import provenance
from selfnorm.train.experiments import find_recipe
from selfnorm.train.loop import Trainer
from selfnorm.train.settings import override

COMMON = ("standardize=false", "weight=1", "learning_rate=0.001", "decay=0")
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
LOSES = "the paper's objective"
DRAWN = (LOSES, "one-sided", "one-sided, λ = 0.1")
MEASUREMENTS, VALIDATIONS = 8, 80


def run(variant: str, epochs: int) -> dict[str, Any]:
    """Returns the distance of the worst layer at each measurement, the largest log-determinant angle, the exact NLLs, and the
    records of all validations."""
    every = epochs // VALIDATIONS
    recipe = override(find_recipe("digits-fc-snf"), [f"epochs={epochs}", *COMMON, f"validate_every={every}", *VARIANTS[variant]])
    found: dict[str, Any] = {"distance": [], "validations": []}

    def measure(event: dict[str, Any]) -> None:
        if event["kind"] == "validation":
            found["validations"].append(event)
            found["nll"] = event["nll"]
            if event["epoch"] % (every * VALIDATIONS // MEASUREMENTS) == 0:
                health = examine(trainer.flow, trainer.train.random_examples(200, seed=0))
                found["distance"].append(max(layer.distance for layer in health.layers))
                found["angle"] = max(layer.log_det_angle for layer in health.layers)

    trainer = Trainer(recipe, load_dataset(recipe.data.source), report=measure)
    trainer.start()
    trainer.run()
    return found


def draw(path: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Draws the error of the worst layer in some runs, and the stability ratio of both layers with the paper's objective."""
    figure = new_figure(9.2, 3.4)
    errors, ratios = figure.subplots(1, 2)
    for colour, variant in zip(("tab:red", "tab:blue", "tab:cyan"), DRAWN, strict=True):
        validations = runs[variant]["validations"]
        label = variant if "λ" in variant else f"{variant}, λ = 1"
        errors.plot(
            [each["epoch"] for each in validations],
            [max(each["inverse_error"]) for each in validations],
            color=colour,
            label=label,
        )
    validations = runs[LOSES]["validations"]
    for index, style in enumerate(("--", "-")):
        values = [each["stability_ratio"][index] for each in validations]
        label = f"layer {index + 1}"
        ratios.plot([each["epoch"] for each in validations], values, color="tab:red", linestyle=style, label=label)
    ratios.axhline(1, color="0.4", linewidth=0.8, linestyle=":")
    errors.set(title="error of the learned inverse, worst layer", ylabel="‖RW − I‖/√D", yscale="log")
    ratios.set(title="stability ratio of the paper's objective", ylabel="1/(8λ·λ_min(E[hhᵀ]))", yscale="log")
    for ax in (errors, ratios):
        ax.set_xlabel("epoch")
        ax.grid(color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8)
    write_png(path, png_bytes(rendered(figure)))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--epochs", type=at_least(VALIDATIONS), default=8000)
    options.add_argument("--workers", type=at_least(1), default=2)
    options.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    chosen = options.parse_args()
    with ProcessPoolExecutor(chosen.workers, get_context("spawn")) as pool:
        results = list(pool.map(run, chosen.only, [chosen.epochs] * len(chosen.only)))
    interval = chosen.epochs // VALIDATIONS * (VALIDATIONS // MEASUREMENTS)
    epochs_measured = [interval * number for number in range(1, MEASUREMENTS + 1)]
    rows: list[list[Cell]] = [
        [
            variant,
            *(float(f"{distance:.2g}") for distance in result["distance"][1::2]),
            round(result["angle"], 2),
            round(result["nll"], 2),
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
        columns=["objective", *(f"epoch {epoch}" for epoch in epochs_measured[1::2]), "log-det angle, °", "NLL"],
        rows=rows,
        provenance=provenance(command=f"python benchmarks/drift.py --epochs {chosen.epochs} --workers {chosen.workers}")
        | {"epochs": f"{chosen.epochs}"},
    )
    runs = dict(zip(chosen.only, results, strict=True))
    if chosen.json and runs.keys() >= set(DRAWN):
        draw(chosen.json.with_suffix(".png"), runs)


if __name__ == "__main__":
    main()

"""Prints results: of runs, seeds, twins, comparisons, profiles and health checks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from selfnorm.cli.console import ERR, OUT, build_table, print_json, short_number
from selfnorm.compare.table import ComparedRun, Comparison
from selfnorm.evaluate.health import FlowHealth
from selfnorm.runtime.escapes import escaped
from selfnorm.train.folder import RunFolder
from selfnorm.train.profile import Piece
from selfnorm.train.recipe import Recipe
from selfnorm.train.result import Result
from selfnorm.train.stopping import DivergedError


def print_result(folder: Path, result: Result, as_json: bool) -> None:
    """Prints a run's exact test likelihood and where its files are."""
    if as_json:
        return  # it was the run's last record
    OUT.print(Text.assemble((escaped(result.recipe), "bold"), f": test NLL {result.test}"))
    cost = f"{result.epochs} epoch{'s' * (result.epochs != 1)} in {result.seconds:.0f} s"
    cost += "" if result.step_seconds is None else f", {short_number(1e3 * result.step_seconds)} ms per step"
    cost += "" if result.peak_memory is None else f", {result.peak_memory:.0f} MiB"
    OUT.print(f"  {cost}; best at epoch {result.best_epoch} by exact validation NLL")
    files = RunFolder(folder)
    for what, path in (("samples", files.samples), ("curves", files.curves), ("checkpoint", files.best)):
        OUT.print(f"  {what:<10} {path}")


def print_twins(result: Result, twin: Result) -> None:
    """Prints a run next to its exact-gradient twin."""
    rows = [
        (each.recipe, f"{each.test.nll:.2f} ± {each.test.standard_error:.2f}", f"{each.seconds:.0f}") for each in (result, twin)
    ]
    OUT.print(build_table("Exact test NLL", ("", "nats", "seconds"), rows))
    OUT.print(f"difference {result.test.nll - twin.test.nll:+.2f} nats")


def print_seed_runs(runs: Mapping[Path, tuple[Recipe, Result | DivergedError]], as_json: bool) -> None:
    """Prints runs that trained at the same time, by folder, and their mean if they differ only in the seed."""
    if not as_json:
        for path, (recipe, result) in runs.items():
            OUT.print(f"seed {recipe.optimiser.seed}")
            if isinstance(result, Result):
                print_result(path, result, as_json)
            else:
                OUT.print(f"  {result}. The best and the last good checkpoint are in {path}")
        OUT.print(f"timings: {len(runs)} runs shared the machine")
    recipes = [recipe for recipe, _ in runs.values()]
    seeds = {recipe.optimiser.seed for recipe in recipes}
    if len(seeds) == len(runs) and all(recipe.changed(seed=recipes[0].optimiser.seed) == recipes[0] for recipe in recipes):
        _print_seed_mean({recipe.optimiser.seed: result for recipe, result in runs.values()}, as_json)


def _print_seed_mean(runs: Mapping[int, Result | DivergedError], as_json: bool) -> None:
    results = {seed: result.test.nll for seed, result in runs.items() if isinstance(result, Result)}
    nlls = list(results.values())
    mean = statistics.mean(nlls) if nlls else None
    error = statistics.stdev(nlls) / math.sqrt(len(nlls)) if len(nlls) > 1 else None
    if as_json:
        diverged = [seed for seed in runs if seed not in results]
        print_json({"kind": "seeds", "mean": mean, "standard_error": error, "nll": results, "diverged": diverged})
        return
    if mean is None:
        return
    line = f"test NLL {mean:.2f}" + ("" if error is None else f" ± {error:.2f}") + " nats: exact, "
    line += f"mean{' and standard error' if error is not None else ''} over {len(nlls)} of {len(runs)} seeds"
    OUT.print(line + f" ({', '.join(f'{nll:.2f}' for nll in nlls)})")


def print_profile(pieces: Sequence[Piece], as_json: bool) -> None:
    """Prints where a step's time goes: by layer, by kind of layer, and the rest."""
    if as_json:
        print_json({"kind": "profile", "pieces": [piece._asdict() for piece in pieces]})
        return
    total = sum(piece.forward + piece.backward for piece in pieces)

    def row(name: str, some: Sequence[Piece], kind: str = "") -> tuple[str, ...]:
        forward, backward = sum(piece.forward for piece in some), sum(piece.backward for piece in some)
        backward_cell = f"{1e6 * backward:.1f}" if backward else "–"
        return name, kind, f"{1e6 * forward:.1f}", backward_cell, f"{100 * (forward + backward) / total:.1f} %"

    layers, rest = [piece for piece in pieces if piece.kind], [piece for piece in pieces if not piece.kind]
    kinds = sorted({piece.kind for piece in layers})
    rows = [row(f"layer {piece.place}", [piece], piece.kind) for piece in layers]
    gap = ("",) * 5
    rows += [
        gap,
        *(row(f"all {kind}", some, f"× {len(some)}") for kind in kinds if (some := [p for p in layers if p.kind == kind])),
    ]
    rows += [gap, *(row(piece.place, [piece]) for piece in rest), gap, row("a step", pieces)]
    OUT.print(build_table("Where a step's time goes", ("", "kind", "forward µs", "backward µs", "share"), rows))


def print_compared_run(run: ComparedRun, as_json: bool) -> None:
    """Prints one line about a run of a comparison when it is done; as JSON only if it failed."""
    planned = run.planned
    if not as_json:
        ERR.print(f"{planned.place} {planned.name}: {run.failure or (run.result and f'test NLL {run.result.test}')}")
    elif run.failure:
        print_json({"run": str(planned.path), "kind": "failure", "diverged": run.diverged, "reason": run.failure})


def print_comparison(comparison: Comparison) -> None:
    """Prints the table of a comparison, its caption, and a line for each run that failed."""
    columns = ("", "test NLL", "ms/step", "seconds", "MiB", "parameters", "inverse error", "ms/sample")
    rows = [
        (
            row.label,
            _with_error(row.nll, row.standard_error),
            short_number(row.step_ms),
            short_number(row.seconds),
            "–" if row.peak_memory is None else f"{row.peak_memory:.0f}",
            "–" if row.parameters is None else f"{row.parameters:,.0f}",
            "–" if row.inverse_error is None else f"{row.inverse_error:.1e}",
            short_number(row.sample_ms),
        )
        for row in comparison.rows()
    ]
    # On a narrow terminal, its own line breaks lose less than cut cells would.
    OUT.print(build_table(comparison.title, columns, rows), width=max(OUT.width, 110), crop=False)
    OUT.print(comparison.about)
    for failure in comparison.failures():
        OUT.print(failure)


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" + (f" ± {error:.2f}" if error is not None and math.isfinite(error) else "")


def print_health(health: FlowHealth, as_json: bool) -> None:
    """Prints what `examine` found about a flow's inverses."""
    if as_json:
        print_json(asdict(health))
        return
    with_ratios = any(layer.stability_ratio is not None for layer in health.layers)
    columns = (
        "layer",
        "D",
        "‖RW−I‖/√D",
        *(["stability ratio"] if with_ratios else []),
        "cond W",
        "data error",
        "noise error",
        "log-det angle",
        "gradient angle",
        "gradient size",
    )
    rows = [
        (
            f"{layer.name} {layer.layer.split('(')[0]}",
            f"{layer.dimensions}",
            f"{layer.distance:.2e}",
            *([short_number(layer.stability_ratio)] if with_ratios else []),
            "–" if layer.condition is None else f"{layer.condition:.1f}",
            f"{layer.data_reconstruction:.1e}",
            f"{layer.noise_reconstruction:.1e}",
            f"{layer.log_det_angle:.2f}°",
            f"{layer.angle:.2f}°",
            f"{layer.gradient_size:.1e}",
        )
        for layer in health.layers
    ]
    OUT.print(build_table("Stored inverses", columns, rows) if rows else "No layer stores an inverse.")
    trips = ", ".join(f"{inverse} {error:.1e}" for inverse, error in health.round_trip.items())
    OUT.print(f"round trip of prior samples, ‖f(g(z)) − z‖/‖z‖: {trips}")
    distances = ", ".join(f"{inverse} {error:.1e}" for inverse, error in health.sample_error.items())
    OUT.print(f"distance of samples from the exact ones, ‖g(z) − f⁻¹(z)‖/‖f⁻¹(z)‖: {distances}")
    OUT.print(f"auto uses: {health.auto}")
    for note in health.notes:
        OUT.print(f"note: {note}")

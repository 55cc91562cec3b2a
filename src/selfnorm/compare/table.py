"""The results of a comparison: one table, as JSON in the shape of results/, as CSV, and as a figure of the validation curves."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from selfnorm.compare.files import comparison_files
from selfnorm.compare.plan import PlannedRun
from selfnorm.report import figures
from selfnorm.report.provenance import provenance
from selfnorm.runtime.files import json_text, replacing, write_text
from selfnorm.train.folder import RunFolder
from selfnorm.train.result import Result

COMPARISON_COLUMNS = (
    "recipe",
    "exact test NLL (nats)",
    "±",
    "bits/dim",
    "ms a step",
    "seconds in all",
    "peak MiB",
    "parameters",
    "inverse error",
    "ms a sample",
)


@dataclass(frozen=True)
class ComparedRun:
    """A run with its measurements, or with the reason why it has no result.

    inverse_error:   the median over prior samples z of ‖f(g(z)) − z‖/‖z‖, where g is the flow's fastest inverse: the learned one
                     if there is one.
    sample_seconds:  the time of drawing one sample with that inverse; None if a sample was not finite.
    """

    planned: PlannedRun
    result: Result | None = None
    inverse_error: float | None = None
    sample_seconds: float | None = None
    failure: str = ""
    diverged: bool = False

    def row(self) -> dict[str, Any]:
        """Returns all numbers of the run, unrounded, by names that include their units."""
        recipe, result = self.planned.recipe, self.result
        outcome = "finished" if result else "diverged" if self.diverged else "failed"
        return {
            "recipe": recipe.name,
            "seed": recipe.optimiser.seed,
            "outcome": outcome,
            "test_nll_nats": result and result.test.nll,
            "standard_error_nats": result and result.test.standard_error,
            "bits_per_dim": result and result.test.bits_per_dim,
            "validation_nll_nats": result and result.validation_nll,
            "best_epoch": result and result.best_epoch,
            "epochs": result and result.epochs,
            "rollbacks": result and result.rollbacks,
            "step_ms": result and _milli(result.step_seconds),
            "total_seconds": result and result.seconds,
            "peak_memory_mib": result and result.peak_memory,
            "parameters": result and result.parameters,
            "inverse_error": self.inverse_error,
            "sample_ms": _milli(self.sample_seconds),
            "folder": str(self.planned.path),
            "failure": self.failure,
        }


@dataclass(frozen=True)
class ComparisonRow:
    """A recipe's row in the table. Over several seeds: the mean NLL, and the median of everything else."""

    recipe: str
    note: str  # such as "1 of 3 failed"; empty if none did
    nll: float | None
    standard_error: float | None
    bits_per_dim: float | None
    step_ms: float | None
    seconds: float | None
    peak_memory: float | None
    parameters: float | None
    inverse_error: float | None
    sample_ms: float | None

    @property
    def label(self) -> str:
        """The recipe's name, with the note if there is one."""
        return f"{self.recipe} ({self.note})" if self.note else self.recipe


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison with their results, the command that made it, and the device."""

    runs: tuple[ComparedRun, ...]
    command: str
    device: torch.device

    @property
    def title(self) -> str:
        data = self.runs[0].planned.recipe.data.source
        names = len({run.planned.recipe.name for run in self.runs})
        models = {run.planned.recipe.architecture.model for run in self.runs}
        model = f"{models.pop()} " if len(models) == 1 else ""
        epochs = {run.planned.recipe.optimiser.epochs for run in self.runs}
        length = f", {(most := epochs.pop())} epoch{'s' * (most > 1)}" if len(epochs) == 1 else ""
        return f"{names} {model}recipe{'s' * (names > 1)} on {Path(data).name}{length}"

    @property
    def about(self) -> str:
        """A caption that explains the columns."""
        seeds = sorted({run.planned.recipe.optimiser.seed for run in self.runs})
        tests = [run.result.test for run in self.runs if run.result]
        examples = f"{tests[0].examples} test examples" if tests else "the test examples"
        if len(seeds) > 1:
            spread = (
                f"NLL: exact, the mean over seeds {seeds[0]} to {seeds[-1]} ± the standard error of that mean over seeds "
                f"(std/√n); {examples}. The other columns are medians over seeds"
            )
        else:
            spread = f"NLL: exact ± its standard error over {examples}; one seed, {seeds[0]}"
        return (
            f"{spread}. Lower is better. All runs saw the same batches and noise. They ran one after another, each in its own "
            "process. Inverse error: the median of ‖f(g(z)) − z‖/‖z‖ over prior samples, where g is the flow's fastest inverse; "
            "samples are drawn with g, one at a time. Peak memory: of training, "
            + ("on the device." if self.device.type == "cuda" else "above what the process held before it.")
        )

    def rows(self) -> list[ComparisonRow]:
        """Returns one row for each recipe, the best first, those without a result last."""
        groups: dict[str, list[ComparedRun]] = {}
        for run in self.runs:
            groups.setdefault(run.planned.recipe.name, []).append(run)
        rows = [_summary(name, runs) for name, runs in groups.items()]
        return sorted(rows, key=lambda row: math.inf if row.nll is None else row.nll)

    def failures(self) -> list[str]:
        """Returns one line for each run that has no result, with the reason."""
        return [f"{run.planned.name}: {run.failure}" for run in self.runs if run.failure]

    def report(self) -> dict[str, Any]:
        """Returns the comparison in the shape of a file in results/."""
        return {
            "title": self.title,
            "about": " ".join([self.about, *self.failures()]),
            "columns": list(COMPARISON_COLUMNS),
            "rows": [
                [
                    row.label,
                    _to_decimals(row.nll, 3),
                    _to_decimals(row.standard_error, 3),
                    _to_decimals(row.bits_per_dim, 4),
                    _to_digits(row.step_ms, 3),
                    _to_decimals(row.seconds, 1),
                    _to_digits(row.peak_memory, 3),
                    None if row.parameters is None else int(row.parameters),
                    _to_digits(row.inverse_error, 2),
                    _to_digits(row.sample_ms, 3),
                ]
                for row in self.rows()
            ],
            "provenance": self._provenance(),
        }

    def write(self, folder: Path) -> list[Path]:
        """Writes comparison.json, comparison.csv and, if anything was validated, comparison.png; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        table, lines, figure = comparison_files(folder)
        write_text(table, json_text(self.report(), indent=1) + "\n")
        rows = [run.row() for run in self.runs]
        with replacing(lines) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        # The figure comes last: if drawing fails, the numbers are on disk.
        curves = self._validation_curves()
        if curves:
            figures.comparison_curves(figure, self.title, curves)
        return [table, lines, *([figure] if curves else [])]

    def _validation_curves(self) -> dict[str, list[list[tuple[float, float | None]]]]:
        """Returns, for each row of the table, its runs' exact validation NLLs as (seconds of training, NLL)."""
        found: dict[str, list[list[tuple[float, float | None]]]] = {}
        for row in self.rows():
            for run in self.runs:
                if run.planned.recipe.name == row.recipe:
                    records = RunFolder(run.planned.path).read_log()
                    validations = [record for record in records if record["kind"] == "validation"]
                    curve = [(each["seconds"], each.get("nll")) for each in validations if each.get("seconds") is not None]
                    found.setdefault(row.label, []).extend([curve] if curve else [])
        return {label: curves for label, curves in found.items() if curves}

    def _provenance(self) -> dict[str, str | None]:
        """Returns the provenance of the runs, which may have trained on different days, with the comparison's command."""
        results = [run.result for run in self.runs if run.result]
        source = provenance(self.device, self.command)
        for key in source.keys() - {"command"}:
            found = dict.fromkeys(value for result in results if (value := result.provenance.get(key)) is not None)
            if results:
                source[key] = ", ".join(found) or None
        epochs = {result.epochs for result in results} or {run.planned.recipe.optimiser.epochs for run in self.runs}
        return {**source, "epochs": " to ".join(map(str, sorted({min(epochs), max(epochs)})))}


def _summary(name: str, runs: list[ComparedRun]) -> ComparisonRow:
    """Returns the row of a recipe's runs."""
    found = [run.result for run in runs if run.result]
    values = [result.test.nll for result in found]
    if len(runs) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    else:
        error = found[0].test.standard_error if found else None
    note = ""
    if len(found) < len(runs):
        failed = "diverged" if all(run.diverged for run in runs if run.failure) else "failed"
        note = f"{len(runs) - len(found)} of {len(runs)} {failed}" if len(runs) > 1 else failed
    return ComparisonRow(
        recipe=name,
        note=note,
        nll=statistics.fmean(values) if values else None,
        standard_error=error,
        bits_per_dim=statistics.fmean(result.test.bits_per_dim for result in found) if found else None,
        step_ms=_milli(_median(result.step_seconds for result in found)),
        seconds=_median(result.seconds for result in found),
        peak_memory=_median(result.peak_memory for result in found),
        parameters=_median(result.parameters for result in found),
        inverse_error=_median(run.inverse_error for run in runs),
        sample_ms=_milli(_median(run.sample_seconds for run in runs)),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _to_decimals(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def _to_digits(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")

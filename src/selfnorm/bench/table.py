"""A table of measurements: for the screen, and as a file in the shape that `selfnorm.report.results` reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from selfnorm.bench.timing import Timing
from selfnorm.files import json_text, write_text
from selfnorm.precision import networks_in_bf16
from selfnorm.report.provenance import provenance

Cell = str | int | float | None


@dataclass(frozen=True)
class BenchTable:
    """Measurements.

    details:   all figures by name, with units, for programs.
    failures:  why figures are missing, a line each.
    """

    title: str
    about: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    source: dict[str, str | None]
    details: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "about": self.about,
            "columns": list(self.columns),
            "rows": self.rows,
            "provenance": self.source,
            "details": self.details,
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json_text(self.report(), indent=1) + "\n")


def source_of(device: torch.device, command: str | None, clocks: tuple[int | None, int | None]) -> dict[str, str | None]:
    """Provenance, with the precision of products and, of a GPU, how fast its clock was before and after."""
    source = provenance(device, command)
    if networks_in_bf16():
        source["precision"] = "bf16"
    elif device.type == "cuda":
        source["precision"] = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
    if device.type == "cuda":
        source["SM clock"] = None if clocks == (None, None) else f"{clocks[0]} MHz before, {clocks[1]} MHz after"
    return source


def significant(value: float | None, digits: int = 3) -> float | None:
    """Rounded to so many digits, whole where those stand before the point; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return round(value) if abs(value) >= 10 ** (digits - 1) else rounded


def milli(timing: Timing | None) -> tuple[float | None, float | None, float | None]:
    """Median, low and high in milliseconds, rounded for a table."""
    if timing is None:
        return None, None, None
    return significant(1e3 * timing.median), significant(1e3 * timing.low), significant(1e3 * timing.high)


def in_full(name: str, timing: Timing | None) -> dict[str, Any]:
    """All of a timing, by names that have their units."""
    if timing is None:
        return {f"{name}_ms": None}
    return {
        f"{name}_ms": 1e3 * timing.median,
        f"{name}_ms_10": 1e3 * timing.low,
        f"{name}_ms_90": 1e3 * timing.high,
        f"{name}_blocks": timing.blocks,
    }

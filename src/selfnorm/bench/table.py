"""A table of measurements: for the screen, and as a file in the shape that `selfnorm.report.results` reads."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from selfnorm.bench.conditions import Conditions
from selfnorm.bench.timing import Timing
from selfnorm.report.provenance import provenance
from selfnorm.runtime.files import json_text, write_text
from selfnorm.runtime.precision import networks_in_bf16, products_in_tf32

Cell = str | int | float | None
Told = Callable[[str], object]  # is called with a line: about what was just measured, or what is being measured now


class Note(NamedTuple):
    """A sentence or two about a table. columns: those that it explains; for none, all of them."""

    text: str
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchTable:
    """Measurements.

    details:   all figures by name, with units, for programs.
    failures:  why figures are missing, a line each.
    stopped:   where it was stopped before its end, if it was.
    """

    title: str
    notes: Sequence[Note]
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    source: dict[str, str | None]
    details: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stopped: str = ""

    @property
    def about(self) -> str:
        return " ".join(note.text for note in self.notes)

    @property
    def heading(self) -> str:
        """The title, which says so if this is a part of a table."""
        return self.title + (f" (partial: {self.stopped})" if self.stopped else "")

    def report(self) -> dict[str, Any]:
        return {
            "title": self.heading,
            "about": self.about,
            "columns": list(self.columns),
            "rows": self.rows,
            "provenance": self.source | ({"partial": self.stopped} if self.stopped else {}),
            "details": self.details,
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json_text(self.report(), indent=1) + "\n")


@dataclass
class Measuring:
    """stopped: whether it was interrupted."""

    stopped: bool = False

    def after(self, done: int, total: int, what: str) -> str:
        """Where it was stopped; nothing if it was not."""
        return f"stopped after {done} of {total} {what}" if self.stopped else ""


@contextmanager
def measuring(device: torch.device) -> Iterator[Measuring]:
    """In this block random draws change no one else's, and an interruption (^C) ends the block alone, so that what has been
    measured by then can be shown."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    found = Measuring()
    with torch.random.fork_rng([index] if device.type == "cuda" else []):
        try:
            yield found
        except KeyboardInterrupt:
            found.stopped = True


def machine_of(device: torch.device, threads: Iterable[int] = ()) -> str:
    """A GPU's name; of a CPU how many threads are used, by default as many as torch is set to."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    used = sorted({*threads} or {torch.get_num_threads()})
    return f"{platform.machine()} {device.type.upper()}, {' and '.join(map(str, used))} thread{'s' * (used != [1])}"


def source_of(
    device: torch.device, command: str | None, before: Conditions, threads: Iterable[int] = ()
) -> dict[str, str | None]:
    """Provenance, with the precision of products, and under what conditions it was measured since then."""
    source = provenance(device, command) | {"machine": machine_of(device, threads)}
    if networks_in_bf16():
        source["precision"] = "bf16"
    elif device.type == "cuda":
        source["precision"] = "tf32" if products_in_tf32() else "float32"
    return source | before.until(Conditions.now(device), device)


def blocks_of(timings: Iterable[Timing | None]) -> str:
    """Over how many blocks medians are, for a note."""
    numbers = {timing.blocks for timing in timings if timing}
    if not numbers:
        return "no blocks"
    return f"{min(numbers)} to {max(numbers)} blocks" if len(numbers) > 1 else f"{min(numbers)} blocks"


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

"""Tables of measurements, to print or to write as files for `selfnorm.report.results`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from selfnorm.bench.conditions import Conditions
from selfnorm.bench.timing import Timing
from selfnorm.report.provenance import machine_of, provenance
from selfnorm.runtime.files import json_text, write_text
from selfnorm.runtime.precision import networks_in_bf16, products_in_tf32

Cell = str | int | float | None
LineCallback = Callable[[str], object]  # called with one line about what was just measured, or is being measured


class Note(NamedTuple):
    """A sentence or two about a table. columns: those that it explains; empty if it is about the whole table."""

    text: str
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchTable:
    """A table of measurements.

    details:   all figures by name, with units, for programs.
    failures:  the reasons for missing figures, one line each.
    stopped:   where the measuring was interrupted; empty if it was not.
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
        """All notes as one text."""
        return " ".join(note.text for note in self.notes)

    @property
    def heading(self) -> str:
        """The title, marked as partial if the measuring was interrupted."""
        return self.title + (f" (partial: {self.stopped})" if self.stopped else "")

    def report(self) -> dict[str, Any]:
        """Returns the table as `selfnorm.report.results` reads it, with all details."""
        return {
            "title": self.heading,
            "about": self.about,
            "columns": list(self.columns),
            "rows": self.rows,
            "provenance": self.source | ({"partial": self.stopped} if self.stopped else {}),
            "details": self.details,
        }

    def write(self, path: Path) -> None:
        """Writes `report` as JSON, creating the folder if necessary."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json_text(self.report(), indent=1) + "\n")


@dataclass
class Measuring:
    """The state of a `measuring` block. stopped: whether it was interrupted."""

    stopped: bool = False

    def after(self, done: int, total: int, what: str) -> str:
        """Returns where the measuring was interrupted; an empty text if it was not."""
        return f"stopped after {done} of {total} {what}" if self.stopped else ""


@contextmanager
def measuring(device: torch.device) -> Iterator[Measuring]:
    """Context manager that restores the global random state after its block, and lets Ctrl-C end only the block, so that you can
    show what was measured until then."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    found = Measuring()
    with torch.random.fork_rng([index] if device.type == "cuda" else []):
        try:
            yield found
        except KeyboardInterrupt:
            found.stopped = True


def source_of(
    device: torch.device, command: str | None, before: Conditions, threads: Iterable[int] = ()
) -> dict[str, str | None]:
    """Returns the provenance, with the precision of products and the conditions since `before`."""
    source = provenance(device, command) | {"machine": machine_of(device, threads)}
    if networks_in_bf16():
        source["precision"] = "bf16"
    elif device.type == "cuda":
        source["precision"] = "tf32" if products_in_tf32() else "float32"
    return source | before.until(Conditions.now(device), device)


def blocks_of(timings: Iterable[Timing | None]) -> str:
    """Returns the number of blocks, such as "3 to 20 blocks", for a note about medians."""
    numbers = {timing.blocks for timing in timings if timing}
    if not numbers:
        return "no blocks"
    return f"{min(numbers)} to {max(numbers)} blocks" if len(numbers) > 1 else f"{min(numbers)} blocks"


def significant(value: float | None, digits: int = 3) -> float | None:
    """Returns the value rounded to this many significant digits, or to an integer if it is larger; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return round(value) if abs(value) >= 10 ** (digits - 1) else rounded


def milliseconds(timing: Timing | None) -> tuple[float | None, float | None, float | None]:
    """Returns median, low and high in milliseconds, rounded for a table."""
    if timing is None:
        return None, None, None
    return significant(1e3 * timing.median), significant(1e3 * timing.low), significant(1e3 * timing.high)


def timing_details(name: str, timing: Timing | None) -> dict[str, Any]:
    """Returns all figures of a timing, by names with units."""
    if timing is None:
        return {f"{name}_ms": None}
    return {
        f"{name}_ms": 1e3 * timing.median,
        f"{name}_ms_10": 1e3 * timing.low,
        f"{name}_ms_90": 1e3 * timing.high,
        f"{name}_blocks": timing.blocks,
    }

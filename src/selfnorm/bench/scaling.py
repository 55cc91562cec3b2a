"""Measures the paper's timing figure: one fully connected layer of each kind by dimension, with slopes and crossovers."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm.bench.conditions import Conditions
from selfnorm.bench.graph import captured
from selfnorm.bench.table import (
    BenchTable,
    Cell,
    LineCallback,
    Note,
    blocks_of,
    measuring,
    significant,
    source_of,
    timing_details,
)
from selfnorm.bench.timing import Effort, Failure, Timing, Work, measure, reason_for
from selfnorm.bijection import Bijection
from selfnorm.models import LINEAR
from selfnorm.report.provenance import machine_of
from selfnorm.runtime.collector import AdamArguments, collected_gradients
from selfnorm.train.adam import BETAS, EPS, moments_of, update_from_factors

SCALING_BATCH = 128
MIN_DIMENSION = 32
MAX_DIMENSION = 2**16
SCALING_LEARNING_RATE = 1e-6  # small enough that the weights hardly change while they are timed
# From the name in the paper's figure to that in `selfnorm.models.LINEAR`.
KINDS = {
    "learned": "selfnorm",
    "Newton–Schulz": "tracked",
    "sketch": "sketch",
    "relative": "relative",
    "LU": "lu",
    "exact": "exact",
}
STEP_PARTS = ("gradient", "with Adam")
Times = dict[str, dict[int, float]]  # seconds by kind and dimension


@dataclass(frozen=True)
class Point:
    """The time of a layer at one dimension. how: "graph" or "eager"."""

    kind: str
    part: str
    dimensions: int
    timing: Timing | None
    how: str = "eager"
    failure: str = ""


def sizes(largest: int) -> list[int]:
    """Returns the powers of two from 32 to `largest`."""
    if not MIN_DIMENSION <= largest <= MAX_DIMENSION or largest.bit_count() != 1:
        raise ValueError(f"--largest: expected a power of two from {MIN_DIMENSION} to {MAX_DIMENSION}, got {largest}")
    return [2**power for power in range(MIN_DIMENSION.bit_length() - 1, largest.bit_length())]


def measure_scaling(
    dimensions: Sequence[int],
    device: torch.device,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    effort: Effort | None = None,
    on_result: LineCallback = str,
    on_status: LineCallback = str,
) -> Iterator[Point]:
    """Yields the time of each kind of layer at each dimension, without and with Adam; at each dimension all take turns.

    on_result:  called with one line for each measured dimension.
    on_status:  called with one line about what is being measured.
    """
    eager: set[str] = set()
    for size in dimensions:
        on_status(f"D = {size}: {', '.join(kinds)} in turn")
        found = _at_size(size, device, kinds, eager, effort or Effort())
        # A failed capture has side effects, so a kind that could not be captured is not tried again.
        eager |= {point.kind for point in found if point.timing and point.how == "eager"}
        times = {point.kind: point.timing for point in found if point.part == STEP_PARTS[0]}
        on_result(f"D = {size}: " + ", ".join(f"{kind} {1e3 * time.median:.3g} ms" for kind, time in times.items() if time))
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        yield from found


def layer_step(layer: Bijection, x: Tensor, optimizer: torch.optim.Adam | None = None) -> Callable[[], None]:
    """Returns a function that runs `surrogate` and its backward pass, with a gradient for x as inside a flow, then Adam, if
    given, then tracking.

    With Adam, gradients are left as factors where possible, as in training.
    """
    x = x.detach().requires_grad_()
    rate, frozen, failed = x.new_tensor([optimizer.param_groups[0]["lr"] if optimizer else 0.0, 0.0, 0.0]).detach()
    adam = AdamArguments(rate, frozen, failed, BETAS, EPS)

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with nullcontext() if optimizer is None else collected_gradients() as collector:
            z, log_det, reconstruction = layer.surrogate(x)
            loss = (0.5 * z.square().sum() - log_det.sum() + reconstruction.sum()) / len(x)
            loss.backward()
        if optimizer is not None and collector is not None:
            for gradient in collector.take():
                moments = [moments_of(optimizer, parameter) for parameter in gradient.parameters]
                torch._foreach_add_([each.step for each in moments], 1)
                update_from_factors(gradient, moments, adam)
            optimizer.step()
        if layer.inverse_tracker is not None:
            layer.inverse_tracker.track()  # `after_step` without reading the device, which the training loop rarely does

    return run


def slope(times: Mapping[int, float]) -> float | None:
    """Returns the slope of log t against log D, by least squares over the upper half of the dimensions; None if fewer than 2."""
    known = sorted(times)
    upper = known[-max(2, math.ceil(len(known) / 2)) :]
    if len(upper) < 2:
        return None
    x, y = [math.log(size) for size in upper], [math.log(times[size]) for size in upper]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def crossover(fast: Mapping[int, float], slow: Mapping[int, float]) -> float | None:
    """Returns the dimension above which `fast` is faster than `slow`, interpolated in logarithms.

    This is the smallest measured dimension if `fast` is always faster, and infinity if it is slower at the largest. None if the
    two share fewer than two dimensions, which show no trend.
    """
    shared = sorted(fast.keys() & slow.keys())
    if len(shared) < 2:
        return None
    gains = [math.log(slow[size] / fast[size]) for size in shared]
    if gains[-1] <= 0:
        return math.inf
    behind = [index for index, gain in enumerate(gains) if gain <= 0]
    if not behind:
        return float(shared[0])
    last = behind[-1]
    part = -gains[last] / (gains[last + 1] - gains[last])
    return math.exp((1 - part) * math.log(shared[last]) + part * math.log(shared[last + 1]))


def times_of(points: Sequence[Point], part: str) -> Times:
    """Returns the median seconds by kind and dimension."""
    found: Times = {kind: {} for kind in dict.fromkeys(point.kind for point in points)}
    for point in points:
        if point.part == part and point.timing:
            found[point.kind][point.dimensions] = point.timing.median
    return {kind: times for kind, times in found.items() if times}


def scaling_table(
    dimensions: Sequence[int],
    device: torch.device,
    *,
    effort: Effort | None = None,
    command: str | None = None,
    on_result: LineCallback = str,
    on_status: LineCallback = str,
) -> tuple[BenchTable, list[Point]]:
    """Returns the table and its measurements. Ctrl-C stops the measuring; the table then holds what was finished."""
    before, points = Conditions.now(device), list[Point]()
    with measuring(device) as stop:
        for point in measure_scaling(dimensions, device, effort=effort, on_result=on_result, on_status=on_status):
            points.append(point)
    failures = [f"{point.kind}, D = {point.dimensions}, {point.part}: {point.failure}" for point in points if point.failure]
    table = BenchTable(
        title=f"Time of one fully connected layer by dimension, batch {SCALING_BATCH}, on {machine_of(device)}",
        notes=_scaling_notes(points, device),
        columns=("D", "step", *(f"{kind}, ms" for kind in KINDS), "exact / learned"),
        rows=[row for part in STEP_PARTS for row in rows_of(points, part)] if points else [],
        source=source_of(device, command, before),
        details=[_point_details(point) for point in points],
        failures=failures,
        stopped=stop.after(len({point.dimensions for point in points}), len(dimensions), "dimensions"),
    )
    return table, points


def rows_of(points: Sequence[Point], part: str) -> list[list[Cell]]:
    """Returns a row for each dimension, then the slopes, then where each kind becomes faster than exact, slower than learned."""
    times = times_of(points, part)
    learned, exact = times.get("learned", {}), times.get("exact", {})
    rows: list[list[Cell]] = []
    for size in sorted({point.dimensions for point in points}):
        ratio = exact[size] / learned[size] if size in learned and size in exact else None
        cells = [times.get(kind, {}).get(size) for kind in KINDS]
        rows.append([size, part, *(significant(1e3 * cell) if cell else None for cell in cells), significant(ratio)])
    rows.append(["slope", part, *(_slope_cell(slope(times.get(kind, {}))) for kind in KINDS), None])
    faster = [None if kind == "exact" else _crossover_cell(crossover(times.get(kind, {}), exact), exact) for kind in KINDS]
    rows.append(["faster than exact", part, *faster, None])
    behind = [None if kind == "learned" else _crossover_cell(crossover(learned, times.get(kind, {})), learned) for kind in KINDS]
    rows.append(["slower than learned", part, *behind, None])
    return rows


def _at_size(size: int, device: torch.device, kinds: Sequence[str], eager: set[str], effort: Effort) -> list[Point]:
    works: dict[str, Work] = {}
    points: dict[str, Point] = {}
    x = torch.randn(SCALING_BATCH, size, device=device, dtype=torch.float32)
    for kind in kinds:
        for part in STEP_PARTS:
            name = f"{kind}, {part}"
            points[name] = Point(kind, part, size, None)
            try:
                run = _prepared(KINDS[kind], part, size, x, device)
                graph = None if kind in eager else captured(run, device, _repeats(size))
            except Exception as error:
                points[name] = Point(kind, part, size, None, failure=reason_for(error))
                continue
            works[name] = graph or Work(run)
            points[name] = Point(kind, part, size, None, "graph" if graph else "eager")
    for name, timing in measure(works, device, effort).items():
        point = points[name]
        if isinstance(timing, Failure):
            points[name] = Point(point.kind, point.part, size, None, point.how, timing.reason)
        else:
            points[name] = Point(point.kind, point.part, size, timing, point.how)
    return list(points.values())


def _prepared(kind: str, part: str, size: int, x: Tensor, device: torch.device) -> Callable[[], None]:
    with torch.device(device):  # so that a tracker's first inverse is computed there, too
        layer: nn.Module = LINEAR[kind](size)
    layer = layer.to(device, torch.float32)
    assert isinstance(layer, Bijection)
    optimizer = None
    if part == STEP_PARTS[1]:
        capturable = device.type == "cuda"
        optimizer = torch.optim.Adam(
            layer.parameters(), lr=SCALING_LEARNING_RATE, betas=BETAS, eps=EPS, fused=True, capturable=capturable
        )
    return layer_step(layer, x, optimizer)


def _repeats(size: int) -> int:
    """Returns the number of steps in a graph: more if they are short."""
    return max(1, min(20, 20 * 1024 // size))


def _crossover_cell(size: float | None, measured: Mapping[int, float]) -> Cell:
    if size is None:
        return None
    if math.isinf(size):
        return "not yet"
    return f"from {size:.0f}" if size > min(measured) else f"from ≤{min(measured)}"


def _slope_cell(value: float | None) -> float | None:
    return None if value is None else round(value, 2) + 0.0  # −0 is 0


def _point_details(point: Point) -> dict[str, Any]:
    return {
        "kind": point.kind,
        "part": point.part,
        "dimensions": point.dimensions,
        "how": point.how,
        **timing_details("step", point.timing),
        "failure": point.failure,
    }


def _scaling_notes(points: Sequence[Point], device: torch.device) -> list[Note]:
    eager = sorted({point.kind for point in points if point.how == "eager" and point.timing})
    how = fused = ""
    if device.type == "cuda":
        fused = ", whose kernel multiplies out gradients that are left as factors"
        how = " In CUDA graphs of up to 20 steps" + (f", except {', '.join(eager)}, which cannot be captured." if eager else ".")
    return [
        Note(
            f"Gradient: `surrogate` and its backward pass at batch {SCALING_BATCH}, and tracking, if any; with Adam: the "
            f"same and the optimiser step{fused}. "
            f"Milliseconds, medians over {blocks_of(point.timing for point in points)} after a warm-up; at each D all kinds took "
            "turns." + how
        ),
        Note("Learned: the self-normalizing layer; Newton–Schulz and sketch: tracked inverses; exact: by slogdet."),
        Note(
            "Slope: of log time against log D, by least squares over the upper half of the dimensions. Faster than exact, slower "
            "than learned: the D above which this holds, interpolated in logarithms."
        ),
    ]

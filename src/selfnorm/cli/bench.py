"""The verbs `selfnorm bench steps`, `scaling` and `peers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from selfnorm.bench.peers import CIFAR, FC, MISSING, MNIST, PEERS, PeerRow, peers_table
from selfnorm.bench.scaling import KINDS, STEP_PARTS, Point, scaling_table, sizes, slope, times_of
from selfnorm.bench.step_memory import memory_table
from selfnorm.bench.steps import Measured
from selfnorm.bench.steps_table import steps_table
from selfnorm.bench.table import BenchTable
from selfnorm.bench.timing import Effort, Timing
from selfnorm.bench.workloads import MODELS, choose, default_models
from selfnorm.cli.application import FlaggedGroup, app, command
from selfnorm.cli.bench_output import ScreenTable, deliver, output_files, show_measurements
from selfnorm.cli.options import Debug, Device, Force, PrecisionChoice, Quiet, resolve_device
from selfnorm.report import timings
from selfnorm.report.timings import Bar
from selfnorm.runtime.precision import precision as using_precision

bench = typer.Typer(
    cls=FlaggedGroup,
    help="Measure training steps, sampling, how layers scale, and other libraries.",
    epilog="Examples:\n\n`selfnorm bench steps --quick --models 'digits-*'`\n\n`selfnorm bench scaling --quick --largest 512`\n\n"
    "`selfnorm bench peers --json peers.json`",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(bench, name="bench")

JsonPath = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table to this .json file.")]
Figure = Annotated[
    Path | None, typer.Option("--figure", metavar="FILE", help="Draw the figure to this .png file; default next to --json.")
]
Seconds = Annotated[
    float | None, typer.Option(metavar="S", help="Time to spend on each measurement; default 2, with --quick 0.3.")
]
ShorterSeconds = Annotated[
    float | None, typer.Option(metavar="S", help="Time to spend on each measurement; default 1, with --quick 0.3.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Take short, rough measurements.")]
PrecisionOption = Annotated[
    PrecisionChoice,
    typer.Option(help="Precision of matrix products on a GPU; bf16 also applies to coupling networks on any device."),
]


@command(
    "steps",
    "selfnorm bench steps",
    "selfnorm bench steps --quick --models 'digits-*'",
    "selfnorm bench steps --models 'mnist-fc-*' --models mnist-conv-snf --json results/steps-h200.json",
    "selfnorm bench steps --memory --models fc4096-snf",
    group=bench,
)
def steps(
    models: Annotated[
        list[str] | None,
        typer.Option("--models", metavar="NAME", help="Recipe or pattern; repeatable. Default: the paper's."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Measure a step's peak memory and the minimum it needs, instead.")
    ] = False,
    seconds: Seconds = None,
    quick: Annotated[bool, typer.Option("--quick", help="Take short, rough measurements; no peak memory on a CPU.")] = False,
    precision: PrecisionOption = PrecisionChoice.tf32,
    json: JsonPath = None,
    figure: Figure = None,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure training steps and sampling: the paper's runtime table.

    For each model: the time of a training step, of samples one at a time and in bulk, peak memory, and how close the step comes
    to the shortest time possible on this machine.

    Steps are complete and use synthetic data of the right shape, so no data set is needed. Besides the recipes you can name
    fc3072-snf, fc3072-exact, fc4096-snf and fc4096-exact, wider fully connected flows, and mnist-fc-bare and fc3072-bare, which
    run only the matrix products and the optimiser of a step. A model that fails gets a row that says so.
    """
    where = resolve_device(device)
    chosen = choose(models) if models else default_models(where)
    if memory and not models:
        chosen += [MODELS["fc4096-snf"]]
    for option, given in (("--figure", figure is not None), ("--seconds", seconds is not None), ("--quick", quick)):
        if memory and given:
            why = "draws no figure" if option == "--figure" else "measures no time"
            raise ValueError(f"{option}: expected none with --memory, which {why}; leave one of them out")
    total = sum(not (memory and model.bare) for model in chosen)
    if not total:
        names = ", ".join(model.name for model in chosen)
        raise ValueError(f"--memory: expected a whole model, got {names}; name the flow whose step it is part of")
    effort = _effort(seconds, quick)
    files = output_files(json, figure, force, draws=not memory)
    with using_precision(precision.value), show_measurements("steps", total, quiet) as (on_done, on_start):
        if memory:
            table = memory_table(chosen, where, on_result=on_done, on_status=on_start)
        else:
            peaks = not (quick and where.type == "cpu")
            table, measured = steps_table(chosen, where, effort=effort, memory=peaks, on_result=on_done, on_status=on_start)
    if memory:
        deliver(table, files, quiet)
        return
    floors = {each["model"]: each["floor_ms"] for each in table.details}
    deliver(table, files, quiet, lambda path: timings.bars(path, table.heading, _step_bars(measured, floors)))


@command(
    "scaling",
    "selfnorm bench scaling",
    "selfnorm bench scaling --quick --largest 512",
    "selfnorm bench scaling --largest 4096 --device cuda --json results/scaling-h200.json",
    group=bench,
)
def scaling(
    largest: Annotated[
        int | None, typer.Option(metavar="D", help="Largest D, a power of two; default 8192, or 2048 on a CPU.")
    ] = None,
    seconds: ShorterSeconds = None,
    quick: Quick = False,
    precision: PrecisionOption = PrecisionChoice.tf32,
    json: JsonPath = None,
    figure: Figure = None,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure how layers scale with their width D: the paper's timing figure.

    Times one fully connected layer at batch 128 for D = 32, 64, …: learned, Newton–Schulz, sketch, relative, LU and exact. Also
    gives the slopes of log time against log D, and the D from which one layer is faster than another.
    """
    where = resolve_device(device)
    dimensions = sizes((2048 if where.type == "cpu" else 8192) if largest is None else largest)
    effort = _effort(seconds, quick, default=1.0)
    files = output_files(json, figure, force)
    with using_precision(precision.value), show_measurements("scaling", len(dimensions), quiet) as (on_done, on_start):
        table, points = scaling_table(dimensions, where, effort=effort, on_result=on_done, on_status=on_start)
    deliver(table, files, quiet, lambda path: _draw_scaling(path, table.heading, points), _tables_by_part(table))


@command(
    "peers",
    "selfnorm bench peers",
    "selfnorm bench peers --quick --images",
    "selfnorm bench peers --cifar --json results/peers-h200.json",
    group=bench,
)
def peers(
    cifar: Annotated[bool, typer.Option("--cifar", help="Include Glows for CIFAR-10; on a CPU they take minutes.")] = False,
    images: Annotated[
        bool | None,
        typer.Option("--images/--no-images", help="Include Glows for MNIST; the default, except on a CPU."),
    ] = None,
    seconds: Seconds = None,
    quick: Quick = False,
    precision: PrecisionOption = PrecisionChoice.tf32,
    json: JsonPath = None,
    figure: Figure = None,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure training steps of other libraries next to ours, at the same shapes and in the same run.

    The libraries are zuko, nflows and normflows; those that are not installed are left out.
    """
    where = resolve_device(device)
    images = where.type != "cpu" if images is None else images
    shapes: list[tuple[int, ...]] = [FC, *([MNIST] if images else []), *([CIFAR] if cifar else [])]
    effort = _effort(seconds, quick)
    files = output_files(json, figure, force)
    total = sum(2 + sum(peer.shape == shape for peer in PEERS) for shape in shapes)
    with using_precision(precision.value), show_measurements("peers", total, quiet) as (on_done, on_start):
        table, rows = peers_table(shapes, where, effort=effort, on_result=on_done, on_status=on_start)
    absent = list(dict.fromkeys(row.library for row in rows if row.note == MISSING))
    more = [f"not installed: {', '.join(absent)}; to measure them: pip install {' '.join(absent)}"] if absent else []
    without_notes = ScreenTable(table.heading, table.columns[:-1], [row[:-1] for row in table.rows])  # failures come below it
    deliver(table, files, quiet, lambda path: timings.bars(path, table.heading, _peer_bars(rows)), [without_notes], more)


def _effort(seconds: float | None, quick: bool, default: float = 2.0) -> Effort:
    if seconds is not None and not 0 < seconds <= 3600:
        raise ValueError(f"--seconds: expected a time above 0 and at most 3600, got {seconds:g}")
    return Effort.of(seconds if seconds is not None else 0.3 if quick else default)


def _tables_by_part(table: BenchTable) -> list[ScreenTable]:
    """Returns one table for the gradient and one for the step with Adam, both with narrower columns."""
    columns = ["D", *KINDS, table.columns[-1]]
    return [
        ScreenTable(f"{table.heading}: ms, {part}", columns, [[row[0], *row[2:]] for row in table.rows if row[1] == part])
        for part in STEP_PARTS
    ]


def _step_bars(measured: Sequence[Measured], floors: dict[str, float | None]) -> list[Bar]:
    return [
        _bar(each.model.name, each.step, f"{each.model.family}", floors.get(each.model.name)) for each in measured if each.step
    ]


def _peer_bars(rows: Sequence[PeerRow]) -> list[Bar]:
    return [
        _bar(f"{row.name}, {'×'.join(map(str, row.shape))}", row.step, "ours" if row.library == "selfnorm" else "theirs")
        for row in rows
        if row.step
    ]


def _bar(label: str, timing: Timing, group: str, floor_ms: float | None = None) -> Bar:
    return Bar(label, 1e3 * timing.median, 1e3 * timing.low, 1e3 * timing.high, floor_ms, group)


def _draw_scaling(path: Path, title: str, points: Sequence[Point]) -> None:
    names = {STEP_PARTS[0]: "forward and backward", STEP_PARTS[1]: "with Adam"}
    times = {name: times_of(points, part) for part, name in names.items()}
    slopes = {name: {kind: slope(found) for kind, found in kinds.items()} for name, kinds in times.items()}
    milliseconds = {
        name: {kind: {size: 1e3 * seconds for size, seconds in found.items()} for kind, found in kinds.items()}
        for name, kinds in times.items()
    }
    timings.growth(path, title, milliseconds, slopes)

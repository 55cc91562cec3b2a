"""`selfnorm bench`: how long training steps and samples take, how layers scale, and how other libraries do."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from selfnorm.bench.memory import memory_table
from selfnorm.bench.models import MODELS, choose, default_models
from selfnorm.bench.peers import CIFAR, FC, MNIST, PEERS, Row, peers_table
from selfnorm.bench.scaling import PARTS, Point, scaling_table, sizes, slope, times_of
from selfnorm.bench.steps import Measured, steps_table
from selfnorm.bench.table import BenchTable, Cell
from selfnorm.bench.timing import Effort, Timing
from selfnorm.command import Debug, Device, Quiet, Rounding, command, the_device
from selfnorm.display import ERR, OUT, table
from selfnorm.precision import precision as using_precision
from selfnorm.report import timings
from selfnorm.report.timings import Bar

bench = typer.Typer(
    help="Time training steps, samples, layers as they grow, and other libraries.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


JsonPath = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table here, for results/.")]
Figure = Annotated[Path | None, typer.Option("--figure", metavar="FILE", help="Draw it here, as .png; else beside --json.")]
Seconds = Annotated[float | None, typer.Option(metavar="S", help="Measure each for about so long; 2, or 0.3 with --quick.")]
Quick = Annotated[bool, typer.Option("--quick", help="A rough look: short measurements, no peak memory on a CPU.")]
PrecisionOption = Annotated[Rounding, typer.Option(help="Of products on a GPU; bf16 also of coupling networks anywhere.")]


@command(
    "steps",
    "selfnorm bench steps",
    "selfnorm bench steps --models 'mnist-fc-*' --models mnist-conv-snf --json results/steps-h200.json",
    "selfnorm bench steps --memory --models fc4096-snf",
    of=bench,
)
def steps(
    models: Annotated[
        list[str] | None, typer.Option("--models", metavar="NAME", help="By recipe or pattern; repeatable. Default: the paper's.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="What a step takes in memory instead, against what it needs.")] = False,
    seconds: Seconds = None,
    quick: Quick = False,
    precision: PrecisionOption = Rounding.tf32,
    json: JsonPath = None,
    figure: Figure = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The paper's runtime table: each model's training step, its samples one at a time and in bulk, peak memory, and how near the
    step is to the least time that this machine could take for it.

    Steps are whole ones, on made-up data of the right shape, so no data set is needed. Beside the recipes there are fc3072-snf,
    fc3072-exact, fc4096-snf and fc4096-exact, wider fully connected flows, and mnist-fc-bare and fc3072-bare, the matrix products
    and the optimiser of such a step alone. A model that fails leaves a row that says so.
    """
    where = the_device(device)
    chosen = choose(models) if models else default_models(where)
    if memory and not models:
        chosen += [MODELS["fc4096-snf"]]
    effort = _effort(seconds, quick)
    if memory and figure:
        raise ValueError("--figure: expected none with --memory, which is a table alone")
    files = _files(json, None if memory else figure, draws=not memory)
    with using_precision(precision.value), _progress("steps", len(chosen), quiet) as told:
        if memory:
            made = memory_table(chosen, where, told=told)
            _finish(made, files, lambda path: None)
            return
        made, measured = steps_table(chosen, where, effort=effort, memory=not (quick and where.type == "cpu"), told=told)
    floors = {each["model"]: each["floor_ms"] for each in made.details}
    _finish(made, files, lambda path: timings.bars(path, made.title, _step_bars(measured, floors)), _for_screen(made))


@command(
    "scaling",
    "selfnorm bench scaling",
    "selfnorm bench scaling --largest 4096 --device cuda --json results/scaling-h200.json",
    of=bench,
)
def scaling(
    largest: Annotated[int | None, typer.Option(metavar="D", help="Up to this dimension; 8192, on a CPU 2048.")] = None,
    seconds: Seconds = None,
    quick: Quick = False,
    precision: PrecisionOption = Rounding.tf32,
    json: JsonPath = None,
    figure: Figure = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The paper's timing figure: one fully connected layer at batch 128, D = 32, 64, …: learned, Newton–Schulz, sketch, relative,
    LU and exact, with the slopes of log time against log D, and from which D on one is faster than another."""
    where = the_device(device)
    dimensions = sizes((2048 if where.type == "cpu" else 8192) if largest is None else largest)
    effort = _effort(seconds, quick, usual=1.0)
    files = _files(json, figure)
    with using_precision(precision.value), _progress("scaling", len(dimensions), quiet) as told:
        made, points = scaling_table(dimensions, where, effort=effort, told=told)
    _finish(made, files, lambda path: _draw_growth(path, made.title, points))


@command("peers", "selfnorm bench peers", "selfnorm bench peers --cifar --json results/peers-h200.json", of=bench)
def peers(
    cifar: Annotated[bool, typer.Option("--cifar", help="With Glows for CIFAR-10, too; on a CPU they take minutes.")] = False,
    images: Annotated[
        bool | None,
        typer.Option("--images/--no-images", help="With Glows for MNIST; by default not on a CPU."),
    ] = None,
    seconds: Seconds = None,
    quick: Quick = False,
    precision: PrecisionOption = Rounding.tf32,
    json: JsonPath = None,
    figure: Figure = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Training steps of other libraries' flows beside ours, at the same shapes and in the same run: zuko, nflows and normflows,
    those of them that are installed."""
    where = the_device(device)
    images = where.type != "cpu" if images is None else images
    shapes: list[tuple[int, ...]] = [FC, *([MNIST] if images else []), *([CIFAR] if cifar else [])]
    effort = _effort(seconds, quick)
    files = _files(json, figure)
    total = sum(2 + sum(peer.shape == shape for peer in PEERS) for shape in shapes)
    with using_precision(precision.value), _progress("peers", total, quiet) as told:
        made, rows = peers_table(shapes, where, effort=effort, told=told)
    _finish(made, files, lambda path: timings.bars(path, made.title, _peer_bars(rows)))


def _effort(seconds: float | None, quick: bool, usual: float = 2.0) -> Effort:
    if seconds is not None and not 0 < seconds <= 3600:
        raise ValueError(f"--seconds: expected a time above 0 and up to 3600, got {seconds:g}")
    return Effort.of(seconds if seconds is not None else 0.3 if quick else usual)


def _files(json: Path | None, figure: Path | None, draws: bool = True) -> tuple[Path | None, Path | None]:
    """Where to write, looked at before hours of measuring."""
    if figure is not None and figure.suffix.lower() != ".png":
        raise ValueError(f"--figure: expected a name that ends in .png, got {figure}")
    if json is not None and json.suffix.lower() == ".png":
        raise ValueError(f"--json: expected another name than a picture's, got {json}")
    for option, path in (("--json", json), ("--figure", figure)):
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{option}: expected a file to write, got the folder {path}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ValueError(f"{option}: expected a folder to write to, got {error.strerror} at {path.parent}") from None
    if draws and figure is None and json is not None:
        figure = json.with_suffix(".png")
    return json, figure


def _finish(
    made: BenchTable,
    files: tuple[Path | None, Path | None],
    draw: Callable[[Path], None],
    shown: tuple[Sequence[str], list[list[Cell]]] | None = None,
) -> None:
    """Print the table, write it, draw it: in this order, since what goes wrong with a file must not cost the figures."""
    columns, rows = shown or (made.columns, made.rows)
    printed = table(made.title, columns, ([_text(cell) for cell in row] for row in rows))
    OUT.print(printed, width=max(OUT.width, 160), crop=False)
    OUT.print(made.about)
    clock = made.source.get("SM clock")
    if clock:
        OUT.print(f"SM clock: {clock}")
    for failure in made.failures:
        OUT.print(failure)
    json, figure = files
    if json is not None:
        made.write(json)
        OUT.print(f"  {json}")
    if figure is not None and any(key.endswith("_ms") and value for row in made.details for key, value in row.items()):
        draw(figure)
        OUT.print(f"  {figure}")
    if made.failures:
        raise typer.Exit(3)


def _for_screen(made: BenchTable) -> tuple[Sequence[str], list[list[Cell]]]:
    """A table without its columns that are empty all the way down."""
    filled = [index for index in range(len(made.columns)) if any(row[index] is not None for row in made.rows)]
    return [made.columns[index] for index in filled], [[row[index] for index in filled] for row in made.rows]


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) and cell >= 10_000 else f"{cell}"


def _step_bars(measured: Sequence[Measured], floors: dict[str, float | None]) -> list[Bar]:
    return [
        _bar(each.model.name, each.step, " ".join(map(str, each.model.family)), floors.get(each.model.name))
        for each in measured
        if each.step
    ]


def _peer_bars(rows: Sequence[Row]) -> list[Bar]:
    return [
        _bar(f"{row.name}, {'×'.join(map(str, row.shape))}", row.step, "ours" if row.library == "selfnorm" else "theirs")
        for row in rows
        if row.step
    ]


def _bar(label: str, timing: Timing, group: str, floor_ms: float | None = None) -> Bar:
    return Bar(label, 1e3 * timing.median, 1e3 * timing.low, 1e3 * timing.high, floor_ms, group)


def _draw_growth(path: Path, title: str, points: Sequence[Point]) -> None:
    names = {PARTS[0]: "forward and backward", PARTS[1]: "with Adam"}
    times = {name: times_of(points, part) for part, name in names.items()}
    slopes = {name: {kind: slope(found) for kind, found in kinds.items()} for name, kinds in times.items()}
    milliseconds = {
        name: {kind: {size: 1e3 * seconds for size, seconds in found.items()} for kind, found in kinds.items()}
        for name, kinds in times.items()
    }
    timings.growth(path, title, milliseconds, slopes)


@contextmanager
def _progress(what: str, total: int, quiet: bool) -> Iterator[Callable[[str], object]]:
    """A callback for lines of progress: above a bar where there is a terminal, else with the time that has passed."""
    if quiet:
        yield lambda line: None
        return
    began = time.monotonic()
    if not ERR.is_terminal:
        yield lambda line: ERR.print(f"{time.monotonic() - began:5.0f} s  {line}")
        return
    columns = (TextColumn("[bold]{task.description}[/]"), BarColumn(bar_width=30), TimeElapsedColumn())
    with Progress(*columns, console=ERR, transient=True) as progress:
        task = progress.add_task(what, total=total)

        def show(line: str) -> None:
            progress.console.print(line)
            if not line.startswith("ceilings"):
                progress.advance(task)

        yield show

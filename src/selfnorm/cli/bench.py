"""`selfnorm bench`: how long training steps and samples take, how layers scale, and how other libraries do."""

from __future__ import annotations

import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from selfnorm.bench.models import MODELS, choose, default_models
from selfnorm.bench.peers import CIFAR, FC, MISSING, MNIST, PEERS, PeerRow, peers_table
from selfnorm.bench.scaling import KINDS, STEP_PARTS, Point, scaling_table, sizes, slope, times_of
from selfnorm.bench.step_memory import memory_table
from selfnorm.bench.steps import Measured
from selfnorm.bench.steps_table import steps_table
from selfnorm.bench.table import BenchTable, Cell, LineCallback
from selfnorm.bench.timing import Effort, Timing
from selfnorm.cli.display import ERR, OUT, table
from selfnorm.cli.options import Debug, Device, Quiet, Rounding, command, the_device
from selfnorm.report import timings
from selfnorm.report.timings import Bar
from selfnorm.runtime.precision import precision as using_precision

bench = typer.Typer(
    help="Time training steps, samples, layers as they grow, and other libraries.",
    epilog="Examples:\n\n`selfnorm bench steps --quick --models 'digits-*'`\n\n`selfnorm bench scaling --quick --largest 512`\n\n"
    "`selfnorm bench peers --json peers.json`",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

PIPED = 80  # columns, where there is no terminal to ask
JsonPath = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table here, for results/.")]
Figure = Annotated[Path | None, typer.Option("--figure", metavar="FILE", help="Draw it here, as .png; else beside --json.")]
Seconds = Annotated[float | None, typer.Option(metavar="S", help="Measure each for about so long; 2, or 0.3 with --quick.")]
Shorter = Annotated[float | None, typer.Option(metavar="S", help="Measure each for about so long; 1, or 0.3 with --quick.")]
Quick = Annotated[bool, typer.Option("--quick", help="A rough look: short measurements.")]
PrecisionOption = Annotated[Rounding, typer.Option(help="Of products on a GPU; bf16 also of coupling networks anywhere.")]


@command(
    "steps",
    "selfnorm bench steps",
    "selfnorm bench steps --quick --models 'digits-*'",
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
    quick: Annotated[bool, typer.Option("--quick", help="A rough look: short measurements, no peak memory on a CPU.")] = False,
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
    for option, given in (("--figure", figure is not None), ("--seconds", seconds is not None), ("--quick", quick)):
        if memory and given:
            why = "a table alone" if option == "--figure" else "not timed"
            raise ValueError(f"{option}: expected none with --memory, which is {why}, got one")
    total = sum(not (memory and model.bare) for model in chosen)
    if not total:
        names = ", ".join(model.name for model in chosen)
        raise ValueError(f"--memory: expected a whole model, got {names}, which holds what its flow does; name that instead")
    effort = _effort(seconds, quick)
    files = _files(json, figure, draws=not memory)
    with using_precision(precision.value), _progress("steps", total, quiet) as (told, now):
        if memory:
            made = memory_table(chosen, where, on_result=told, on_status=now)
        else:
            peaks = not (quick and where.type == "cpu")
            made, measured = steps_table(chosen, where, effort=effort, memory=peaks, on_result=told, on_status=now)
    if memory:
        _finish(made, files, quiet)
        return
    floors = {each["model"]: each["floor_ms"] for each in made.details}
    _finish(made, files, quiet, lambda path: timings.bars(path, made.heading, _step_bars(measured, floors)))


@command(
    "scaling",
    "selfnorm bench scaling",
    "selfnorm bench scaling --quick --largest 512",
    "selfnorm bench scaling --largest 4096 --device cuda --json results/scaling-h200.json",
    of=bench,
)
def scaling(
    largest: Annotated[int | None, typer.Option(metavar="D", help="Up to this power of two; 8192, on a CPU 2048.")] = None,
    seconds: Shorter = None,
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
    with using_precision(precision.value), _progress("scaling", len(dimensions), quiet) as (told, now):
        made, points = scaling_table(dimensions, where, effort=effort, on_result=told, on_status=now)
    _finish(made, files, quiet, lambda path: _draw_growth(path, made.heading, points), _by_part(made))


@command(
    "peers",
    "selfnorm bench peers",
    "selfnorm bench peers --quick --images",
    "selfnorm bench peers --cifar --json results/peers-h200.json",
    of=bench,
)
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
    with using_precision(precision.value), _progress("peers", total, quiet) as (told, now):
        made, rows = peers_table(shapes, where, effort=effort, on_result=told, on_status=now)
    absent = list(dict.fromkeys(row.library for row in rows if row.note == MISSING))
    more = [f"not installed: {', '.join(absent)}; to have them measured: pip install {' '.join(absent)}"] if absent else []
    without_notes = Screen(made.heading, made.columns[:-1], [row[:-1] for row in made.rows])  # failures are told of below
    _finish(made, files, quiet, lambda path: timings.bars(path, made.heading, _peer_bars(rows)), [without_notes], more)


def _effort(seconds: float | None, quick: bool, usual: float = 2.0) -> Effort:
    if seconds is not None and not 0 < seconds <= 3600:
        raise ValueError(f"--seconds: expected a time above 0 and up to 3600, got {seconds:g}")
    return Effort.of(seconds if seconds is not None else 0.3 if quick else usual)


def _files(json: Path | None, figure: Path | None, draws: bool = True) -> tuple[Path | None, Path | None]:
    """Where to write, looked at before hours of measuring."""
    if figure is not None and figure.suffix.lower() != ".png":
        raise ValueError(f"--figure: expected a name that ends in .png, got {figure}")
    if json is not None and json.suffix != ".json":
        raise ValueError(f"--json: expected a name that ends in .json, got {json}")
    if draws and figure is None and json is not None:
        figure = json.with_suffix(".png")
    for option, path in (("--json", json), ("--figure", figure)):
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{option}: expected a file to write, got the folder {path}")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ValueError(f"{option}: expected a folder to write to, got {error.strerror} at {path.parent}") from None
    return json, figure


class Screen(NamedTuple):
    """A table as it is shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def _finish(
    made: BenchTable,
    files: tuple[Path | None, Path | None],
    quiet: bool,
    draw: Callable[[Path], None] | None = None,
    screens: Sequence[Screen] | None = None,
    more: Sequence[str] = (),
) -> None:
    """Print the table, write it, draw it: in this order, since what goes wrong with a file must not cost the figures.

    screens:  what to show instead of the table as it is.
    more:     lines for under it.
    """
    if made.stopped and not made.rows:
        ERR.print("selfnorm: stopped before there was anything to show; nothing was written")
        raise typer.Exit(130)
    width = OUT.width if OUT.is_terminal else PIPED
    tables = [part for screen in screens or [Screen(made.heading, made.columns, made.rows)] for part in _fitting(screen, width)]
    for number, part in enumerate(tables):
        if number:
            OUT.print()
        _print_table(part, width)
    seen = {column for part in tables for column in part.columns}
    notes = " ".join(note.text for note in made.notes if not note.columns or seen & set(note.columns))
    for line in [
        *([] if quiet else [notes]),
        *(f"{name}: {made.source[name]}" for name in ("SM clock", "taken by others") if made.source.get(name)),
        *more,
        *made.failures,
    ]:
        OUT.print(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False))
    json, figure = files
    if json is not None:
        with _naming(json):
            made.write(json)
        OUT.print(f"  {json}")
    if draw and figure is not None and any(key.endswith("_ms") and value for row in made.details for key, value in row.items()):
        with _naming(figure):
            draw(figure)
        OUT.print(f"  {figure}")
    if made.stopped:
        written = "what was done is written, marked as partial" if json or figure else "nothing was written"
        ERR.print(f"selfnorm: {made.stopped}; {written}")
        raise typer.Exit(130)
    if made.failures:
        raise typer.Exit(3)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A full disk says no name by itself."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path}: expected to write it, got {error.strerror or error}") from None


def _fitting(screen: Screen, width: int) -> Iterator[Screen]:
    """The table without the columns that are empty all the way down, as several if it is wider than this with all its cells
    broken at blanks; each has the first column."""
    title, columns, rows = screen
    filled = [at for at in range(1, len(columns)) if any(row[at] is not None for row in rows)]
    label = max(len(text) for text in (columns[0], *(_text(row[0]) for row in rows)))
    groups: list[list[int]] = [[]]
    taken = label
    for at in filled:
        needed = 1 + _longest_word([columns[at], *(_text(row[at]) for row in rows)])
        if groups[-1] and taken + needed > width:
            groups.append([])
            taken = label
        groups[-1].append(at)
        taken += needed
    for number, group in enumerate(groups):
        kept = [0, *group]
        yield Screen("" if number else title, [columns[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _print_table(screen: Screen, width: int) -> None:
    """With cells and headers on one line each if there is room; else with headers broken at blanks, and if need be cells, too."""
    header = [_glued(name) for name in screen.columns]
    rows = [[_text(cell) for cell in row] for row in screen.rows]
    columns = list(zip(header, *rows, strict=True))
    whole = [max(map(len, column)) for column in columns]
    words = [whole[0], *(_longest_word(column) for column in columns[1:])]
    cells = [whole[0], *(max(_longest_word(column[:1]), *map(len, column[1:])) for column in columns[1:])]
    layouts = ((whole, 2), (cells, 2), (cells, 1), (words, 1))
    widths, gap = next((each for each in layouts if _total(*each) <= width), layouts[-1])
    broken = ["\n".join(textwrap.wrap(name, wide)) for name, wide in zip(header, widths, strict=True)]
    printed = table("", broken, rows)
    printed.title, printed.padding = None, (0, gap, 0, 0)
    for column, wide in zip(printed.columns, widths, strict=True):
        column.width = wide
        column.justify = "left" if column is printed.columns[0] else "right"
    if screen.title:
        OUT.print(Text(textwrap.fill(screen.title, width), style="bold"))
    OUT.print(printed, width=max(width, _total(widths, gap)), crop=False)


def _total(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _longest_word(texts: Iterable[str]) -> int:
    return max(len(word) for text in texts for word in _glued(text).split(" "))


def _glued(text: str) -> str:
    """So that no line begins with a stroke or a per cent sign."""
    return text.replace(" /", "\xa0/").replace(" %", "\xa0%")


def _by_part(made: BenchTable) -> list[Screen]:
    """A table for the gradient, and one with Adam, with narrower columns."""
    columns = ["D", *KINDS, made.columns[-1]]
    return [
        Screen(f"{made.heading}: ms, {part}", columns, [[row[0], *row[2:]] for row in made.rows if row[1] == part])
        for part in STEP_PARTS
    ]


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) and cell >= 10_000 else f"{cell}"


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


def _draw_growth(path: Path, title: str, points: Sequence[Point]) -> None:
    names = {STEP_PARTS[0]: "forward and backward", STEP_PARTS[1]: "with Adam"}
    times = {name: times_of(points, part) for part, name in names.items()}
    slopes = {name: {kind: slope(found) for kind, found in kinds.items()} for name, kinds in times.items()}
    milliseconds = {
        name: {kind: {size: 1e3 * seconds for size, seconds in found.items()} for kind, found in kinds.items()}
        for name, kinds in times.items()
    }
    timings.growth(path, title, milliseconds, slopes)


@contextmanager
def _progress(what: str, total: int, quiet: bool) -> Iterator[tuple[LineCallback, LineCallback]]:
    """Callbacks for what was measured, one call for each of the total, and for what is being measured now: lines above a bar
    where there is a terminal, else lines with the time that has passed and how many are done."""
    if quiet:
        yield (lambda line: None), (lambda line: None)
        return
    began, done = time.monotonic(), 0
    if not ERR.is_terminal:

        def say(line: str) -> None:
            ERR.print(f"{time.monotonic() - began:5.0f} s  {done}/{total}  {line}")

        def count(line: str) -> None:
            nonlocal done
            done += 1
            say(line)

        yield count, lambda line: say(f"… {line}")
        return
    bar = (TextColumn("{task.completed}/{task.total}"), BarColumn(bar_width=20), TimeElapsedColumn())
    room = max(20, ERR.width - 40)  # beside the bar
    with Progress(*bar, TextColumn("{task.description}", markup=False), console=ERR, transient=True) as progress:
        task = progress.add_task(what, total=total)

        def show(line: str) -> None:
            progress.console.print(line)
            progress.advance(task)

        yield show, lambda line: progress.update(task, description=line if len(line) <= room else f"{line[: room - 1]}…")

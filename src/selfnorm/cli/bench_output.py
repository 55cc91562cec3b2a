"""Output of the bench verbs: progress while they measure, then the table, its files and its figure."""

from __future__ import annotations

import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from selfnorm.bench.table import BenchTable, Cell
from selfnorm.bijection import located
from selfnorm.cli.console import ERR, OUT, build_table
from selfnorm.cli.outputs import check_output
from selfnorm.runtime.files import is_stream

# Entries of a table's source that are shown below it, and what they are called there.
CONDITIONS = {"SM clock": "SM clock", "taken by others": "CPU used by other processes"}
DEFAULT_WIDTH = 80  # columns, if there is no terminal to ask


def output_files(json: Path | None, figure: Path | None, force: bool, draws: bool = True) -> tuple[Path | None, Path | None]:
    """Returns the paths of the table and the figure. Raises ValueError, before hours of measuring, if one cannot be written."""
    if figure is not None and figure.suffix.lower() != ".png":
        raise ValueError(f"--figure: expected a name that ends in .png, got {figure}")
    if json is not None and json.suffix != ".json":
        raise ValueError(f"--json: expected a name that ends in .json, got {json}")
    if draws and figure is None and json is not None:
        figure = json.with_suffix(".png")
    for option, path in (("--json", json), ("--figure", figure)):
        if path is None:
            continue
        if is_stream(path):
            raise ValueError(f"{option}: expected a regular file to write, got {path}")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ValueError(f"{option}: expected a folder to write to, got {error.strerror} at {path.parent}") from None
        with located(option):
            check_output(path, (path.suffix.lower(),), force)
    return json, figure


class ScreenTable(NamedTuple):
    """A table as it is printed."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def deliver(
    table: BenchTable,
    files: tuple[Path | None, Path | None],
    quiet: bool,
    draw: Callable[[Path], None] | None = None,
    screens: Sequence[ScreenTable] | None = None,
    more: Sequence[str] = (),
) -> None:
    """Prints the table, then writes it, then draws it, so that a file that cannot be written loses no results.

    screens:  tables to print instead of this one.
    more:     lines to print below it.

    Exits with status 130 if measuring was stopped, and with 3 if a measurement failed.
    """
    if table.stopped and not table.rows:
        ERR.print("selfnorm: stopped before the first measurement; nothing was written")
        raise typer.Exit(130)
    width = OUT.width if OUT.is_terminal else DEFAULT_WIDTH
    screens = screens or [ScreenTable(table.heading, table.columns, table.rows)]
    parts = [part for screen in screens for part in _split_to_fit(screen, width)]
    for number, part in enumerate(parts):
        if number:
            OUT.print()
        _print_screen_table(part, width)
    seen = {column for part in parts for column in part.columns}
    notes = " ".join(note.text for note in table.notes if not note.columns or seen & set(note.columns))
    for line in [
        *([] if quiet else [notes]),
        *(f"{label}: {table.source[name]}" for name, label in CONDITIONS.items() if table.source.get(name)),
        *more,
        *table.failures,
    ]:
        OUT.print(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False))
    json, figure = files
    if json is not None:
        with _naming_file(json):
            table.write(json)
        OUT.print(f"  {json}")
    if draw and figure is not None and any(key.endswith("_ms") and value for row in table.details for key, value in row.items()):
        with _naming_file(figure):
            draw(figure)
        OUT.print(f"  {figure}")
    if table.stopped:
        written = "what was measured is written, marked as partial" if json or figure else "nothing was written"
        ERR.print(f"selfnorm: {table.stopped}; {written}")
        raise typer.Exit(130)
    if table.failures:
        raise typer.Exit(3)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Adds the file's name to errors such as a full disk's."""
    try:
        yield
    except OSError as error:
        if str(path) in str(error):
            raise
        raise OSError(f"{path}: expected to write it, got {error.strerror or error}") from None


def _split_to_fit(screen: ScreenTable, width: int) -> Iterator[ScreenTable]:
    """Returns the table without its empty columns, split into several if it is too wide even with its cells broken at blanks.

    Each part repeats the first column.
    """
    title, columns, rows = screen
    filled = [at for at in range(1, len(columns)) if any(row[at] is not None for row in rows)]
    label = max(len(text) for text in (columns[0], *(_cell_text(row[0]) for row in rows)))
    groups: list[list[int]] = [[]]
    taken = label
    for at in filled:
        needed = 1 + _longest_word([columns[at], *(_cell_text(row[at]) for row in rows)])
        if groups[-1] and taken + needed > width:
            groups.append([])
            taken = label
        groups[-1].append(at)
        taken += needed
    for number, group in enumerate(groups):
        kept = [0, *group]
        yield ScreenTable("" if number else title, [columns[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _print_screen_table(screen: ScreenTable, width: int) -> None:
    """Prints cells and headers on one line each if there is room; otherwise breaks headers at blanks, and if necessary cells."""
    header = [_unbroken(name) for name in screen.columns]
    rows = [[_cell_text(cell) for cell in row] for row in screen.rows]
    columns = list(zip(header, *rows, strict=True))
    whole = [max(map(len, column)) for column in columns]
    words = [whole[0], *(_longest_word(column) for column in columns[1:])]
    cells = [whole[0], *(max(_longest_word(column[:1]), *map(len, column[1:])) for column in columns[1:])]
    layouts = ((whole, 2), (cells, 2), (cells, 1), (words, 1))
    widths, gap = next((each for each in layouts if _total_width(*each) <= width), layouts[-1])
    broken = ["\n".join(textwrap.wrap(name, wide)) for name, wide in zip(header, widths, strict=True)]
    printed = build_table("", broken, rows)
    printed.title, printed.padding = None, (0, gap, 0, 0)
    for column, wide in zip(printed.columns, widths, strict=True):
        column.width = wide
        column.justify = "left" if column is printed.columns[0] else "right"
    if screen.title:
        OUT.print(Text(textwrap.fill(screen.title, width), style="bold"))
    OUT.print(printed, width=max(width, _total_width(widths, gap)), crop=False)


def _total_width(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _longest_word(texts: Iterable[str]) -> int:
    return max(len(word) for text in texts for word in _unbroken(text).split(" "))


def _unbroken(text: str) -> str:
    """Returns the text with blanks that do not break before a slash or a per cent sign."""
    return text.replace(" /", "\xa0/").replace(" %", "\xa0%")


def _cell_text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) and cell >= 10_000 else f"{cell}"


@contextmanager
def show_measurements(what: str, total: int, quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Context manager that yields two callbacks, each of which shows a line: for a finished measurement, and for the current one.

    A terminal shows lines above a progress bar; otherwise each line has the elapsed time and the number of measurements done.
    """
    if quiet:
        yield (lambda line: None), (lambda line: None)
        return
    began, done = time.monotonic(), 0
    if not ERR.is_terminal:

        def print_line(line: str) -> None:
            ERR.print(f"{time.monotonic() - began:5.0f} s  {done}/{total}  {line}")

        def count(line: str) -> None:
            nonlocal done
            done += 1
            print_line(line)

        yield count, lambda line: print_line(f"… {line}")
        return
    bar = (TextColumn("{task.completed}/{task.total}"), BarColumn(bar_width=20), TimeElapsedColumn())
    room = max(20, ERR.width - 40)  # next to the bar
    with Progress(*bar, TextColumn("{task.description}", markup=False), console=ERR, transient=True) as progress:
        task = progress.add_task(what, total=total)

        def show(line: str) -> None:
            progress.console.print(line)
            progress.advance(task)

        yield show, lambda line: progress.update(task, description=line if len(line) <= room else f"{line[: room - 1]}…")

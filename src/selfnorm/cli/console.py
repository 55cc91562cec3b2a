"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from selfnorm.report.timings import three_digits
from selfnorm.runtime.escapes import escaped
from selfnorm.runtime.files import json_text
from selfnorm.runtime.standard_output import discard_unwritten


class PlainConsole(Console):
    """A console that shows the control characters in what it prints; its own, for colours and progress, reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escaped(text), **options)  # before rich drops some control characters

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that is being handled; rich would exit, which looks like any other SystemExit


# Without markup, since a path may contain brackets.
OUT = PlainConsole(soft_wrap=True, highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 160)
ERR = PlainConsole(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_json(record: Any) -> None:
    """Prints one line of JSON to stdout. If the reader has left, as `| head` does, the run continues and output is discarded."""
    try:
        print(json_text(record), flush=True)
    except BrokenPipeError:
        discard_unwritten(sys.stdout, sys.stderr)


def build_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Returns a table without borders; its first column is never cut."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    return table


def short_number(value: float | None) -> str:
    """Returns three significant digits, or all digits before the decimal point if there are more; – for None."""
    return "–" if value is None else three_digits(value)

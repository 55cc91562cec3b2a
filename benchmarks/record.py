"""Shared by the scripts: the option --json, and a table that is printed and stored as `selfnorm.report.results` reads it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfnorm.runtime.files import write_text
from selfnorm.train.stopping import StoppedError

Cell = str | float | None


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns an argument parser with the option --json."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write the figures here, with command, commit, machine and date")
    return made


def at_least(least: int) -> Callable[[str], int]:
    """Returns the type of an option that takes a whole number of at least `least`."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more, got {text!r}")
        return int(text)

    return number


def command() -> str:
    """Returns the command line without --json."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def run(main: Callable[[], None]) -> None:
    """Runs a script, and reports a ValueError, or that it was stopped, as one line."""
    try:
        main()
    except (ValueError, StoppedError) as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")


def record(
    path: Path | None,
    *,
    title: str,
    about: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    provenance: Mapping[str, str | None],
    metrics: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Prints the rows. If a path is given, writes everything there, with metrics that are too long for a table."""
    for row in rows:
        print("   ".join(f"{column}: {cell}" for column, cell in zip(columns, row, strict=True) if cell is not None))
    if path:
        report = {"title": title, "about": about, "columns": columns, "rows": rows, "provenance": provenance}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1, ensure_ascii=False)
        if metrics:
            lines = ",\n  ".join(map(json.dumps, metrics))
            text = text.removesuffix("\n}") + f',\n "metrics": [\n  {lines}\n ]\n}}'
        write_text(path, text + "\n")

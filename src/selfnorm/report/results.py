"""RESULTS.md, made of the measurements in results/*.json. To make it anew, in the repository's root:

    python -m selfnorm.report.results

A file holds one table: title, about (a sentence or two), columns, rows (a list of cells each, null for none), and provenance,
which must name the command, commit, machine, date and torch that it was measured with, and may name more. Sections follow the
files' names, cells are shown as they are stored, with a picture of the same name if there is one, and the same files always make
the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from selfnorm.runtime.files import write_text

HEADER = """# Results

Each table was measured by the command under it. This page is made of `results/*.json` by `python -m selfnorm.report.results`:
change those, not this.
"""
PARTS: dict[str, type] = {"title": str, "about": str, "columns": list, "rows": list, "provenance": dict}
PROVENANCE = ("command", "commit", "machine", "date", "torch")


def build(results_dir: str | Path) -> str:
    """The text of RESULTS.md for a folder of measurements."""
    folder = Path(results_dir)
    if not folder.is_dir():
        raise ValueError(f"results: expected a folder of measurements, got {folder}; run this in the repository's root")
    return "\n".join([HEADER, *(_section(path) for path in sorted(folder.glob("*.json")))])


def write(results_dir: str | Path, output: str | Path) -> None:
    """Write it, if it changed."""
    text, output = build(results_dir), Path(output)
    if not output.exists() or output.read_text(encoding="utf-8") != text:
        write_text(output, text)


def _section(path: Path) -> str:
    result = _read(path)
    rows = result["rows"]
    numeric = [all(isinstance(row[index], int | float | None) for row in rows) for index in range(len(result["columns"]))]
    table = [_line(result["columns"]), _line("---:" if number else "---" for number in numeric), *map(_line, rows)]
    source = f"{_provenance(result['provenance'])} · `results/{path.name}`"
    figure = path.with_suffix(".png")
    picture = [f"![{result['title']}](results/{figure.name})", ""] if figure.exists() else []
    return "\n".join([f"## {result['title']}", "", result["about"], "", *table, "", *picture, source, ""])


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: expected JSON, got {error}") from error
    if not isinstance(result, dict):
        raise ValueError(f"{path.name}: expected an object with {', '.join(PARTS)}, got a {type(result).__name__}")
    for part, kind in PARTS.items():
        if not isinstance(result.get(part), kind):
            raise ValueError(f"{path.name}: expected {part!r} to be a {kind.__name__}, got {result.get(part)!r}")
    width = len(result["columns"])
    for index, row in enumerate(result["rows"]):
        if not isinstance(row, list) or len(row) != width:
            raise ValueError(f"{path.name}: expected {width} cells in row {index}, one for each column, got {row!r}")
    missing = [name for name in PROVENANCE if name not in result["provenance"]]
    if missing:
        raise ValueError(f"{path.name}: expected provenance with {', '.join(PROVENANCE)}, got none for {', '.join(missing)}")
    return result


def _provenance(source: Mapping[str, Any]) -> str:
    """On one line: the command, then the rest, what every table has first."""
    names = [*PROVENANCE[1:], *(name for name in source if name not in PROVENANCE)]
    plain = ("machine", "date")  # say by themselves what they are
    rest = [("" if name in plain else f"{name} ") + _cell(source[name]) for name in names]
    return " · ".join([f"`{source['command']}`", *rest])


def _line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return str(value).replace("|", r"\|").replace("\n", " ")


if __name__ == "__main__":
    write("results", "RESULTS.md")

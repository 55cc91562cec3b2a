"""Generates RESULTS.md from the measurements in results/*.json. Run in the root of the repository:

    python -m selfnorm.report.results

Each file holds one table: title, about (a sentence or two), columns, rows (lists of cells, null if empty), and provenance, which
must name the command, commit, machine, date and torch version of the measurement, and may name more. Sections are sorted by
file name. Cells are shown as stored, followed by the picture of the same name if there is one. The same files always give the
same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from selfnorm.runtime.files import write_text

PAGE_HEADER = """# Results

Each table was measured by the command below it. `python -m selfnorm.report.results` generates this page from `results/*.json`.
Do not edit it: to change a table, run its command again with `--json`.
"""
RESULT_FIELDS: dict[str, type] = {"title": str, "about": str, "columns": list, "rows": list, "provenance": dict}
PROVENANCE_FIELDS = ("command", "commit", "machine", "date", "torch")


def build(results_dir: str | Path) -> str:
    """Returns the text of RESULTS.md for a folder of measurements."""
    folder = Path(results_dir)
    if not folder.is_dir():
        raise ValueError(f"results: expected a folder of measurements, got {folder}; run this in the root of the repository")
    return "\n".join([PAGE_HEADER, *(_markdown_section(path) for path in sorted(folder.glob("*.json")))])


def write_results(results_dir: str | Path, output: str | Path) -> None:
    """Writes the text of `build` to the output file, unless it is already there."""
    text, output = build(results_dir), Path(output)
    if not output.exists() or output.read_text(encoding="utf-8") != text:
        write_text(output, text)


def _markdown_section(path: Path) -> str:
    result = _read_result(path)
    rows = result["rows"]
    numeric = [all(isinstance(row[index], int | float | None) for row in rows) for index in range(len(result["columns"]))]
    table = [
        _markdown_row(result["columns"]),
        _markdown_row("---:" if number else "---" for number in numeric),
        *map(_markdown_row, rows),
    ]
    source = f"{_provenance_line(result['provenance'])} · `results/{path.name}`"
    figure = path.with_suffix(".png")
    picture = [f"![{result['title']}](results/{figure.name})", ""] if figure.exists() else []
    return "\n".join([f"## {result['title']}", "", result["about"], "", *table, "", *picture, source, ""])


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: expected JSON, got {error}") from error
    if not isinstance(result, dict):
        raise ValueError(f"{path.name}: expected an object with {', '.join(RESULT_FIELDS)}, got a {type(result).__name__}")
    for part, kind in RESULT_FIELDS.items():
        if not isinstance(result.get(part), kind):
            raise ValueError(f"{path.name}: expected {part!r} to be a {kind.__name__}, got {result.get(part)!r}")
    width = len(result["columns"])
    for index, row in enumerate(result["rows"]):
        if not isinstance(row, list) or len(row) != width:
            raise ValueError(f"{path.name}: expected {width} cells in row {index}, one for each column, got {row!r}")
    missing = [name for name in PROVENANCE_FIELDS if name not in result["provenance"]]
    if missing:
        raise ValueError(
            f"{path.name}: expected provenance with {', '.join(PROVENANCE_FIELDS)}, got none for {', '.join(missing)}"
        )
    return result


def _provenance_line(source: Mapping[str, Any]) -> str:
    """Returns the provenance as one line: command, the other required fields, then any further ones."""
    names = [*PROVENANCE_FIELDS[1:], *(name for name in source if name not in PROVENANCE_FIELDS)]
    plain = ("machine", "date")  # need no label
    rest = [("" if name in plain else f"{name} ") + _markdown_cell(source[name]) for name in names]
    return " · ".join([f"`{source['command']}`", *rest])


def _markdown_row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(_markdown_cell, cells))} |"


def _markdown_cell(value: Any) -> str:
    if value is None:
        return "–"
    return str(value).replace("|", r"\|").replace("\n", " ")


if __name__ == "__main__":
    write_results("results", "RESULTS.md")

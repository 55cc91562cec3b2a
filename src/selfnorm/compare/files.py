"""The files of a comparison, and which files of these names it may replace."""

from __future__ import annotations

import json
from pathlib import Path

COMPARISON_KEYS = {"title", "about", "columns", "rows", "provenance"}
LARGEST = 1 << 24  # bytes of a table that is read to find out where it comes from


def comparison_files(folder: Path) -> tuple[Path, Path, Path]:
    """Returns the paths of the table, of the lines for each run, and of the figure, in the order in which they are written."""
    return folder / "comparison.json", folder / "comparison.csv", folder / "comparison.png"


def expect_own_files(folder: Path) -> None:
    """Raises ValueError if a folder has a file of one of these names that no comparison has written."""
    table, lines, figure = comparison_files(folder)
    own = _is_table(table)
    # The table is written before the figure, so there is none without it.
    for path, is_own in ((table, own), (lines, _has_lines(lines)), (figure, own and figure.is_file())):
        if path.exists() and not is_own:
            raise ValueError(
                f"{path}: expected no file, or one that `selfnorm compare` wrote, got another; move it, or choose another folder "
                "with --run"
            )


def _is_table(path: Path) -> bool:
    try:
        stored = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size <= LARGEST else None
        return isinstance(stored, dict) and stored.keys() >= COMPARISON_KEYS and stored["columns"][0] == "recipe"
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def _has_lines(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(20).startswith(b"recipe,seed,outcome,")

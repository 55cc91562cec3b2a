"""A log of test runs: `pytest --counts=FILE` adds a row to a table that `selfnorm.report.results` can read.

Parts of one run, each with its own table, are added up by `python tests/support/counts.py PART... -o FILE`.
"""

import argparse
import json
from pathlib import Path

COLUMNS = ["date", "commit", "machine", "torch", "passed", "failed", "skipped", "minutes", "note"]
SUMMED = slice(4, 8)
TITLES = {"gpu_tests": "Tests that need a GPU", "slow_tests": "Slow tests"}
COMMANDS = {"gpu_tests": "make gpu-test", "slow_tests": "make test-slow"}


def row_of(stats, seconds, provenance):
    """One run as a row of the table."""
    passed, failed, errors, skipped = (len(stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped"))
    facts = [provenance[key] for key in ("date", "commit", "machine", "torch")]
    return [*facts, passed, failed + errors, skipped, round(seconds / 60, 1), ""]


def add_row(path, row):
    """Adds a row to the log, in place of an earlier one of the same commit, machine and date."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = [*(each for each in rows if each[:4] != row[:4]), row]
    table = {
        "title": TITLES.get(path.stem, path.stem),
        "about": "Each row is one run of all of them at a commit. Skipped are tests that only run without a GPU, or that need "
        "something else that was not there.",
        "columns": COLUMNS,
        "rows": rows,
        "provenance": {
            "command": COMMANDS.get(path.stem, "pytest"),
            "commit": row[1],
            "machine": row[2],
            "date": row[0],
            "torch": row[3],
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("parts", type=Path, nargs="+")
    options.add_argument("-o", "--output", type=Path, required=True)
    options.add_argument("--commit", help="if the machine did not know it")
    options.add_argument("--note", default="", help="what the numbers do not say")
    chosen = options.parse_args()
    rows = [json.loads(path.read_text(encoding="utf-8"))["rows"][-1] for path in chosen.parts]
    if len({tuple(row[:4]) for row in rows}) != 1:
        raise SystemExit(f"counts: expected parts of one run, got {[row[:4] for row in rows]}")
    total = [round(sum(column), 1) for column in zip(*(row[SUMMED] for row in rows), strict=True)]
    day, commit, machine, torch = rows[0][:4]
    add_row(chosen.output, [day, chosen.commit or commit, machine, torch, *total, chosen.note])


if __name__ == "__main__":
    main()

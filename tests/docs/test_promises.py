"""Every promise of docs/promises.md names a test that exists."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "promises.md"


def rows():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith("| promise")]


def test_every_promise_names_a_test():
    assert len(rows()) > 25
    assert [row for row in rows() if not re.search(r"\]\(\.\./tests/[^)]+\.py\)", row.rsplit(" | ", 1)[1])] == []


def test_the_tests_that_hold_promises_exist():
    named = re.findall(r"\]\(([^)]+\.py)\)(?:`::(\w+)`)?", "\n".join(rows()))
    sources = {path: (PAGE.parent / path).read_text(encoding="utf-8") for path, _ in named}
    assert [f"{path}::{name}" for path, name in named if f"\ndef {name}(" not in sources[path] and name] == []

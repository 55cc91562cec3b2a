"""Every test that docs/promises.md names exists."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "promises.md"


def test_the_tests_that_hold_promises_exist():
    named = re.findall(r"\]\(([^)]+\.py)\)`::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 10
    sources = {path: (PAGE.parent / path).read_text(encoding="utf-8") for path, _ in named}
    assert [f"{path}::{name}" for path, name in named if f"\ndef {name}(" not in sources[path]] == []

"""The property of every call, whatever its options and files: it does what it says, or says in one line why not."""

import re
import unicodedata
from collections.abc import Iterator

from fuzz.cases import Case, Outcome
from fuzz.runner import perform
from fuzz.whole import what_is_not_whole

CODES = {0, 1, 2, 3}  # docs/promises.md; no signal is sent here
LONGEST_LINE = 3000


def violations(case: Case) -> tuple[Outcome, list[str]]:
    """Runs a case, and returns its outcome and everything that is wrong with it, each as one line."""
    outcome = perform(case)
    return outcome, [" ".join(each.split()) for each in _wrong(case, outcome)]


def _wrong(case: Case, outcome: Outcome) -> Iterator[str]:
    if outcome.escaped:
        yield f"escaped: {outcome.escaped}"
    elif outcome.code not in CODES:
        yield f"exit status: {outcome.code}"
    yield from _wrong_output(case, outcome)
    yield from _wrong_files(case, outcome)
    if outcome.code == 0 and case.right:
        try:
            yield from case.right(outcome)
        except Exception as error:  # what cannot be read is as wrong as what is other than it should be
            yield f"other result: cannot be read: {error!r}"
    if outcome.code in (1, 3) and not outcome.escaped:
        yield from _wrong_lines(outcome.stderr)
    if case.must_succeed and outcome.code not in (0, None):
        yield f"refused: {outcome.stderr[-300:]}"


def _wrong_output(case: Case, outcome: Outcome) -> Iterator[str]:
    for name, text in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
        # What identifies the rows is carried to the table as it is; stdout is no terminal here.
        raw = name == "stdout" and case.verb == "score" and outcome.code == 0
        if not raw and (found := {each for each in text if unicodedata.category(each) == "Cc" and each != "\n"}):
            yield f"control characters: {sorted(map(ascii, found))} on {name}"
        if "Traceback" in text:
            yield f"traceback: on {name}"


def _wrong_lines(stderr: str) -> Iterator[str]:
    lines = stderr.splitlines() or [""]
    if not stderr.endswith("\n") or "" in lines:
        yield f"lines: expected whole lines, got {stderr[-200:]!r}"
    if other := [line for line in lines if not line.startswith("selfnorm: ")]:
        yield f"lines: expected each to begin with selfnorm:, got {other[0][:200]!r}"
    if max(map(len, lines)) > LONGEST_LINE:
        yield f"lines: expected a line that can be read, got {max(map(len, lines))} characters: {lines[-1][:200]}"
    if hint := re.search(r"\((\w+); use --debug", lines[-1]):
        yield f"unforeseen: {hint[1]}: {lines[-1][:300]}"
    if len(lines[-1]) < len("selfnorm: ") + 8:
        yield f"lines: expected a line that says what to do, got {lines[-1]!r}"


def _wrong_files(case: Case, outcome: Outcome) -> Iterator[str]:
    for name in outcome.changed:
        if not name.startswith(case.may_change or ("\0",)):
            yield f"changed: {name}, exit {outcome.code}"
    for name, content in outcome.made.items():
        if ".part" in name:
            yield f"leftover: {name}"
        elif content is not None and (why := what_is_not_whole(name, content)):
            yield f"not whole: {name}, exit {outcome.code}: {why[:200]}"
    if outcome.code in (1, 2) and outcome.made and case.verb not in ("train", "fit"):
        yield f"made in spite of an error: {', '.join(outcome.made)}"

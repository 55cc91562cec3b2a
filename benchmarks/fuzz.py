"""Calls the command with random tables, damaged run files, odd options and images, and checks that it is right or says why not.

    python benchmarks/fuzz.py [--cases 10000] [--jobs 2] [--seed 0] [--json results/fuzz-cpu.json]

Uses the strategies and the property of tests/fuzz, of which `make test` tries a few hundred cases. The calls run inside one
process for each job, which is replaced if a call kills it. Wrong calls are counted, and the smallest of each sort is kept as
text. Exits with 1 if there is one. About ten minutes.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis

from progress import progress
from record import Cell, at_least, command, parser, record, run
from selfnorm.report.provenance import provenance

# Before the package of tests with this script's name is imported, and before torch counts the cores.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

STRATEGIES = {  # with their share of the cases
    "tables": ("fuzz.strategies_tables", "tables", 0.4),
    "run bytes": ("fuzz.strategies_bytes", "run_bytes", 0.3),
    "options": ("fuzz.strategies_options", "options", 0.2),
    "images": ("fuzz.strategies_images", "images", 0.1),
}
BATCH = 250  # cases from one seed: Hypothesis stops early if it finds few new ones
CODES = ("0", "1", "2", "3")


@dataclass(frozen=True)
class Tried:
    """One call: what was varied, its verb, how it ended, what was wrong with it, and the call itself."""

    kind: str
    verb: str
    code: int | None
    wrong: list[str]
    text: str
    size: int


@dataclass
class Failure:
    count: int
    what: str
    text: str
    size: int


@dataclass
class Counts:
    """Calls by what was varied and verb, and failures by what was wrong."""

    ended: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    failures: dict[tuple[str, str, str], Failure] = field(default_factory=dict)

    def add(self, tried: Tried) -> None:
        row = self.ended.setdefault((tried.kind, tried.verb), Counter())
        row["cases"] += 1
        row[f"{tried.code}" if f"{tried.code}" in CODES else "other"] += 1
        row["wrong"] += bool(tried.wrong)
        for what in tried.wrong:
            known = self.failures.setdefault((tried.kind, tried.verb, sort_of(what)), Failure(0, what, tried.text, tried.size))
            known.count += 1
            if tried.size < known.size:
                known.what, known.text, known.size = what, tried.text, tried.size

    def rows(self) -> list[list[Cell]]:
        columns = ("cases", *CODES, "other", "wrong")
        total = sum(self.ended.values(), Counter[str]())
        listed = [*sorted(self.ended.items()), (("all", ""), total)]
        return [[kind, verb, *(counts[name] for name in columns)] for (kind, verb), counts in listed]


def sort_of(what: str) -> str:
    """Returns what a violation has in common with others of its sort: no numbers, lists or names."""
    text = re.sub(r"[\[({].*", "", re.sub(r"(?<=: ).*?(?=\.\w+, exit)", "*", what))
    return re.sub(r"made in spite of an error.*", "made in spite of an error", re.sub(r"\d[\d.e+-]*", "#", text))[:90].strip()


def work(job: int, seed: int, quotas: dict[str, int], current: Path, results: Any) -> None:
    """Tries so many cases of each kind, and puts them into the queue."""
    violations = importlib.import_module("fuzz.properties").violations
    for kind, quota in quotas.items():
        done = 0

        def attempt(case: Any, kind: str) -> None:
            nonlocal done
            done += 1
            text = str(case)
            current.write_text(f"{kind}\n{case.verb}\n{text}", encoding="utf-8")
            outcome, wrong = violations(case)
            results.put((job, Tried(kind, case.verb, outcome.code, wrong, text, case.size)))

        while done < quota:
            draw_cases(kind, seed, min(BATCH, quota - done), partial(attempt, kind=kind))
            seed += 1
    importlib.import_module("fuzz.runner").remove_workshop()


def draw_cases(kind: str, seed: int, count: int, attempt: Callable[[Any], None]) -> None:
    """Calls `attempt` with at most so many cases of a kind; the same seed gives the same cases."""
    module, name, _ = STRATEGIES[kind]
    strategy = getattr(importlib.import_module(module), name)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy() if callable(strategy) else strategy)
    def draw(case: Any) -> None:
        attempt(case)

    draw()


def try_all(cases: int, jobs: int, seed: int) -> Iterator[Tried]:
    """Yields calls as they end, from several processes; one that dies is a failure, and is replaced."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        left = [
            {
                kind: round(cases * share * (job + 1) / jobs) - round(cases * share * job / jobs)
                for kind, (*_, share) in STRATEGIES.items()
            }
            for job in range(jobs)
        ]
        started = [0] * jobs
        workers: list[Any] = [None] * jobs

        def start(job: int) -> None:
            place = Path(folder, f"{job}")
            place.write_text(f"{next(iter(STRATEGIES))}\nnone\nbefore the first case", encoding="utf-8")
            own = 1_000_000 * (seed + 1) + 10_000 * job + 1000 * started[job]
            workers[job] = context.Process(target=work, args=(job, own, left[job], place, results), daemon=True)
            started[job] += 1
            workers[job].start()

        for job in range(jobs):
            start(job)
        try:
            while any(worker is not None for worker in workers):
                try:
                    job, tried = results.get(timeout=0.5)
                except queue.Empty:
                    ended = [job for job, worker in enumerate(workers) if worker is not None and worker.exitcode is not None]
                else:
                    left[job][tried.kind] -= 1
                    yield tried
                    continue
                for job in ended:
                    status, workers[job] = workers[job].exitcode, None
                    if status:
                        kind, verb, text = Path(folder, f"{job}").read_text(encoding="utf-8").split("\n", 2)
                        left[job][kind] -= 1
                        yield Tried(kind, verb, None, [f"died: exit status {status}"], text, len(text))
                        start(job)
        finally:
            for worker in workers:
                if worker is not None:
                    worker.terminate()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", type=at_least(1), default=10_000)
    options.add_argument("--jobs", type=at_least(1), default=2, help="processes that try cases at the same time")
    options.add_argument("--seed", type=int, default=0, help="of the random cases")
    chosen = options.parse_args()
    counts, wrong, began = Counts(), 0, time.monotonic()
    with progress(chosen.cases) as advance:
        for tried in try_all(chosen.cases, chosen.jobs, chosen.seed):
            counts.add(tried)
            wrong += bool(tried.wrong)
            advance(wrong)
    seconds = time.monotonic() - began
    rows = counts.rows()
    failures = [
        {"varied": kind, "verb": verb, "count": found.count, "what": found.what, "case": found.text}
        for (kind, verb, _), found in sorted(counts.failures.items(), key=lambda item: -item[1].count)
    ]
    for failure in failures:
        print(f"\n{failure['count']} × {failure['what']}\n  {failure['case']}")
    record(
        chosen.json,
        title=f"{rows[-1][2]} fuzz cases",
        about=(
            "Calls of the command with random or damaged input, by what was varied and by verb: how they ended, and how many "
            "were wrong. A call is right if it ends with 0 and a result that a slow reference confirms, or with one line that "
            "says why not. Nothing that was there may change, and no part of a file may remain. Status 1 is an error, 2 wrong "
            "usage, 3 divergence."
        ),
        columns=["varied", "verb", "cases", *(f"exit {code}" for code in CODES), "other", "wrong"],
        rows=rows,
        provenance=provenance(command=command()) | {"seconds": f"{seconds:.0f}"},
        metrics=failures,
    )
    if failures:
        sys.exit(f"fuzz: expected no wrong calls, got {wrong}, of {len(failures)} sorts")


if __name__ == "__main__":
    run(main)

"""The fully connected step against its exact twin's and against its bare products and Adam, again and again.

    python benchmarks/fc_ratio.py [--runs 10] [--json results/fc_ratio-cpu.json]

`selfnorm bench steps` in a process of its own for each run, since on a shared machine one run says little: ratios within a run,
all runs kept. Exits with 1 if the median is below 2 against the exact twin, or above 1.6 against the bare products.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Cell, at_least, command, parser, record, run
from selfnorm.report.provenance import provenance

MODELS = ("mnist-fc-snf", "mnist-fc-exact", "mnist-fc-bare")
LEAST, MOST = 2.0, 1.6


def one_run() -> list[float]:
    """Milliseconds a step of each."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        words = ["bench", "steps", "--models", ",".join(MODELS), "--seconds", "1", "--device", "cpu", "-q", "--json", str(file)]
        subprocess.run([sys.executable, "-m", "selfnorm", *words], check=True, stdout=subprocess.DEVNULL)
        return [each["step_ms"] for each in json.loads(file.read_text(encoding="utf-8"))["details"]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=at_least(1), default=10)
    chosen = options.parse_args()
    if chosen.runs < 1:
        raise ValueError(f"--runs: expected at least 1, got {chosen.runs}")
    found = [one_run() for _ in range(chosen.runs)]
    gains, costs = [exact / snf for snf, exact, _ in found], [snf / bare for snf, _, bare in found]
    rows: list[list[Cell]] = [
        [number, *(round(each, 1) for each in times), round(gain, 2), round(cost, 2)]
        for number, (times, gain, cost) in enumerate(zip(found, gains, costs, strict=True), 1)
    ]
    middle = statistics.median(gains), statistics.median(costs)
    rows.append(
        [
            "median",
            *(round(statistics.median(column), 1) for column in zip(*found, strict=True)),
            *(round(each, 2) for each in middle),
        ]
    )
    record(
        chosen.json,
        title="The fully connected step on a CPU, run by run",
        about=(
            "Milliseconds a step at D = 784, batch 100, each run in a process of its own; the exact twin's against it (at least "
            f"{LEAST:g} is wanted), and it against its bare matrix products and Adam (at most {MOST:g})."
        ),
        columns=["run", *MODELS, "exact / snf", "snf / bare"],
        rows=rows,
        provenance=provenance(command=command()),
    )
    if middle[0] < LEAST or middle[1] > MOST:
        sys.exit(
            f"fc_ratio: expected medians of at least {LEAST:g} and at most {MOST:g}, got {middle[0]:.2f} and {middle[1]:.2f}"
        )


if __name__ == "__main__":
    run(main)

"""Times the fully connected step against its exact twin, and against its bare products and Adam, in several runs.

    python benchmarks/fc_ratio.py [--runs 10] [--json results/fc_ratio-cpu.json]

Each run is `selfnorm bench steps` in a separate process, since a single run on a shared machine is not reliable. Ratios are taken
within a run, and all runs are kept. Exits with 1 if the median gain over the exact twin is below 2, or the median time relative
to the bare products above 1.6.
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
MIN_GAIN, MAX_COST = 2.0, 1.6


def one_run() -> list[float]:
    """Returns the milliseconds per step of each model."""
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
            "Milliseconds per step at D = 784, batch 100, each run in a separate process; the exact twin's time over it (target: "
            f"at least {MIN_GAIN:g}), and its time over its bare matrix products and Adam (target: at most {MAX_COST:g})."
        ),
        columns=["run", *MODELS, "exact / snf", "snf / bare"],
        rows=rows,
        provenance=provenance(command=command()),
    )
    if middle[0] < MIN_GAIN or middle[1] > MAX_COST:
        sys.exit(
            f"fc_ratio: expected medians of at least {MIN_GAIN:g} and at most {MAX_COST:g}, "
            f"got {middle[0]:.2f} and {middle[1]:.2f}"
        )


if __name__ == "__main__":
    run(main)

"""A few of the faults of `benchmarks/faults.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs forks and Linux's way to see to orphans")
def test_faults_leave_no_trace():
    command = [sys.executable, ROOT / "benchmarks" / "faults.py", "--faults", "60", "--jobs", "1", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stdout + done.stderr

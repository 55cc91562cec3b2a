"""Calls the `selfnorm` command in tests."""

import csv
import hashlib
import io
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from selfnorm.cli import app

VERBS = ("train", "compare", "fit", "eval", "sample", "score", "recipes", "doctor")
SHORT = ("--set", "epochs=2", "--set", "validate_every=1", "--set", "test_samples=2")


def invoke(*args):
    """Returns the result of `selfnorm ARGS`, run in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="selfnorm")


def ok(*args):
    """Returns the output of a call, which must succeed."""
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*args, code=1):
    """Returns the error of a call, which must fail with one line on stderr."""
    result = invoke(*args)
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.startswith("selfnorm: ") and result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    assert "Traceback" not in result.stderr
    return result.stderr


def digest(folder):
    """Returns the SHA-256 of every file below a folder, by path."""
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def read_csv(text):
    """Returns the rows of a CSV text as dicts."""
    return list(csv.DictReader(io.StringIO(text)))


def numbers(n, columns, seed=0):
    """Returns a table (n, columns) of normal numbers, with a different scale in each column."""
    rows = np.random.default_rng(seed).normal(size=(n, columns)) * np.arange(1, columns + 1) + 3
    return rows.astype(np.float32)


def write_csv(path, rows, header="a,b,c"):
    """Writes a table with a header line and returns its path."""
    np.savetxt(path, rows, delimiter=",", header=header, comments="", fmt="%.9g")
    return path

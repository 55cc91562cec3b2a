"""Runs the command in this process, in a folder of its own, with limits on time and memory."""

import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from typer.testing import CliRunner

from fuzz.cases import Case, Outcome
from selfnorm.cli import app
from selfnorm.train.recipe import Recipe
from selfnorm.train.run import start_run

SECONDS = 10  # for one call; the longest takes less than 2
MEMORY = 6 << 30  # in addition to what the process uses already
GHOSTSCRIPT = "ghostscript-was-called"


class TookTooLongError(BaseException):
    """Not an Exception, so that nothing on the way takes it for an error of its own."""


class HalfWayError(Exception):
    pass


@cache
def workshop() -> Path:
    """A folder for this process, with the runs that cases start from, and a `gs` that must never be called."""
    folder = Path(tempfile.mkdtemp(prefix="selfnorm-fuzz-"))
    (folder / "bin").mkdir()
    fake = folder / "bin" / "gs"
    fake.write_text(f"#!/bin/sh\ntouch {folder}/{GHOSTSCRIPT}\nexit 1\n")
    fake.chmod(0o755)
    (folder / "data").mkdir()
    return folder


def remove_workshop() -> None:
    if workshop.cache_info().currsize:
        shutil.rmtree(workshop(), ignore_errors=True)


@cache
def run_folder(kind: str) -> Path:
    """The run that cases of this kind start from: a table with the columns a and b, images, or a run stopped half way."""
    folder = workshop() / kind
    with _as_the_command():
        if kind == "stopped":
            _stop_half_way(folder)
        else:
            layers = ("--set", "layers=2", "--set", "epochs=2", "--set", "model=fc", "--set", "standardize=true")
            result = CliRunner().invoke(app, ["fit", str(training_data(kind)), "--run", str(folder), "-q", *layers])
            assert result.exit_code == 0, result.stderr
    return folder


@cache
def training_data(kind: str) -> Path:
    """What a run of this kind was trained with."""
    random = np.random.default_rng(1)
    if kind == "images":
        folder = workshop() / "data" / "images"
        folder.mkdir()
        for index, pixels in enumerate(random.integers(0, 256, (40, 4, 4), np.uint8)):
            Image.fromarray(pixels).save(folder / f"{index:02}.png")
        return folder
    file = workshop() / "data" / "train.csv"
    if not file.exists():
        rows = random.normal(size=(80, 2)) @ [[1, 0.5], [0, 2]] + [3, -1]
        np.savetxt(file, rows, delimiter=",", header="a,b", comments="", fmt="%.17g")
    return file


def _stop_half_way(folder: Path) -> None:
    """Leaves a run that was killed after half of its epochs, with a checkpoint after each step."""

    def report(event: dict[str, object]) -> None:
        if event["kind"] == "epoch" and event["epoch"] == 3:
            raise HalfWayError

    recipe = Recipe("stopped").changed(
        source=str(training_data("stopped")), layers=2, epochs=6, batch_size=16, standardize=True, threads=1, validate_every=1
    )
    try:
        start_run(recipe, folder, report=report, save_every=0.0)
    except HalfWayError:
        return
    raise AssertionError("expected the run to stop half way")


def perform(case: Case) -> Outcome:
    """Makes the case's files in a new folder, runs the command there, and says what it did."""
    marker = workshop() / GHOSTSCRIPT
    with tempfile.TemporaryDirectory(dir=workshop()) as name:
        home = Path(name)
        train = training_data(case.run) if case.run else workshop() / "data"
        if case.run:
            shutil.copytree(run_folder(case.run), home / "run")
        for file, content in case.files.items():
            if content is None:
                (home / file).unlink(missing_ok=True)
            else:
                (home / file).parent.mkdir(parents=True, exist_ok=True)
                (home / file).write_bytes(content)
        args = [word.replace("{train}", str(train)).replace("{home}", str(home)) for word in case.args]
        before, data = _contents(home), _contents(workshop() / "data")
        code, stdout, stderr, escaped = _call(args, home)
        after, data_after = _contents(home), _contents(workshop() / "data")
        changed = {path: after.get(path) for path, content in before.items() if after.get(path, b"gone") != content}
        for path, content in data.items():
            if data_after.get(path) != content and content is not None:
                changed["{train}"] = data_after.get(path)
                (workshop() / "data" / path).write_bytes(content)
        if marker.exists():
            marker.unlink()
            escaped = escaped or "Ghostscript was called"
        made = {path: content for path, content in after.items() if path not in before}
        return Outcome(code, stdout.replace(name, "{home}"), stderr.replace(name, "{home}"), escaped, changed, made)


def _contents(folder: Path) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


def _call(args: list[str], home: Path) -> tuple[int | None, str, str, str]:
    runner = CliRunner()
    before = Path.cwd()
    os.chdir(home)
    try:
        with _as_the_command(), _limited():
            result = runner.invoke(app, args, prog_name="selfnorm")
    except TookTooLongError:
        return None, "", "", f"took longer than {SECONDS} s"
    finally:
        os.chdir(before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return None, result.stdout, result.stderr, repr(result.exception)
    return result.exit_code, result.stdout, result.stderr, ""


@contextmanager
def _as_the_command() -> Iterator[None]:
    """Sets what the tests have set otherwise to what it is in the command."""
    dtype, threads, path, data = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        os.environ["PATH"],
        os.environ.get("SELFNORM_DATA"),
    )
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    os.environ |= {"PATH": f"{workshop() / 'bin'}:{path}", "SELFNORM_DATA": str(workshop() / "bin"), "COLUMNS": "200"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        os.environ["PATH"] = path
        os.environ.pop("COLUMNS")
        os.environ.pop("SELFNORM_DATA")
        if data is not None:
            os.environ["SELFNORM_DATA"] = data


@contextmanager
def _limited() -> Iterator[None]:
    """Ends calls that take too long with `TookTooLongError`, and those that ask for too much memory with a MemoryError."""

    def stop(*_: object) -> None:
        raise TookTooLongError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

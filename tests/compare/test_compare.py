"""Comparisons: the same data for all, one table that agrees with the runs, going on, and runs that fail."""

import json
import mmap
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from selfnorm.compare.execute import run_comparison
from selfnorm.compare.plan import plan_runs
from selfnorm.compare.table import ComparedRun, Comparison
from selfnorm.evaluate.likelihood import Likelihood
from selfnorm.report import canvas, figures
from selfnorm.report.results import build
from selfnorm.runtime.memory import PeakMemory
from selfnorm.train.checkpoint import read_checkpoint
from selfnorm.train.folder import RunFolder
from selfnorm.train.run import Result, _step_seconds
from support.commandline import SHORT, digest, fails, invoke, numbers, ok, read_csv, write_csv
from support.small_runs import started, without_worker

pytestmark = pytest.mark.usefixtures("elsewhere")
NAMES = ("digits-fc-snf", "digits-fc-exact")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A finished comparison of two recipes, and what it printed."""
    folder = tmp_path_factory.mktemp("compare") / "both"
    return folder, invoke("compare", "digits-fc-sn[f]", "digits-fc-exact", *SHORT, "--run", folder)


@pytest.fixture
def copy(compared, tmp_path):
    return shutil.copytree(compared[0], tmp_path / "copy")


def test_what_was_decided_about_a_table_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("selfnorm.compare.execute.run_in_worker", without_worker)
    file = write_csv(tmp_path / "t.csv", np.insert(numbers(400, 2), 1, 7.5, axis=1))
    call = ("compare", "moons-fc-snf", "--set", f"data={file}", *SHORT, "--set", "layers=1", "--run", tmp_path / "run", "-q")
    result = invoke(*call)
    assert result.exit_code == 0, result.output
    assert result.stderr == f"selfnorm: {file}: header: yes, 2 columns; column 'b' is 7.5 in all training rows: left out\n"


# The table


def test_a_comparison_agrees_with_its_runs(compared):
    folder, printed = compared
    assert printed.exit_code == 0, printed.output
    results = {name: json.loads((folder / name / "result.json").read_text()) for name in NAMES}
    best_first = sorted(NAMES, key=lambda name: results[name]["test"]["nll"])
    lines = printed.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == best_first
    for line, name in zip(lines[2:4], best_first, strict=True):
        test = results[name]["test"]
        assert f"{test['nll']:.2f} ± {test['standard_error']:.2f}" in line and f"{results[name]['parameters']:,}" in line
    assert "standard error over 250 test examples; one seed, 0" in printed.stdout
    assert all(f"{place} {name}: test NLL" in printed.stderr for place, name in zip(("1/2", "2/2"), NAMES, strict=True))

    rows = {row["recipe"]: row for row in read_csv((folder / "comparison.csv").read_text())}
    assert list(rows) == list(NAMES)
    for name, row in rows.items():
        result = results[name]
        assert (row["outcome"], row["seed"], row["failure"]) == ("finished", "0", "")
        assert float(row["test_nll_nats"]) == result["test"]["nll"]
        assert float(row["total_seconds"]) == result["seconds"] and int(row["epochs"]) == 2
        assert float(row["step_ms"]) == pytest.approx(1e3 * result["step_seconds"])
        assert float(row["sample_ms"]) > 0 and 0 < float(row["inverse_error"]) < 10
    assert float(rows["digits-fc-exact"]["inverse_error"]) < 1e-4, "its own inverse is the exact one"
    assert float(rows["digits-fc-snf"]["inverse_error"]) > 1e-4, "after two epochs"


def test_a_comparison_can_be_put_among_the_results(compared, tmp_path):
    stored = json.loads((compared[0] / "comparison.json").read_text())
    assert stored["title"] == "2 fc recipes on digits, 2 epochs" and len(stored["rows"]) == 2
    assert stored["provenance"]["epochs"] == "2" and stored["provenance"]["machine"].endswith("1 thread")
    assert all(isinstance(cell, int | float) for row in stored["rows"] for cell in row[1:])
    shutil.copy(compared[0] / "comparison.json", tmp_path)
    text = build(tmp_path)
    assert "| digits-fc-snf |" in text and "`selfnorm compare 'digits-fc-sn[f]' digits-fc-exact --set epochs=2" in text
    with Image.open(compared[0] / "comparison.png") as picture:
        assert picture.size == (820, 420)


def test_several_seeds_are_a_mean_with_its_own_standard_error(compared, tmp_path):
    runs = plan_runs(NAMES, ["seed=4", "epochs=2"], tmp_path, seeds=3)
    assert [run.path.name for run in runs[::2]] == ["digits-fc-snf", "digits-fc-snf-seed5", "digits-fc-snf-seed6"]
    assert plan_runs(NAMES, ["seed=4", "epochs=2"], tmp_path)[0].path == runs[0].path, "so that seeds can be added"
    assert runs[3].place == "4/6" and runs[3].name == "digits-fc-exact, seed 5"
    result = Result.read(compared[0] / "digits-fc-snf" / "result.json")
    values = iter([1.0, 50.0, 2.0, 51.0, 6.0, 0.0])
    done = [
        ComparedRun(run, replace(result, test=Likelihood(next(values), 9.0, 1.0, 250, 2)), 0.5, index)
        for index, run in enumerate(runs)
    ]
    done[5] = ComparedRun(runs[5], failure="it broke")
    done[3] = ComparedRun(runs[3], failure="it grew", diverged=True)
    mixed = Comparison(tuple(done), "selfnorm compare", torch.device("cpu"))
    assert mixed.rows()[1].note == "2 of 3 failed", "not all of those that failed diverged"
    done[3] = ComparedRun(runs[3], replace(result, test=Likelihood(51.0, 9.0, 1.0, 250, 2)), 0.5, 3)
    done[5] = ComparedRun(runs[5], failure="it broke", diverged=True)
    comparison = Comparison(tuple(done), "selfnorm compare", torch.device("cpu"))
    first, second = comparison.rows()
    assert (first.nll, first.standard_error, first.sample_ms) == (3.0, pytest.approx(7**0.5 / 3**0.5), 2000)
    assert (second.nll, second.standard_error) == (50.5, 0.5) and second.note == "1 of 3 diverged"
    assert "mean over seeds 4 to 6" in comparison.about and comparison.failures() == ["digits-fc-exact, seed 6: it broke"]


# Refusals, before anything is trained


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("digits-fc-snff",), "did you mean digits-fc-snf?"),
        (("nothing-*",), "expected a pattern that matches one of digits-fc-snf, "),
        (("digits-fc-snf", "digits-*"), "digits-fc-snf twice"),
        (("digits-fc-snf", "moons-fc-snf"), "got data.source digits of digits-fc-snf, moons of moons-fc-snf"),
        (("mnist-glow-snf", "mnist-fc-snf"), "got data.jitter 1 of mnist-glow-snf, 0 of mnist-fc-snf"),
        (("digits-fc-snf", "--set", "epoch=3"), "did you mean epochs?"),
        (("digits-fc-snf", "--set", "kind=magic"), "magic"),
        (
            ("digits-fc-snf", "digits-fc-lu", "--set", "kind=lu"),
            "expected recipes that differ, got digits-fc-snf and digits-fc-lu",
        ),
        (("digits-conv-exact", "digits-conv-snf", "--set", "polish=low-rank"), "polish was removed"),
        (("mnist-fc-snf", "--data", "nowhere"), "no such folder"),
        (("digits-fc-snf", "--device", "nonsense"), "--device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_arguments(args, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in fails("compare", *args)
    assert list(tmp_path.iterdir()) == []


def test_another_recipe_in_a_runs_folder_is_left_alone(copy):
    assert "got a different optimiser.epochs" in fails("compare", *NAMES, *SHORT, "--set", "epochs=3", "--run", copy)
    (copy / "digits-fc-snf" / "recipe.toml").unlink()
    assert "got something else" in fails("compare", *NAMES, *SHORT, "--run", copy)


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    said = fails("compare", *NAMES, *SHORT, "--run", tmp_path / "file")
    assert f"{tmp_path / 'file'}: expected a folder to write to, got File exists; choose another with --run" in said


@pytest.mark.parametrize("name", ["comparison.json", "comparison.csv", "comparison.png"])
@pytest.mark.parametrize("content", ["recipe,mass\nbread,1\n", '{"columns": []}', "[" * 9999])
def test_a_file_that_no_comparison_wrote_is_refused_before_training(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    said = fails("compare", *NAMES, *SHORT, "--run", tmp_path)
    assert f"{tmp_path / name}: expected no file, or one that `selfnorm compare` wrote, got another; move it" in said
    assert (tmp_path / name).read_text() == content and {path.name for path in tmp_path.iterdir()} == {name, ".lock"}


def test_dependent_columns_are_refused_before_training_but_not_in_runs_that_exist(tmp_path, monkeypatch):
    monkeypatch.setattr("selfnorm.compare.execute.run_in_worker", without_worker)
    rows = numbers(60, 2)
    file = write_csv(tmp_path / "t.csv", np.column_stack([rows, rows.sum(1)]))
    folder = tmp_path / "both"
    call = ("compare", "moons-fc-snf", "moons-fc-exact", "--set", f"data={file}", *SHORT, "--set", "layers=1", "--run", folder)
    assert "t.csv: expected linearly independent columns" in fails(*call)
    assert not folder.exists()
    with monkeypatch.context() as earlier:  # as a version that did not look for them
        earlier.setattr("selfnorm.data.own.expect_independent", lambda *args: None)
        ok(*call, "-q")
    ok(*call, "-q")
    shutil.rmtree(folder / "moons-fc-exact")
    before = digest(folder)
    assert "t.csv: expected linearly independent columns" in fails(*call)
    assert digest(folder) == before


def test_a_run_that_another_process_is_at_is_refused_before_training(copy):
    (copy / "digits-fc-exact" / "result.json").unlink()
    with RunFolder(copy / "digits-fc-exact").locked():
        assert "being trained" in fails("compare", *NAMES, *SHORT, "--run", copy)


# Going on


def test_going_on_keeps_what_is_finished(copy):
    finished, unfinished = (copy / name / "result.json" for name in NAMES)
    before = finished.read_bytes(), json.loads(unfinished.read_text())
    unfinished.unlink()
    records = [json.loads(line) for line in ok("compare", *NAMES, *SHORT, "--run", copy, "--json").splitlines()]
    assert finished.read_bytes() == before[0] and json.loads(unfinished.read_text())["test"] == before[1]["test"]
    assert {record["run"] for record in records[:-1]} == {str(copy / NAMES[1])}, "the other is not trained again"
    assert records[-2]["kind"] == "result" and records[-2]["test"] == before[1]["test"]
    assert records[-1]["kind"] == "comparison" and [run["recipe"] for run in records[-1]["runs"]] == list(NAMES)
    assert records[-1]["rows"] == json.loads((copy / "comparison.json").read_text())["rows"]


def test_a_damaged_result_is_computed_again(copy):
    path = copy / NAMES[0] / "result.json"
    before = json.loads(path.read_text())
    changed = {**before, "test": {**before["test"], "nll": before["test"]["nll"] - 10}}
    path.write_text(json.dumps(changed))
    records = [json.loads(line) for line in ok("compare", *NAMES, *SHORT, "--run", copy, "--json").splitlines()]
    assert json.loads(path.read_text())["test"] == before["test"]
    assert before["test"]["nll"] in [run["test_nll_nats"] for run in records[-1]["runs"]]


def test_figures_that_a_run_could_not_draw_are_drawn_by_going_on(copy):
    """As after a full disk: the result is written before the figures."""
    drawn, result = copy / NAMES[0] / "samples.png", (copy / NAMES[0] / "result.json").read_bytes()
    drawn.unlink()
    ok("compare", *NAMES, *SHORT, "--run", copy, "-q")
    (copy / NAMES[1] / "samples.png").unlink()
    (copy / NAMES[1] / "last.safetensors").unlink()  # a missing figure alone does not cost the result
    ok("compare", *NAMES, *SHORT, "--run", copy, "-q")
    assert drawn.stat().st_size > 0 and (copy / NAMES[0] / "result.json").read_bytes() == result


@pytest.mark.parametrize("names", [("best.safetensors",), ("best.safetensors", "result.json")])
def test_weights_of_another_run_are_not_measured_as_this_ones(copy, names):
    for name in names:
        shutil.copy(copy / NAMES[1] / name, copy / NAMES[0])
    result = invoke("compare", *NAMES, *SHORT, "--run", copy, "-q")
    assert result.exit_code == 3
    assert f"{NAMES[0]}/best.safetensors: expected the recipe that the run started with, got a different" in result.output


def test_a_signal_saves_the_run_under_way_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "two runs"
    command = [sys.executable, "-m", "selfnorm", "compare", *NAMES, "--set", "epochs=900", "--run", str(folder)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=-1, stderr=-1, text=True)
    metrics, deadline = folder / NAMES[0] / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith(
        "selfnorm: stopped by SIGINT, all saved; continue with: selfnorm compare digits-fc-snf digits-fc-exact"
    )
    assert last.endswith(f" --set epochs=900 --run '{folder}'") and stdout == "" and "Traceback" not in stderr
    assert 0 < read_checkpoint(folder / NAMES[0] / "last.safetensors").progress["step"] < 900 * 12
    with RunFolder(folder / NAMES[0]).locked():
        assert not (folder / NAMES[1]).exists(), "the run is no longer locked, and the other was not started"


@pytest.mark.skipif(os.name != "posix", reason="only POSIX lets the worker save itself")
def test_a_run_whose_comparison_was_killed_saves_itself_and_stops(tmp_path):
    command = [sys.executable, "-m", "selfnorm", "compare", NAMES[0], "--set", "epochs=3000", "--run", str(tmp_path)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=-3, stderr=-3)
    run, deadline = RunFolder(tmp_path / NAMES[0]), time.monotonic() + 60
    while not (run.metrics.exists() and run.metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    while time.monotonic() < deadline:
        time.sleep(0.05)
        with suppress(ValueError), run.locked():
            break
    assert time.monotonic() < deadline and 0 < read_checkpoint(run.last).progress["step"] < 3000 * 12


# Runs that fail


def test_a_run_that_fails_has_a_row_and_costs_no_other(copy):
    (copy / "digits-fc-exact" / "result.json").unlink()
    for name in ("best", "last"):  # from either of them the run would go on
        (copy / "digits-fc-exact" / f"{name}.safetensors").write_bytes(b"nothing")
    result = invoke("compare", *NAMES, *SHORT, "--run", copy, "-q")
    assert result.exit_code == 3 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[2].startswith("digits-fc-snf ") and "±" in lines[2]
    assert lines[3].startswith("digits-fc-exact (failed)") and "±" not in lines[3]
    assert any(line.startswith("digits-fc-exact: ") and "last.safetensors: expected" in line for line in lines)
    assert json.loads((copy / "comparison.json").read_text())["rows"][1][1:] == [None] * 9


def test_a_run_that_is_killed_costs_no_other_and_can_be_continued(tmp_path):
    runs = plan_runs(NAMES, ["epochs=2", "validate_every=1", "test_samples=2"], tmp_path)

    def kill_the_first(record):
        for worker in multiprocessing.active_children():
            worker.kill()

    def compare(report_of):
        return run_comparison(runs, command="", watch=lambda run: nullcontext(report_of[run.recipe.name]))

    killed, other = compare({NAMES[0]: kill_the_first, NAMES[1]: lambda record: None}).runs
    assert (killed.failure, killed.diverged, killed.result) == ("killed by SIGKILL", False, None) and other.result is not None
    records = []
    first, second = compare({NAMES[0]: records.append}).runs
    assert first.result is not None and second.result == other.result and records[-1]["kind"] == "result"


def test_a_run_that_diverges_says_so(tmp_path):
    wild = ("--set", "learning_rate=1e30", "--set", "warmup_epochs=0", "--set", "seed=3")
    result = invoke("compare", "digits-fc-snf", *wild, "--run", tmp_path / "one", "--device", "cpu", "--json")
    assert result.exit_code == 3 and result.stderr == ""
    *records, failure, comparison = map(json.loads, result.stdout.splitlines())
    assert all(record["kind"] in ("epoch", "validation") for record in records)
    assert failure["kind"] == "failure" and failure["diverged"]
    assert failure["reason"].startswith("digits-fc-snf diverged: ")
    assert failure["reason"].endswith(f". The best and the last good checkpoint are in {tmp_path / 'one' / 'digits-fc-snf'}")
    assert comparison["runs"][0]["outcome"] == "diverged" and comparison["rows"][0][0] == "digits-fc-snf (diverged)"
    stored = RunFolder(tmp_path / "one" / "digits-fc-snf").read_recipe()
    assert (stored.optimiser.seed, stored.optimiser.learning_rate) == (3, 1e30)


def test_a_data_folder_is_part_of_every_planned_run(tmp_path):
    runs = plan_runs(["mnist-fc-snf", "mnist-fc-exact"], [], tmp_path, data_dir="elsewhere")
    assert [run.recipe.data.folder for run in runs] == ["elsewhere", "elsewhere"]


# What runs measure of themselves


def test_results_know_time_memory_and_size(compared):
    result = Result.read(compared[0] / "digits-fc-snf" / "result.json")
    assert 0 < result.step_seconds * 2 * 12 <= result.seconds
    assert result.parameters == 2 * (2 * 64**2 + 64)
    assert _step_seconds([{"step_seconds": value} for value in (1.0, None, 9.0, 2.0)]) == 2.0
    assert result.peak_memory is None or 0 < result.peak_memory < 2000
    with pytest.raises(ValueError, match=r"nowhere.*expected a run's result"):
        Result.read(compared[0] / "nowhere")


def test_an_epoch_entered_in_its_middle_has_no_time_per_step():
    records = []
    trainer = started(report=records.append)
    trainer.progress.step = 5
    trainer.run()
    times = [record["step_seconds"] for record in records if record["kind"] == "epoch"]
    assert len(times) == 6 and times[0] is None and min(times[1:]) > 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux forgets an earlier peak")
def test_peak_memory_forgets_what_was_before():
    def hold_for_a_moment(mebibytes):
        with mmap.mmap(-1, mebibytes * 2**20) as pages:  # which no earlier allocation can have left behind
            pages.write(bytes(mebibytes * 2**20))

    hold_for_a_moment(128)
    PeakMemory._is_first = True
    memory, later = PeakMemory(), PeakMemory()
    hold_for_a_moment(32)
    assert 30 < memory.mebibytes() < 100  # and a copy of it
    assert later.mebibytes() is None, "it would find there what the first has left"


def test_the_picture_is_not_spoilt_by_a_wild_start_or_a_bad_run(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(figures, "rendered", lambda figure: drawn.append(figure) or canvas.rendered(figure))
    good = [(second, 96 + 30 * 0.9**second + 1e6 * (second == 1)) for second in range(1, 50)]
    bad = [(second, 1e5 * second) for second in range(1, 12)]
    figures.comparison_curves(
        tmp_path / "c.png", "title", {"good": [good, good], "bad": [[*bad, (12, None)]], "long": [[(900, 97.0)]]}
    )
    (ax,) = drawn[0].axes
    colors = [line.get_color() for line in ax.lines]
    assert len(colors) == 5 and len(set(colors[:3])) == 1 and len(set(colors)) == 3  # the mean of two, both, and the others
    assert ax.get_ylim()[0] < 96.2 and 100 < ax.get_ylim()[1] < 130
    assert ax.get_xscale() == "log" and ax.get_xlim()[1] > 900
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["good", "bad, above the plot", "long"]

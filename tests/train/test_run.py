"""Runs in practice: moved, shared, damaged, or given other data."""

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from selfnorm.data.batches import Examples, generator_for
from selfnorm.data.dataset import Dataset, fingerprint
from selfnorm.models import fc_flow
from selfnorm.report import figures
from selfnorm.train.checkpoint import read_checkpoint, save_checkpoint
from selfnorm.train.folder import RunFolder
from selfnorm.train.records import parse_records
from selfnorm.train.run import draw_samples, free_path, start_run
from selfnorm.train.scores import Scores
from selfnorm.train.trained import Trained
from support.commandline import SHORT, fails, invoke, ok
from support.small_runs import SMALL
from support.small_runs import digits as digits_recipe


@pytest.fixture
def table(tmp_path):
    """A run on a named table of three columns."""
    rows = np.random.default_rng(0).normal(size=(120, 3)) + np.array([0, 5, 10])
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="a,b,c", comments="")
    ok("fit", tmp_path / "t.csv", "--set", "epochs=4", "--run", tmp_path / "run", "-q")
    return tmp_path / "run", rows


@pytest.fixture
def digits(tmp_path):
    ok("train", *SHORT, "--run", tmp_path / "digits", "-q")
    return tmp_path / "digits"


def test_columns_are_selected_by_name(table, tmp_path):
    run, rows = table
    np.savetxt(tmp_path / "same.csv", rows, delimiter=",", header="a,b,c", comments="")
    more = np.c_[rows[:, 2], rows[:, 0], 0 * rows[:, 0], rows[:, 1]]
    np.savetxt(tmp_path / "more.csv", more, delimiter=",", header="c,a,extra,b", comments="")
    assert ok("score", run, tmp_path / "same.csv") == ok("score", run, tmp_path / "more.csv")
    np.savetxt(tmp_path / "less.csv", rows[:, :2], delimiter=",", header="a,b", comments="")
    assert "expected the columns of the training data, 'a', 'b', 'c'" in fails("score", run, tmp_path / "less.csv")


def test_samples_of_images_in_a_table_can_be_scored(digits, tmp_path):
    for ending in ("csv", "npy"):
        ok("sample", digits, "-n", 5, "-o", tmp_path / f"s.{ending}")
    assert ok("score", digits, tmp_path / "s.csv") == ok("score", digits, tmp_path / "s.npy")
    (tmp_path / "half.csv").write_text((tmp_path / "s.csv").read_text() + ",".join(["0.5"] * 64) + "\n")
    assert "whole grey levels" in fails("score", digits, tmp_path / "half.csv")


def test_a_run_whose_data_changed_is_not_evaluated(table, tmp_path):
    run, rows = table
    np.savetxt(tmp_path / "t.csv", rows * 1e3, delimiter=",", header="a,b,c", comments="")
    assert "expected the data that" in fails("eval", run)
    assert "other data from" in fails("train", "--resume", run)


def test_a_relative_data_path_works_from_another_folder(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ok("train", "moons-fc-snf", *SHORT, "--set", "data=t.csv", "--set", "layers=2", "--run", "here", "-q")
    monkeypatch.chdir("/")
    ok("eval", tmp_path / "here")


def test_only_one_process_trains_a_run_at_a_time(digits):
    with RunFolder(digits).locked():
        assert "being trained" in fails("train", "--resume", digits)
    ok("train", "--resume", digits)


def test_a_best_checkpoint_alone_is_not_resumed(digits):
    (digits / "last.safetensors").unlink()
    assert "last.safetensors: expected the checkpoint" in fails("train", "--resume", digits)
    ok("eval", digits)


def test_a_lost_log_does_not_cost_the_result(digits):
    (digits / "metrics.jsonl").unlink()
    assert "test NLL" in ok("train", "--resume", digits)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00v"])
def test_damaged_training_scores_are_named(table, tmp_path, content):
    run, _ = table
    (run / "training_scores.npy").write_bytes(content)
    assert "training_scores.npy: expected" in fails("score", run, tmp_path / "t.csv")


def test_each_checkpoint_is_compared_with_its_own_training_scores(table, tmp_path):
    """About half of the training rows are less likely than the median one, for any weights."""
    run, _ = table
    last = read_checkpoint(run / "last.safetensors")
    # Weights that make everything far less likely than the best ones do, as those of another epoch may.
    biases = {name: value + 3 if name.endswith("bias") else value for name, value in last.tensors.items()}
    save_checkpoint(run / "last.safetensors", replace(last, tensors=biases))
    for name in ("best.safetensors", "last.safetensors"):
        scores = Trained.open(run / name).score(tmp_path / "t.csv")
        assert 35 < np.median(scores.percentile) < 65


def test_rank_and_percentile_with_ties():
    scores = Scores.of(np.array([-1.0, -3.0, -2.0, -3.0]), np.array([-4.0, -3.0, -3.0, -1.0]))
    assert scores.rank.tolist() == [4, 1, 3, 2]
    assert scores.percentile.tolist() == [75.0, 25.0, 75.0, 25.0], "strictly less likely ones count"


def test_scores_are_averaged_over_dequantisation_noise(digits, tmp_path):
    images = np.random.default_rng(0).integers(0, 17, (6, 8, 8)).astype(np.uint8)
    np.save(tmp_path / "x.npy", images)
    trained = Trained.open(digits)
    single = [trained.score(tmp_path / "x.npy", samples=1, seed=seed).log_likelihood for seed in range(40)]
    several = trained.score(tmp_path / "x.npy", samples=40).log_likelihood
    spread = np.std(single, axis=0).mean()
    assert np.abs(several - np.mean(single, axis=0)).max() < spread
    assert len(np.unique(np.round(single, 6), axis=0)) == 40


def test_columns_with_few_distinct_values_give_a_warning(tmp_path):
    rows = np.random.default_rng(0).normal(size=(100, 2))
    rows[:, 1] = rows[:, 1] > 0
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="x,sex", comments="")
    result = invoke("fit", tmp_path / "t.csv", "--set", "epochs=1", "--run", tmp_path / "run")
    assert "column 'sex' takes 2 different values" in result.stderr


def test_a_table_of_images_with_an_odd_number_of_channels(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (40, 8, 8, 4)).astype(np.uint8))
    ok("fit", tmp_path / "x.npy", "--set", "epochs=2", "--run", tmp_path / "run")
    assert (tmp_path / "run" / "samples.png").exists()


def test_twins_of_every_kind(tmp_path):
    settings = ("model=conv", "blocks=1", "layers_per_block=1", "kernel_size=3", "inverse_kernel_size=5")
    conv = [part for setting in settings for part in ("--set", setting)]
    assert "Exact test NLL" in ok("train", *SHORT, *conv, "--twin", "--run", tmp_path / "run")
    assert "exact twin itself" in fails("train", "digits-fc-exact", "--twin")


def test_a_closed_output_pipe_does_not_end_a_run(tmp_path):
    command = [sys.executable, "-m", "selfnorm", "train", "--set", "epochs=30", "--json", "--run", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.wait()
    assert errors == b""
    assert (tmp_path / "run" / "result.json").exists()


def test_a_terminal_that_only_knows_ascii(digits):
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "", "HOME": "/"}
    result = subprocess.run(
        [sys.executable, "-m", "selfnorm", "eval", str(digits)], capture_output=True, text=True, env=environment, check=True
    )
    assert "nats" in result.stdout


def test_free_path_numbers_existing_names(tmp_path):
    assert free_path(tmp_path / "a.png") == tmp_path / "a.png"
    (tmp_path / "a.png").touch()
    (tmp_path / "a-2.png").touch()
    assert free_path(tmp_path / "a.png") == tmp_path / "a-3.png"


def test_files_get_the_usual_permissions(digits, tmp_path):
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode & 0o777 for path in digits.iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}


def test_one_row_has_no_standard_error(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(6, 2)))
    printed = ok("fit", tmp_path / "x.npy", "--set", "epochs=2", "--run", tmp_path / "run")
    assert "inf" not in printed
    assert "Infinity" not in (tmp_path / "run" / "result.json").read_text()


def test_a_header_with_commas_is_quoted(tmp_path):
    rows = np.random.default_rng(0).normal(size=(40, 2))
    lines = io.StringIO()
    np.savetxt(lines, rows, delimiter=",")
    (tmp_path / "t.csv").write_text('"a,b",c\n' + lines.getvalue())
    ok("fit", tmp_path / "t.csv", "--set", "epochs=2", "--run", tmp_path / "run", "-q")
    ok("sample", tmp_path / "run", "-o", tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text().startswith('"a,b",c\n')
    ok("score", tmp_path / "run", tmp_path / "s.csv")


def test_samples_do_not_overwrite_by_default(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ok("sample", digits, "-n", 2)
    ok("sample", digits, "-n", 2)
    assert {path.name for path in Path().glob("samples*")} == {"samples.png", "samples-2.png"}


def test_json_and_an_output_file_exclude_each_other(digits, tmp_path):
    assert "expected no -o" in fails("score", digits, tmp_path, "--json", "-o", "x.csv")


@pytest.mark.parametrize("damage", [b"no json\n", b"\xff\xfe\n", b"[1]\n"])
def test_a_damaged_line_of_the_log_is_skipped(digits, damage):
    path = digits / "metrics.jsonl"
    path.write_bytes(damage + path.read_bytes())
    assert len(RunFolder(digits).read_log()) == 4
    assert "test NLL" in ok("train", "--resume", digits)


def test_changed_test_rows_are_detected(table, tmp_path):
    run, rows = table
    order = np.random.RandomState(0).permutation(120)
    rows[order[-1]] += 50  # in the last tenth, which holds the test rows
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="a,b,c", comments="")
    assert "expected the data that" in fails("eval", run)


def test_the_fingerprint_of_large_data_uses_a_part_of_it(monkeypatch):
    x = torch.zeros(100_000, 1, dtype=torch.float32)
    dataset = Dataset("many", x, x[:5], x[:5])
    whole = fingerprint(dataset)
    monkeypatch.setattr("selfnorm.data.dataset.LARGE_PART_BYTES", 100)
    assert fingerprint(dataset) != whole
    x[-1] = 1.0
    assert fingerprint(dataset) != fingerprint(Dataset("many", torch.zeros_like(x), x[:5], x[:5]))


def test_a_similar_data_set_name_is_suggested():
    assert "did you mean digits" in fails("train", "--set", "data=digit")


def test_only_temporary_files_of_the_run_are_removed(digits):
    folder = RunFolder(digits)
    own, other = digits / ".last.0123.part.safetensors", digits / ".repaired.0123.part.safetensors"
    own.touch()
    other.touch()
    folder.remove_partial_files()
    assert not own.exists()
    assert other.exists()


@pytest.mark.parametrize(("kind", "exact"), [("tracked", False), ("lu", True)])
def test_curves_know_whether_the_training_loss_is_a_likelihood(tmp_path, monkeypatch, kind, exact):
    found = []
    monkeypatch.setattr("selfnorm.report.figures.run_curves", lambda *args, exact: found.append(exact))
    start_run(digits_recipe(*SMALL, f"kind={kind}"), tmp_path / "run")
    assert found == [exact]


def test_a_twin_has_the_same_map():
    for recipe, said in (("digits-conv-emerging", "which has no exact twin"), ("digits-fc-exact", "an exact twin itself")):
        assert said in fails("train", recipe, "--twin", "--set", "epochs=1")


@pytest.mark.parametrize(
    ("linear", "titles"), [("selfnorm", ["data", "samples", "learned inverse"]), ("exact", ["data", "samples"])]
)
@pytest.mark.parametrize("shape", [(2,), (1, 4, 4)])
def test_the_sample_sheet_shows_the_learned_inverse_only_if_there_is_one(linear, titles, shape, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "sample_sheet", lambda path, data, samples, levels: drawn.update({"data": data, **samples}))
    monkeypatch.setattr(figures, "sample_scatter", lambda path, data, samples, columns: drawn.update({"data": data, **samples}))
    levels = 17 if len(shape) == 3 else None
    flow = fc_flow(shape, linear=linear, levels=levels).float()
    with torch.no_grad():
        for layer in flow.planned_inverses().values():
            layer.weight_inv.mul_(2)  # which must not warn here
    table = torch.randint(0, 17, (70, *shape), dtype=torch.uint8) if levels else torch.randn(70, *shape, dtype=torch.float32)
    draw_samples(tmp_path / "samples.png", flow, Examples(table, levels, torch.device("cpu")), ())
    assert list(drawn) == titles
    exact = flow.eval().sample(len(drawn["samples"]), "exact", generator_for(torch.device("cpu"), 0, "sheet"))
    torch.testing.assert_close(drawn["samples"], exact, rtol=1e-3, atol=1e-3)


def test_times_below_zero_are_left_out_of_a_log():
    assert parse_records('{"kind": "epoch", "step_seconds": -1, "seconds": 0.5}') == [{"kind": "epoch", "seconds": 0.5}]

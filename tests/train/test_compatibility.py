"""Runs of the version before recipes had groups can be loaded, evaluated, resumed and drawn.

`tests/fixtures/before_groups` holds a finished run of 48 steps, `whole`, and the same run stopped at step 30, `stopped`. Their
recipes are flat, and both their logs and their checkpoints call λ `weight`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import selfnorm
from selfnorm.data import load_dataset
from selfnorm.report import canvas, figures
from selfnorm.train.checkpoint import read_checkpoint
from selfnorm.train.experiments import find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.run import Result
from selfnorm.train.trained import Trained
from support.commandline import ok

BEFORE = Path(__file__).parents[1] / "fixtures" / "before_groups"
pytestmark = pytest.mark.filterwarnings("ignore::selfnorm.train.checkpoint.UnverifiedCheckpointWarning")
RECIPE = find_recipe("digits-conv-snf").changed(
    epochs=4,
    validate_every=1,
    test_samples=2,
    blocks=1,
    layers_per_block=2,
    penalty="geco",
    reconstruction_weight=1000.0,
    inverse_kernel_size=5,
    probes=2,
    inverse_likelihood=True,
    threads=1,
)


@pytest.fixture
def copied(tmp_path):
    """Copies a stored run to where it may be changed."""
    return lambda name: Path(shutil.copytree(BEFORE / name, tmp_path / name))


@pytest.mark.parametrize("name", ["whole", "stopped"])
def test_flat_recipes_are_read(name):
    assert "[" not in (BEFORE / name / "recipe.toml").read_text()
    assert RunFolder(BEFORE / name).read_recipe() == RECIPE
    assert {read_checkpoint(BEFORE / name / f"{file}.safetensors").recipe for file in ("best", "last")} == {RECIPE}


def test_the_flow_scores_and_samples():
    flow = selfnorm.load(BEFORE / "whole")
    assert flow.sample(3).shape == (3, 1, 8, 8)
    assert torch.isfinite(flow.log_prob(torch.full((2, 1, 8, 8), 8.5, dtype=torch.float32))).all()


def test_the_likelihood_is_the_stored_one():
    result = Result.read(BEFORE / "whole" / "result.json")
    assert (result.recipe, result.epochs, result.test.examples) == ("digits-conv-snf", 4, 250)
    assert Trained.open(BEFORE / "whole").evaluate().nll == pytest.approx(result.test.nll, abs=1e-3)


@pytest.mark.filterwarnings("ignore::selfnorm.train.scores.UnverifiedScoresWarning")
def test_images_get_the_stored_percentiles(tmp_path):
    np.save(tmp_path / "images.npy", load_dataset("digits").test[:20].numpy())
    scores = Trained.open(BEFORE / "whole").score(tmp_path / "images.npy")
    assert sorted(scores.rank) == list(range(1, 21)) and 0 < scores.percentile.mean() < 100


def test_a_stopped_run_goes_on_to_the_same_end(copied):
    run = copied("stopped")
    ok("train", "--resume", run, "--device", "cpu", "-q")
    whole, resumed = Result.read(BEFORE / "whole" / "result.json"), Result.read(run / "result.json")
    assert resumed.validation_nll == pytest.approx(whole.validation_nll, abs=1e-3)
    assert resumed.test.nll == pytest.approx(whole.test.nll, abs=1e-3)
    assert (run / "metrics.jsonl").read_text().startswith((BEFORE / "stopped" / "metrics.jsonl").read_text())
    before, after = (
        [record for record in RunFolder(path).read_log() if record["kind"] == "epoch"] for path in (BEFORE / "whole", run)
    )
    assert [record["epoch"] for record in after] == [1, 2, 3, 4]
    for old, new in zip(before[2:], after[2:], strict=True):
        assert new["reconstruction_weight"] == pytest.approx(old["weight"], rel=1e-3)
    checkpoint = read_checkpoint(run / "last.safetensors")
    assert checkpoint.recipe == RECIPE
    assert "loss.penalty.reconstruction_weight" in checkpoint.tensors
    assert (run / "curves.png").exists()


def test_a_finished_run_is_finished(copied):
    run = copied("whole")
    ok("train", "--resume", run, "--device", "cpu", "-q")
    before, after = (json.loads((path / "result.json").read_text()) for path in (BEFORE / "whole", run))
    assert after.pop("test")["nll"] == pytest.approx(before.pop("test")["nll"], abs=1e-3)
    assert after.pop("scores_digest") and after.pop("digest")  # which earlier versions did not store
    assert after == before


def test_curves_show_lambda(tmp_path, monkeypatch):
    """It varies in this run, so it has its own panel."""
    drawn = []
    monkeypatch.setattr(figures, "rendered", lambda figure: drawn.append(figure) or canvas.rendered(figure))
    figures.run_curves(tmp_path / "curves.png", RunFolder(BEFORE / "whole").read_log())
    assert [ax.get_ylabel() for ax in drawn[0].axes][-1] == "λ"
    assert drawn[0].axes[-1].lines[0].get_ydata()[0] == pytest.approx(1029.2, abs=0.1)


@pytest.mark.parametrize("name", ["whole", "stopped"])
def test_verbs_accept_the_run(name, tmp_path):
    assert "digits-conv-snf, test: 11" in ok("eval", BEFORE / name)
    assert "round_trip" in json.loads(ok("doctor", BEFORE / name, "--json").splitlines()[0])
    ok("doctor", BEFORE / name, "--repair", "-o", tmp_path / "mended.safetensors")
    assert read_checkpoint(tmp_path / "mended.safetensors").recipe == RECIPE
    ok("sample", BEFORE / name, "-n", "4", "-o", tmp_path / "samples.png")
    assert (tmp_path / "samples.png").exists()


def as_stored_earlier(run):
    """Changes a run on a table to what earlier versions stored, which knew none of these settings."""
    settings = ("header", "drop", "keep", "set_outliers_aside")
    recipe = run / "recipe.toml"
    kept = [line for line in recipe.read_text().splitlines() if line.removeprefix("# ").split(" ")[0] not in settings]
    recipe.write_text("\n".join(kept) + "\n")
    for name in ("best", "last"):
        with safe_open(run / f"{name}.safetensors", framework="pt") as stored:
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
            facts, form = json.loads(stored.metadata()["facts"]), stored.metadata()["format"]
        del facts["table"]
        for setting in settings:
            del facts["recipe"]["data"][setting]
        save_file(tensors, run / f"{name}.safetensors", metadata={"format": form, "facts": json.dumps(facts)})


def test_runs_on_tables_with_outliers_find_their_data_again(tmp_path):
    """Earlier versions trained on all rows, in float32, which an outlier made seem enough."""
    rows = np.random.default_rng(0).normal([0, 1e6], size=(200, 2))
    rows[5] = [1e5, 1e10]
    file, run = tmp_path / "t.npy", tmp_path / "run"
    np.save(file, rows.astype(np.float32))
    ok("fit", file, "--set", "epochs=2", "--set", "layers=1", "--set", "set_outliers_aside=false", "--run", run, "-q")
    before = ok("eval", run)
    np.save(file, rows)
    assert load_dataset(str(file)).train.dtype == torch.float64
    as_stored_earlier(run)
    assert ok("eval", run) == before
    assert "test NLL" in ok("train", "--resume", run, "-q")
    (run / "result.json").unlink()
    assert "test NLL" in ok("train", "--resume", run, "-q") and ok("eval", run) == before

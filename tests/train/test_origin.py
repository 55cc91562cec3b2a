"""Data that float32 cannot resolve: trained on distances from an origin, used in its own units and in float64."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from selfnorm.data import load_dataset
from selfnorm.train.checkpoint import load, read_checkpoint, save_checkpoint
from selfnorm.train.experiments import recipe_for
from selfnorm.train.run import resume_run, start_run
from selfnorm.train.trained import Trained
from support.commandline import fails, ok, read_csv

SMALL = np.random.default_rng(0).uniform(-1, 1, size=(200, 2))


def fitted(folder, values, name):
    np.save(folder / f"{name}.npy", values)
    dataset = load_dataset(str(folder / f"{name}.npy"))
    recipe = recipe_for(str(folder / f"{name}.npy"), dataset.shape, len(dataset.train), 20).changed(layers=2)
    return folder / name, start_run(recipe, folder / name)


def float64_scores(run, values, offset):
    """The likelihood by the stored weights alone: the learned flow in float64, on values − origin taken in Python's integers."""
    checkpoint = read_checkpoint(run / "best.safetensors")
    origin = checkpoint.tensors["data.origin"]
    flow = copy.deepcopy(checkpoint.learned_flow()).double()
    return flow.log_prob(torch.from_numpy(values - (origin.numpy() - offset))).detach().numpy()


@pytest.mark.parametrize("offset", [1e8, 1e12])
@pytest.mark.parametrize("shape", [(200, 2), (400,), (100, 2, 2)])
def test_a_shift_of_all_rows_changes_nothing(tmp_path, offset, shape):
    small = (offset + SMALL.reshape(shape)) - offset  # what the shift leaves of the digits
    near, result = fitted(tmp_path, small, "near")
    far, moved = fitted(tmp_path, offset + small, "far")
    assert load_dataset(str(tmp_path / "far.npy")).train.dtype == torch.float64
    assert moved.validation_nll == result.validation_nll
    assert moved.test.nll == pytest.approx(result.test.nll, abs=1e-4)
    scores = Trained.open(far).score(tmp_path / "far.npy").log_likelihood
    assert np.allclose(scores, Trained.open(near).score(tmp_path / "near.npy").log_likelihood, atol=1e-3)
    events = small if small.ndim > 1 else small[:, None]
    assert np.allclose(scores, float64_scores(far, events, offset), atol=1e-9)
    assert np.allclose(load(far).double().log_prob(torch.from_numpy(offset + events)).detach(), scores, atol=1e-12)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_whole_numbers_of_any_width_are_alike(tmp_path, dtype):
    values = np.random.default_rng(0).integers(0, 100_000, (200, 2)) + 2_024_000_000
    run, result = fitted(tmp_path, values.astype(dtype), dtype)
    wide, expected = fitted(tmp_path, values.astype(np.float64), "wide")
    assert result.test == expected.test
    scores = Trained.open(run).score(tmp_path / f"{dtype}.npy").log_likelihood
    origin = read_checkpoint(wide / "best.safetensors").tensors["data.origin"].numpy()
    assert np.allclose(scores, float64_scores(wide, values - origin, origin), atol=1e-9)


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_the_unit_moves_the_likelihood_by_its_logarithm(tmp_path, scale):
    _, plain = fitted(tmp_path, SMALL, "plain")
    _, scaled = fitted(tmp_path, SMALL * scale, "scaled")
    assert scaled.test.nll - plain.test.nll == pytest.approx(2 * math.log(scale), abs=1e-2)


@pytest.fixture(scope="module")
def far_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("far")
    file = folder / "far.csv"
    np.savetxt(file, 1e8 + SMALL, delimiter=",", header="a,b", comments="", fmt="%.17g")
    ok("fit", file, "--set", "epochs=3", "--run", folder / "run", "--quiet")
    return folder / "run", file


def test_every_verb_speaks_in_the_units_of_the_data(far_run, tmp_path):
    run, file = far_run
    ok("sample", run, "-n", 50, "-o", tmp_path / "samples.csv")
    drawn = np.loadtxt(tmp_path / "samples.csv", delimiter=",", skiprows=1)
    assert (np.abs(drawn - 1e8) < 20).all() and len(np.unique(drawn)) == 100  # float32 would give multiples of 8
    ok("sample", run, "-n", 2, "-o", tmp_path / "samples.npy")
    assert np.load(tmp_path / "samples.npy").dtype == np.float64
    evaluated = Trained.open(run).evaluate("train")
    held = load_dataset(str(file)).train
    assert evaluated.nll == pytest.approx(-load(run).log_prob(held).mean().item(), abs=1e-9)
    ok("doctor", run, "--repair", "-o", tmp_path / "repaired.safetensors")
    assert load(tmp_path / "repaired.safetensors").log_prob(held).mean().item() == pytest.approx(-evaluated.nll, abs=1e-6)
    assert resume_run(run).test == Trained.open(run).evaluate("test")


def test_rows_to_score_may_lie_close_together(table_run, tmp_path):
    """The spread of the training data matters, not that of two rows."""
    run, _ = table_run
    (tmp_path / "two.csv").write_text("a,b,c\n3.0000001,3,3\n3.0000002,3,3\n")
    assert len(read_csv(ok("score", run, tmp_path / "two.csv"))) == 2


def test_rows_beyond_float32_are_scored(table_run, tmp_path):
    np.save(tmp_path / "far.npy", np.array([[3.0, 3, 3], [1e20, 3, 3], [1e30, 3, 3], [1e39, 3, 3], [1e300, 3, 3]]))
    scores = Trained.open(table_run[0]).score(tmp_path / "far.npy")
    assert scores.rank.tolist() == [5, 4, 3, 2, 1]
    assert np.isfinite(scores.log_likelihood[:4]).all() and scores.log_likelihood[4] == -np.inf
    assert scores.log_likelihood[3] == pytest.approx(1e18 * scores.log_likelihood[2], rel=1e-3)  # the tail is normal


def test_a_damaged_origin_is_refused(far_run, tmp_path):
    checkpoint = read_checkpoint(far_run[0] / "best.safetensors")
    save_checkpoint(tmp_path / "x.safetensors", replace(checkpoint, tensors=checkpoint.tensors | {"data.origin": torch.zeros(3)}))
    assert "expected a finite origin of shape (2,)" in fails("sample", tmp_path / "x.safetensors", "-o", tmp_path / "x.csv")


def test_a_run_on_data_that_would_be_refused_today_can_be_used(tmp_path, monkeypatch):
    """Earlier versions trained on float32 tables that are rounded to steps of a fifth of their spread."""
    generator = np.random.default_rng(0)
    rows = np.column_stack([generator.normal(size=200), 1.7e9 + 600 * generator.normal(size=200)]).astype(np.float32)
    np.save(tmp_path / "t.npy", rows)
    assert "that float32 can tell apart, got a spread of" in fails(
        "fit", tmp_path / "t.npy", "--set", "epochs=2", "-q", "--run", tmp_path / "new"
    )
    with monkeypatch.context() as patched:
        patched.setattr("selfnorm.data.own.expect_distinguishable", lambda *args: None)
        ok("fit", tmp_path / "t.npy", "--set", "epochs=2", "--run", tmp_path / "run")
    for call in (("eval", tmp_path / "run"), ("train", "--resume", tmp_path / "run"), ("doctor", tmp_path / "run")):
        ok(*call)

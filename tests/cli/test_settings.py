"""Settings on the command line: by path and by flat key, shown in groups and as flat JSON."""

import json
import re

import pytest

from selfnorm.train.folder import RunFolder
from support.commandline import SHORT, fails, invoke, ok


@pytest.mark.parametrize("key", ["objective.reconstruction_weight", "reconstruction_weight", "weight"])
def test_train_takes_a_path_or_a_key(key, tmp_path):
    ok("train", *SHORT, "--set", f"{key}=7", "--set", "epochs=1", "--seed", "3", "--run", tmp_path / "run", "-q")
    recipe = RunFolder(tmp_path / "run").read_recipe()
    assert (recipe.objective.reconstruction_weight, recipe.optimiser.epochs, recipe.optimiser.seed) == (7.0, 1, 3)
    records = RunFolder(tmp_path / "run").read_log()
    assert [record["reconstruction_weight"] for record in records if record["kind"] == "epoch"] == [[7.0, 7.0]]


def test_settings_without_effect_are_named(tmp_path):
    result = invoke(
        "train", "digits-fc-lu", *SHORT, "--set", "probes=2", "--set", "inverse_likelihood=true", "--run", tmp_path / "run"
    )
    assert result.exit_code == 0, result.output
    assert (
        "selfnorm: probes, inverse_likelihood will have no effect: no layer of digits-fc-lu learns its inverse\n" in result.stderr
    )


@pytest.mark.filterwarnings("default::selfnorm.objective.UnstableObjectiveWarning")
def test_a_weight_too_small_for_the_paper_is_a_warning_of_one_line(tmp_path):
    settings = ("--set", "inverse_likelihood=true", "--set", "weight=0.05", "--set", "epochs=4", "--set", "validate_every=2")
    result = invoke("train", *SHORT, *settings, "--run", tmp_path / "run")
    assert result.exit_code == 0, result.output
    told = [line for line in result.stderr.splitlines() if "inverse_likelihood" in line]
    assert len(told) == 2
    assert told[0].startswith("selfnorm: Loss: with λ = 0.05, the paper's objective") and "below 2.5 in some" in told[0]
    assert re.match(r"digits-fc-snf, epoch 2: layer \d is predicted to lose its learned inverse", told[1])
    doctor = ok("doctor", tmp_path / "run")
    assert "stability ratio" in doctor
    assert re.search(
        r"note: layer \d (is predicted to lose|has lost) its learned inverse.*Train with inverse_likelihood=false", doctor
    )


@pytest.mark.parametrize("probes", ["-1", "10001"])
def test_probes_out_of_range_are_refused(probes, tmp_path):
    assert "expected objective.probes in [0, 10000]" in fails("train", "--set", f"probes={probes}")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "kind=emerging",
            "expected architecture.kind to be one of selfnorm, exact, tracked, sketch, relative, lu for the model fc",
        ),
        ("optimiser.epoch=3", "did you mean optimiser.epochs?"),
        ("objective.weight=3", "did you mean objective.reconstruction_weight?"),
        ("epochs=0", "recipe digits-fc-snf: expected optimiser.epochs at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused_at_once(setting, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in fails("train", "--set", setting)
    assert list(tmp_path.iterdir()) == []


def test_recipes_are_shown_in_groups_and_printed_flat():
    groups = re.findall(r"^\[(.*)\]$", ok("recipes", "mnist-glow-snf"), re.MULTILINE)
    assert groups == ["data", "architecture", "objective", "optimiser", "evaluation"]
    flat = json.loads(ok("recipes", "mnist-glow-snf", "--json"))
    assert (len(flat), flat["data"], flat["weight"], flat["steps"], flat["eval_batch_size"]) == (48, "mnist", 10.0, 16, 500)
    assert all(len(json.loads(line)) == 48 for line in ok("recipes", "--json").splitlines())

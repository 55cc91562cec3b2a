"""A damaged checkpoint is refused, whichever bit is wrong; a run resumes from its best one if its last one is damaged."""

import json
import random
import shutil
import signal
import struct
import warnings
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import selfnorm
from selfnorm.train import digest as digests
from selfnorm.train.checkpoint import Checkpoint, UnverifiedCheckpointWarning, read_checkpoint, save_checkpoint
from selfnorm.train.counters import RunProgress
from selfnorm.train.loop import Trainer
from selfnorm.train.result import Result
from selfnorm.train.run import resume_run, start_run
from selfnorm.train.starts import DamagedCheckpointWarning
from selfnorm.train.stopping import StoppedError
from support.checkpoint_files import write_checkpoint
from support.commandline import digest, fails, invoke, ok
from support.small_runs import SMALL, assert_same_runs, digits, same

SMALLEST = Checkpoint(
    digits("layers=1"),
    (2,),
    None,
    ("a", "b"),
    "fingerprint",
    {
        "loss.flow.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float32),
        "loss.flow.weight_inv": torch.tensor([[1.0, 3.0], [2.0, 4.0]], dtype=torch.float32),
        "loss.flow.fallbacks": torch.tensor(3),
        "loss.flow.initialized": torch.tensor([True, False]),
        "loss.low": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "epoch.metrics": torch.zeros(0, 2, dtype=torch.float32),
    },
    asdict(RunProgress(step=7)),
)


@pytest.fixture
def small(tmp_path):
    """The path of a small checkpoint, its bytes, and the length of the bytes before its tensors."""
    path = tmp_path / "small.safetensors"
    save_checkpoint(path, SMALLEST)
    whole = path.read_bytes()
    return path, whole, 8 + struct.unpack("<Q", whole[:8])[0]


def stored(path):
    """Returns the tensors and the metadata of a file, read without the library."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def flip(path, where=-100):
    """Flips one bit, by default of a tensor."""
    content = bytearray(path.read_bytes())
    content[where] ^= 4
    path.write_bytes(bytes(content))


def gives_the_right_result(path):
    """Returns whether a file is read as the small checkpoint; False if it is refused, in words that name it."""
    try:
        found = read_checkpoint(path)
    except ValueError as error:
        assert str(error).startswith(str(path))
        return False
    assert same(found, SMALLEST) and replace(found, tensors={}) == replace(SMALLEST, tensors={})
    return True


def test_every_flipped_bit_of_the_tensors_is_found(small):
    path, whole, start = small
    assert gives_the_right_result(path)
    for at in range(start, len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert not gives_the_right_result(path), (at, bit)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_anywhere_in_the_header_is_found_or_changes_nothing(small, every):
    path, whole, start = small
    chance = random.Random(0)
    tried = refused = 0
    for at in (*range(8), *range(8, start, every)):
        for bit in range(8) if at < 8 else chance.sample(range(8), 2):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            refused += not gives_the_right_result(path)
            tried += 1
    assert refused > 0.95 * tried > 0.35 * start / every


@pytest.mark.parametrize(
    "change",
    [
        lambda found: {
            **found,
            "loss.flow.weight": found["loss.flow.weight_inv"],
            "loss.flow.weight_inv": found["loss.flow.weight"],
        },
        lambda found: {name: value for name, value in found.items() if name != "loss.flow.fallbacks"},
        lambda found: {**found, "loss.flow.weight": found["loss.flow.weight"].view(torch.int32)},
        lambda found: {**found, "loss.flow.weight": found["loss.flow.weight"].reshape(4)},
        lambda found: {**found, "epoch.metrics": found["epoch.metrics"].reshape(2, 0)},
        lambda found: {**found, "other": torch.ones(1)},
    ],
    ids=["exchanged", "missing", "another dtype", "another shape", "another empty shape", "one more"],
)
def test_tensors_that_are_not_those_written(small, change):
    path, _, _ = small
    tensors, metadata = stored(path)
    save_file(change(tensors), path, metadata)
    assert not gives_the_right_result(path)


@pytest.mark.parametrize(("key", "value"), [("data", "other"), ("shape", [1, 2]), ("progress", {"step": 8})])
def test_facts_that_are_not_those_written(small, key, value):
    path, _, _ = small
    tensors, metadata = stored(path)
    save_file(tensors, path, {**metadata, "facts": json.dumps({**json.loads(metadata["facts"]), key: value})})
    assert not gives_the_right_result(path)


def test_the_digest_is_that_of_its_definition(small, tmp_path):
    tensors, metadata = stored(small[0])
    write_checkpoint(tmp_path / "other.safetensors", tensors, metadata["facts"])
    assert stored(tmp_path / "other.safetensors")[1] == metadata


def test_the_digest_does_not_depend_on_threads(monkeypatch):
    tensors = {f"{index}": torch.rand(2**index) for index in range(20)}
    expected = digests.digest(tensors, "facts")
    monkeypatch.setattr(digests, "LARGE", 1 << 40)
    assert digests.digest(dict(reversed(tensors.items())), "facts") == expected
    monkeypatch.undo()
    tensors["18"][-1] += 1
    assert digests.digest(tensors, "facts") != expected


def test_a_checkpoint_without_a_digest_is_read_with_a_note(small):
    path, _, _ = small
    tensors, metadata = stored(path)
    del metadata["digest"]
    save_file(tensors, path, metadata)
    with pytest.warns(UnverifiedCheckpointWarning, match="small.safetensors: an earlier version wrote this file without"):
        assert gives_the_right_result(path)


def test_the_note_is_one_line_of_the_command(digits_run, tmp_path):
    tensors, metadata = stored(digits_run[0] / "best.safetensors")
    del metadata["digest"]
    save_file(tensors, tmp_path / "old.safetensors", metadata)
    with warnings.catch_warnings(action="default"):
        result = invoke("sample", tmp_path / "old.safetensors", "-n", 2, "-o", tmp_path / "s.npy")
    assert result.exit_code == 0 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"selfnorm: {tmp_path / 'old.safetensors'}: an earlier version wrote this file")


def test_no_verb_uses_a_damaged_best_checkpoint(digits_run, tmp_path):
    run = shutil.copytree(digits_run[0], tmp_path / "run")
    np.save(tmp_path / "x.npy", np.zeros((2, 8, 8), np.uint8))
    flip(run / "best.safetensors")
    before = digest(tmp_path)
    for args in (
        ("eval", run),
        ("score", run, tmp_path / "x.npy"),
        ("sample", run, "-o", tmp_path / "s.png"),
        ("doctor", run),
        ("doctor", run, "--repair"),
        ("train", "--resume", run),
    ):
        said = fails(*args)
        assert f"{run / 'best.safetensors'}: expected the numbers and the recipe that were written, got a damaged file" in said
        assert str(run / "last.safetensors") in said, "what can be used instead"
    assert digest(tmp_path) == before
    with pytest.raises(ValueError, match=r"best.safetensors.*last.safetensors, from the end of training, is whole: name it"):
        selfnorm.load(run)
    selfnorm.load(run / "last.safetensors")
    flip(run / "last.safetensors")
    with pytest.raises(ValueError, match="damaged") as caught:
        selfnorm.load(run)
    assert "last" not in str(caught.value)


# Resuming


def stopped_run(path):
    """Trains a small run, with its first validations behind it, up to the middle of an epoch."""

    def stop(record):
        if record["kind"] == "epoch" and record["epoch"] == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError):
        start_run(digits(*SMALL), path, report=stop)
    steps = [read_checkpoint(path / f"{name}.safetensors").progress["step"] for name in ("best", "last")]
    assert 0 < steps[0] < steps[1], "otherwise the two are the same"
    return path


def test_a_run_with_a_damaged_last_checkpoint_goes_on_from_its_best_to_the_same_bits(tmp_path):
    start_run(digits(*SMALL), tmp_path / "whole")
    run = stopped_run(tmp_path / "stopped")
    flip(run / "last.safetensors")
    with pytest.warns(DamagedCheckpointWarning, match=r"last.safetensors: .*; the run continues from best.safetensors, step 24"):
        resume_run(run)
    assert_same_runs(tmp_path / "whole", run)


def test_the_command_says_so_in_one_line(tmp_path):
    run = stopped_run(tmp_path / "stopped")
    flip(run / "last.safetensors")
    with warnings.catch_warnings(action="default"):
        result = invoke("train", "--resume", run, "-q")
    assert result.exit_code == 0 and result.stderr.count("\n") == 1 and "continues from best.safetensors" in result.stderr


def test_a_run_with_two_damaged_checkpoints_names_both(tmp_path):
    run = stopped_run(tmp_path / "stopped")
    for name in ("best", "last"):
        flip(run / f"{name}.safetensors")
    before = digest(run)
    with pytest.raises(ValueError, match=r"last.safetensors: .* nor can the run go on from its best .*best.safetensors: "):
        resume_run(run)
    assert digest(run) == before


def test_a_run_with_a_damaged_best_checkpoint_is_refused_before_it_trains(tmp_path):
    run = stopped_run(tmp_path / "stopped")
    flip(run / "best.safetensors")
    records = []
    with pytest.raises(ValueError, match=r"best.safetensors: expected .*damaged"):
        resume_run(run, report=records.append)
    assert records == []


@pytest.mark.parametrize("damaged", [False, True])
def test_weights_alone_are_not_resumed(tmp_path, damaged):
    """They would go on with Adam's moments at zero."""
    run = stopped_run(tmp_path / "stopped")
    for name in ("best", "last"):
        whole = read_checkpoint(run / f"{name}.safetensors")
        weights = {key: value for key, value in whole.tensors.items() if key.startswith("loss.")}
        save_checkpoint(run / f"{name}.safetensors", replace(whole, tensors=weights))
    if damaged:
        flip(run / "last.safetensors")
    said = f"{'best' if damaged else 'last'}.safetensors: expected a checkpoint to resume from, got weights without"
    with warnings.catch_warnings(action="ignore", category=DamagedCheckpointWarning), pytest.raises(ValueError, match=said):
        resume_run(run)


@pytest.mark.parametrize("damage", [None, "{", "earlier"])
def test_scores_that_cannot_be_verified_are_used_with_a_note(table_run, tmp_path, damage):
    run = shutil.copytree(table_run[0], tmp_path / "run")
    before = ok("score", run, table_run[1])
    if damage is None:
        (run / "result.json").unlink()
    else:
        stored = json.loads((run / "result.json").read_text())
        del stored["scores_digest"], stored["digest"]
        (run / "result.json").write_text(json.dumps(stored) if damage == "earlier" else damage)
    with warnings.catch_warnings(action="default"):
        result = invoke("score", run, table_run[1])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (0, before, 1)
    assert f"{run / 'training_scores.npy'}: the run's result holds no digest of this file" in result.stderr


OTHERS_RECIPE = "best.safetensors: expected the recipe that the run started with, got a different optimiser.seed in recipe.toml"


@pytest.mark.parametrize("names", [("best.safetensors",), ("best.safetensors", "result.json", "training_scores.npy")])
def test_the_best_weights_of_another_run_are_not_taken_for_its_own(table_run, tmp_path, names):
    """Each file is whole, but the rest of the run does not belong to these weights."""
    run, other = shutil.copytree(table_run[0], tmp_path / "run"), tmp_path / "other"
    ok("fit", table_run[1], "--set", "epochs=4", "--set", "seed=1", "--run", other, "--quiet")
    for name in names:
        shutil.copy(other / name, run)
    table = table_run[1]
    for call in (("score", run, table), ("eval", run), ("sample", run, "-n", "3"), ("doctor", run), ("train", "--resume", run)):
        assert OTHERS_RECIPE in fails(*call)
    with pytest.raises(ValueError, match="expected the recipe that the run started with"):
        selfnorm.load(run)
    (run / "recipe.toml").unlink()  # then nothing but a result says whose they are
    (ok if "result.json" in names else fails)("eval", run)


def test_other_weights_of_the_same_recipe_are_not_taken_for_the_best_ones(table_run, tmp_path):
    """As from another machine; the training scores are not theirs."""
    run = shutil.copytree(table_run[0], tmp_path / "run")
    best = read_checkpoint(run / "best.safetensors")
    save_checkpoint(run / "best.safetensors", replace(best, progress={**best.progress, "best_nll": 2.5}))
    said = fails("score", run, table_run[1])
    assert (
        "best.safetensors: expected the weights with the validation NLL in result.json" in said and "got others, with 2.5" in said
    )


def test_a_run_without_its_checkpoints_is_not_trained_again(table_run, tmp_path):
    """It was, from the first step on, and its log and result were replaced without a word."""
    run = shutil.copytree(table_run[0], tmp_path / "run")
    for name in ("best", "last"):
        (run / f"{name}.safetensors").unlink()
    for gone in ("curves.png", "metrics.jsonl", "result.json"):  # the scores alone tell
        (run / gone).unlink(missing_ok=True)
        before = digest(run)
        assert "last.safetensors: expected the checkpoint to resume from, got none" in fails("train", "--resume", run)
        assert digest(run) == before


def test_a_changed_digit_of_a_result_is_noticed(table_run, tmp_path):
    run = shutil.copytree(table_run[0], tmp_path / "run")
    path, before = run / "result.json", Result.read(table_run[0] / "result.json")
    stored = json.loads(path.read_text())
    changed = {**stored, "test": {**stored["test"], "nll": stored["test"]["nll"] - 10}}
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"result.json: expected a run's result, got a missing, damaged .*its digest differs"):
        Result.read(path)
    ok("train", "--resume", run, "-q")
    assert Result.read(path).test == before.test
    path.write_text(json.dumps({key: value for key, value in stored.items() if key != "digest"}, indent=7))
    assert Result.read(path) == before, "of an earlier version, without a digest"


def test_the_result_is_that_of_the_best_weights_on_disk(tmp_path, monkeypatch):
    """A kill between the two checkpoints leaves a best one that is newer than the last, and later validations may be worse."""
    run = stopped_run(tmp_path / "stopped")
    ended = shutil.copytree(run, tmp_path / "ended")
    expected = resume_run(ended)
    shutil.copy(ended / "best.safetensors", run)
    likelihood = Trainer._likelihood

    def worse(*args):
        found = likelihood(*args)
        return replace(found, nll=found.nll + 15)

    monkeypatch.setattr(Trainer, "_likelihood", worse)
    result = resume_run(run)
    assert (result.validation_nll, result.best_epoch) == (expected.validation_nll, expected.best_epoch)

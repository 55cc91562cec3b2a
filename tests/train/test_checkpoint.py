"""Checkpoints survive a round trip, invalid files raise an error that names them, and a failed write keeps the old file."""

import errno
import io
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import selfnorm
from selfnorm.data import load_dataset
from selfnorm.train import checkpoint as checkpoints
from selfnorm.train.checkpoint import FORMAT, load, read_checkpoint, save_checkpoint
from selfnorm.train.experiments import find_recipe
from selfnorm.train.loop import Trainer
from selfnorm.train.recipe import FLAT_KEYS
from support.checkpoint_files import write_checkpoint
from support.small_runs import folder_with, same, started

DIGITS = find_recipe("digits-fc-snf").changed(epochs=2, validate_every=1)
GLOW = find_recipe("mnist-glow-snf").changed(name="digits-glow", data="digits", blocks=1, steps=1, hidden=4, epochs=1)


def train(recipe, path):
    trainer = Trainer(recipe, load_dataset(recipe.data.source), folder=folder_with(recipe, path))
    trainer.start()
    return trainer, trainer.run()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder, the best checkpoint as it was in memory, and the trainer."""
    path = tmp_path_factory.mktemp("runs") / "digits"
    trainer, best = train(DIGITS, path)
    return path, best, trainer


@pytest.fixture
def file(trained, tmp_path):
    """A checkpoint file that a test may damage."""
    path = tmp_path / "best.safetensors"
    path.write_bytes((trained[0] / "best.safetensors").read_bytes())
    return path


def rewritten(path, change=lambda facts: facts, tensors=lambda tensors: tensors, metadata=lambda metadata: metadata):
    """Overwrites a checkpoint with changed facts, tensors or metadata, under the digest of what it then holds."""
    with safe_open(path, framework="pt") as opened:
        stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        facts = json.loads(opened.metadata()["facts"])
    return write_checkpoint(path, tensors(stored), change(facts), metadata)


def with_setting(facts, key, value):
    """The facts of a checkpoint whose recipe has another value for a setting, or one that is unknown, within its group."""
    group, _, name = FLAT_KEYS.get(key, f"data.{key}").partition(".")
    recipe = facts["recipe"]
    return {**facts, "recipe": {**recipe, group: {**recipe[group], name: value}}}


def refused(path):
    """Returns the error message for a file that is not a valid checkpoint; it names the file."""
    with pytest.raises(ValueError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_round_trip(trained, tmp_path):
    _, best, _ = trained
    columned = replace(best, columns=("a", "b"), levels=None, shape=(2,))
    for checkpoint in (best, columned):
        save_checkpoint(tmp_path / "one.safetensors", checkpoint)
        back = read_checkpoint(tmp_path / "one.safetensors")
        assert replace(back, tensors={}) == replace(checkpoint, tensors={})
        assert back.tensors.keys() == checkpoint.tensors.keys()
        for name, value in checkpoint.tensors.items():
            assert back.tensors[name].dtype == value.dtype and torch.equal(back.tensors[name], value), name
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]


def test_a_checkpoint_has_weights_multipliers_moments_and_metrics(trained):
    path, best, _ = trained
    assert read_checkpoint(path / "best.safetensors").progress == best.progress
    assert {name.split(".")[0] for name in best.tensors} == {"loss", "adam", "epoch"}
    assert "loss.penalty.reconstruction_weight" in best.tensors
    assert {value.dtype for value in best.part("loss.flow.").values()} <= {torch.float32, torch.bool}


def test_views_and_transposed_tensors_are_saved_by_value(trained, tmp_path):
    _, best, _ = trained
    base = torch.arange(6.0).reshape(2, 3)
    views = {"loss.a": base.T, "loss.b": base[:, 1:], "loss.c": base.clone().requires_grad_()}
    save_checkpoint(tmp_path / "views.safetensors", replace(best, tensors=views))
    back = read_checkpoint(tmp_path / "views.safetensors").tensors
    assert all(torch.equal(back[name], value) for name, value in views.items())


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_a_loaded_flow_scores_bit_for_bit_as_the_trained_one(trained, default):
    path, best, trainer = trained
    torch.set_default_dtype(default)
    x = trainer.validation.random_examples(50, seed=0)
    with torch.no_grad():
        expected = best.flow().log_prob(x)
        for source in (path, str(path), path / "best.safetensors", path / "last.safetensors"):
            flow = selfnorm.load(source)
            assert not flow.training
            assert torch.equal(flow.log_prob(x), expected)  # the last epoch was the best, so both files hold it
        trainer.flow.eval()
        assert torch.equal(trainer.flow.log_prob(x), expected)
        assert selfnorm.load(path).sample(3).dtype == torch.float32


def test_a_folder_stands_for_its_best_checkpoint_and_no_other(trained, tmp_path):
    """A run always has one. The last weights may be far worse, and were used without a word."""
    _, best, _ = trained
    save_checkpoint(tmp_path / "last.safetensors", best)
    with pytest.raises(
        ValueError, match=r"best.safetensors: expected the best weights of the run, got none; .*last.safetensors, from"
    ):
        checkpoints.open_checkpoint(tmp_path)
    assert checkpoints.open_checkpoint(tmp_path / "last.safetensors")[1].data == best.data
    save_checkpoint(tmp_path / "best.safetensors", best)
    assert checkpoints.open_checkpoint(tmp_path)[0] == tmp_path / "best.safetensors"


@pytest.mark.parametrize("part", [0, 4, 8, 100, 0.5, 0.999])
def test_a_truncated_file(file, part):
    whole = file.read_bytes()
    file.write_bytes(whole[: part if isinstance(part, int) else int(part * len(whole))])
    assert "truncated or foreign" in refused(file)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "selfnorm-checkpoint-999"}])
def test_a_foreign_safetensors_file(tmp_path, metadata):
    path = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.ones(2)}, path, metadata=metadata)
    assert FORMAT in refused(path)


def write_pickle(value, path):
    path.write_bytes(pickle.dumps(value))


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize(
    "write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))], ids=["torch", "pickle"]
)
@pytest.mark.parametrize("name", ["best.safetensors", "model.pt", "model.pkl"])
def test_a_pickle_runs_no_code(tmp_path, write, name):
    marker = tmp_path / "marker"
    path = tmp_path / name
    write({"weight": Bomb(marker)}, path)
    refused(path)
    if name == "best.safetensors":
        refused(path.parent)
    assert not marker.exists()
    file = io.BytesIO(path.read_bytes())
    torch.load(file, weights_only=False) if write is torch.save else pickle.load(file)
    assert marker.exists()  # the bomb does work


def test_a_text_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello, I am not a checkpoint\n" * 10)
    assert "truncated or foreign" in refused(path)


def test_a_header_that_claims_terabytes(tmp_path):
    path = tmp_path / "huge.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    assert "truncated or foreign" in refused(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: "{not json",
        lambda facts: "[]",
        lambda facts: "null",
        lambda facts: {},
        lambda facts: {**facts, "recipe": None},
        lambda facts: {**facts, "recipe": "digits"},
        lambda facts: {**facts, "recipe": []},
        lambda facts: {**facts, "shape": None},
        lambda facts: {**facts, "shape": ["a"]},
        lambda facts: {**facts, "shape": [-1]},
        lambda facts: {**facts, "shape": []},
        lambda facts: {**facts, "levels": "many"},
        lambda facts: {**facts, "levels": -3},
        lambda facts: {**facts, "columns": 5},
        lambda facts: {**facts, "progress": 5},
        lambda facts: {**facts, "progress": "ab"},
    ],
)
def test_damaged_facts(file, change):
    refused(rewritten(file, change))


def test_no_facts_at_all(file):
    refused(rewritten(file, metadata=lambda metadata: {"format": FORMAT}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("colour", "red", "unknown data.colour"),
        ("epochs", "many", "a whole number"),
        ("layers", True, "a whole number"),
        ("model", "vae", "one of fc, conv, glow"),
        ("kind", "magic", "magic"),
        ("layers", 0, "layers"),
        ("levels", 1000, "levels"),
        ("decay", 7, "decay"),
    ],
)
def test_a_recipe_with_invalid_settings(file, key, value, said):
    assert said in refused(rewritten(file, lambda facts: with_setting(facts, key, value)))


@pytest.mark.parametrize(
    "tensors",
    [
        lambda tensors: {name: value for name, value in tensors.items() if not name.endswith(".bias")},
        lambda tensors: {name: value[:1] if value.dim() == 2 else value for name, value in tensors.items()},
        lambda tensors: {**tensors, "loss.flow.bijection.99.weight": torch.ones(2)},
        lambda tensors: {"other": torch.ones(1)},
    ],
    ids=["missing", "of other shapes", "too many", "none"],
)
def test_weights_that_do_not_fit_the_recipe(file, tensors):
    assert "expected weights that fit the recipe" in refused(rewritten(file, tensors=tensors))


def test_weights_of_another_recipe(file):
    refused(rewritten(file, lambda facts: with_setting(facts, "layers", 3)))
    refused(rewritten(file, lambda facts: {**with_setting(facts, "layers", 2), "shape": [1, 4, 4]}))


@pytest.mark.parametrize("size", [10**12, 10**30], ids="{:.0e}".format)
def test_absurd_sizes(tmp_path, file, size):
    path = tmp_path / "glow"
    train(GLOW, path)
    best = path / "best.safetensors"
    load(best)
    refused(rewritten(best, lambda facts: with_setting(facts, "hidden", size)))
    for key in ("layers", "steps", "blocks", "kernel_size", "bins"):  # must not loop for ages either
        refused(rewritten(file, lambda facts, key=key: with_setting(facts, key, size)))


def test_an_absurd_shape(file):
    refused(rewritten(file, lambda facts: {**facts, "shape": [10**6, 10**6]}))


def test_a_missing_file(tmp_path):
    assert "got no such file" in refused(tmp_path / "nowhere" / "best.safetensors")
    assert "no such file" in refused(tmp_path / "nowhere")
    assert "expected a run folder with best.safetensors, got none" in refused(tmp_path)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")],
    ids=["OSError", "SafetensorError"],
)
@pytest.mark.parametrize("existing", [True, False])
def test_a_write_that_fails_midway_leaves_the_old_file(trained, tmp_path, monkeypatch, error, existing):
    _, best, _ = trained
    path = tmp_path / "last.safetensors"
    if existing:
        save_checkpoint(path, best)
    before = path.read_bytes() if existing else None

    def half(tensors, target, metadata):
        Path(target).write_bytes(b"\0" * 1000)
        raise error

    monkeypatch.setattr(checkpoints, "save_file", half)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, replace(best, columns=("new",)))
    assert list(tmp_path.iterdir()) == ([path] if existing else [])
    assert not existing or path.read_bytes() == before


def test_a_missing_folder_is_named(trained, tmp_path):
    _, best, _ = trained
    with pytest.raises(OSError, match="nowhere"):
        save_checkpoint(tmp_path / "nowhere" / "last.safetensors", best)
    assert not (tmp_path / "nowhere").exists()


def test_a_checkpoint_without_an_epochs_metrics_can_be_resumed(tmp_path):
    """The first versions stored sums instead; then the means of that one epoch cover only the remaining steps."""
    trainer = started()
    checkpoint = trainer._make_checkpoint()
    older = replace(checkpoint, tensors={name: value for name, value in checkpoint.tensors.items() if "epoch." not in name})
    save_checkpoint(tmp_path / "old.safetensors", older)
    again = started()
    again.resume(read_checkpoint(tmp_path / "old.safetensors"))
    assert same(again.run(), trainer.run())


WHOLE = ("step", "validated", "best_step", "stale", "worse", "rollbacks", "far_off", "log_length")
UNSOUND = [
    *((name, value) for name in WHOLE for value in ([], None, True, 1.5, math.nan, -1, 10**400)),
    *(("seconds", value) for value in ([], None, math.nan, -0.5, 10**400)),
    *(("best_nll", value) for value in ([], "", math.inf, math.nan, 10**400)),
    *(("warned", value) for value in (None, "error", 3, [3], {})),
]


def test_counters_of_another_kind_are_refused(trained, tmp_path):
    best = read_checkpoint(trained[0] / "best.safetensors")
    for name, value in UNSOUND:
        save_checkpoint(tmp_path / "x.safetensors", replace(best, progress={**best.progress, name: value}))
        with pytest.raises(
            ValueError, match=rf"x.safetensors: expected readable checkpoint metadata, got .* \(unusable {name}\)"
        ):
            read_checkpoint(tmp_path / "x.safetensors")
    for progress in ({}, {"step": 3, "best_nll": None}, {**best.progress, "later": []}):  # of other versions
        save_checkpoint(tmp_path / "x.safetensors", replace(best, progress=progress))
        assert read_checkpoint(tmp_path / "x.safetensors").progress == progress

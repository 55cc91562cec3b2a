"""The command: every verb, what it prints and leaves, and one line for everything that can be wrong."""

import csv
import errno
import hashlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import selfnorm
from selfnorm.cli import app
from selfnorm.data import cifar10, load_dataset, mnist
from selfnorm.recipes import RECIPES
from selfnorm.train import checkpoint as checkpoints
from selfnorm.train.checkpoint import read

VERBS = ("train", "fit", "eval", "sample", "score", "recipes", "doctor")
SHORT = ("--set", "epochs=2", "--set", "validate_every=1", "--set", "test_samples=2")


def invoke(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="selfnorm")


def ok(*args):
    """What a call that must succeed prints."""
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*args, code=1):
    """The one line of a call that must fail."""
    result = invoke(*args)
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.startswith("selfnorm: ") and result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    assert "Traceback" not in result.stderr
    return result.stderr


def digest(folder):
    """All files below a folder, by their content."""
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def read_csv(text):
    return list(csv.DictReader(io.StringIO(text)))


def numbers(n, columns, seed=0):
    rows = np.random.default_rng(seed).normal(size=(n, columns)) * np.arange(1, columns + 1) + 3
    return rows.astype(np.float32)


def write_csv(path, rows, header="a,b,c"):
    np.savetxt(path, rows, delimiter=",", header=header, comments="", fmt="%.9g")
    return path


@pytest.fixture(scope="module", autouse=True)
def cwd(tmp_path_factory):
    """A working folder of its own, so that no test leaves anything in the repository."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("work"))
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run of images, and what its training printed."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    return folder, ok("train", "digits-fc-snf", *SHORT, "--run", folder, "-q")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A run on a table with named columns, and that table's file."""
    folder = tmp_path_factory.mktemp("table")
    file = write_csv(folder / "measured.csv", numbers(200, 3))
    ok("fit", file, "--set", "epochs=4", "--run", folder / "run", "--quiet")
    return folder / "run", file


# Help and version


def test_version():
    assert ok("--version").startswith(f"selfnorm {selfnorm.__version__}, torch {torch.__version__}")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_by_examples(verb):
    text = ok(verb, "--help")
    assert "Examples" in text and f"selfnorm {verb} " in text.split("Examples")[1].replace("\n", " ")
    assert text == ok(verb, "-h")


def test_the_help_lists_all_verbs():
    text = ok("--help")
    assert all(f" {verb} " in text for verb in VERBS)
    assert invoke().exit_code == 2  # nothing asked for


# recipes


def test_recipes_lists_all():
    text = ok("recipes")
    assert all(name in text for name in RECIPES)


def test_recipes_shows_one():
    text = ok("recipes", "mnist-glow-snf")
    assert 'model = "glow"' in text and "weight = 100.0" in text


def test_recipes_as_json():
    assert [json.loads(line)["name"] for line in ok("recipes", "--json").splitlines()] == list(RECIPES)
    assert json.loads(ok("recipes", "mnist-fc-snf", "--json"))["epochs"] == 6000


# train, eval


def test_train_leaves_a_whole_run_and_quiet_prints_its_result_only(digits):
    folder, printed = digits
    assert {path.name for path in folder.iterdir()} == {
        "recipe.toml",
        "metrics.jsonl",
        "best.safetensors",
        "last.safetensors",
        "training_scores.npy",
        "samples.png",
        "curves.png",
        "result.json",
    }
    lines = printed.splitlines()
    assert len(lines) == 5 and lines[0].startswith("digits-fc-snf: test NLL ")
    assert all(str(folder / name) in printed for name in ("samples.png", "curves.png", "best.safetensors"))


def test_eval_says_what_train_said(digits):
    folder, printed = digits
    said = printed.splitlines()[0].split("test NLL ")[1]
    assert ok("eval", folder).strip() == f"digits-fc-snf, test: {said}"
    result = json.loads((folder / "result.json").read_text())
    found = json.loads(ok("eval", folder, "--json"))
    assert {key: found[key] for key in result["test"]} == result["test"]
    assert found["run"] == str(folder) and found["part"] == "test"


def test_eval_is_the_mean_of_log_prob(table):
    folder, file = table
    flow, data = selfnorm.load(folder), load_dataset(str(file))
    for part in ("train", "validation", "test"):
        found = json.loads(ok("eval", folder, "--part", part, "--json"))
        with torch.no_grad():
            expected = -flow.log_prob(getattr(data, part)).double().mean().item()
        assert found["nll"] == pytest.approx(expected, abs=3e-5)
    assert json.loads(ok("eval", folder / "last.safetensors", "--samples", 3, "--json"))["samples"] == 1  # a table has no noise


def test_the_same_seed_gives_the_same_numbers(digits, tmp_path):
    folder, printed = digits
    again = ok("train", "digits-fc-snf", *SHORT, "--run", tmp_path / "again", "--quiet")
    other = ok("train", "digits-fc-snf", *SHORT, "--run", tmp_path / "other", "--quiet", "--seed", 1)
    assert again.splitlines()[0] == printed.splitlines()[0] != other.splitlines()[0]
    first, second = read(folder / "best.safetensors"), read(tmp_path / "again" / "best.safetensors")
    assert all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items())


def test_train_as_json(tmp_path):
    folder = tmp_path / "run"
    text = ok("train", "moons-fc-snf", "--set", "epochs=1", "--set", "layers=2", "--set", "bins=4", "--run", folder, "--json")
    records = [json.loads(line) for line in text.splitlines()]
    assert {record["kind"] for record in records} == {"epoch", "validation", "result"}
    assert records[-1]["kind"] == "result" and records[-1]["folder"] == str(folder)
    assert records[-1]["test"]["nll"] == json.loads((folder / "result.json").read_text())["test"]["nll"]


def test_a_run_without_a_name_gets_a_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("digits-fc-snf", "digits-fc-snf-2"):
        ok("train", "--set", "epochs=1", "--set", "test_samples=1", "--quiet")
        assert (tmp_path / "runs" / name / "result.json").exists()


def test_train_twin_compares(tmp_path):
    result = invoke("train", "digits-fc-snf", *SHORT, "--twin", "--run", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run-twin" / "result.json").exists()
    assert 'kind = "exact"' in (tmp_path / "run-twin" / "recipe.toml").read_text()
    nll = [json.loads((tmp_path / name / "result.json").read_text())["test"]["nll"] for name in ("run", "run-twin")]
    assert f"difference {nll[0] - nll[1]:+.2f} nats" in result.stdout
    assert "epoch" in result.stderr  # progress goes elsewhere than results


def test_resuming_a_finished_run_changes_nothing_of_it(digits):
    folder, printed = digits
    last = folder / "last.safetensors"
    before, files = read(last), digest(folder)
    assert ok("train", "--resume", folder, "-q").splitlines()[0] == printed.splitlines()[0]
    after = read(last)  # written again, where the order of what it holds may differ
    assert replace(after, tensors={}) == replace(before, tensors={})
    assert all(torch.equal(value, before.tensors[name]) for name, value in after.tensors.items())
    written = {last, folder / "result.json"}  # the latter says when
    assert {path: value for path, value in digest(folder).items() if path not in written} == {
        path: value for path, value in files.items() if path not in written
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number, code):
    folder = tmp_path / "a run"
    command = [sys.executable, "-m", "selfnorm", "train", "digits-fc-snf", "--set", "epochs=150", "--set", "validate_every=5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--run", str(folder), "--quiet"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stdout == "" and stderr.count("\n") == 1 and "Traceback" not in stderr
    assert stderr.startswith(f"selfnorm: stopped by {signal.Signals(number).name}")
    assert f"selfnorm train --resume '{folder}'" in stderr  # in quotes, for its blank
    assert not (folder / "result.json").exists()
    assert 0 < read(folder / "last.safetensors").progress["step"] < 150 * 12
    if number == signal.SIGINT:
        assert "test NLL" in ok("train", "--resume", folder, "-q")
        assert json.loads((folder / "result.json").read_text())["epochs"] == 150


# sample


def test_samples_as_pictures(digits, tmp_path):
    assert "5 samples by the learned inverse" in ok("sample", digits[0], "-n", 5, "-o", tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert min(image.size) >= 8


@pytest.mark.parametrize("inverse", ["learned", "exact", "refined"])
def test_samples_as_numbers(table, tmp_path, inverse):
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        ok("sample", table[0], "-n", 700, "--inverse", inverse, "--seed", seed, "-o", tmp_path / f"{name}.csv")
    rows = read_csv((tmp_path / "a.csv").read_text())
    assert len(rows) == 700 and list(rows[0]) == ["a", "b", "c"]
    a, b, c = ((tmp_path / f"{name}.csv").read_bytes() for name in "abc")
    assert a == b != c
    ok("sample", table[0], "-n", 700, "--inverse", inverse, "-o", tmp_path / "a.npy")
    array = np.load(tmp_path / "a.npy")
    assert array.shape == (700, 3) and array.dtype == np.float32
    assert np.allclose(array, [[float(value) for value in row.values()] for row in rows], rtol=1e-6)
    assert np.abs(array.mean(0) - 3).max() < 1.0


def test_image_samples_as_grey_levels(digits, tmp_path):
    ok("sample", digits[0], "-n", 6, "--inverse", "exact", "-o", tmp_path / "a.npy")
    array = np.load(tmp_path / "a.npy")
    assert array.shape == (6, 1, 8, 8) and array.dtype == np.uint8 and array.max() < 17
    ok("sample", digits[0], "-n", 6, "--inverse", "exact", "-o", tmp_path / "a.csv")
    assert np.array_equal(np.loadtxt(tmp_path / "a.csv", delimiter=",", skiprows=1), array.reshape(6, 64))


def test_samples_have_a_default_name(table, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ok("sample", table[0])
    ok("sample", digits[0])
    assert {path.name for path in tmp_path.iterdir()} == {"samples.csv", "samples.png"}


def test_brackets_in_a_path_are_shown(table, tmp_path):
    assert "a[bold]b.csv" in ok("sample", table[0], "-o", tmp_path / "a[bold]b.csv")
    assert "[red]" in fails("eval", tmp_path / "[red]")


# fit


def test_fit_a_table(table):
    folder, file = table
    recipe = read(folder / "best.safetensors").recipe
    assert (recipe.name, recipe.model, recipe.data) == ("fit-measured", "fc", str(file))
    assert read(folder / "best.safetensors").columns == ("a", "b", "c")


def test_fit_small_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, size=(60, 12, 12)).astype(np.uint8)
    np.save(tmp_path / "images.npy", images)
    folder = tmp_path / "run"
    ok("fit", tmp_path / "images.npy", "--set", "epochs=1", "--set", "layers=1", "--set", "test_samples=1", "--run", folder, "-q")
    checkpoint = read(folder / "best.safetensors")
    assert (checkpoint.recipe.model, checkpoint.shape, checkpoint.levels) == ("fc", (1, 12, 12), 256)
    rows = read_csv(ok("score", folder, tmp_path / "images.npy", "--samples", 2))
    assert len(rows) == 60


def test_fit_an_image_folder(tmp_path):
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for index in range(40):
        pixels = random.integers(0, 256, size=(20, 20, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index}.png")
    folder = tmp_path / "run"
    tiny = ("epochs=1", "steps=1", "hidden=4", "test_samples=1")
    ok("fit", tmp_path / "images", *(part for setting in tiny for part in ("--set", setting)), "--run", folder, "-q")
    checkpoint = read(folder / "best.safetensors")
    assert (checkpoint.recipe.model, checkpoint.shape, checkpoint.levels) == ("glow", (3, 20, 20), 256)
    ok("sample", folder, "-n", 4, "-o", tmp_path / "samples.png")


# score


def test_scores_are_log_prob_with_rank_and_percentile(table, tmp_path):
    folder, _ = table
    new = numbers(40, 3, seed=1)
    new[7] = 100.0
    file = write_csv(tmp_path / "new.csv", new)
    text = ok("score", folder, file)
    rows = read_csv(text)
    assert list(rows[0]) == ["row", "log_likelihood", "rank", "percentile"]
    assert [int(row["row"]) for row in rows] == list(range(40))
    scores = np.array([float(row["log_likelihood"]) for row in rows])
    with torch.no_grad():
        expected = selfnorm.load(folder).log_prob(torch.from_numpy(new)).double().numpy()
    assert np.abs(scores - expected)[np.arange(40) != 7].max() < 3 * 1e-5
    assert [int(row["rank"]) for row in rows] == [1 + int((scores < score).sum()) for score in scores]
    assert rows[7]["rank"] == "1" and float(rows[7]["percentile"]) == 0
    with torch.no_grad():
        training = selfnorm.load(folder).log_prob(load_dataset(str(table[1])).train).double().numpy()
    by_hand = [100 * (training < score).mean() for score in scores]
    assert np.abs(by_hand - np.array([float(row["percentile"]) for row in rows])).max() <= 100 / 160 + 1e-9  # a tie at most
    assert "40 rows in" in ok("score", folder, file, "-o", tmp_path / "scores.csv")
    assert (tmp_path / "scores.csv").read_text() == text
    assert [json.loads(line)["log_likelihood"] for line in ok("score", folder, file, "--json").splitlines()] == scores.tolist()


def test_columns_are_found_by_name(table, tmp_path):
    new = numbers(10, 3, seed=2)
    straight = write_csv(tmp_path / "straight.csv", new)
    turned = write_csv(tmp_path / "turned.csv", new[:, [2, 0, 1]], "c,a,b")
    nameless = tmp_path / "nameless.npy"
    np.save(nameless, new)
    texts = [ok("score", table[0], file) for file in (straight, turned, nameless)]
    assert texts[0] == texts[1] == texts[2]


def test_image_scores_average_their_noise(digits, tmp_path):
    folder, _ = digits
    np.save(tmp_path / "images.npy", load_dataset("digits").test[:9].numpy())
    one, other, many = (
        [float(row["log_likelihood"]) for row in read_csv(ok("score", folder, tmp_path / "images.npy", *options))]
        for options in ((), ("--seed", 1), ("--samples", 50))
    )
    assert one != other
    assert np.std(np.subtract(one, many)) < np.std(np.subtract(one, other)) * 1.5


# doctor


def test_doctor(digits):
    text = ok("doctor", digits[0])
    assert "‖RW−I‖" in text and "SelfNormLinear" in text and "round trip" in text
    (health,) = map(json.loads, ok("doctor", digits[0], "--json").splitlines())
    assert len(health["layers"]) == 2


def test_doctor_repairs_into_a_new_checkpoint(digits):
    folder, _ = digits
    before = digest(folder)
    first, second = map(json.loads, ok("doctor", folder, "--repair", "--json").splitlines())
    repaired = folder / "repaired.safetensors"
    assert {path: value for path, value in digest(folder).items() if path != repaired} == before
    assert max(layer["distance"] for layer in second["layers"]) < 1e-4 < max(layer["distance"] for layer in first["layers"])
    x = load_dataset("digits").test[:5].float() + 0.5
    with torch.no_grad():
        assert torch.equal(selfnorm.load(repaired).log_prob(x), selfnorm.load(folder).log_prob(x))
    assert "digits-fc-snf, test" in ok("eval", repaired)
    assert f"written to {repaired}" in ok("doctor", folder, "--repair")
    repaired.unlink()


def test_doctor_on_a_flow_without_learned_inverses(tmp_path):
    ok("train", "digits-fc-exact", "--set", "epochs=1", "--set", "test_samples=1", "--run", tmp_path / "run", "-q")
    assert "No layer learns its inverse" in ok("doctor", tmp_path / "run")


# What is wrong, in one line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("train", "nonsense"), "digits-fc-snf, "),
        (("train", "mnist-fc-snff"), "did you mean mnist-fc-snf?"),
        (("recipes", "nonsense"), "expected one of digits-fc-snf"),
        (("train", "--set", "epoch=3"), "did you mean epochs?"),
        (("train", "--set", "colour=red"), "learning_rate"),
        (("train", "--set", "name=me"), "expected one of"),
        (("train", "--set", "epochs"), "key=value"),
        (("train", "--set", "epochs=many"), "a whole number, got 'many'"),
        (("train", "--set", "epochs=1.5"), "a whole number"),
        (("train", "--set", "standardize=1"), "true or false"),
        (("train", "--set", "model=vae"), "one of fc, conv, glow"),
        (("train", "--set", "epochs=0"), "at least 1"),
        (("train", "--set", "learning_rate=nan"), "learning_rate"),
        (("train", "--set", "kind=magic"), "magic"),
        (("train", "--set", "data=nonsense"), "nonsense"),
        (("train", "--seed", "-1"), "seed"),
        (("train", "--device", "nonsense"), "--device"),
        (("train", "--device", "meta"), "--device"),
        (("train", "--resume", "nowhere"), "nowhere"),
        (("train", "--resume", "nowhere", "--set", "epochs=3"), "a run goes on as it began"),
        (("train", "digits-fc-snf", "--resume", "nowhere"), "a run goes on as it began"),
        (("train", "mnist-fc-snf", "--data", "nowhere"), "no such folder"),
        (("fit", "nowhere.csv"), "nowhere.csv"),
        (("eval", "nowhere"), "nowhere"),
        (("sample", "nowhere"), "nowhere"),
        (("score", "nowhere", __file__), "nowhere"),
        (("doctor", "nowhere"), "nowhere"),
        (("fit", __file__), "expected .npy"),
    ],
    ids=" ".join,
)
def test_wrong_arguments(args, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in fails(*args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args", [("nonsense",), ("train", "--nonsense"), ("eval",), ("sample", "x", "-n", "0"), ("sample", "x", "--inverse", "magic")]
)
def test_wrong_usage(args):
    result = invoke(*args)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr


def test_a_folder_that_has_a_run_is_left_alone(digits):
    folder, _ = digits
    before = digest(folder)
    assert "--resume" in fails("train", "digits-fc-snf", *SHORT, "--run", folder)
    assert digest(folder) == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,2\n3,x\n5,6\n7,8\n", "line 3, column 2 (b)"),
        ("a,b\n1,2\n3,nan\n5,6\n7,8\n", "line 3, column 2 (b)"),
        ("a,b\n1,2\n3,inf\n5,6\n7,8\n", "line 3, column 2 (b)"),
        ("a,b\n1,2\n3,\n5,6\n7,8\n", "line 3, column 2 (b)"),
        ("a,b\n1,2\n3,4,5\n5,6\n7,8\n", "line 3: expected 2 columns"),
        ("a,b\n1,2\n3,4\n", "at least 4"),
        ("a,b\n", "at least one row"),
        ("", "at least one row"),
        ("a,b\n" + "1,2\n" * 20, "constant"),
    ],
)
def test_a_table_with_a_flaw(tmp_path, monkeypatch, table, content, said):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "flawed.csv"
    file.write_text(content)
    assert said in fails("fit", file)
    assert list(tmp_path.iterdir()) == [file]
    fails("score", table[0], file, "-o", tmp_path / "scores.csv")
    assert list(tmp_path.iterdir()) == [file]


def test_score_wants_the_columns_of_the_training(table, digits, tmp_path):
    folder, _ = table
    (tmp_path / "old.csv").write_text("keep me")
    two = write_csv(tmp_path / "two.csv", numbers(5, 2), "a,b")
    other = write_csv(tmp_path / "other.csv", numbers(5, 3), "a,b,d")
    np.save(tmp_path / "four.npy", numbers(5, 4))
    for file, said in ((two, "a, b, c"), (other, "a, b, d"), (tmp_path / "four.npy", "3 columns, as in training, got 4")):
        message = fails("score", folder, file, "-o", tmp_path / "old.csv")
        assert str(file) in message and said in message
    assert (tmp_path / "old.csv").read_text() == "keep me"
    np.save(tmp_path / "bright.npy", np.full((2, 8, 8), 200, np.uint8))
    assert "below 17" in fails("score", digits[0], tmp_path / "bright.npy")
    np.save(tmp_path / "real.npy", np.ones((2, 1, 8, 8), np.float32))
    assert "8-bit images" in fails("score", digits[0], tmp_path / "real.npy")


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:1000], lambda whole: b"", lambda whole: b"\x80\x04."], ids=["cut", "empty", "pickle"]
)
def test_a_damaged_checkpoint(digits, tmp_path, damage):
    folder, _ = digits
    copy = tmp_path / "run"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    for name in ("best.safetensors", "last.safetensors"):
        (copy / name).write_bytes(damage((copy / name).read_bytes()))
    before = digest(tmp_path)
    new = numbers(5, 3)
    np.save(tmp_path / "new.npy", new)
    for args in (
        ("eval", copy),
        ("sample", copy, "-o", tmp_path / "x.png"),
        ("doctor", copy, "--repair"),
        ("train", "--resume", copy),
    ):
        assert "safetensors" in fails(*args)
    assert "safetensors" in fails("score", copy, tmp_path / "new.npy")
    (tmp_path / "new.npy").unlink()
    assert digest(tmp_path) == before


def test_weights_of_another_recipe_name_the_file(digits, tmp_path):
    checkpoint = read(digits[0] / "best.safetensors")
    path = tmp_path / "odd.safetensors"
    checkpoints.save(path, replace(checkpoint, shape=(1, 4, 4)))
    assert str(path) in fails("eval", path)


def test_a_damaged_recipe(digits, tmp_path):
    (tmp_path / "recipe.toml").write_text("name = [")
    assert "expected TOML" in fails("train", "--resume", tmp_path)
    (tmp_path / "recipe.toml").write_text('name = "x"\ncolour = "red"\n')
    assert "unknown colour" in fails("train", "--resume", tmp_path)


def test_mnist_with_a_wrong_magic_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in mnist.COUNTS.items():
        (folder / name).write_bytes(struct.pack(">4I", 2049, count, 28, 28))
    assert mnist.TRAIN in fails("train", "mnist-fc-snf", "--data", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_short_cifar_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / cifar10.PLACE).mkdir()
    for name in cifar10.CHECKSUMS:
        (tmp_path / cifar10.PLACE / name).write_bytes(bytes(100))
    assert "data_batch_1.bin" in fails("train", "cifar10-glow-snf", "--data", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_data_that_is_gone(tmp_path):
    file = write_csv(tmp_path / "gone.csv", numbers(60, 2), "a,b")
    ok("fit", file, "--set", "epochs=1", "--set", "layers=1", "--run", tmp_path / "run", "-q")
    file.unlink()
    for args in (("eval", tmp_path / "run"), ("doctor", tmp_path / "run"), ("train", "--resume", tmp_path / "run")):
        assert str(file) in fails(*args)
    ok("sample", tmp_path / "run", "-o", tmp_path / "samples.csv")  # which needs none


def test_where_output_cannot_go(digits, table, tmp_path):
    nowhere = tmp_path / "nowhere"
    for args in (
        ("sample", digits[0], "-o", nowhere / "a.png"),
        ("sample", table[0], "-o", nowhere / "a.csv"),
        ("score", table[0], table[1], "-o", nowhere / "a.csv"),
        ("sample", table[0], "-o", tmp_path / "a.png"),  # a table has no picture
        ("sample", digits[0], "-o", tmp_path / "a.txt"),
        ("sample", digits[0], "-o", tmp_path / "a"),
    ):
        assert str(args[-1]) in fails(*args)
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in fails("train", *SHORT, "--run", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    result = invoke("doctor", digits[0], "--repair", "-o", nowhere / "a.safetensors")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and str(nowhere) in result.stderr


def test_output_never_takes_the_place_of_a_device_and_follows_links(table, tmp_path):
    pipe, link, target = tmp_path / "pipe.csv", tmp_path / "link.csv", tmp_path / "target.csv"
    os.mkfifo(pipe)
    assert str(pipe) in fails("score", table[0], table[1], "-o", pipe)
    assert pipe.is_fifo()
    target.write_text("old")
    link.symlink_to(target)
    ok("score", table[0], table[1], "-o", link)
    assert link.is_symlink() and target.read_text().startswith("row,log_likelihood")


def test_a_full_disk(digits, tmp_path, monkeypatch):
    def full(tensors, target, metadata):
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    assert "No space left" in fails("train", *SHORT, "--run", tmp_path / "run", "-q")
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*part*"))
    before = digest(digits[0])
    assert "No space left" in fails("train", "--resume", digits[0], "-q")
    assert digest(digits[0]) == before


def test_divergence_is_exit_3_and_keeps_the_checkpoints(tmp_path):
    message = fails(
        "train", *SHORT, "--set", "learning_rate=1e30", "--set", "warmup_epochs=0", "--run", tmp_path / "run", "-q", code=3
    )
    assert "diverged" in message and "λ" in message and str(tmp_path / "run") in message
    assert selfnorm.load(tmp_path / "run").log_prob(load_dataset("digits").test[:2].float() + 0.5).isfinite().all()


def test_debug_shows_where(tmp_path):
    result = invoke("eval", tmp_path / "nowhere", "--debug")
    assert isinstance(result.exception, ValueError) and result.stderr == ""
    done = subprocess.run(
        [sys.executable, "-m", "selfnorm", "recipes", "nonsense", "--debug"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "Traceback" in done.stderr and "find_recipe" in done.stderr


def test_a_reader_that_leaves_is_no_error(table, tmp_path):
    np.save(tmp_path / "many.npy", numbers(3000, 3))  # more than a pipe holds
    for option in ("", "--json"):
        command = (
            f"{sys.executable} -m selfnorm score {table[0]} {tmp_path / 'many.npy'} {option} | head -n 1; echo ${{PIPESTATUS[0]}}"
        )
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert "log_likelihood" in done.stdout.splitlines()[0]
        assert done.stdout.splitlines()[1] == "0" and done.stderr == ""

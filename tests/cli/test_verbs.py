"""The command: every verb, what it prints and leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import selfnorm
from selfnorm.data import load_dataset
from selfnorm.train.checkpoint import read_checkpoint
from selfnorm.train.experiments import RECIPES
from support.commandline import SHORT, VERBS, digest, fails, invoke, numbers, ok, read_csv, write_csv

pytestmark = pytest.mark.usefixtures("elsewhere")


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


@pytest.mark.parametrize(("given", "expected"), [({}, "1"), ({"THP_MEM_ALLOC_ENABLE": "0"}, "0")])
def test_the_command_asks_for_large_pages_unless_told_otherwise(given, expected):
    said = "import os, selfnorm.cli; print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    others = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", said], env=others | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


# recipes


def test_recipes_lists_all():
    text = ok("recipes")
    assert all(name in text for name in RECIPES)


def test_recipes_shows_one():
    text = ok("recipes", "mnist-glow-snf")
    assert 'model = "glow"' in text and "reconstruction_weight = 10.0" in text


def test_recipes_as_json():
    assert [json.loads(line)["name"] for line in ok("recipes", "--json").splitlines()] == list(RECIPES)
    assert json.loads(ok("recipes", "mnist-fc-snf", "--json"))["epochs"] == 6000


# train, eval


def test_train_leaves_a_whole_run_and_quiet_prints_its_result_only(digits_run):
    folder, printed = digits_run
    assert {path.name for path in folder.iterdir() if path.name != ".lock"} == {
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


def test_eval_says_what_train_said(digits_run):
    folder, printed = digits_run
    said = printed.splitlines()[0].split("test NLL ")[1]
    assert ok("eval", folder).strip() == f"digits-fc-snf, test: {said}"
    result = json.loads((folder / "result.json").read_text())
    found = json.loads(ok("eval", folder, "--json"))
    assert {key: found[key] for key in result["test"]} == result["test"]
    assert found["run"] == str(folder) and found["part"] == "test"


def test_eval_is_the_mean_of_log_prob(table_run):
    folder, file = table_run
    flow, data = selfnorm.load(folder), load_dataset(str(file))
    for part in ("train", "validation", "test"):
        found = json.loads(ok("eval", folder, "--part", part, "--json"))
        with torch.no_grad():
            expected = -flow.log_prob(getattr(data, part)).double().mean().item()
        assert found["nll"] == pytest.approx(expected, abs=3e-5)
    assert json.loads(ok("eval", folder / "last.safetensors", "--samples", 3, "--json"))["samples"] == 1  # a table has no noise


def test_the_same_seed_gives_the_same_numbers(digits_run, tmp_path):
    folder, printed = digits_run
    again = ok("train", "digits-fc-snf", *SHORT, "--run", tmp_path / "again", "--quiet")
    other = ok("train", "digits-fc-snf", *SHORT, "--run", tmp_path / "other", "--quiet", "--seed", 1)
    assert again.splitlines()[0] == printed.splitlines()[0] != other.splitlines()[0]
    first, second = read_checkpoint(folder / "best.safetensors"), read_checkpoint(tmp_path / "again" / "best.safetensors")
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


def test_resuming_a_finished_run_changes_nothing_of_it(digits_run):
    folder, printed = digits_run
    last = folder / "last.safetensors"
    before, files = read_checkpoint(last), digest(folder)
    assert ok("train", "--resume", folder, "-q").splitlines()[0] == printed.splitlines()[0]
    after = read_checkpoint(last)  # written again, where the order of what it holds may differ
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
    assert 0 < read_checkpoint(folder / "last.safetensors").progress["step"] < 150 * 12
    if number == signal.SIGINT:
        assert "test NLL" in ok("train", "--resume", folder, "-q")
        assert json.loads((folder / "result.json").read_text())["epochs"] == 150


# sample


def test_samples_as_pictures(digits_run, tmp_path):
    printed = ok("sample", digits_run[0], "-n", 5, "-o", tmp_path / "a.png")
    assert "wrote 5 samples to" in printed and "used the learned inverse, refined by" in printed and "in 2 layers" in printed
    with Image.open(tmp_path / "a.png") as image:
        assert min(image.size) >= 8


@pytest.mark.parametrize("inverse", ["auto", "learned", "exact", "refined"])
def test_samples_as_numbers(table_run, tmp_path, inverse):
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        ok("sample", table_run[0], "-n", 700, "--inverse", inverse, "--seed", seed, "-o", tmp_path / f"{name}.csv")
    rows = read_csv((tmp_path / "a.csv").read_text())
    assert len(rows) == 700 and list(rows[0]) == ["a", "b", "c"]
    a, b, c = ((tmp_path / f"{name}.csv").read_bytes() for name in "abc")
    assert a == b != c
    ok("sample", table_run[0], "-n", 700, "--inverse", inverse, "-o", tmp_path / "a.npy")
    array = np.load(tmp_path / "a.npy")
    assert array.shape == (700, 3) and array.dtype == np.float32
    assert np.allclose(array, [[float(value) for value in row.values()] for row in rows], rtol=1e-6)
    assert np.abs(array.mean(0) - 3).max() < 1.0


def test_image_samples_as_grey_levels(digits_run, tmp_path):
    ok("sample", digits_run[0], "-n", 6, "--inverse", "exact", "-o", tmp_path / "a.npy")
    array = np.load(tmp_path / "a.npy")
    assert array.shape == (6, 1, 8, 8) and array.dtype == np.uint8 and array.max() < 17
    ok("sample", digits_run[0], "-n", 6, "--inverse", "exact", "-o", tmp_path / "a.csv")
    assert np.array_equal(np.loadtxt(tmp_path / "a.csv", delimiter=",", skiprows=1), array.reshape(6, 64))


def test_samples_have_a_default_name(table_run, digits_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ok("sample", table_run[0])
    ok("sample", digits_run[0])
    assert {path.name for path in tmp_path.iterdir()} == {"samples.csv", "samples.png"}


def test_brackets_in_a_path_are_shown(table_run, tmp_path):
    assert "a[bold]b.csv" in ok("sample", table_run[0], "-o", tmp_path / "a[bold]b.csv")
    assert "[red]" in fails("eval", tmp_path / "[red]")


# fit


def test_fit_a_table(table_run):
    folder, file = table_run
    recipe = read_checkpoint(folder / "best.safetensors").recipe
    assert (recipe.name, recipe.architecture.model, recipe.data.source) == ("fit-measured", "fc", str(file))
    assert read_checkpoint(folder / "best.safetensors").columns == ("a", "b", "c")


def test_fit_small_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, size=(60, 12, 12)).astype(np.uint8)
    np.save(tmp_path / "images.npy", images)
    folder = tmp_path / "run"
    ok("fit", tmp_path / "images.npy", "--set", "epochs=1", "--set", "layers=1", "--set", "test_samples=1", "--run", folder, "-q")
    checkpoint = read_checkpoint(folder / "best.safetensors")
    assert (checkpoint.recipe.architecture.model, checkpoint.shape, checkpoint.levels) == ("fc", (1, 12, 12), 256)
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
    checkpoint = read_checkpoint(folder / "best.safetensors")
    assert (checkpoint.recipe.architecture.model, checkpoint.shape, checkpoint.levels) == ("glow", (3, 20, 20), 256)
    ok("sample", folder, "-n", 4, "-o", tmp_path / "samples.png")


# score


def test_scores_are_log_prob_with_rank_and_percentile(table_run, tmp_path):
    folder, _ = table_run
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
        training = selfnorm.load(folder).log_prob(load_dataset(str(table_run[1])).train).double().numpy()
    by_hand = [100 * (training < score).mean() for score in scores]
    assert np.abs(by_hand - np.array([float(row["percentile"]) for row in rows])).max() <= 100 / 160 + 1e-9  # a tie at most
    assert "wrote 40 rows to" in ok("score", folder, file, "-o", tmp_path / "scores.csv")
    assert (tmp_path / "scores.csv").read_text() == text
    assert [json.loads(line)["log_likelihood"] for line in ok("score", folder, file, "--json").splitlines()] == scores.tolist()


def test_columns_are_found_by_name(table_run, tmp_path):
    new = numbers(10, 3, seed=2)
    straight = write_csv(tmp_path / "straight.csv", new)
    turned = write_csv(tmp_path / "turned.csv", new[:, [2, 0, 1]], "c,a,b")
    nameless = tmp_path / "nameless.npy"
    np.save(nameless, new)
    texts = [ok("score", table_run[0], file) for file in (straight, turned, nameless)]
    assert texts[0] == texts[1] == texts[2]


def test_image_scores_average_their_noise(digits_run, tmp_path):
    folder, _ = digits_run
    np.save(tmp_path / "images.npy", load_dataset("digits").test[:9].numpy())
    one, other, many = (
        [float(row["log_likelihood"]) for row in read_csv(ok("score", folder, tmp_path / "images.npy", *options))]
        for options in ((), ("--seed", 1), ("--samples", 50))
    )
    assert one != other
    assert np.std(np.subtract(one, many)) < np.std(np.subtract(one, other)) * 1.5


# doctor


def test_doctor(digits_run):
    text = ok("doctor", digits_run[0])
    assert "‖RW−I‖" in text and "SelfNormLinear" in text and "round trip" in text
    assert "distance of samples from the exact ones, ‖g(z) − f⁻¹(z)‖/‖f⁻¹(z)‖: auto " in " ".join(text.split())
    assert "auto uses: learned inverse, refined by" in text
    (health,) = map(json.loads, ok("doctor", digits_run[0], "--json").splitlines())
    assert len(health["layers"]) == 2
    assert list(health["sample_error"]) == ["auto", "learned", "refined"]
    assert health["sample_error"]["auto"] < 1e-3 < health["sample_error"]["learned"]
    assert health["auto"].startswith("learned inverse, refined by")


def test_doctor_repairs_into_a_new_checkpoint(digits_run):
    folder, _ = digits_run
    before = digest(folder)
    first, second = map(json.loads, ok("doctor", folder, "--repair", "--json").splitlines())
    repaired = folder / "repaired.safetensors"
    assert {path: value for path, value in digest(folder).items() if path != repaired} == before
    assert max(layer["distance"] for layer in second["layers"]) < 1e-4 < max(layer["distance"] for layer in first["layers"])
    x = load_dataset("digits").test[:5].float() + 0.5
    with torch.no_grad():
        assert torch.equal(selfnorm.load(repaired).log_prob(x), selfnorm.load(folder).log_prob(x))
    assert "digits-fc-snf, test" in ok("eval", repaired)
    assert f"written to {repaired}" in ok("doctor", folder, "--repair", "--force")
    repaired.unlink()


def test_doctor_on_a_flow_without_learned_inverses(tmp_path):
    ok("train", "digits-fc-exact", "--set", "epochs=1", "--set", "test_samples=1", "--run", tmp_path / "run", "-q")
    text = ok("doctor", tmp_path / "run")
    assert "No layer stores an inverse" in text and "auto uses: exact inverse\n" in text

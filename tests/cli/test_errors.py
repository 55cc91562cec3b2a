"""The command: one line for everything that can be wrong, and nothing overwritten."""

import errno
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import selfnorm
from selfnorm.cli.application import command
from selfnorm.data import cifar10, load_dataset, mnist
from selfnorm.train import checkpoint as checkpoints
from selfnorm.train.checkpoint import read_checkpoint, save_checkpoint
from selfnorm.train.folder import RunFolder
from support.commandline import SHORT, digest, fails, invoke, numbers, ok, write_csv

pytestmark = pytest.mark.usefixtures("elsewhere")


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
        (("train", "--resume", "nowhere", "--set", "epochs=3"), "a run continues with the settings that it started with"),
        (("train", "digits-fc-snf", "--resume", "nowhere"), "a run continues with the settings that it started with"),
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
    assert "Usage: selfnorm" in result.stderr


def test_a_folder_that_has_a_run_is_left_alone(digits_run):
    folder, _ = digits_run
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
def test_a_table_with_a_flaw(tmp_path, monkeypatch, table_run, content, said):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "flawed.csv"
    file.write_text(content)
    assert said in fails("fit", file)
    assert list(tmp_path.iterdir()) == [file]
    fails("score", table_run[0], file, "-o", tmp_path / "scores.csv")
    assert list(tmp_path.iterdir()) == [file]


def test_score_wants_the_columns_of_the_training(table_run, digits_run, tmp_path):
    folder, _ = table_run
    (tmp_path / "old.csv").write_text("keep me")
    two = write_csv(tmp_path / "two.csv", numbers(5, 2), "a,b")
    other = write_csv(tmp_path / "other.csv", numbers(5, 3), "a,b,d")
    np.save(tmp_path / "four.npy", numbers(5, 4))
    for file, said in (
        (two, "'a', 'b', 'c'"),
        (other, "'a', 'b', 'd'"),
        (tmp_path / "four.npy", "3 columns, as in training, got 4"),
    ):
        message = fails("score", folder, file, "-o", tmp_path / "old.csv", "--force")
        assert str(file) in message and said in message
    assert (tmp_path / "old.csv").read_text() == "keep me"
    np.save(tmp_path / "bright.npy", np.full((2, 8, 8), 200, np.uint8))
    assert "below 17" in fails("score", digits_run[0], tmp_path / "bright.npy")
    np.save(tmp_path / "real.npy", np.ones((2, 1, 8, 8), np.float32))
    assert "8-bit images" in fails("score", digits_run[0], tmp_path / "real.npy")


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:1000], lambda whole: b"", lambda whole: b"\x80\x04."], ids=["cut", "empty", "pickle"]
)
def test_a_damaged_checkpoint(digits_run, tmp_path, damage):
    folder, _ = digits_run
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


def test_weights_of_another_recipe_name_the_file(digits_run, tmp_path):
    checkpoint = read_checkpoint(digits_run[0] / "best.safetensors")
    path = tmp_path / "odd.safetensors"
    checkpoints.save_checkpoint(path, replace(checkpoint, shape=(1, 4, 4)))
    assert str(path) in fails("eval", path)


def test_a_damaged_recipe(digits_run, tmp_path):
    (tmp_path / "recipe.toml").write_text("name = [")
    assert "expected TOML" in fails("train", "--resume", tmp_path)
    (tmp_path / "recipe.toml").write_text('name = "x"\ncolour = "red"\n')
    assert "unknown colour" in fails("train", "--resume", tmp_path)


def test_a_data_folder_for_a_set_without_files(digits_run, tmp_path):
    for arguments in (
        ("train", *SHORT),
        ("compare", "digits-fc-snf"),
        ("eval", digits_run[0]),
        ("train", "--resume", digits_run[0]),
    ):
        assert "expected no data folder for digits, which needs no files" in fails(*arguments, "--data", tmp_path)


def test_a_run_that_stored_a_needless_data_folder_is_of_use(digits_run, tmp_path):
    """Such as one of an earlier version, which took any folder for any data."""
    run = tmp_path / "run"
    shutil.copytree(digits_run[0], run)
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("# folder is not set", f'folder = "{tmp_path}"'))
    assert RunFolder(run).read_recipe().data.folder == str(tmp_path)
    for file in (run / "best.safetensors", run / "last.safetensors"):
        checkpoint = read_checkpoint(file)
        save_checkpoint(file, replace(checkpoint, recipe=checkpoint.recipe.changed(folder=str(tmp_path))))
    ok("eval", run)
    ok("train", "--resume", run, "-q")


def test_mnist_with_a_wrong_magic_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in mnist.IMAGES_IN_FILE.items():
        (folder / name).write_bytes(struct.pack(">4I", 2049, count, 28, 28))
    assert mnist.TRAIN_FILE in fails("train", "mnist-fc-snf", "--data", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_short_cifar_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / cifar10.CIFAR10_SUBFOLDER).mkdir()
    for name in cifar10.CIFAR10_CHECKSUMS:
        (tmp_path / cifar10.CIFAR10_SUBFOLDER / name).write_bytes(bytes(100))
    assert "data_batch_1.bin" in fails("train", "cifar10-glow-snf", "--data", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_data_that_is_gone(tmp_path):
    file = write_csv(tmp_path / "gone.csv", numbers(60, 2), "a,b")
    ok("fit", file, "--set", "epochs=1", "--set", "layers=1", "--run", tmp_path / "run", "-q")
    file.unlink()
    for args in (("eval", tmp_path / "run"), ("doctor", tmp_path / "run"), ("train", "--resume", tmp_path / "run")):
        assert str(file) in fails(*args)
    ok("sample", tmp_path / "run", "-o", tmp_path / "samples.csv")  # which needs none


def test_where_output_cannot_go(digits_run, table_run, tmp_path):
    nowhere = tmp_path / "nowhere"
    for args in (
        ("sample", digits_run[0], "-o", nowhere / "a.png"),
        ("sample", table_run[0], "-o", nowhere / "a.csv"),
        ("score", table_run[0], table_run[1], "-o", nowhere / "a.csv"),
        ("sample", table_run[0], "-o", tmp_path / "a.png"),  # a table has no picture
        ("sample", digits_run[0], "-o", tmp_path / "a.txt"),
        ("sample", digits_run[0], "-o", tmp_path / "a"),
    ):
        assert str(args[-1]) in fails(*args)
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in fails("train", *SHORT, "--run", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    result = invoke("doctor", digits_run[0], "--repair", "-o", nowhere / "a.safetensors")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and str(nowhere) in result.stderr


def test_output_never_takes_the_place_of_a_device_and_follows_links(table_run, tmp_path):
    pipe, link, target = tmp_path / "pipe.csv", tmp_path / "link.csv", tmp_path / "target.csv"
    os.mkfifo(pipe)
    assert str(pipe) in fails("score", table_run[0], table_run[1], "-o", pipe)
    assert pipe.is_fifo()
    target.write_text("old")
    link.symlink_to(target)
    ok("score", table_run[0], table_run[1], "-o", link, "--force")
    assert link.is_symlink() and target.read_text().startswith("row,log_likelihood")


def test_a_full_disk(digits_run, tmp_path, monkeypatch):
    def full(tensors, target, metadata):
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    assert "No space left" in fails("train", *SHORT, "--run", tmp_path / "run", "-q")
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*part*"))
    before = digest(digits_run[0])
    assert "No space left" in fails("train", "--resume", digits_run[0], "-q")
    assert digest(digits_run[0]) == before


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


def test_a_reader_that_leaves_is_no_error(table_run, tmp_path):
    np.save(tmp_path / "many.npy", numbers(3000, 3))  # more than a pipe holds
    for option in ("", "--json"):
        score = f"{sys.executable} -m selfnorm score {table_run[0]} {tmp_path / 'many.npy'} {option}"
        command = f"{score} | head -n 1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert "log_likelihood" in done.stdout.splitlines()[0]
        assert done.stdout.splitlines()[1] == "0" and done.stderr == ""


def test_a_verb_without_debug_is_refused_when_it_is_registered():
    with pytest.raises(TypeError, match="command nonsense: expected a parameter `debug: Debug = False`"):
        command("nonsense")(lambda: None)


@pytest.mark.parametrize("code", [0, 4, "a reason"])
def test_an_exit_that_the_reader_of_the_output_did_not_cause_keeps_its_status(monkeypatch, code):
    def leave(*args):
        raise SystemExit(code)

    monkeypatch.setattr("selfnorm.cli.use.find_recipe", leave)
    assert invoke("recipes", "digits-fc-snf").exit_code == (1 if isinstance(code, str) else code)


@pytest.mark.skipif(sys.platform != "linux", reason="file systems of macOS and Windows hold no such name")
def test_a_path_that_is_not_in_utf8(table_run, tmp_path):
    named = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.csv"))
    shutil.copy(table_run[1], named)
    folder = named.with_suffix("")
    folder.mkdir()
    shutil.copy(table_run[1], folder / "inner.csv")
    for args in (
        ("fit", named),
        ("fit", folder / "inner.csv"),
        ("train", "--set", f"source={named}"),
        ("train", "mnist-fc-snf", "--data", folder),
    ):
        message = fails(*args, "--run", tmp_path / "run")
        assert r"caf\xe9" in message and "expected a path in UTF-8" in message and "rename the file or folder" in message
        assert not (tmp_path / "run").exists()
    assert ok("score", table_run[0], named) == ok("score", table_run[0], table_run[1])


def test_scores_of_images_whose_names_are_not_in_utf8(tmp_path):
    (tmp_path / "images").mkdir()
    for index in range(12):
        Image.fromarray(np.full((4, 4), 20 * index, np.uint8)).save(os.fsencode(tmp_path / "images") + b"/\xe9%d.png" % index)
    ok("fit", tmp_path / "images", "--set", "epochs=1", "--run", tmp_path / "run", "-q")
    ok("score", tmp_path / "run", tmp_path / "images", "-o", tmp_path / "scores.csv")
    assert r"\xe90.png,0," in (tmp_path / "scores.csv").read_text()

"""What the verbs write, and what they never replace."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from selfnorm.cli.outputs import expect_not_data
from selfnorm.data import cifar10, mnist
from selfnorm.data.batches import generator_for
from selfnorm.evaluate.likelihood import evaluating
from selfnorm.train.checkpoint import read_checkpoint, save_checkpoint
from selfnorm.train.experiments import RECIPES
from selfnorm.train.folder import RunFolder
from selfnorm.train.sample_files import write_samples
from selfnorm.train.trained import Trained
from support.commandline import digest, fails, invoke, numbers, ok, read_csv, write_csv

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def a_run(table_run, tmp_path):
    """A copy of a run, and its training data."""
    shutil.copytree(table_run[0], tmp_path / "run")
    return tmp_path / "run", table_run[1]


def test_an_existing_file_is_replaced_only_by_force(a_run, tmp_path):
    run, data = a_run
    old, repaired = tmp_path / "old.csv", run / "repaired.safetensors"
    for path in (old, repaired, tmp_path / "mended.safetensors"):
        path.write_text("mine")
    for args in (
        ("score", run, data, "-o", old),
        ("sample", run, "-o", old),
        ("doctor", run, "--repair"),
        ("doctor", run, "--repair", "-o", tmp_path / "mended.safetensors"),
    ):
        before = digest(tmp_path)
        message = fails(*args)
        assert "got one that exists" in message and "--force" in message
        assert digest(tmp_path) == before
        ok(*args, "--force")
        assert digest(tmp_path) != before


def test_what_is_read_is_never_replaced(a_run, tmp_path):
    run, data = a_run
    new = write_csv(tmp_path / "new.csv", numbers(5, 3))
    link, hard = tmp_path / "link.csv", tmp_path / "hard.csv"
    link.symlink_to(new)
    os.link(data, hard)
    before, measured = digest(tmp_path), data.read_bytes()
    for args in (
        ("score", run, new, "-o", new),
        ("score", run, new, "-o", link),
        ("score", run, link, "-o", new),
        ("score", run, new, "-o", data),
        ("score", run, new, "-o", hard),
        ("sample", run, "-o", data),
        ("sample", run, "-o", hard),
        ("sample", run, "-o", tmp_path / "run" / ".." / "hard.csv"),
    ):
        message = fails(*args, "--force")
        assert "stays as it is" in message and "--force" not in message
    assert digest(tmp_path) == before and data.read_bytes() == measured


def test_the_files_of_a_run_are_never_replaced(a_run, digits_run, tmp_path):
    run, data = a_run
    other = tmp_path / "other"
    shutil.copytree(digits_run[0], other)
    outside = tmp_path / "outside.safetensors"
    outside.symlink_to(other / "last.safetensors")
    linked = tmp_path / "linked.npy"
    os.link(run / "training_scores.npy", linked)
    before = digest(tmp_path)
    for args in (
        ("score", run, data, "-o", run / "training_scores.npy"),
        ("score", run, data, "-o", other / "training_scores.npy"),
        ("score", run, data, "-o", linked),
        ("sample", digits_run[0], "-o", other / "samples.png"),
        ("doctor", other, "--repair", "-o", other / "last.safetensors"),
        ("doctor", other / "best.safetensors", "--repair", "-o", outside),
        ("doctor", run, "--repair", "-o", other / "best.safetensors"),
    ):
        assert "stays as it is" in fails(*args, "--force")
    assert digest(tmp_path) == before
    for args in (("--json", other / "result.json"), ("--figure", other / "curves.png"), ("--json", other / "samples.json")):
        assert "stays as it is" in fails("bench", "scaling", *args, "--force")
    assert digest(tmp_path) == before
    (other / "curves.png").unlink()  # its name is still the run's
    assert "stays as it is" in fails("sample", digits_run[0], "-o", other / "curves.png")
    assert {path.name for path in RunFolder(other).own_files()} >= {path.name for path in other.iterdir()}


def save_images(folder):
    """Saves twelve grey images in two folders below this one."""
    from PIL import Image

    for index, image in enumerate(np.random.default_rng(0).integers(0, 256, (12, 4, 4), np.uint8)):
        (folder / f"{index % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{index % 2}" / f"{index}.png")


def test_images_of_the_training_data_are_never_replaced(tmp_path, monkeypatch):
    save_images(tmp_path / "images")
    ok("fit", tmp_path / "images", "--set", "epochs=1", "--run", tmp_path / "run", "-q")
    before = digest(tmp_path / "images")
    for name in ("0/0.png", "new.png"):  # a new image would change the data
        assert "stays as it is" in fails("sample", tmp_path / "run", "-o", tmp_path / "images" / name, "--force")
    assert digest(tmp_path / "images") == before
    ok("score", tmp_path / "run", tmp_path / "images", "-o", tmp_path / "images" / "scores.csv")
    monkeypatch.chdir(tmp_path / "images")
    ok("fit", ".", "--set", "epochs=1", "--run", tmp_path / "here", "-q")
    assert RunFolder(tmp_path / "here").read_recipe().name == "fit-images"
    assert "samples.png: expected another file" in fails("sample", tmp_path / "run")  # the default name is here


def test_images_that_a_folder_links_to_are_never_replaced(tmp_path):
    save_images(tmp_path / "real")
    (tmp_path / "links").mkdir()
    for file in (tmp_path / "real").rglob("*.png"):
        (tmp_path / "links" / file.name).symlink_to(file)
    (tmp_path / "links" / "11.png").unlink()
    os.link(tmp_path / "real" / "1" / "11.png", tmp_path / "links" / "11.png")
    ok("fit", tmp_path / "links", "--set", "epochs=1", "--run", tmp_path / "run", "-q")
    (tmp_path / "table.csv").symlink_to(tmp_path / "links" / "3.png")
    before = digest(tmp_path)
    for name in ("real/0/0.png", "real/1/11.png", "table.csv"):
        assert "stays as it is" in fails("sample", tmp_path / "run", "-o", tmp_path / name, "--force")
    assert digest(tmp_path) == before
    (tmp_path / "other.png").write_text("mine")
    ok("sample", tmp_path / "run", "-o", tmp_path / "other.png", "--force")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("mnist", (f"MNIST/raw/{mnist.TEST_FILE}.gz", f"{mnist.TRAIN_FILE}")),
        ("cifar10", (f"{cifar10.CIFAR10_SUBFOLDER}/test_batch.bin",)),
        ("imagenet32", ("imagenet32/val_data.npz", "valid_32x32/new.csv", "imagenet32/selfnorm-imagenet32/train.npy")),
        ("imagenet32", ("../cache/selfnorm/imagenet32-*/train.npy",)),
    ],
)
def test_the_files_of_a_built_in_data_set_are_never_replaced(tmp_path, monkeypatch, source, names):
    from selfnorm.data.imagenet32 import _conversions

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    for place in (folder / "imagenet32/selfnorm-imagenet32", folder / "valid_32x32", _conversions(folder)[1]):
        place.mkdir(parents=True)
        (place / "train.npy").touch()
    recipe = RECIPES["digits-fc-snf"].changed(source=source)
    for stored, variable in ((str(folder), ""), (None, str(folder))):
        monkeypatch.setenv("SELFNORM_DATA", variable)
        trained = SimpleNamespace(checkpoint=SimpleNamespace(recipe=recipe.changed(folder=stored)))
        for name in names:
            output = next(folder.glob(name)) if "*" in name else folder / name
            with pytest.raises(ValueError, match="stays as it is"):
                expect_not_data(output, trained)
        expect_not_data(folder / "scores.csv", trained)  # it is not the data's folder alone
    monkeypatch.setenv("SELFNORM_DATA", str(tmp_path / "gone"))
    expect_not_data(folder / names[0], trained)


@pytest.mark.filterwarnings("default")
def test_a_run_inside_the_image_folder_that_it_reads_is_no_data(tmp_path, monkeypatch):
    save_images(tmp_path / "images")
    monkeypatch.chdir(tmp_path / "images")
    settings = ("--set", "epochs=1", "-q")
    first = ok("fit", ".", *settings)
    run = RunFolder(tmp_path / "images" / "runs" / "fit-images")
    assert run.samples.exists() and run.curves.exists()
    result = invoke("fit", ".", *settings)
    assert result.stdout.splitlines()[0] == first.splitlines()[0]
    assert result.stderr.count("images in 1 folder that holds a run are left out") == 1
    ok("eval", run.path)
    ok("train", "--resume", run.path, "-q")
    ok("sample", run.path, "-o", run.path / "more.png")
    assert len(read_csv(ok("score", run.path, "."))) == 12
    assert "stays as it is" in fails("sample", run.path, "-o", "runs/more.png")


def test_doctor_does_not_replace_a_file_that_was_written_meanwhile(a_run, monkeypatch):
    path = a_run[0] / "repaired.safetensors"
    monkeypatch.setattr("selfnorm.cli.use.repair", lambda flow, x: path.write_text("mine") and ["layer 0"])
    result = invoke("doctor", a_run[0], "--repair")
    assert result.exit_code == 1 and "got one that was written meanwhile" in result.stderr
    assert path.read_text() == "mine"


def test_scores_are_written_as_the_name_says(table_run, tmp_path):
    run, data = table_run
    rows = read_csv(ok("score", run, data))
    for ending in ("npy", "parquet", "csv"):
        ok("score", run, data, "-o", tmp_path / f"scores.{ending}")
    parquet = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "scores.parquet").to_pydict()
    array = np.load(tmp_path / "scores.npy", allow_pickle=False)
    assert list(parquet) == list(array.dtype.names) == list(rows[0])
    for name in rows[0]:
        assert parquet[name] == array[name].tolist() == [float(row[name]) for row in rows]
    for name in ("scores.json", "scores", "scores.xlsx"):
        assert "expected a name that ends in .csv, .npy, .parquet" in fails("score", run, data, "-o", tmp_path / name)
        assert not (tmp_path / name).exists()


def test_wrong_names_are_refused_before_any_work(table_run, tmp_path, monkeypatch):
    def never(*args):
        raise AssertionError("opened")

    monkeypatch.setattr("selfnorm.train.trained.Trained.open", never)
    (tmp_path / "old.csv").touch()
    run, data = table_run
    for name in ("a.txt", "nowhere/a.csv", "old.csv"):
        fails("score", run, data, "-o", tmp_path / name)
        fails("sample", run, "-o", tmp_path / name)
    assert "expected --repair" in fails("doctor", run, "-o", tmp_path / "x.safetensors")


def test_streams_are_written_directly(table_run, tmp_path):
    run, data = table_run
    expected = ok("score", run, data)
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    assert "a pipe that a program reads" in fails("score", run, data, "-o", pipe)  # and does not wait for one
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    result = invoke("score", run, data, "-o", pipe)
    assert result.exit_code == 0 and result.stdout == "" and "wrote 200 rows" in result.stderr
    assert os.read(reader, 1 << 20).decode() == expected and pipe.is_fifo()
    os.close(reader)
    ok("score", run, data, "-o", os.devnull)


def test_standard_output_is_not_a_file_that_exists(table_run, tmp_path, capfd):
    run, data = table_run
    expected = ok("score", run, data)
    capfd.readouterr()
    assert invoke("score", run, data, "-o", "/dev/stdout").exit_code == 0  # here redirected to a regular file
    assert capfd.readouterr().out == expected


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input_is_scored_but_not_fitted(table_run, name):
    run, data = table_run
    with subprocess.Popen(["cat", data], stdout=subprocess.PIPE) as cat:
        args = [sys.executable, "-m", "selfnorm", "score", run, name]
        done = subprocess.run(args, stdin=cat.stdout, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == ok("score", run, data)
    before = os.dup(0)
    read, write = os.pipe()
    try:
        os.dup2(read, 0)
        assert "standard input; save the data in a file first" in fails("fit", name)
    finally:
        os.dup2(before, 0)
        for each in (before, read, write):
            os.close(each)


@pytest.mark.parametrize("ending", ["csv", "npy"])
def test_samples_in_batches_are_those_drawn_at_once(table_run, tmp_path, ending, monkeypatch):
    trained = Trained.open(table_run[0])
    size = trained.checkpoint.recipe.evaluation.batch_size
    n = 2 * size + 7
    generator = generator_for("cpu", 5, "sample")
    with evaluating(trained.flow):
        parts = [trained.flow.sample(count, "auto", generator) for count in (size, size, 7)]
    expected = torch.cat(parts).numpy()
    ok("sample", table_run[0], "-n", n, "--seed", 5, "-o", tmp_path / f"x.{ending}")
    if ending == "npy":
        got = np.load(tmp_path / "x.npy")
        assert got.dtype == np.float32 and np.array_equal(got, expected)
    else:
        assert np.array_equal(np.loadtxt(tmp_path / "x.csv", np.float32, delimiter=",", skiprows=1), expected)


def test_samples_are_written_while_they_are_drawn(table_run, tmp_path):
    """At no time are two batches held: each is written before the next is drawn."""
    written = []

    def batches():
        for _ in range(5):
            (file,) = tmp_path.iterdir()
            written.append(file.stat().st_size)
            yield torch.zeros(10_000, 3, dtype=torch.float32)

    write_samples(tmp_path / "x.npy", batches(), 50_000, (3,), None, ())
    assert np.load(tmp_path / "x.npy").shape == (50_000, 3)
    assert written[4] >= 4 * 120_000 > written[3]


@pytest.mark.parametrize("n", [10**20, 10**9])
def test_more_samples_than_the_disk_holds_are_refused_at_once(table_run, digits_run, tmp_path, monkeypatch, n):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**10))
    for name in ("x.csv", "x.npy"):
        message = fails("sample", table_run[0], "-n", n, "-o", tmp_path / name)
        assert "10.0 GB left" in message and "draw fewer" in message
    assert "expected a picture of at most 20,000,000 pixels" in fails("sample", digits_run[0], "-n", n, "-o", tmp_path / "x.png")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 4000))
    message = fails("sample", table_run[0], "-n", 100_000, "-o", tmp_path / "x.npy")
    assert "has 4.0 kB left, got 100,000 that take about 1.2 MB" in message
    assert list(tmp_path.iterdir()) == []


def test_the_size_of_a_table_is_not_overestimated(table_run, digits_run, tmp_path, monkeypatch):
    """A file that fits must never be refused, so the estimate stays below the real size."""
    files = ((table_run[0], "x.csv"), (table_run[0], "x.npy"), (digits_run[0], "y.csv"), (digits_run[0], "y.npy"))
    for run, name in files:
        ok("sample", run, "-n", 500, "-o", tmp_path / name)
    for run, name in files:
        size = (tmp_path / name).stat().st_size
        for free, refused in ((size, False), (size // 2, True)):
            monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(10**12, 0, free))
            assert (invoke("sample", run, "-n", 500, "-o", tmp_path / name, "--force").exit_code == 1) is refused


def test_data_with_an_impossible_name_is_no_output(a_run, tmp_path):
    run, _ = a_run
    best = read_checkpoint(run / "best.safetensors")
    save_checkpoint(tmp_path / "x.safetensors", replace(best, recipe=best.recipe.changed(source="a\0b")))
    ok("sample", tmp_path / "x.safetensors", "-n", 2, "-o", tmp_path / "x.csv")

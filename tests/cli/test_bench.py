"""The pictures and the command line of `selfnorm bench`. No test looks at how long anything takes: the machine may be busy."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from selfnorm.bench import peers, step_memory, steps, workloads
from selfnorm.bench.peers import FC
from selfnorm.bench.table import BenchTable
from selfnorm.bench.workloads import MODELS
from selfnorm.report import timings
from selfnorm.report.results import build
from selfnorm.report.timings import Bar
from support.benching import stop
from support.commandline import fails, invoke

pytestmark = pytest.mark.usefixtures("elsewhere")
CPU = torch.device("cpu")


# Figures


def drawn(path):
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return (pixels < 250).any() and pixels.shape


def test_bars_are_drawn(tmp_path):
    shown = [
        Bar(f"model {index}", 10.0**index, 0.9 * 10.0**index, 1.2 * 10.0**index, floor=0.1, group=f"{index % 2}")
        for index in range(4)
    ]
    timings.bars(tmp_path / "bars.png", "Steps", shown)
    few = drawn(tmp_path / "bars.png")
    timings.bars(tmp_path / "bars.png", "Steps", shown * 3)
    assert few and drawn(tmp_path / "bars.png")[0] > few[0]
    with pytest.raises(ValueError, match="at least one"):
        timings.bars(tmp_path / "none.png", "Steps", [])


def test_lengths_begin_at_zero_or_are_not_drawn(tmp_path, monkeypatch):
    figures = []
    original = timings.rendered
    monkeypatch.setattr(timings, "rendered", lambda figure: figures.append(figure) or original(figure))
    for longest in (9.0, 11.0):
        shown = [Bar("short", 1.0, 1.0, 1.0, floor=0.01), Bar("long", longest, longest, longest)]
        timings.bars(tmp_path / "bars.png", "Steps", shown)
    near, far = (figure.axes[0] for figure in figures)
    assert near.get_xscale() == "linear" and near.get_xlim()[0] == 0
    assert [bar.get_width() for bar in near.patches] == [1.0, 9.0]
    assert far.get_xscale() == "log" and not far.patches


def test_growth_is_drawn(tmp_path):
    kinds = {"learned": {32: 1.0, 64: 2.0}, "exact": {32: 1.0, 64: 8.0}}
    timings.growth(tmp_path / "one.png", "Growth", {"a": kinds, "b": {}}, {"a": {"learned": 1.0, "exact": None}})
    timings.growth(tmp_path / "two.png", "Growth", {"a": kinds, "b": kinds}, {})
    assert drawn(tmp_path / "one.png")[1] < drawn(tmp_path / "two.png")[1]
    with pytest.raises(ValueError, match="at least one"):
        timings.growth(tmp_path / "none.png", "Growth", {"a": {}}, {})


# The command


@pytest.mark.parametrize("verb", ["steps", "scaling", "peers"])
def test_every_verb_explains_itself_by_examples(verb):
    text = invoke("bench", verb, "--help").stdout
    assert "Examples" in text and f"selfnorm bench {verb}" in text.split("Examples")[1]
    assert "--quick" in text.split("Examples")[1]
    assert f"selfnorm bench {verb}" in invoke("bench", "--help").stdout.split("Examples")[1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("steps", "--models", "nonsense"), "expected a recipe, as `selfnorm recipes` lists them"),
        (("steps", "--models", "mnist-fc-snff"), "did you mean mnist-fc-snf?"),
        (("steps", "--device", "nonsense"), "--device"),
        (("steps", "--seconds", "0"), "--seconds: expected a time above 0"),
        (("steps", "--figure", "steps.pdf"), "--figure: expected a name that ends in .png, got steps.pdf"),
        (("steps", "--memory", "--figure", "x.png"), "--figure: expected none with --memory"),
        (("steps", "--memory", "--models", "*-bare"), "--memory: expected a whole model, got mnist-fc-bare, fc3072-bare"),
        (("steps", "--memory", "--quick"), "--quick: expected none with --memory"),
        (("steps", "--memory", "--seconds", "1"), "--seconds: expected none with --memory"),
        (("steps", "--json", "."), "--json: expected a name that ends in .json, got ."),
        (("steps", "--json", "out/steps.json"), "--json: expected a folder to write to, got No such file or directory at out"),
        (("peers", "--json", "x.png"), "--json: expected a name that ends in .json, got x.png"),
        (("scaling", "--largest", "0"), "--largest: expected a power of two from 32 to 65536, got 0"),
        (("scaling", "--largest", "100"), "--largest: expected a power of two from 32 to 65536, got 100"),
        (("scaling", "--largest", "31"), "--largest"),
        (("scaling", "--device", "meta"), "--device"),
        (("peers", "--seconds", "nan"), "--seconds"),
    ],
    ids=" ".join,
)
def test_wrong_arguments(args, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in fails("bench", *args)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert "--json: expected a folder to write to" in fails("bench", "scaling", "--json", tmp_path / "file" / "x.json")
    (tmp_path / "x.png").mkdir()
    assert f"--figure: {tmp_path / 'x.png'}: expected a file to write" in fails("bench", "scaling", "--json", tmp_path / "x.json")


@pytest.mark.parametrize("name", ["x.json", "x.png"])
def test_an_existing_file_is_refused_at_once(tmp_path, name):
    (tmp_path / name).write_text("mine")
    message = fails("bench", "scaling", "--json", tmp_path / "x.json")
    assert str(tmp_path / name) in message and "--force" in message


@pytest.mark.usefixtures("brief")
def test_a_full_disk_costs_no_figures_and_names_the_file(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BenchTable, "write", full)
    done = invoke("bench", "steps", "--quick", "-q", "--models", "digits-fc-snf", "--json", "steps.json", "--device", "cpu")
    assert done.exit_code == 1 and "digits-fc-snf" in done.stdout
    assert done.stderr == "selfnorm: steps.json: expected to write it, got No space left on device\n"


@pytest.mark.usefixtures("brief")
def test_an_interruption_of_the_command(monkeypatch):
    make = steps.training_step
    monkeypatch.setattr(steps, "training_step", lambda model, device: stop() if "conv" in model.name else make(model, device))
    args = ("bench", "steps", "--quick", "-q", "--json", "steps.json", "--force", "--device", "cpu", "--models")
    done = invoke(*args, "digits-conv-snf,digits-fc-snf")
    assert (
        done.exit_code == 130 and done.stdout == "" and "nothing was written" in done.stderr and not Path("steps.json").exists()
    )
    done = invoke(*args, "digits-fc-snf,digits-conv-snf")
    assert done.exit_code == 130 and "(partial: " in done.stdout and "written, marked as partial" in done.stderr
    assert json.loads(Path("steps.json").read_text())["provenance"]["partial"] == "stopped after 1 of 2 models"
    assert "digits-fc-snf" in build(".") and drawn("steps.png")


@pytest.mark.usefixtures("brief")
def test_all_of_it_fits_a_narrow_screen(monkeypatch):
    monkeypatch.setattr(peers, "OURS", {FC: (MODELS["digits-fc-snf"],)})
    monkeypatch.setattr(step_memory, "memory_of", lambda model, device: step_memory.Memory(2**30 + 1, 2**31 + 1, 2**33 + 1))
    several = ("--models", "digits-fc-*,digits-conv-snf", "--device", "cpu")
    shown = [
        invoke("bench", "steps", "--quick", *several).stdout,
        invoke("bench", "steps", "--memory", *several).stdout,
        invoke("bench", "scaling", "--largest", "64", "--device", "cpu").stdout,
        invoke("bench", "peers", "--device", "cpu").stdout,
    ]
    for text in shown:
        assert max(map(len, text.splitlines())) <= 80 and "…" not in text, text
    words = " ".join(shown[0].split())
    assert "Samples/s: 1000" not in words and "Samples/s: 3 in one call." in words  # which `brief` makes of them
    assert "In a graph" not in words and "Paper's ms" not in words and "Peak memory was not measured." in words
    assert shown[2].count("\nslower than learned") == 2 and "pip install zuko nflows" in " ".join(shown[3].split())
    quiet = invoke("bench", "scaling", "--largest", "64", "-q", "--device", "cpu")
    assert "medians" in shown[2] and "medians" not in quiet.stdout and quiet.stderr == ""


@pytest.mark.usefixtures("brief")
def test_steps_from_the_command():
    Path("out").mkdir()
    done = invoke(
        "bench", "steps", "--quick", "--models", "digits-fc-snf,digits-fc-exact", "--json", "out/steps.json", "--device", "cpu"
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Training steps and samples") and "floor" in lines[1] and "in a graph" not in done.stdout
    assert lines[3].startswith("digits-fc-snf") and lines[4].startswith("digits-fc-exact")
    assert "0/2  … steps of digits-fc-snf, digits-fc-exact in turn" in done.stderr and "2/2  digits-fc-exact: " in done.stderr
    assert lines[-2:] == ["  out/steps.json", "  out/steps.png"] and "digits-fc-snf: " in done.stderr
    assert drawn("out/steps.png") and "digits-fc-exact" in build("out") and "](results/steps.png)" in build("out")


@pytest.mark.usefixtures("brief")
def test_a_failure_from_the_command(monkeypatch):
    monkeypatch.setattr(steps, "training_step", lambda model, device: 1 / 0)
    args = ("--quick", "-q", "--models", "digits-fc-snf", "--json", "steps.json", "--device", "cpu")
    done = invoke("bench", "steps", *args)
    assert done.exit_code == 3 and "digits-fc-snf (failed)" in done.stdout and done.stderr == ""
    assert "digits-fc-snf: ZeroDivisionError" in done.stdout and "steps.png" not in done.stdout  # nothing to draw
    assert json.loads(Path("steps.json").read_text())["rows"][0][0] == "digits-fc-snf (failed)"


@pytest.mark.usefixtures("brief")
def test_scaling_and_peers_from_the_command(monkeypatch):
    done = invoke("bench", "scaling", "--largest", "64", "--figure", "growth.png", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "faster than exact" in done.stdout and drawn("growth.png") and "D = 64: learned" in done.stderr
    monkeypatch.setattr(peers, "OURS", {FC: (MODELS["digits-fc-snf"],)})
    monkeypatch.setattr(peers, "PEERS", ())
    done = invoke("bench", "peers", "-q", "--json", "peers.json", "--figure", "other.png", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert drawn("other.png") and json.loads(Path("peers.json").read_text())["columns"][0] == "model"


@pytest.mark.usefixtures("brief")
def test_precision_is_set_for_the_run_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(steps, "training_step", lambda *args: seen.append(torch.backends.cuda.matmul.allow_tf32) or 1 / 0)
    before = torch.backends.cuda.matmul.allow_tf32
    for value in ("float32", "tf32"):
        invoke("bench", "steps", "--quick", "-q", "--models", "digits-fc-snf", "--precision", value, "--device", "cpu")
    assert seen == [False, True] and torch.backends.cuda.matmul.allow_tf32 == before


def test_every_data_set_of_a_recipe_has_a_shape():
    assert {model.recipe.data.source for model in MODELS.values()} <= workloads.SHAPES.keys()

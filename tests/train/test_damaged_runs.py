"""The files of a run are checked when they are read: a damaged log costs a point, anything else one clear line."""

import json
import math
import re
import shutil
import struct
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open

from selfnorm.cli.console import PlainConsole
from selfnorm.evaluate.likelihood import reference_scores
from selfnorm.report import figures
from selfnorm.train import checkpoint as checkpoints
from selfnorm.train.experiments import find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.result import Result
from selfnorm.train.trained import Trained
from support.checkpoint_files import write_checkpoint
from support.commandline import fails, invoke, ok, write_csv
from support.small_runs import without_worker

DEEP = "[" * 100_000
LONG = "9" * 5000


@pytest.fixture
def run(table_run, tmp_path):
    """A copy of a run on a table of three columns."""
    return shutil.copytree(table_run[0], tmp_path / "run")


@pytest.fixture
def digits(digits_run, tmp_path):
    """A copy of a run on the digits."""
    return shutil.copytree(digits_run[0], tmp_path / "digits")


def changed(path, tensors=lambda tensors: tensors, facts=lambda facts: facts):
    """Rewrites a checkpoint with other tensors or facts, under the right digest."""
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = json.loads(file.metadata()["facts"])
    return write_checkpoint(path, tensors(stored), facts(found))


# Training scores


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (np.array([3.0, 1.0, 2.0]), "unsorted"),
        (np.array([1.0, np.nan]), "non-finite"),
        (np.array([-np.inf, 0.0]), "non-finite"),
        (np.array([]), "none"),
        (np.array(["a", "b"]), "dtype <U1"),
        (np.array([1, 2, 3]), "dtype int64"),
        (np.array([1 + 1j]), "dtype complex128"),
        (np.zeros((3, 2)), "shape (3, 2)"),
        (np.array(1.0), "shape ()"),
        (np.array([object()]), "damaged"),
    ],
    ids=["unsorted", "NaN", "infinite", "empty", "text", "integers", "complex", "table", "number", "objects"],
)
def test_training_scores_that_give_no_percentiles(run, table_run, scores, said):
    np.save(run / "training_scores.npy", scores, allow_pickle=True)
    message = fails("score", run, table_run[1])
    assert f"{run / 'training_scores.npy'}: expected the training data's scores" in message and said in message
    assert f"`selfnorm train --resume {run}` writes them again" in message


@pytest.mark.parametrize("damage", ["huge", "cut", "nested", "zip", "folder"])
def test_a_file_of_training_scores_that_cannot_be_read(run, table_run, damage):
    path = run / "training_scores.npy"
    whole = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "zip":
        with path.open("wb") as file:
            np.savez(file, a=np.ones(3))
    elif damage == "cut":
        path.write_bytes(whole[:-3])
    else:  # a header that claims 8 TB, or nests
        head = {"huge": b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }", "nested": b"(" * 5000}[damage]
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head) + 1) + head + b"\n" + bytes(80))
    expected = "expected a regular file" if damage == "folder" else "expected the training data's scores"
    assert f"{path}: {expected}" in fails("score", run, table_run[1])


def test_a_flipped_bit_in_the_training_scores_is_noticed(run, table_run):
    """The last bit of a number changes neither the order nor, visibly, a percentile."""
    path = run / "training_scores.npy"
    content = bytearray(path.read_bytes())
    content[len(content) - 8] ^= 1
    path.write_bytes(content)
    assert "got others than the run wrote" in fails("score", run, table_run[1])


def test_resuming_writes_the_scores_again(run, table_run):
    before = ok("score", run, table_run[1])
    (run / "training_scores.npy").write_bytes(b"")
    ok("train", "--resume", run, "-q")
    assert ok("score", run, table_run[1]) == before
    trained = Trained.open(run)
    expected = reference_scores(trained.flow, trained.examples("train"), 500, trained.checkpoint.recipe.optimiser.seed)
    assert np.array_equal(np.load(run / "training_scores.npy"), expected.numpy())


# Weights


@pytest.mark.parametrize("kind", [torch.int32, torch.float64, torch.float16], ids=str)
def test_weights_of_another_type_are_never_cast(run, kind):
    for name in ("best", "last"):
        changed(
            run / f"{name}.safetensors",
            lambda tensors: {key: value.to(kind) if key.endswith(".weight") else value for key, value in tensors.items()},
        )
    said = f"weight: expected torch.float32, got {kind}"
    assert said in fails("eval", run)
    assert said in fails("train", "--resume", run)


def test_a_number_is_not_taken_from_a_list(digits):
    """As torch does for compatibility with files of its first versions."""
    path = changed(
        digits / "best.safetensors",
        lambda tensors: {
            name: torch.stack([value, value]) if name.startswith("loss.flow.") and value.dim() == 0 else value
            for name, value in tensors.items()
        },
    )
    assert "expected one number, got shape (2,)" in fails("eval", path)


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c", "d"]], ids=len)
def test_each_column_needs_one_name(run, names):
    path = changed(run / "best.safetensors", facts=lambda facts: {**facts, "columns": names})
    said = fails("sample", path, "-o", run / "s.csv")
    assert f"{path}: expected one column name for each entry of the shape (3,), got {len(names)}" in said


ABSURD = [
    ("moons-fc-snf", (2,), "layers=65536"),
    ("moons-fc-snf", (2,), "bins=65536"),
    ("moons-fc-snf", (65536,), ""),
    ("digits-conv-snf", (1, 8, 8), "layers_per_block=65536"),
    ("digits-conv-snf", (1, 8, 8), "kernel_size=65535"),
    ("digits-conv-snf", (1, 8, 8), "inverse_kernel_size=65535"),
    ("digits-conv-snf", (1, 2**40, 2**40), ""),
    ("digits-conv-snf", (1, 2**70000, 2**70000), "blocks=65536"),
    ("mnist-glow-snf", (1, 8, 8), "steps_per_block=65536"),
    ("mnist-glow-snf", (1, 8, 8), "hidden=65536"),
    ("mnist-glow-snf", (1, 8, 8), "kernel_size=65535"),
    ("mnist-glow-snf", (2**40, 8, 8), ""),
]


@pytest.mark.parametrize(("name", "shape", "setting"), ABSURD, ids=range(len(ABSURD)))
def test_absurd_sizes_are_refused_before_a_flow_is_built(digits, monkeypatch, name, shape, setting):
    recipe = find_recipe(name)
    if setting:
        key, value = setting.split("=")
        recipe = recipe.changed(**{key: int(value)})
    checkpoint = checkpoints.read_checkpoint(digits / "best.safetensors")
    absurd = checkpoints.Checkpoint(recipe, shape, 17, (), "", checkpoint.tensors, checkpoint.progress)
    monkeypatch.setattr(checkpoints, "build_flow", lambda *_: pytest.fail("it was built"))
    with pytest.raises(
        ValueError, match=r"expected weights that fit the recipe, got others: the recipe needs more than the \d+ tensors"
    ):
        absurd.flow()


@pytest.mark.parametrize("name", ["digits-fc-snf", "digits-conv-snf", "mnist-glow-snf", "moons-fc-snf", "digits-fc-exact"])
def test_what_fits_is_built(digits, name):
    """The bounds are below what a flow really has."""
    recipe = find_recipe(name).changed(standardize=True, inverse_kernel_size=3 if "conv" in name else None)
    recipe = recipe.changed(**({"steps_per_block": 2, "hidden": 8} if "glow" in name else {"layers": 2}))
    shape = (2,) if name.startswith("moons") else (1, 8, 8)
    flow = checkpoints.build_flow(recipe, shape, None if len(shape) == 1 else 17)
    tensors = {f"loss.flow.{key}": value for key, value in flow.state_dict().items()}
    again = checkpoints.Checkpoint(recipe, shape, None if len(shape) == 1 else 17, (), "", tensors, {}).flow()
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in flow.state_dict().items())


# What reaches the terminal

ESCAPE = "$\\x$\x1b]0owned\x07\x1b[31m\x9b1m\x7f\u202e"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
SHOWN = r"\x1b]0owned\x07\x1b[31m\x9b1m\x7f\u202e"


def test_control_characters_of_names_are_shown_not_sent(tmp_path):
    rows = np.random.default_rng(0).normal(size=(100, 3))
    rows[:, 0] = rows[:, 0] > 0
    file = write_csv(tmp_path / "t.csv", rows, "a,b,c")
    file.write_text(file.read_text().replace("a,b,c", f"{ESCAPE},b,c"))
    run = tmp_path / f"run{ESCAPE}"
    result = invoke("fit", file, "--set", "epochs=1", "--set", "layers=1", "--run", run)
    assert result.exit_code == 0, result.output
    assert not CONTROL.search(result.output)
    assert SHOWN in result.stderr and rf"run$\x${SHOWN}" in result.stdout
    np.savetxt(tmp_path / "two.csv", rows[:, :2], delimiter=",", header="b,c", comments="")
    said = fails("score", run, tmp_path / "two.csv")
    assert SHOWN in said and not CONTROL.search(said)
    assert rf"{SHOWN}\x0d\x0b" in fails("eval", tmp_path / f"{ESCAPE}\r\v")


def test_a_consoles_own_colours_still_work(capsys):
    PlainConsole(force_terminal=True, color_system="standard", width=80, highlight=False).print("a\x1b[2Jb", style="red")
    assert capsys.readouterr().out == "\x1b[31ma\\x1b[2Jb\x1b[0m\n"


# Logs

LINES = [
    '{"kind": "epoch", "epoch": "three", "surrogate": [1], "reconstruction": "x", "step_seconds": "fast", "seconds": {}}',
    '{"kind": "epoch", "epoch": 1e999, "surrogate": NaN, "reconstruction": [[1], 2], "reconstruction_weight": {"a": 1}}',
    '{"kind": "epoch", "epoch": true, "surrogate": 1e300, "reconstruction": [1e300], "step_seconds": -Infinity}',
    '{"kind": "validation", "epoch": [], "nll": "low", "seconds": "long", "inverse_error": 3, "stability_ratio": ["a"]}',
    '{"kind": "validation"}',
    '{"kind": ["epoch"], "epoch": 3}',
    '{"kind": 3}',
    '{"epoch": 3}',
    "3",
    "null",
    '["kind"]',
    f'{{"kind": "epoch", "epoch": {LONG}}}',
    f'{{"kind": "epoch", "epoch": {"9" * 4000}, "surrogate": {"9" * 4000}, "reconstruction": [{"9" * 4000}]}}',
    f'{{"kind": "validation", "epoch": {DEEP}}}',
    DEEP,
    "\x00\x00",
    "{",
]


@pytest.fixture
def never_rewound(digits, monkeypatch):
    """A finished run whose checkpoints remember a longer log, so that resuming removes nothing from it, nor draws samples."""
    monkeypatch.setattr("selfnorm.report.figures.sample_sheet", lambda *args, **options: None)
    for name in ("best", "last"):
        changed(
            digits / f"{name}.safetensors", facts=lambda facts: {**facts, "progress": {**facts["progress"], "log_length": 10**9}}
        )
    return digits


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_damaged_line_of_a_log_costs_no_run(never_rewound, line):
    digits = never_rewound
    path = digits / "metrics.jsonl"
    whole = RunFolder(digits).read_log()
    path.write_text(line + "\n" + path.read_text())
    (digits / "curves.png").unlink()
    assert "test NLL" in ok("train", "--resume", digits)
    assert (digits / "curves.png").exists()
    again = RunFolder(digits).read_log()
    assert again[-len(whole) :] == whole
    figures.run_curves(digits / "more.png", again)


def test_a_log_of_nothing_but_damage(never_rewound):
    digits = never_rewound
    (digits / "metrics.jsonl").write_text("\n".join(LINES))
    assert "test NLL" in ok("train", "--resume", digits)
    for record in RunFolder(digits).read_log():
        for value in record.values():
            for each in value if isinstance(value, list) else [value]:
                assert each is None or isinstance(each, str) or math.isfinite(each)


def test_a_comparison_draws_what_is_left_of_a_log(tmp_path, monkeypatch):
    monkeypatch.setattr("selfnorm.compare.execute.run_in_worker", without_worker)
    names = ("--set", "epochs=2", "--set", "validate_every=1", "--run", tmp_path / "both", "-q")
    ok("compare", "digits-fc-snf", *names)
    path = tmp_path / "both" / "digits-fc-snf" / "metrics.jsonl"
    path.write_text("\n".join([*LINES, path.read_text()]))
    ok("compare", "digits-fc-snf", *names)
    path.write_text("\n".join(LINES))
    ok("compare", "digits-fc-snf", *names)


# Results and recipes


def with_value(path, *keys, value):
    """Overwrites one value of a result."""
    stored = json.loads(path.read_text())
    inner = stored
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(stored))


RESULTS = {
    "nested": lambda path: path.write_text(DEEP),
    "long number": lambda path: path.write_text(f'{{"test": {LONG}}}'),
    "list": lambda path: path.write_text("[]"),
    "text": lambda path: path.write_text('"digest"'),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe"),
    "text for a number": lambda path: with_value(path, "seconds", value="long"),
    "NaN": lambda path: with_value(path, "test", "nll", value=math.nan),
    "infinite": lambda path: with_value(path, "validation_nll", value=math.inf),
    "list for a number": lambda path: with_value(path, "test", "standard_error", value=[]),
    "large number": lambda path: with_value(path, "parameters", value=10**4000),
    "bool": lambda path: with_value(path, "epochs", value=True),
    "null": lambda path: with_value(path, "test", "nll", value=None),
    "provenance": lambda path: with_value(path, "provenance", value=3),
    "in provenance": lambda path: with_value(path, "provenance", "torch", value=[[]]),
}


@pytest.mark.parametrize("damage", RESULTS)
def test_a_damaged_result_is_one_line_and_computed_again(digits, damage):
    path = digits / "result.json"
    before = Result.read(path)
    RESULTS[damage](path)
    with pytest.raises(ValueError, match=r"result.json: expected a run's result, got a missing, damaged or older file"):
        Result.read(path)
    ok("train", "--resume", digits)
    assert Result.read(path).test == before.test


@pytest.mark.parametrize(
    "text",
    [
        f"a = {DEEP}",
        "a = " + "{a=" * 5000,
        f'name = "x"\nepochs = {LONG}',
        f'name = "x"\n[optimiser]\nepochs = 0x{"f" * 9000}',
        f'name = "x"\n[optimiser]\nlearning_rate = 0x{"f" * 900}',
        f'name = "x"\npaper = {"[" * 300}{"]" * 300}',
        "a" + ".a" * 100_000 + " = 1",
        "[a" + ".a" * 100_000 + "]",
        '"\x00" = 1',
    ],
    ids=["nested", "nested tables", "long number", "long hexadecimal", "large number", "nested value", "dots", "table", "NUL"],
)
def test_a_damaged_recipe_is_one_line(digits, text):
    (digits / "recipe.toml").write_text(text)
    said = fails("train", "--resume", digits)
    assert f"{digits / 'recipe.toml'}: expected" in said and len(said) < 4000 and sys.getrecursionlimit() >= 1000


def test_a_changed_recipe_is_refused_before_anything_is_built_by_it(digits, monkeypatch):
    """65,536 layers took 45 s to build, and were then refused."""

    def built(*args, **options):
        raise AssertionError("built")

    path = digits / "recipe.toml"
    path.write_text(path.read_text().replace("layers = 2", "layers = 65536"))
    monkeypatch.setattr("selfnorm.train.loop.build_flow", built)
    assert "expected the recipe that the run started with, got a different architecture.layers" in fails(
        "train", "--resume", digits
    )

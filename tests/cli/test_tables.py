"""Tables from `fit` to `score` and `sample`: what was understood is said, stored, and holds for every later file."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

import selfnorm
from selfnorm.cli import app
from selfnorm.data import headers, load_dataset
from selfnorm.train.checkpoint import read_checkpoint, save_checkpoint
from selfnorm.train.folder import RunFolder
from support.commandline import fails, invoke, ok, read_csv

TINY = [part for each in ("epochs=2", "layers=1", "validate_every=1") for part in ("--set", each)]
VALUES = np.random.default_rng(3).normal(size=(80, 2)).round(6)


def write_rows(path, header, rows):
    path.write_text("\n".join([*([header] if header else []), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def rows_of(values, constant="7.5"):
    """Returns the rows of a pandas file: an index, two columns and a constant between them."""
    return [(index, a, constant, b) for index, (a, b) in enumerate(values.tolist())]


@pytest.fixture(scope="module")
def pandas_run(tmp_path_factory):
    """A run on what `DataFrame.to_csv` writes by default, its file, and what `fit` said."""
    folder = tmp_path_factory.mktemp("tables")
    file = write_rows(folder / "pandas.csv", ",0,1,2", rows_of(VALUES))
    result = invoke("fit", file, *TINY, "--run", folder / "run", "--quiet")
    assert result.exit_code == 0, result.output
    return folder / "run", file, result.stderr


def likelihoods(run, values):
    flow = selfnorm.load(run)
    with torch.no_grad():
        return flow.log_prob(torch.from_numpy(np.asarray(values, np.float32))).double().numpy()


def scores_of(text):
    return np.array([float(row["log_likelihood"]) for row in read_csv(text)])


def test_fit_says_what_it_understood_and_stores_it(pandas_run):
    run, file, said = pandas_run
    assert said.splitlines()[0] == (
        f"selfnorm: {file}: header: yes, 2 columns; unnamed column 1 counts the rows: left out; "
        "column '1' is 7.5 in all training rows: left out"
    )
    stored = read_checkpoint(run / "best.safetensors")
    assert (stored.columns, stored.shape) == (("0", "2"), (2,))
    assert stored.table == load_dataset(str(file)).table and stored.table.constant == ((2, 7.5),)
    data = load_dataset(str(file))
    assert sorted(torch.cat([data.train, data.validation, data.test]).tolist()) == sorted(VALUES.astype(np.float32).tolist())


def test_the_same_file_is_scored_evaluated_and_resumed(pandas_run):
    run, file, _ = pandas_run
    np.testing.assert_allclose(scores_of(ok("score", run, file)), likelihoods(run, VALUES), atol=1e-5)
    assert ok("eval", run).split("test: ")[1].strip() in ok("train", "--resume", run, "-q")


def test_samples_have_the_columns_of_the_file_and_can_be_scored(pandas_run, tmp_path):
    run, _, _ = pandas_run
    for ending in ("csv", "npy"):
        ok("sample", run, "-n", 5, "-o", tmp_path / f"s.{ending}")
    samples = np.load(tmp_path / "s.npy")
    assert samples.shape == (5, 3) and (samples[:, 1] == 7.5).all()
    assert (tmp_path / "s.csv").read_text().splitlines()[0] == "0,1,2"
    np.testing.assert_allclose(np.loadtxt(tmp_path / "s.csv", delimiter=",", skiprows=1), samples, rtol=1e-6)
    for ending in ("csv", "npy"):
        text = ok("score", run, tmp_path / f"s.{ending}")
        np.testing.assert_allclose(scores_of(text), likelihoods(run, samples[:, [0, 2]]), atol=1e-5)
        assert [row["differs"] for row in read_csv(text)] == [""] * 5


def test_samples_of_a_run_without_names_can_be_scored(tmp_path):
    np.save(tmp_path / "t.npy", np.insert(VALUES, 1, -2.0, axis=1))
    ok("fit", tmp_path / "t.npy", *TINY, "--run", tmp_path / "run", "-q")
    ok("sample", tmp_path / "run", "-n", 4, "-o", tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text().splitlines()[0] == "x0,x1,x2"
    samples = np.loadtxt(tmp_path / "s.csv", delimiter=",", skiprows=1)
    assert (samples[:, 1] == -2).all()
    text = ok("score", tmp_path / "run", tmp_path / "s.csv")
    np.testing.assert_allclose(scores_of(text), likelihoods(tmp_path / "run", samples[:, [0, 2]]), atol=1e-5)


def test_a_row_that_differs_in_a_constant_column(pandas_run, tmp_path):
    run, _, _ = pandas_run
    rows = [list(row) for row in rows_of(VALUES[:6])]
    rows[2][2] = rows[4][2] = 8
    file = write_rows(tmp_path / "new.csv", ",0,1,2", rows)
    text = ok("score", run, file)
    scores, table = scores_of(text), read_csv(text)
    expected = likelihoods(run, VALUES[:6])
    expected[[2, 4]] = -np.inf
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert [row["differs"] for row in table] == ["", "", "1", "", "1", ""]
    assert [table[row]["rank"] for row in (2, 4)] == ["1", "2"] and table[2]["percentile"] == "0.0"
    lines = [json.loads(line) for line in ok("score", run, file, "--json").splitlines()]
    assert [line["log_likelihood"] is None for line in lines] == [bool(line["differs"]) for line in lines]
    flagged = ok("score", run, file, "--constant-columns", "flag")
    np.testing.assert_allclose(scores_of(flagged), likelihoods(run, VALUES[:6]), atol=1e-5)
    assert [row["differs"] for row in read_csv(flagged)] == ["", "", "1", "", "1", ""]


def test_identifiers_are_carried_to_the_output_in_order(pandas_run, tmp_path):
    run, _, _ = pandas_run
    rows = [(b, f'"Öl, {index}"', 100 - index, index, a) for index, (a, b) in enumerate(VALUES[:6].tolist())]
    file = write_rows(tmp_path / "new.csv", "2,name,number,rank,0", rows)
    result = invoke("score", run, file, "--id", "number", "--id", "rank")
    assert result.exit_code == 0, result.output
    table = read_csv(result.stdout)
    assert list(table[0]) == ["number", "input_rank", "name", "row", "log_likelihood", "rank", "percentile"]
    assert [(row["number"], row["input_rank"], row["name"]) for row in table] == [
        (str(100 - index), str(index), f"Öl, {index}") for index in range(6)
    ]
    np.testing.assert_allclose(scores_of(result.stdout), likelihoods(run, VALUES[:6]), atol=1e-5)
    assert "constant in the training data and not in this file: column '1'" in result.stderr
    (first, *_) = ok("score", run, file, "--id", "number", "--json").splitlines()
    assert json.loads(first)["number"] == "100" and json.loads(first)["name"] == "Öl, 0"
    assert "expected --id to name a column" in fails("score", run, file, "--id", "nobody")
    write_rows(tmp_path / "bad.csv", "2,name,0", [(1, "x", 2), (1, "y", "z")])
    assert "line 3, column 3 (0): expected a number" in fails("score", run, tmp_path / "bad.csv")
    write_rows(tmp_path / "few.csv", "name,0", [("x", 2), ("y", 3)])
    assert "without '2'" in fails("score", run, tmp_path / "few.csv")


def test_images_are_identified_by_their_files(tmp_path):
    random = np.random.default_rng(0)
    for index in range(12):
        folder = tmp_path / "images" / ("a" if index % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, size=(4, 4)).astype(np.uint8)).save(folder / f"{index}.png")
    ok("fit", tmp_path / "images", *TINY, "--set", "test_samples=1", "--run", tmp_path / "run", "-q")
    table = read_csv(ok("score", tmp_path / "run", tmp_path / "images"))
    files = sorted(str(path.relative_to(tmp_path / "images")) for path in (tmp_path / "images").rglob("*.png"))
    assert [row["file"] for row in table] == files and [row["row"] for row in table] == [str(row) for row in range(12)]
    single = read_csv(ok("score", tmp_path / "run", tmp_path / "images" / "a" / "1.png"))
    assert [row["file"] for row in single] == ["1.png"]
    assert "expected a table for --id, got images" in fails("score", tmp_path / "run", tmp_path / "images", "--id", "x")


def test_the_decisions_of_fit_can_be_overruled_and_are_settings(tmp_path):
    rows = [(f"n{index}", index, a, b) for index, (a, b) in enumerate(VALUES.tolist())]
    file = write_rows(tmp_path / "t.csv", "name,id,a,b", rows)
    run = tmp_path / "run"
    assert "expected a number" in fails("fit", file, "--run", run)
    result = invoke("fit", file, *TINY, "--drop", "name", "--drop", "b", "--run", run, "-q")
    assert result.exit_code == 0, result.output
    assert (
        "columns 'name', 'b' dropped: left out; column 'id' counts the rows and is kept: use --drop id if it is only an index"
        in result.stderr
    )
    recipe = RunFolder(run).read_recipe()
    assert (recipe.data.drop, recipe.data.keep, recipe.data.header) == (("name", "b"), (), None)
    assert read_checkpoint(run / "best.safetensors").columns == ("id", "a")
    assert "test NLL" in ok("train", "--resume", run, "-q")
    whole = write_rows(tmp_path / "w.csv", "", [(0, 1, 2), *((index, index**2, index**3) for index in range(60))])
    for options, columns, count in (((), ("0", "1", "2"), 60), (("--no-header",), (), 61), (("--set", "header=false"), (), 61)):
        folder = tmp_path / f"whole{len(options)}{count}"
        result = invoke("fit", whole, *TINY, *options, "--run", folder)
        assert result.exit_code == 0, result.output
        assert f"header: {'yes' if columns else 'no'}, 3 columns" in result.stderr
        assert read_checkpoint(folder / "best.safetensors").columns == columns
        assert len(read_csv(ok("score", folder, whole))) == count
    for setting in ("drop=x", "keep=*"):
        assert "expected header, drop and keep only for your own tables" in fails("train", "moons-fc-snf", "--set", setting)


def test_many_columns_are_named_in_one_line(tmp_path):
    table = np.random.default_rng(0).integers(0, 2, size=(100, 9))
    file = write_rows(tmp_path / "t.csv", ",".join(f"c{index}" for index in range(9)), table.tolist())
    result = invoke("fit", file, *TINY, "--run", tmp_path / "run", "-q")
    assert "columns 'c0', 'c1', 'c2', 'c3', 'c4' and 4 more take few different values" in result.stderr


def test_a_compressed_table(tmp_path):
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(write_rows(tmp_path / "t.csv", "a,b", VALUES.tolist()).read_bytes()))
    ok("fit", file, *TINY, "--run", tmp_path / "run", "-q")
    assert RunFolder(tmp_path / "run").read_recipe().name == "fit-t"
    assert ok("score", tmp_path / "run", file) == ok("score", tmp_path / "run", tmp_path / "t.csv")


@pytest.mark.filterwarnings("ignore:.*without a digest")
def test_runs_of_earlier_versions_read_their_tables_as_before(tmp_path):
    """They fitted the index of pandas as a column; what they were trained on must be found again."""
    rows = [(index, a, b) for index, (a, b) in enumerate(VALUES.tolist())]
    file, run = write_rows(tmp_path / "t.csv", ",a,b", rows), tmp_path / "run"
    ok("fit", file, *TINY, "--keep", "*", "--run", run, "-q")
    before = [ok("score", run, file), ok("eval", run)]
    recipe = run / "recipe.toml"
    kept = [line for line in recipe.read_text().splitlines() if line.split(" ")[0] not in ("drop", "keep")]
    recipe.write_text("\n".join(kept) + "\n")
    for name in ("best", "last"):
        with safe_open(run / f"{name}.safetensors", framework="pt") as stored:
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
            facts = json.loads(stored.metadata()["facts"])
            form = stored.metadata()["format"]
        del facts["table"], facts["recipe"]["data"]["header"], facts["recipe"]["data"]["drop"], facts["recipe"]["data"]["keep"]
        save_file(tensors, run / f"{name}.safetensors", metadata={"format": form, "facts": json.dumps(facts)})
    checkpoint = read_checkpoint(run / "best.safetensors")
    assert (checkpoint.table, checkpoint.columns) == (None, ("", "a", "b"))
    assert [ok("score", run, file), ok("eval", run)] == before
    assert "test NLL" in ok("train", "--resume", run, "-q")


def test_a_layout_that_does_not_fit_the_run_is_refused(pandas_run, tmp_path):
    run, file, _ = pandas_run
    with safe_open(run / "best.safetensors", framework="pt") as stored:
        tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
        facts, form = json.loads(stored.metadata()["facts"]), stored.metadata()["format"]
    for table in ({"width": 9}, {"constant": [[0, "x"]]}, {"names": None}, {"left_out": []}):
        changed = facts | {"table": facts["table"] | table}
        save_file(tensors, tmp_path / "bad.safetensors", metadata={"format": form, "facts": json.dumps(changed)})
        assert "bad.safetensors: expected" in fails("score", tmp_path / "bad.safetensors", file)


def test_identifiers_of_any_name_reach_every_format(pandas_run, tmp_path):
    """An index of texts has no name, and a column may be called as one of the output."""
    run, _, _ = pandas_run
    rows = [(f"i{index}", a, b, f"r{index}", f"s{index}") for index, (a, b) in enumerate(VALUES[:4].tolist())]
    file = write_rows(tmp_path / "new.csv", ",0,2,row,input_row", rows)
    ok("score", run, file, "-o", tmp_path / "s.npy")
    table = np.load(tmp_path / "s.npy")
    assert table["column 1"].tolist() == ["i0", "i1", "i2", "i3"] and table["row"].tolist() == [0, 1, 2, 3]
    assert table["input_row"].tolist() == ["s0", "s1", "s2", "s3"]
    assert table["input_input_row"].tolist() == ["r0", "r1", "r2", "r3"]


def test_a_guess_on_the_first_line_is_said_and_can_be_overruled(tmp_path):
    np.save(tmp_path / "t.npy", VALUES.repeat(2, axis=1)[:, :3] + np.random.default_rng(0).normal(size=(80, 3)))
    run = tmp_path / "run"
    ok("fit", tmp_path / "t.npy", *TINY, "--run", run, "-q")
    file = write_rows(tmp_path / "new.csv", "0,1,2", [(0.5, 0.25, 1.5), (0.75, 0.5, 2.5)])
    result = invoke("score", run, file)
    assert len(read_csv(result.stdout)) == 2
    assert "the numbers of the first line (0, 1, 2) are read as names: use --no-header if they are a row" in result.stderr
    overruled = invoke("score", run, file, "--no-header")
    assert len(read_csv(overruled.stdout)) == 3 and overruled.stderr == ""
    certain = write_rows(tmp_path / "index.csv", ",0,1,2", [(0, 0.5, 0.25, 1.5), (1, 0.75, 0.5, 2.5)])
    result = invoke("score", run, certain)
    assert (len(read_csv(result.stdout)), result.stderr) == (2, f"selfnorm: {certain}: ignored: column 1\n")
    assert scores_of(result.stdout).tolist() == scores_of(ok("score", run, file)).tolist()
    write_rows(certain, ",x,y,z", [(0, 0.5, 0.25, 1.5), (1, 0.75, 0.5, 2.5)])
    assert invoke("score", run, certain, "--id", "1").stderr == ""
    assert "expected no header option" in fails("score", run, tmp_path / "t.npy", "--header")
    ok("fit", tmp_path / "t.npy", *TINY, "--keep", "*", "--run", tmp_path / "kept", "-q")
    result = invoke("score", tmp_path / "kept", file)
    assert len(read_csv(result.stdout)) == 3
    assert "the numbers of the first line (0, 1, 2) are read as a row: use --header if they are names" in result.stderr
    assert len(read_csv(ok("score", tmp_path / "kept", file, "--header"))) == 2


@pytest.mark.parametrize(
    ("text", "option", "guessed", "overruled"),
    [("0,1,2\n3,4,5\n6,7,8\n", "--header", 3, 2), ("0,1,2\n0.5,0.25,1.5\n0.75,0.5,2.5\n", "--no-header", 2, 3)],
    ids=["header", "no header"],
)
def test_a_guess_on_standard_input_can_be_overruled(table_run, text, option, guessed, overruled):
    for options, count in (((), guessed), ((option,), overruled)):
        call = ["score", str(table_run[0]), "-", *options]
        result = CliRunner().invoke(app, call, input=text, prog_name="selfnorm")
        assert result.exit_code == 0, result.output
        assert len(read_csv(result.stdout)) == count


@pytest.mark.parametrize("options", [(), ("--seeds", "2")], ids=["one run", "two seeds"])
def test_train_says_what_it_decided_once_and_each_run_logs_it(tmp_path, options):
    file, folder = write_rows(tmp_path / "t.csv", ",0,1,2", rows_of(VALUES)), tmp_path / "run"
    result = invoke("train", "moons-fc-snf", "--set", f"data={file}", *TINY, *options, "--run", folder, "-q")
    assert result.exit_code == 0, result.output
    notes = load_dataset(str(file)).notes
    assert "unnamed column 1 counts the rows: left out; column '1' is 7.5 in all training rows: left out" in notes[0]
    assert result.stderr.splitlines() == [f"selfnorm: {note}" for note in notes]
    logs = sorted(tmp_path.rglob("metrics.jsonl"))
    assert len(logs) == (2 if options else 1)
    for log in logs:
        records = [json.loads(line) for line in log.read_text().splitlines()]
        assert [record["message"] for record in records if record["kind"] == "note"] == list(notes)


def test_text_far_below_is_carried_to_the_output(pandas_run, tmp_path):
    """The first thousand lines do not show it."""
    run, _, _ = pandas_run
    rows = [(a, b, index if index < 1500 else f"x{index}", index) for index, (a, b) in enumerate(VALUES.tolist() * 20)]
    file = write_rows(tmp_path / "late.csv", "0,2,late,other", rows)
    result = invoke("score", run, file)
    table = read_csv(result.stdout)
    assert table[3]["late"] == "3" and table[1599]["late"] == "x1599" and "other" not in table[0]
    assert "ignored: 'other'" in result.stderr


def test_columns_without_a_name_are_called_by_their_number(pandas_run, tmp_path):
    run, _, _ = pandas_run
    file = write_rows(tmp_path / "t.csv", "0,2,,,k", [(a, b, 10 + index, 5, 7) for index, (a, b) in enumerate(VALUES.tolist())])
    result = invoke("score", run, file, "--id", "3")
    assert [row["column 3"] for row in read_csv(result.stdout)] == [str(10 + index) for index in range(80)]
    assert "expected --id to name a column, '0', '2', column 3, column 4, 'k', got '5'" in fails("score", run, file, "--id", "5")
    file = write_rows(tmp_path / "x.csv", "0,2,,b", [(a, "x", 5, 6) for a, _ in VALUES.tolist()])
    assert (
        "--drop" not in (told := fails("score", run, file)) and "drop" not in told and "column 2 (2): expected a number" in told
    )
    unnamed = write_rows(tmp_path / "u.csv", ",a,b", [("x", a, b) for a, b in VALUES.tolist()])
    told = fails("fit", unnamed, "--run", tmp_path / "run")
    assert "line 2, column 1: expected a number" in told and told.endswith("got 'x'; leave that column out with --drop 1\n")


def test_other_unnamed_columns_are_named_when_they_are_ignored(tmp_path):
    run = tmp_path / "run"
    ok("fit", write_rows(tmp_path / "t.csv", "a,b", VALUES.tolist()), *TINY, "--run", run, "-q")
    file = write_rows(tmp_path / "n.csv", "a,b,", [(*row, 5) for row in VALUES.tolist()])
    assert "ignored: column 3\n" in invoke("score", run, file).stderr


@pytest.mark.parametrize("index", [np.arange(80) // 2, np.r_[:50, :30]], ids=["twice", "two frames"])
def test_an_unnamed_index_that_repeats_is_pointed_out(tmp_path, index):
    rows = [(each, a, b) for each, (a, b) in zip(index, VALUES.tolist(), strict=True)]
    result = invoke("fit", write_rows(tmp_path / "t.csv", ",a,b", rows), *TINY, "--run", tmp_path / "run", "-q")
    assert result.exit_code == 0
    assert "unnamed column 1 holds whole numbers that repeat and is kept: use --drop 1 if it is only an index" in result.stderr
    dropped = invoke("fit", tmp_path / "t.csv", *TINY, "--drop", "1", "--run", tmp_path / "dropped", "-q")
    assert dropped.exit_code == 0 and "repeat" not in dropped.stderr


def test_true_and_false_are_told_as_such(tmp_path):
    file = write_rows(tmp_path / "t.csv", "a,b", [(a, a > 0) for a, _ in VALUES.tolist()])
    assert "column 2 (b): expected a number; write 1 and 0 for true and false, got '" in fails("fit", file)


def test_gifs_are_images(tmp_path):
    (tmp_path / "images").mkdir()
    for index in range(12):
        pixels = np.random.default_rng(index).integers(0, 256, size=(4, 4)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index}.gif")
    assert len(load_dataset(str(tmp_path / "images")).train) == 10


def test_a_file_for_a_run_without_names_keeps_its_first_row(tmp_path):
    """0,1 above whole numbers is a header for `fit`, if such rows are rare; the run of a file without names knows better."""
    rows = np.random.default_rng(0).integers(2, 400, size=(60, 2))
    write_rows(tmp_path / "train.csv", "", rows)
    run, file = tmp_path / "run", tmp_path / "new.csv"
    ok("fit", tmp_path / "train.csv", *TINY, "--run", run)
    write_rows(file, "0,1", rows)
    assert len(read_csv(ok("score", run, file))) == 61
    assert "read as a row: use --header if they are names" in invoke("score", run, file).stderr
    assert len(read_csv(ok("score", run, file, "--header"))) == 60


@pytest.mark.parametrize("forgotten", [True, False], ids=["earlier version", "this version"])
@pytest.mark.parametrize("understood", [True, False], ids=["header", "no header"])
def test_a_run_does_not_guess_again_whether_there_is_a_header(tmp_path, monkeypatch, understood, forgotten):
    """A later version may guess otherwise, and would find other data than the run was trained on."""
    rows = np.random.default_rng(0).integers(2, 400, size=(60, 2))
    write_rows(tmp_path / "t.csv", "0,1", rows)
    run = tmp_path / "run"
    monkeypatch.setattr(headers, "is_header", lambda *args, **options: understood)
    ok("fit", tmp_path / "t.csv", *TINY, "--run", run)
    before = json.loads((run / "result.json").read_text())["test"]["nll"]
    monkeypatch.setattr(headers, "is_header", lambda *args, **options: not understood)
    for name in ("best", "last") if forgotten else ():
        path = run / f"{name}.safetensors"
        save_checkpoint(path, replace(read_checkpoint(path), table=None))
    ok("train", "--resume", run, "-q")
    assert json.loads((run / "result.json").read_text())["test"]["nll"] == before
    assert json.loads(ok("eval", run, "--samples", "5", "--json"))["nll"] == pytest.approx(before)

"""Gross outliers, dependent columns and tiny tables, through the command and the estimator."""

import json

import numpy as np
import pytest
from sklearn.datasets import load_wine

from selfnorm import SelfNormDensity
from selfnorm.train.run import start_run
from support.commandline import fails, invoke, ok, read_csv, write_csv

FIT = ("--set", "epochs=3", "--set", "layers=2", "--quiet")


def table(rows=240, columns=3):
    return np.random.default_rng(1).normal(size=(rows, columns))


def scores(run, file):
    return np.array([float(row["log_likelihood"]) for row in read_csv(ok("score", run, file))])


@pytest.mark.parametrize("factor", [30, 1e4, 1e6, 1e30])
def test_a_gross_outlier_does_not_change_the_fit_of_the_others(tmp_path, factor):
    rows = table()
    clean = write_csv(tmp_path / "clean.csv", rows)
    dirty = write_csv(tmp_path / "dirty.csv", np.insert(rows, 100, factor * np.array([1.0, -1.0, 2.0]), axis=0))
    ok("fit", clean, *FIT, "--run", tmp_path / "clean")
    told = invoke("fit", dirty, *FIT, "--run", tmp_path / "dirty")
    assert told.exit_code == 0 and "1 of 241 rows set aside" in told.stderr and "row 100 ('" in told.stderr
    found = read_csv(ok("score", tmp_path / "dirty", dirty))
    assert found[100]["rank"] == "1"
    alone = np.delete([float(row["log_likelihood"]) for row in found], 100)
    np.testing.assert_allclose(alone, scores(tmp_path / "clean", clean), atol=1e-4)  # float32 rounds by the size of a batch
    assert np.array_equal(scores(tmp_path / "dirty", clean), scores(tmp_path / "clean", clean))
    notes = [json.loads(line) for line in (tmp_path / "dirty" / "metrics.jsonl").read_text().splitlines() if '"note"' in line]
    assert len(notes) == 2 and "row 100" in notes[0]["message"]  # the other is on the size


def wide():
    rows = np.random.default_rng(0).normal(size=(2000, 200))
    return rows, 1e6 * rows[:1]


def wine():
    rows = load_wine().data
    return rows, 1e4 * rows[77:78]


@pytest.mark.filterwarnings("ignore:.*(expect overfitting|set aside)")
@pytest.mark.parametrize("make", [wide, wine])
def test_one_row_costs_the_others_nothing(make):
    """Without it, training on the first table diverged, and each row of the second lost 5 to 14 nats. 0.3 nats are allowed."""
    rows, far = make()
    model = {"max_steps": 300, "layers": 2, "random_state": 0}
    with_it, without = (SelfNormDensity(**model).fit(given) for given in (np.vstack([rows, far]), rows))
    found = with_it.score_samples(np.vstack([rows, far]))
    assert found.argmin() == len(rows) and with_it.set_aside_.tolist() == [len(rows)]
    assert np.abs(found[:-1] - without.score_samples(rows)).max() < 1e-9


def test_the_estimator_sets_the_same_rows_aside():
    rows = table(200)
    dirty = np.vstack([rows, [[1e5, 0, 0]], [[0, 0, 1e300]]])
    model = {"max_steps": 40, "layers": 2, "random_state": 0}
    with pytest.warns(UserWarning, match=r"SelfNormDensity: 2 of 202 rows set aside.*row 200 \('x0' is 1e\+05"):
        fitted = SelfNormDensity(**model).fit(dirty)
    plain = SelfNormDensity(**model).fit(rows)
    assert fitted.set_aside_.tolist() == [200, 201] and plain.set_aside_.tolist() == []
    assert np.array_equal(fitted.score_samples(rows), plain.score_samples(rows))
    found = fitted.score_samples(dirty)
    assert found.argsort()[:2].tolist() == [201, 200] and found[201] == -np.inf
    assert fitted.predict(dirty)[200:].tolist() == [-1, -1]


def test_fit_names_dependent_columns_before_it_trains(tmp_path):
    rows = table()
    file = write_csv(tmp_path / "twice.csv", np.column_stack([rows[:, :2], 2 * rows[:, 0] + 1]), header="weight,height,pounds")
    told = fails("fit", file, *FIT, "--run", tmp_path / "run")
    assert "twice.csv: expected linearly independent columns" in told and "'pounds' is 2·'weight' + 1" in told
    assert not (tmp_path / "run").exists()


def test_tiny_data_says_what_can_be_trusted(tmp_path):
    file = write_csv(tmp_path / "tiny.csv", table(5))
    told = invoke("fit", file, *FIT, "--run", tmp_path / "run")
    assert told.exit_code == 0
    assert "3 examples to train on, 1 to validate, 1 to test, for 3 columns" in told.stderr
    assert "exact, 1 example, too few to rely on" in told.stdout
    assert "too few to rely on" in ok("eval", tmp_path / "run")


def test_python_users_get_notes_as_records(tmp_path):
    from selfnorm.train.experiments import recipe_for

    file = write_csv(tmp_path / "tiny.csv", table(40))
    records = []
    start_run(recipe_for(str(file), (3,), 32, 20).changed(layers=1), tmp_path / "run", report=records.append)
    (note,) = [record["message"] for record in records if record["kind"] == "note"]
    assert note.startswith("32 examples to train on, 4 to validate, 4 to test: ")


def test_two_outliers_of_few_rows_do_not_hide_each_other(tmp_path):
    rows = table(150)
    dirty = np.vstack([rows, 1e4 * np.array([[1.0, -1.0, 2.0], [2.0, 1.0, -1.0]])])
    clean, file = write_csv(tmp_path / "clean.csv", rows), write_csv(tmp_path / "dirty.csv", dirty)
    ok("fit", clean, *FIT, "--run", tmp_path / "clean")
    assert "2 of 152 rows set aside" in invoke("fit", file, *FIT, "--run", tmp_path / "dirty").stderr
    assert np.array_equal(scores(tmp_path / "dirty", clean), scores(tmp_path / "clean", clean))
    assert set(scores(tmp_path / "dirty", file).argsort()[:2]) == {150, 151}


def test_a_column_that_is_constant_but_for_the_outlier_is_left_out(tmp_path):
    rows = np.insert(table(), 1, 3.0, axis=1)
    dirty = np.insert(rows, 100, [1e5, 3e5, 0, 0], axis=0)
    file = write_csv(tmp_path / "dirty.csv", dirty, header="a,k,b,c")
    told = invoke("fit", file, *FIT, "--run", tmp_path / "dirty")
    assert told.exit_code == 0 and "is 3 in all training rows: left out" in told.stderr and "row 100 ('" in told.stderr
    found = scores(tmp_path / "dirty", file)
    assert found[100] == -np.inf and np.isfinite(np.delete(found, 100)).all()
    with pytest.warns(UserWarning) as said:
        model = SelfNormDensity(max_steps=40, layers=2, random_state=0).fit(dirty)
    assert model.set_aside_.tolist() == [100] and model.constant_columns_.tolist() == [1] and len(said) == 2


def test_a_rare_mode_can_be_kept(tmp_path):
    rows = table(1000)
    rows[[7, 500]] += 200.0
    file = write_csv(tmp_path / "modes.csv", rows)
    told = invoke("fit", file, *FIT, "--run", tmp_path / "aside")
    assert "2 of 1000 rows set aside" in told.stderr and "keep them with `--set set_outliers_aside=false`" in told.stderr
    for number, option in enumerate((("--set", "set_outliers_aside=false"), ("--keep", "*"))):
        kept = invoke("fit", file, *FIT, *option, "--run", tmp_path / f"kept{number}")
        assert kept.exit_code == 0 and "set aside" not in kept.stderr
        assert "100 examples" in ok("eval", tmp_path / f"kept{number}")
    with pytest.warns(UserWarning, match="keep them with set_outliers_aside=False"):
        SelfNormDensity(max_steps=40, layers=1, random_state=0).fit(rows)
    model = SelfNormDensity(max_steps=40, layers=1, random_state=0, set_outliers_aside=False).fit(rows)
    assert model.set_aside_.tolist() == []


def test_dependent_columns_are_looked_for_before_numbers_are_rounded(tmp_path):
    """In float32 the end of each interval was its start plus a constant."""
    random = np.random.default_rng(0)
    start, duration = 1.7e9 + random.uniform(0, 3e7, 300), random.exponential(3000, 300)
    file = tmp_path / "t.csv"
    np.savetxt(file, np.column_stack([start, start + duration, duration]), "%.17g", ",", header="start,end,duration", comments="")
    assert "got dependent ones in the training rows: column 'duration' is -'start' + 'end'. " in fails(
        "fit", file, *FIT, "--run", tmp_path / "run"
    )


def test_columns_that_hardly_differ_are_not_called_copies(tmp_path):
    """Times of a day, and times 20 ms later: their density is finite, but float32 and the flow cannot resolve it."""
    random = np.random.default_rng(0)
    sent = np.sort(random.uniform(0, 86400, 1000))
    file = tmp_path / "t.csv"
    rows = np.column_stack([sent, sent + random.exponential(0.02, 1000)])
    np.savetxt(file, rows, "%.17g", ",", header="sent,received", comments="")
    said = fails("fit", file, *FIT, "--run", tmp_path / "run")
    assert "column 'received' is nearly 'sent' + 0.0" in said and "unbounded" not in said
    assert "Their difference is at most a millionth of the spread" in said and "or put that difference in its place" in said


def test_the_column_to_drop_is_counted_as_drop_counts(tmp_path):
    rows = table()
    np.save(tmp_path / "t.npy", np.column_stack([np.full(240, 2.0), rows, rows[:, :2].sum(1)]))
    told = invoke("fit", tmp_path / "t.npy", *FIT, "--run", tmp_path / "run").stderr
    assert "column 5 is column 2 + column 3. " in told and "leave out column 5 (`--drop`" in told
    assert invoke("fit", tmp_path / "t.npy", *FIT, "--drop", "5", "--run", tmp_path / "run").exit_code == 0


def test_dependent_entries_of_an_array_are_a_note(tmp_path):
    rows = np.random.default_rng(0).normal(size=(240, 2, 2))
    rows[:, 1, 1] = rows[:, 0, 1]
    np.save(tmp_path / "t.npy", rows)
    told = invoke("fit", tmp_path / "t.npy", *FIT, "--run", tmp_path / "run")
    assert told.exit_code == 0 and "dependent entries: entry (2, 2) is entry (1, 2); their likelihood is unbounded" in told.stderr

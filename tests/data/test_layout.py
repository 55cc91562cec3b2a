"""Which columns of a table are data, which are left out, and what a run keeps of that."""

import json
from dataclasses import replace

import numpy as np
import pytest

from selfnorm.data import load_dataset
from selfnorm.data.layout import TableLayout, constant_columns, discrete_columns
from selfnorm.data.matching import read_matching
from support.data_files import write_columns

random = np.random.default_rng(2)
VALUES = random.normal(size=(40, 2))
LAYOUT = TableLayout(("", "a", "k", "b", "note"), 5, ((0, "counts the rows"), (4, "dropped")), ((2, 7.5),))


@pytest.mark.parametrize("ending", ["csv", "npy", "parquet"])
def test_constant_columns_are_left_out(tmp_path, ending):
    table = np.column_stack([VALUES[:, 0], np.full(40, 2.5), VALUES[:, 1], np.full(40, -1.0)])
    path = tmp_path / f"table.{ending}"
    if ending == "csv":
        np.savetxt(path, table, delimiter=",", header="a,k,b,m", comments="")
    elif ending == "npy":
        np.save(path, table)
    else:
        arrow = pytest.importorskip("pyarrow")
        columns = dict(zip("akbm", table.T, strict=True))
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
    dataset = load_dataset(str(path))
    everything = np.concatenate([dataset.train, dataset.validation, dataset.test])
    assert sorted(everything.tolist()) == sorted(VALUES.astype(np.float32).tolist())
    assert dataset.table.constant == ((1, 2.5), (3, -1.0))
    named = ending != "npy"
    assert dataset.columns == (("a", "b") if named else ())
    names = "columns 'k', 'm'" if named else "columns 2, 4"
    assert dataset.table.describe().endswith(f"2 columns; {names} have the same value in all training rows: left out")
    with pytest.raises(ValueError, match=rf"the same value in all 32 training rows of column {'.k.' if named else 2}; .*drop"):
        load_dataset(str(path), keep=["k" if named else "2"])
    assert load_dataset(str(path), drop=["k" if named else "2"]).table.constant == ((3, -1.0),)


def test_a_table_of_constants_alone(tmp_path):
    path = write_columns(tmp_path / "table.csv", "a,b", [1] * 9, [2] * 9)
    with pytest.raises(
        ValueError, match=r"table\.csv: expected columns that vary, got only constant ones: all 7 training rows are the same"
    ):
        load_dataset(str(path))


def test_constant_columns_against_a_loop():
    table = random.integers(0, 2, size=(3, 200)).astype(np.float64)
    assert constant_columns(table) == {
        index: column[0] for index, column in enumerate(table.T.tolist()) if all(value == column[0] for value in column)
    }
    table = np.tile(random.normal(size=(1, 50)), (30, 1))
    table[29, ::2] += 1
    assert list(constant_columns(table)) == list(range(1, 50, 2))
    table[10, 1] = np.nan
    assert 1 not in constant_columns(table)


def test_discrete_columns_against_sets():
    table = np.column_stack([random.integers(0, 3, 100), random.integers(0, 200, 100), np.arange(100), np.arange(100) // 25])
    expected = {index: len(set(column)) for index, column in enumerate(table.T.tolist()) if len(set(column)) < 5}
    assert discrete_columns(table) == expected and set(expected) == {0, 3}
    assert discrete_columns(table[:49]) == {}


def test_a_layout_survives_json():
    assert TableLayout.of_facts(json.loads(json.dumps(LAYOUT.facts())), 2) == LAYOUT
    assert replace(LAYOUT, notes=("decimal commas",)).facts() == LAYOUT.facts()
    assert (LAYOUT.used, LAYOUT.written, LAYOUT.columns) == ((1, 3), (1, 2, 3), ("a", "b"))
    assert LAYOUT.describe() == (
        "header: yes, 2 columns; unnamed column 1 counts the rows: left out; column 'note' dropped: left out; "
        "column 'k' is 7.5 in all training rows: left out"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 4}, "below 4"),
        ({"width": 10**15, "names": []}, "expected 2 columns of data in the layout of the table, got 9999"),
        ({"names": ["a"]}, "expected 5 names in the layout of the table, got 1"),
        ({"constant": [[0, 1.0]]}, "expected distinct columns below 5"),
        ({"left_out": [[-1, "dropped"]]}, "expected distinct columns below 5"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TableLayout.of_facts(LAYOUT.facts() | changes, 2)


def test_samples_get_the_constant_columns_back():
    completed = LAYOUT.completed(VALUES.astype(np.float32))
    assert completed.dtype == np.float32
    np.testing.assert_array_equal(completed, np.insert(VALUES.astype(np.float32), 1, 7.5, axis=1))


# Files to be scored.


def test_columns_of_text_are_named_even_without_a_name_of_their_own(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(",a,x,x,b\nu,1,p,q,2\nv,3,r,s,4\n")
    layout = TableLayout(("a", "b"), 2)
    assert read_matching(path, layout).carried == {
        "column 1": ["u", "v"],
        "x (column 3)": ["p", "r"],
        "x (column 4)": ["q", "s"],
    }
    with pytest.raises(ValueError, match=r"expected --id to name one column, got 'x', the name of columns 3, 4"):
        read_matching(path, layout, ["x"])


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (range(40), "unnamed column 1 counts the rows: left out"),
        (range(1, 41), "unnamed column 1 counts the rows: left out"),
        (
            range(7, 287, 7),
            "unnamed column 1 holds distinct whole numbers, as an index does: left out; keep it with --keep 1",
        ),
    ],
)
def test_what_is_said_of_an_index_is_true(tmp_path, index, says):
    path = write_columns(tmp_path / "t.csv", ",a,b", index, *VALUES.T)
    assert load_dataset(str(path)).table.describe() == f"header: yes, 2 columns; {says}"
    assert load_dataset(str(path), keep=["1"]).columns[1:] == ("a", "b")


@pytest.mark.parametrize("unnamed", ["", "Unnamed: 0"])
def test_the_advice_names_the_index_and_not_a_column_whose_name_is_that_number(tmp_path, unnamed):
    """As pandas names columns: the index is column 1, but "1" is the third column."""
    first, values = f"{unnamed},0,1,2", random.normal(size=(40, 3))
    for index, option in ((range(0, 80, 2), "keep"), ([*range(20)] * 2, "drop"), ([f"2020-{row}" for row in range(40)], "drop")):
        path = write_columns(tmp_path / "t.csv", first, index, *values.T)
        try:
            said = load_dataset(str(path)).table.describe()
        except ValueError as error:
            said = str(error)
        value = repr(unnamed)
        assert f"--{option} {value}" in said
        columns = load_dataset(str(path), **{option: [unnamed]}).columns
        assert columns == ((unnamed, "0", "1", "2") if option == "keep" else ("0", "1", "2"))


def test_one_column_of_decimal_commas_is_pointed_out(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(f"{row},{5 + row % 4}" for row in random.integers(0, 99, 40)) + "\n")
    assert load_dataset(str(path)).table.describe() == (
        "header: no, 2 columns; if a line such as 12,5 is one number with a decimal comma, write 12.5"
    )

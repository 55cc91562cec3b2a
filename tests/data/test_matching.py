"""A file to be scored: its columns are found by name or position, and what identifies its rows is kept."""

import json
from dataclasses import replace

import numpy as np
import pytest

from selfnorm.data import headers, load_dataset
from selfnorm.data.arrays import read_values
from selfnorm.data.layout import TableLayout
from selfnorm.data.matching import read_matching
from support.data_files import write_columns

random = np.random.default_rng(2)
VALUES = random.normal(size=(40, 2))
LAYOUT = TableLayout(("", "a", "k", "b", "note"), 5, ((0, "counts the rows"), (4, "dropped")), ((2, 7.5),))


def matched(path, layout=LAYOUT, **options):
    return read_matching(path, layout, **options)


def test_columns_are_matched_by_name(tmp_path):
    a, b = VALUES.T.tolist()
    found = matched(write_columns(tmp_path / "t.csv", "b,k,a,note", b, [7.5] * 40, a, range(40)))
    np.testing.assert_array_equal(found.values, VALUES)
    assert (found.carried, found.differs, found.understood) == ({}, [""] * 40, "")


def test_what_identifies_rows_is_carried_along(tmp_path):
    a, b = VALUES.T.tolist()
    names = [f'"N. {row}, x"' for row in range(40)]
    path = write_columns(tmp_path / "t.csv", "who,extra,a,id,b,empty", names, range(40), a, range(100, 140), b, [""] * 40)
    found = matched(path, ids=["id"])
    np.testing.assert_array_equal(found.values, VALUES)
    assert found.carried == {"id": [str(row) for row in range(100, 140)], "who": [name.strip('"') for name in names]}
    assert list(found.carried) == ["id", "who"]
    assert found.differs is None
    assert found.understood == ("ignored: 'extra', 'empty'; constant in the training data and not in this file: column 'k'")
    with pytest.raises(ValueError, match=r"t\.csv: expected --id to name a column, 'who', .*, got 'nobody'"):
        matched(path, ids=["nobody"])


def test_rows_that_differ_where_the_training_data_were_constant(tmp_path):
    a, b = VALUES.T.tolist()
    constant = [7.5] * 40
    constant[3], constant[39] = 7.50001, -7.5
    found = matched(write_columns(tmp_path / "t.csv", "a,b,k", a, b, constant))
    assert [row for row, name in enumerate(found.differs) if name == "k"] == [3, 39]
    two = TableLayout(("a", "b", "k", "m"), 4, (), ((2, 7.5), (3, 0.1)))
    found = matched(write_columns(tmp_path / "t.csv", "a,b,m,k", a, b, [np.float32(0.1)] * 39 + [1], constant), two)
    assert found.differs[3] == "k" and found.differs[39] == "k, m" and found.differs[0] == ""


def test_files_without_names_are_matched_by_position(tmp_path):
    a, b = VALUES.T.tolist()
    columns = {
        "all": (range(40), a, [7.5] * 40, b, range(40)),
        "as samples": (a, [7.5] * 40, b),
        "data alone": (a, b),
    }
    for kind, table in columns.items():
        path = write_columns(tmp_path / "t.csv", "", *table)
        found = matched(path)
        np.testing.assert_array_equal(found.values, VALUES, err_msg=kind)
        assert found.understood == "columns matched by position, not by name"
        np.save(tmp_path / "t.npy", np.column_stack(table))
        found = matched(tmp_path / "t.npy")
        np.testing.assert_array_equal(found.values, VALUES, err_msg=kind)
        assert found.differs == (None if kind == "data alone" else [""] * 40)
        assert found.understood == ""
    np.save(tmp_path / "t.npy", random.normal(size=(3, 4)))
    assert matched(tmp_path / "t.npy").values.shape == (3, 4)  # for the caller to refuse


def test_names_that_are_numbers_are_found_again(tmp_path):
    layout = TableLayout(("0", "1"), 2)
    whole = [[3, 4], [5, 6], [7, 8]]
    path = write_columns(tmp_path / "t.csv", "0,1", *zip(*whole, strict=True))
    assert matched(path, layout).values.tolist() == whole
    assert matched(write_columns(path, "1,0", *zip(*whole, strict=True)), layout).values.tolist() == [row[::-1] for row in whole]
    # Without the names, numbers are data, as the run was told.
    assert (
        len(matched(write_columns(path, "0,1", *zip(*whole, strict=True)), TableLayout((), 2), numeric_names=False).values) == 4
    )
    found = matched(write_columns(path, "0,1,2", a := [0.5, 1.5], a, a), TableLayout(("a", "b", "c"), 3))
    assert found.values.tolist() == [[0.5] * 3, [1.5] * 3]
    assert found.understood == (
        "the numbers of the first line (0, 1, 2) are read as names: use --no-header if they are a row; "
        "columns matched by position, not by name"
    )


@pytest.mark.parametrize(
    ("first", "rows", "header"),
    [
        ("1,0", [(1, 18), (0, 22)], False),
        ("2,0,1", [(2, 0, 1), (0, 2, 1)], False),
        ("k0,1,0", [("k1", 1, 18), ("k2", 0, 22)], False),
        ("0,1", [(1, 18), (0, 22)], True),
        ("id,0,1", [("k1", 1, 18), ("k2", 0, 22)], True),
    ],
)
def test_a_row_may_hold_the_names_that_are_numbers(tmp_path, first, rows, header):
    """A row 1,0 was taken for names, and the columns exchanged, without a word."""
    layout = TableLayout(tuple(sorted(set(first.split(",")) & {"0", "1", "2"})), first.count(",") + (not first[0].isalpha()))
    path = write_columns(tmp_path / "t.csv", first, *zip(*rows, strict=True))
    if first.startswith("k0"):
        with pytest.raises(ValueError, match="line 1, column 1: expected a number"):
            matched(path, layout)
        return
    found = matched(path, layout)
    assert len(found.values) == 3 - header
    read = "names: use --no-header if they are a row" if header else "a row: use --header if they are names"
    assert (f"are read as {read}" in found.understood) or first.startswith("id")


@pytest.mark.parametrize(("names", "used"), [("1,2,3", (0, 1)), ("1,2,7", (0, 1)), ("3,1,2", (1, 2)), ("9,8,7,1,2", (3, 4))])
def test_names_that_are_numbers_are_found_beside_others(tmp_path, names, used):
    """The file that a run was trained on holds columns that it left out, too."""
    columns = [[row * place % 6 for row in range(1, 40)] for place in range(1, names.count(",") + 2)]
    layout = TableLayout(("1", "2"), 2)
    found = matched(write_columns(tmp_path / "t.csv", names, *columns), layout)
    assert found.values.T.tolist() == [columns[place] for place in used]
    assert "are read as names: use --no-header if they are a row" in found.understood


def test_names_of_the_training_data_are_names_in_any_order_beside_text_and_if_numbers_are_data(tmp_path):
    path = write_columns(tmp_path / "t.csv", "2,1,a", [2, 1, 2], [1, 2, 1], [5, 6, 7])
    assert matched(path, TableLayout(("a", "1", "2"), 3)).values.tolist() == [[5, 1, 2], [6, 2, 1], [7, 1, 2]]
    path = write_columns(path, "0,1", [2, 3], [4, 5])
    assert matched(path, TableLayout(("0", "1"), 2), numeric_names=False).values.tolist() == [[2, 4], [3, 5]]


def test_another_number_of_columns_is_said_with_the_guess(tmp_path):
    path = write_columns(tmp_path / "t.csv", "2,1,7", *([1, 2, 3, 4],) * 3)
    with pytest.raises(
        ValueError, match=r"expected the 2 columns of the data, got 3; the numbers of .*\(2, 1, 7\) are read as a row"
    ):
        matched(path, TableLayout(("1", "2"), 2))
    path = write_columns(tmp_path / "t.csv", "1,2")
    with pytest.raises(ValueError, match=r"at least one row of numbers, got none: the numbers .*\(1, 2\) are read as names"):
        matched(path, TableLayout(("1", "2"), 2))


def test_many_names_that_are_numbers_are_found_quickly(tmp_path, monkeypatch):
    """Each was looked for in the list of all."""
    count = 3000
    names = [Compared(str(place)) for place in range(count)]
    line = [str(place) for place in range(count)]
    assert headers._holds_names(line, [], line, names)
    assert Compared.calls < 10 * count


class Compared(str):
    """A name that counts how often it is compared."""

    calls = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Compared.calls += 1
        return str.__eq__(self, other)


def test_an_index_before_names_that_are_numbers_is_skipped(tmp_path):
    layout = TableLayout(("", "a", "b", "c"), 4, ((0, "counts the rows"),))
    path = write_columns(tmp_path / "t.csv", ",0,1,2", range(2), a := [0.5, 1.5], a, a)
    found = matched(path, layout)
    assert found.values.tolist() == [[0.5] * 3, [1.5] * 3]
    assert found.understood == "columns matched by position, not by name; ignored: column 1"
    # The second column of an index is not read as one that has a name.
    assert matched(write_columns(path, ",,0,1", range(2), a, a, a), layout).values.shape == (2, 4)  # for the caller to refuse
    found = matched(write_columns(path, ",,0,1", range(2), range(2), a, a), TableLayout(("a", "b"), 2))
    assert found.values.tolist() == [[0.5] * 2, [1.5] * 2]


@pytest.mark.parametrize("suffix", [".csv", ".npy"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("layout", [TableLayout(("a", "b"), 2), TableLayout((), 2)])
def test_identifiers_are_taken_out_of_a_file_without_names(tmp_path, layout, place, suffix):
    columns = [*VALUES.T.tolist()]
    columns.insert(place, list(range(100, 140)))
    path = tmp_path / f"t{suffix}"
    np.save(path, np.column_stack(columns)) if suffix == ".npy" else write_columns(path, "", *columns)
    found = matched(path, layout, ids=[str(place + 1)])
    np.testing.assert_array_equal(found.values, VALUES)
    assert [float(text) for text in found.carried[f"column {place + 1}"]] == columns[place]


@pytest.mark.parametrize("given", [None, "1", "2", "3", "4", "5"])
def test_a_file_with_the_columns_of_the_training_data_is_read_as_they_are(tmp_path, given):
    """Whatever identifies its rows: without that column, the others would fit the data as well."""
    columns = np.column_stack([np.arange(40), VALUES[:, 0], np.full(40, 7.5), VALUES[:, 1], np.arange(40)])
    np.save(tmp_path / "t.npy", columns)
    found = matched(tmp_path / "t.npy", ids=[given] if given else [])
    np.testing.assert_array_equal(found.values, VALUES)
    assert found.differs == [""] * 40 and len(found.carried) == bool(given)
    dropped = TableLayout((), 3, ((1, "dropped"),))
    np.save(tmp_path / "t.npy", columns[:, 1:4])
    if given in ("1", "2", "3"):
        np.testing.assert_array_equal(matched(tmp_path / "t.npy", dropped, ids=[given]).values, VALUES)


@pytest.mark.parametrize("given", ["1", "2", "3"])
def test_a_column_that_may_be_data_or_not_is_refused(tmp_path, given):
    """Three columns may be those of samples, or an identifier beside the two of the data."""
    np.save(tmp_path / "t.npy", np.column_stack([VALUES, np.arange(40)]))
    with pytest.raises(ValueError, match=rf"t\.npy: expected names .* got none, and column {given} may be data or only identify"):
        matched(tmp_path / "t.npy", ids=[given])


def test_text_that_identifies_rows_of_a_file_without_names_is_taken_out_if_asked(tmp_path):
    path = write_columns(tmp_path / "t.csv", "", [f"id{row}" for row in range(40)], *VALUES.T)
    with pytest.raises(ValueError, match=r"t\.csv, line 2, column 1: .* got 'id0'; use --id 1 if it only identifies the rows"):
        matched(path, TableLayout(("a", "b"), 2))
    found = matched(path, TableLayout(("a", "b"), 2), ids=["1"])
    np.testing.assert_array_equal(found.values, VALUES)
    assert found.carried["column 1"][:2] == ["id0", "id1"]
    named = write_columns(tmp_path / "n.csv", "who is it,x,y", [f"id{row}" for row in range(40)], *VALUES.T)
    with pytest.raises(ValueError, match=r"got 'id0'; use --id 'who is it' if it only identifies the rows"):
        matched(named, TableLayout((), 2))
    np.testing.assert_array_equal(matched(named, TableLayout((), 2), ids=["who is it"]).values, VALUES)


@pytest.mark.parametrize("layout", [TableLayout(("a", "b"), 2), TableLayout((), 2)])
def test_an_index_is_not_read_in_the_place_of_a_missing_column(tmp_path, layout):
    path = write_columns(tmp_path / "t.csv", ",0", range(2), [0.5, 1.5])
    with pytest.raises(
        ValueError, match=r"t\.csv: expected 2 columns of data, .*, got column 1, '0'; column 1 has no name, as an index has none"
    ):
        matched(path, layout)
    kept = TableLayout(("", "b"), 2)  # the training data had such a column
    assert matched(path, kept).values.tolist() == [[0, 0.5], [1, 1.5]]


def test_missing_and_repeated_columns_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"training data, column 1, 'a', got column 1, 'b', without 'a'"):
        matched(write_columns(tmp_path / "t.csv", ",b", [1], [7.5]), TableLayout(("", "a"), 2))
    with pytest.raises(
        ValueError, match=r"t\.csv: expected the columns of the training data, 'a', 'b', got 'a', 'k', without 'b'"
    ):
        matched(write_columns(tmp_path / "t.csv", "a,k", [1], [7.5]))
    with pytest.raises(ValueError, match=r"t\.csv: expected each column once, got 'a' more than once"):
        matched(write_columns(tmp_path / "t.csv", "a,a,b", [1], [7.5], [2]))


def test_constants_are_compared_as_they_are_stored(tmp_path):
    layout = TableLayout(("a", "k"), 2, (), ((1, 123456789.0),))
    path = write_columns(tmp_path / "t.csv", "a,k", [1, 2, 3], [123456789, 123456790, 123456789.5])
    assert read_matching(path, layout).differs == ["", "k", "k"]
    layout = replace(layout, constant=((1, 0.1),))
    path = write_columns(tmp_path / "t.csv", "a,k", [1, 2], [0.1, "0.100000001"])
    assert read_matching(path, layout).differs == ["", "k"]
    np.save(tmp_path / "t.npy", np.array([[1, 0.1], [2, 0.2]], np.float32))
    assert read_matching(tmp_path / "t.npy", layout).differs == ["", "k"]
    samples = layout.completed(np.ones((2, 1), np.float32))
    assert samples.dtype == np.float64 and samples[:, 1].tolist() == [0.1, 0.1]
    assert replace(layout, constant=((1, 7.5),)).completed(np.ones((2, 1), np.float32)).dtype == np.float32
    np.save(tmp_path / "narrow.npy", np.column_stack([VALUES[:, 0], np.full(40, 0.1)]).astype(np.float32))
    assert load_dataset(str(tmp_path / "narrow.npy")).table.constant == ((1, 0.1),)


def test_rows_to_be_scored_may_lie_close_together(tmp_path):
    """Their spread is not the one that whole numbers must be resolved at: that is the training data's."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    times = 1_700_000_000_000_000_000 + np.array([0, 500])
    parquet.write_table(arrow.table({"t": times}), tmp_path / "t.parquet")
    assert matched(tmp_path / "t.parquet", TableLayout(("t",), 1)).values.shape == (2, 1)
    with pytest.raises(ValueError, match="expected numbers that float64 can tell apart"):
        read_values(tmp_path / "t.parquet")


@pytest.mark.parametrize("value", [0.1, 1 / 3])
def test_a_constant_is_the_same_in_any_precision(tmp_path, value):
    """Unless two float64 values differ, as they are compared exactly."""
    rows = np.insert(VALUES, 1, value, axis=1)
    files = [tmp_path / name for name in ("f8.npy", "f8.csv", "f4.npy", "f2.npy")]
    np.savetxt(files[1], rows, "%.17g", ",")
    for file, dtype in zip((files[0], *files[2:]), ("f8", "f4", "f2"), strict=True):
        np.save(file, rows.astype(dtype))
    if arrow := pytest.importorskip("pyarrow"):
        files.append(tmp_path / "f4.parquet")
        columns = dict(zip("akb", rows.T.astype("f4"), strict=True))
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), files[-1])
    for known in files:
        layout = load_dataset(str(known)).table
        assert TableLayout.of_facts(json.loads(json.dumps(layout.facts())), 2) == replace(layout, notes=())
        assert all(matched(file, layout).differs == [""] * 40 for file in files)
    np.save(files[0], np.insert(VALUES, 1, value + 1e-12, axis=1))
    assert "" not in matched(files[0], load_dataset(str(files[1])).table).differs

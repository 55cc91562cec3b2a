"""Tables from text and Parquet files; errors name the line and column of a bad cell."""

import sys

import numpy as np
import pytest
import torch

from selfnorm.data import load_dataset, read_examples
from selfnorm.data.matching import read_matching


def table(tmp_path, text, name="table.csv", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    ("text", "name", "columns"),
    [
        ("1,2\n3,-4.5e0\n", "t.csv", ()),
        ("a,b\n1,2\n3,-4.5\n", "t.csv", ("a", "b")),
        ("a,b\r\n1,2\r\n3,-4.5", "t.CSV", ("a", "b")),
        ("\ufeffa,b\n1,2\n\n3,-4.5\n\n", "t.csv", ("a", "b")),
        ('"a, in m"," b"\n"1"," 2"\n3,-4.5\n', "t.csv", ("a, in m", "b")),
        ('"a\nb",c\n1,2\n3,-4.5\n', "t.csv", ("a\nb", "c")),
        ("a;b\n1;2\n3;-4.5\n", "t.csv", ("a", "b")),
        ("größe\tb\n1\t2\n3\t-4.5\n", "t.tsv", ("größe", "b")),
        ("#a,b\n1,2\n3,-4.5\n", "t.csv", ("#a", "b")),
        ("\n\na,b\n\n1,2\n3,-4.5\n", "t.csv", ("a", "b")),
    ],
)
def test_text_tables(tmp_path, text, name, columns):
    examples, names = read_examples(table(tmp_path, text, name))
    assert examples.dtype == torch.float32
    assert examples.tolist() == [[1, 2], [3, -4.5]]
    assert names == columns


def test_one_column_and_one_row(tmp_path):
    assert read_examples(table(tmp_path, "1\n2\n3\n"))[0].tolist() == [[1], [2], [3]]
    assert read_examples(table(tmp_path, "a,b\n1,2"))[0].tolist() == [[1, 2]]


def test_names_reach_the_dataset(tmp_path):
    dataset = load_dataset(str(table(tmp_path, "a,b\n" + "".join(f"{row},{-row}\n" for row in range(10)))))
    assert dataset.columns == ("a", "b")
    assert len(dataset.train) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n\n3,x\n", r"table\.csv, line 4, column 2 \(b\): expected a number, .* got 'x'"),
        ("1,2\n3,\n", r"line 2, column 2: expected a number in every cell; .* got ''"),
        ("1,2\n3,nan\n", r"line 2, column 2: expected a finite number .* got 'nan'"),
        ("1,2\n-inf,3\n", r"line 2, column 1: expected a finite number .* got '-inf'"),
        ("1,2\n1e39,3\n", r"line 2, column 1: expected a finite number that float32 can hold, got '1e39'"),
        ("1,2\n1e999,3\n", r"line 2, column 1: expected a finite number that float32 can hold, got '1e999'"),
        ("a,b\n1,2\n3\n", r"line 3: expected 2 columns, as in the first line, got 1"),
        ("a,b\n1,2,3\n4,5,6\n", r"line 2: expected 2 columns, .* got 3"),
        ("a,1\n2,3\n", r"line 1, column 1: expected a number, .*read as a row \(use --header if it holds names\), got 'a'"),
        ("1.5;2\n1,5;2\n", r"line 2, column 1: expected a number, with a decimal point.* got '1,5'"),
        ("1,2\n1_0,3\n", r"line 2, column 1: .* got '1_0'"),
        ("1,2\n0x10,3\n", r"line 2, column 1: .* got '0x10'"),
        ("", r"table\.csv: expected at least one row of numbers, got none"),
        ("a,b\n\n", r"table\.csv: expected at least one row of numbers, got none"),
        ("1,2\n" * 5000 + "1,?\n" + "1,2\n" * 5000, r"line 5001, column 2: .* got '\?'"),
    ],
)
def test_bad_cells_are_found(tmp_path, text, message):
    path = table(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        read_examples(path)


def test_other_encodings_are_no_riddle(tmp_path):
    for encoding in ("utf-16", "latin-1"):
        path = table(tmp_path, "größe,b\n1,2\n", encoding=encoding)
        with pytest.raises(ValueError, match=r"table\.csv: expected UTF-8 text"):
            read_examples(path)


def test_a_long_table_is_read_exactly(tmp_path):
    numbers = np.random.RandomState(0).normal(size=(20_000, 5)).astype(np.float32)
    np.savetxt(tmp_path / "long.csv", numbers, delimiter=",", header="a,b,c,d,e", comments="", fmt="%.9g")
    assert np.array_equal(read_examples(tmp_path / "long.csv")[0], numbers)


# Parquet


def parquet(tmp_path, **columns):
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.table(columns), tmp_path / "table.parquet")
    return tmp_path / "table.parquet"


def test_parquet(tmp_path):
    examples, names = read_examples(parquet(tmp_path, a=[1, 2, 3], b=[0.5, -1.5, 2.5], c=[True, False, True]))
    assert examples.dtype == torch.float32
    assert examples.tolist() == [[1, 0.5, 1], [2, -1.5, 0], [3, 2.5, 1]]
    assert names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1, 2], "b": ["x", "y"]}, r"table\.parquet: expected columns of numbers, got string in column 'b'"),
        ({"a": [1, None]}, r"expected no empty cells, got 1, the first in column 'a', row 1"),
        ({"a": [None, None]}, r"expected columns of numbers, got null in column 'a'"),
        ({"a": [1.0, float("nan")]}, r"expected finite numbers .* got nan in column 'a', row 1"),
        ({"a": [1.0, 1e39]}, r"float32 can hold, got 1e\+39 in column 'a', row 1"),
        ({"a": []}, r"expected columns of numbers|expected at least one example"),
        ({}, r"expected at least one example"),
    ],
)
def test_bad_parquet(tmp_path, columns, message):
    path = parquet(tmp_path, **columns)
    with pytest.raises(ValueError, match=message):
        read_examples(path)


def test_a_file_that_is_not_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"table\.parquet: expected a Parquet file, got one that cannot be read"):
        read_examples(table(tmp_path, "no parquet", "table.parquet"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'selfnorm\[parquet\]'"):
        read_examples(table(tmp_path, "", "table.parquet"))


def test_a_column_that_is_constant_in_the_training_rows_alone_is_left_out(tmp_path):
    """The estimator leaves it out, too. A held-out row that differs has no finite likelihood, which a note says."""
    held_out = np.random.RandomState(0).permutation(20)[-1]  # a row of the test part
    path = table(tmp_path, "a,b\n" + "".join(f"{row},{5 + (row == held_out)}\n" for row in range(20)))
    dataset = load_dataset(str(path))
    assert (dataset.columns, dataset.table.constant) == (("a",), ((1, 5.0),)) and len(dataset.test) == 2
    assert any(note.startswith("1 of 4 held-out rows differ in column 'b', constant in the") for note in dataset.notes)
    with pytest.raises(ValueError, match=r"table\.csv: .*the same value in all 16 training rows of column 'b'; .*leave it out"):
        load_dataset(str(path), keep=["b"])
    assert load_dataset(str(path), drop=["b"]).columns == ("a",)


def test_two_columns_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"table\.csv: .*'a' more than once"):
        read_examples(table(tmp_path, "a,a,b\n1,2,3\n4,5,6\n"))


def test_parquet_columns_of_one_name_and_long_identifiers(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = np.random.default_rng(0).normal(size=(40, 4))
    identifiers = 2**63 + 3 * np.arange(40, dtype=np.uint64) + 1
    path = tmp_path / "t.parquet"
    columns = [*map(arrow.array, values.T), arrow.array(identifiers)]
    parquet.write_table(arrow.Table.from_arrays(columns, names=["a", "b", "c", "c", "id"]), path)
    with pytest.raises(ValueError, match="expected distinct column names, got 'c' more than once; rename them"):
        load_dataset(str(path), drop=["id"])
    dataset = load_dataset(str(path), drop=["id", "c"])
    found = read_matching(path, dataset.table, ids=["id"])
    assert dataset.columns == ("a", "b") and np.array_equal(found.values, values[:, :2])
    assert found.carried == {"id": [str(each) for each in identifiers.tolist()]}

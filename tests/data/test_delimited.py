"""Text tables in the formats that programs write, against a slow reader; and files that are refused with one line."""

import csv
import gzip

import numpy as np
import pytest

from selfnorm.data import load_dataset, read_examples
from selfnorm.data.arrays import read_values
from support.slow_tables import read_slowly

VALUES = np.random.default_rng(1).normal(size=(30, 3)) * [1, 100, 1e-3]


def text_of(separator=",", decimal=".", names=("a", "b", "c"), end="\n", number=repr):
    """Returns the table of `VALUES` as text."""
    rows = [separator.join(number(value).replace(".", decimal) for value in row) for row in VALUES.tolist()]
    return end.join([separator.join(names), *rows]) + end


@pytest.mark.parametrize(
    ("name", "text", "separator", "decimal"),
    [
        ("t.csv", text_of(), ",", "."),
        ("t.csv", "\ufeff" + text_of(end="\r\n") + "\r\n\r\n", ",", "."),
        ("t.csv", text_of(separator=", "), ",", "."),
        ("t.csv", text_of(number=lambda value: f'"{value!r}"'), ",", "."),
        ("t.csv", text_of(";", ","), ";", ","),
        ("t.csv", text_of(";", ",", number=lambda value: f'"{value!r}"'), ";", ","),
        ("t.csv", text_of(";", ",", names=("Länge, cm", "b", "c")), ";", ","),
        ("t.csv", text_of(";"), ";", "."),
        ("t.csv", text_of("\t", ","), "\t", ","),
        ("t.tsv", text_of("\t"), "\t", "."),
        ("t.tsv", text_of("\t", names=("a;b", "c,d;e", "f")), "\t", "."),
        ("t.csv", text_of(names=('"a; b"', "c;d", "e")), ",", "."),
        ("t.csv", text_of(names=('"a\tb\tc"', "d", "e")), ",", "."),
        ("t.csv.gz", text_of(), ",", "."),
        ("t.CSV.GZ", text_of(end="\r\n"), ",", "."),
        ("t.tsv.gz", text_of("\t", ","), "\t", ","),
    ],
)
def test_formats(tmp_path, name, text, separator, decimal):
    path = tmp_path / name
    raw = text.encode()
    path.write_bytes(gzip.compress(raw) if name.lower().endswith(".gz") else raw)
    named, rows = read_slowly(path.rename(path.with_suffix(path.suffix.lower())), separator, decimal=decimal)
    path = path.with_suffix(path.suffix.lower()).rename(path)
    values, layout = read_values(path)
    assert list(layout.names) == named
    assert values.tolist() == rows == VALUES.tolist()
    assert ("decimal commas" in layout.describe()) == (decimal == ",")


@pytest.mark.parametrize("name", ["a; b", "a\tb"])
def test_one_column_whose_name_holds_a_separator(tmp_path, name):
    (tmp_path / "t.csv").write_text(f"{name}\n1.5\n2.5\n")
    values, layout = read_values(tmp_path / "t.csv")
    assert (values.tolist(), layout.names) == ([[1.5], [2.5]], (name,))


@pytest.mark.parametrize("separator", [", ", "; "])
def test_a_quoted_name_of_two_lines_after_a_space(tmp_path, separator):
    """A reader that keeps the space takes the quote for a part of the cell, and ends the header at the line break."""
    (tmp_path / "t.csv").write_text(f'x{separator}"y\nz"\n1.5{separator}2.5\n3.5{separator}4.5\n')
    values, layout = read_values(tmp_path / "t.csv")
    assert (values.tolist(), layout.names) == ([[1.5, 2.5], [3.5, 4.5]], ("x", "y\nz"))


def test_numbers_without_a_header_and_with_decimal_commas_are_no_header(tmp_path):
    (tmp_path / "t.csv").write_text("1,5;2,5\n3,5;4,5\n")
    assert read_examples(tmp_path / "t.csv")[0].tolist() == [[1.5, 2.5], [3.5, 4.5]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.234,5;1\n2,5;1\n", r"line 1, column 1: expected a number, .* got '1\.234,5'"),
        ("2,5;1\n1.234;1\n", r"line 1, column 1: expected a number, .* got '2,5'"),
        ("2,5;1\n3,5;x\n", r"line 2, column 2: expected a number, .* got 'x'"),
        ('"1,5","2,5"\n1,2\n', r"expected a number"),
        ("1,5\n0,05\n", r"expected numbers with decimal points, got lines as 1,5, .* or a line of names if these are two"),
        ("a b c\n1 2 3\n", r"line 2, column 1 \(a b c\): expected a number, .* got '1 2 3'"),
        ("1,2\n3,4\n5,6,7\n", r"line 3: expected 2 columns, as in the first line, got 3"),
        ("a b c\n1 2 3\n", r"line 2, column 1 .* got '1 2 3'$"),
        ("a b c\n1 2 3\n", r"expected a number, and commas, semicolons or tabs between columns"),
        ("x\n1,5\n2,5\n", r"expected numbers with decimal points, got lines as 1,5, where the comma may be a decimal comma"),
        ("x\n1\n2,5\n", r"line 3: expected numbers with decimal points, got lines as 2,5,"),
        ('a,"b"\n"1",2.5,3\n"2",4,5\n', r"line 2: expected 2 columns, .* got 3; .* as R writes them, put a separator in front"),
        ('a;"b"\n"1";2,5;3\n"2";4,5;5\n', r"line 2: expected 2 columns, .* got 3; .* put a separator in front"),
        (
            "a,b,c\n1,2,\n3,4,\n",
            r"line 2, column 3 \(c\): .* every cell; fill in empty cells, or leave out their rows or columns",
        ),
        ("n,m,a\nx,y,1\nu,v,2\n", r"column 1 \(n\): .* got 'x'; leave columns 'n', 'm' out with --drop n --drop m"),
        ("x y,1\nu v,2\n3,4\n", r"line 1, column 1: .* got 'x y'; leave that column out with --drop 1"),
        ("my n,a\nx,1\nu,2\n", r"got 'x'; leave that column out with --drop 'my n'"),
        ("sep=;\na;b\n1;2\n", r"line 1: expected names or numbers, got 'sep=;', a mark for Excel; remove it"),
        ("x,1\ny,2\n", r"line 1, column 1: expected a number, .*got 'x'; leave that column out with --drop 1"),
    ],
)
def test_what_is_not_clear_is_refused(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_examples(tmp_path / "t.csv", header=False if text[0] == '"' else None)


def test_utf_16_is_named(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"t\.csv: expected UTF-8 text with separated numbers, got UTF-16; save it as UTF-8"):
        read_examples(tmp_path / "t.csv")


def test_columns_of_text_can_be_dropped_and_rows_must_still_be_even(tmp_path):
    rows = [["Ada, L.", 1.5, "x", 2.0], ['Bob "B"', -3.25, "y;z", 4.0], ["1.5", 0.5, "", 6.0]]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["name", "a", "note", "b"], *rows])
    assert read_examples(tmp_path / "t.csv", drop=["name", "note"])[0].tolist() == [[1.5, 2], [-3.25, 4], [0.5, 6]]
    with (tmp_path / "t.csv").open("a") as file:
        file.write("Eve,7,z,8,9\n")
    with pytest.raises(ValueError, match="line 5: expected 4 columns, as in the first line, got 5"):
        read_examples(tmp_path / "t.csv", drop=["name", "note"])
    (tmp_path / "german.csv").write_text("name;a;note\nA. B.;1,5;x.y\nC;2,5;z,z\n")
    assert read_examples(tmp_path / "german.csv", drop=["name", "note"])[0].tolist() == [[1.5], [2.5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ["aa"]}, r"expected drop to name a column, 'a', 'b', got 'aa'; did you mean a\?"),
        ({"drop": ["1"]}, r"expected drop to name a column, 'a', 'b', got '1'"),
        ({"keep": ["c"]}, r"expected keep to name a column, 'a', 'b', got 'c'"),
        ({"drop": ["a"], "keep": ["a"]}, r"expected each column in drop or in keep, got column 'a' in both"),
        ({"drop": ["a", "b"]}, r"expected at least one column to use, got none"),
    ],
)
def test_columns_that_are_not_there(tmp_path, options, message):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n2,3\n")
    with pytest.raises(ValueError, match=message):
        read_examples(tmp_path / "t.csv", **options)


def test_of_many_columns_to_choose_from_the_first_are_listed_and_the_others_counted(tmp_path):
    (tmp_path / "t.csv").write_text(",".join(f"c{index}" for index in range(25)) + "\n" + ",".join(["1"] * 25) + "\n")
    with pytest.raises(ValueError, match=r"expected drop to name a column, 'c0', .*, 'c19' and 5 more, got 'x'$"):
        read_examples(tmp_path / "t.csv", drop=["x"])


def test_a_damaged_or_endless_gzip_file(tmp_path, monkeypatch):
    whole = gzip.compress(text_of().encode())
    for damaged in (whole[:-20], whole[:40] + b"\x00" * 10 + whole[50:], b"text"):
        (tmp_path / "t.csv.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"t\.csv\.gz: expected a whole gzip file, got a damaged one"):
            read_examples(tmp_path / "t.csv.gz")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"1,2\n" * 1_000_000))
    monkeypatch.setattr("selfnorm.data.delimited.available_memory", lambda: 1_000_000)
    with pytest.raises(ValueError, match=r"t\.csv\.gz: expected a table that fits into the available memory"):
        read_examples(tmp_path / "t.csv.gz")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"1" * 4_000_000))  # one endless line
    with pytest.raises(ValueError, match=r"t\.csv\.gz: expected a table that fits into the available memory"):
        read_examples(tmp_path / "t.csv.gz")


@pytest.mark.parametrize("shape", [(50, 20_000), (20_000, 50)])
def test_thousands_of_columns(tmp_path, shape):
    values = np.random.default_rng(0).normal(size=shape)
    names = ",".join(f"c{index}" for index in range(shape[1]))
    np.savetxt(tmp_path / "t.csv", values, delimiter=",", fmt="%.6g", header=names, comments="")
    assert np.array_equal(read_values(tmp_path / "t.csv")[0], np.loadtxt(tmp_path / "t.csv", delimiter=",", skiprows=1))
    dataset = load_dataset(str(tmp_path / "t.csv"))
    assert dataset.columns == tuple(f"c{index}" for index in range(shape[1]))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a,b\n1,2,\n3,4,\n", ("a", "b")),
        ("a,b,\n1,2,\n3,4,\n", ("a", "b")),
        ("a,b,\n1,2\n3,4\n", ("a", "b")),
        ("1,2,\n3,4,\n", ()),
        ("a;b\n1,0;2;\n3;4; \n", ("a", "b")),
        ("a\tb\t\n1\t2\t\n3\t4\t\n", ("a", "b")),
    ],
)
def test_a_separator_at_the_end_of_lines_is_no_column(tmp_path, text, names):
    values, layout = read_values_of(tmp_path, text)
    assert (values.tolist(), layout.columns, layout.width) == ([[1, 2], [3, 4]], names, 2)
    assert read_examples(tmp_path / "t.csv", drop=["a" if names else "1"])[0].tolist() == [[2], [4]]


def read_values_of(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    return read_values(tmp_path / "t.csv")


def test_numbers_behind_the_separators_at_the_end_of_lines_are_found(tmp_path):
    with pytest.raises(ValueError, match=r"line 2003: expected 2 columns, as in the first line, got 3"):
        read_values_of(tmp_path, "a,b\n" + "1,2,\n" * 2001 + "1,2,3\n")
    with pytest.raises(ValueError, match=r"line 3: expected 2 columns, as in the first line, got 3"):
        read_values_of(tmp_path, "a,b\n1,2\n1,2,\n")


@pytest.mark.parametrize("names", ["0;1;2", "a;b;c"])
@pytest.mark.parametrize("blank", ["   ", "", '""', "\t"])
def test_a_blank_line_before_the_names_is_not_taken_for_them(tmp_path, names, blank):
    """Then numbers that are names were read as a row."""
    rows = np.random.default_rng(0).normal(size=(6, 3))
    text = "".join(";".join(map(repr, row)) + "\n" for row in rows.tolist())
    (tmp_path / "t.csv").write_text(f"{blank}\n{names}\n{text}")
    if blank == '""':
        with pytest.raises(ValueError, match=r"line (1|2)"):
            read_values(tmp_path / "t.csv")
        return
    values, layout = read_values(tmp_path / "t.csv")
    assert layout.names == tuple(names.split(";")) and len(values) == 6
    rows = "".join(f"s{row};1.5;{row}.5\n" for row in range(6))  # read cell by cell
    (tmp_path / "t.csv").write_text(f"{blank}\n{names}\n{rows}")
    values, layout = read_values(tmp_path / "t.csv", drop=[names[0]])
    assert layout.names == tuple(names.split(";")) and len(values) == 6

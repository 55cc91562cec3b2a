"""Whether the first line of a table is its header: texts in the format of pandas' `to_csv`, of R, NumPy and by hand."""

import numpy as np
import pytest

from selfnorm.data import load_dataset, read_examples
from selfnorm.data.arrays import read_values
from support.slow_tables import read_slowly

random = np.random.default_rng(0)
FLOATS = random.normal(size=(12, 4))
WHOLE = random.integers(0, 50, size=(12, 4))


def frame(values, names, index=None, quote="", index_name=""):
    """Returns the text that `DataFrame(values, columns=names).to_csv(index=…)` makes."""
    names = [f"{quote}{name}{quote}" for name in names]
    header = ",".join(names if index is None else [index_name, *names])
    rows = [[*([] if index is None else [index[row]]), *cells] for row, cells in enumerate(values.tolist())]
    return "\n".join([header, *(",".join(map(repr, row)).replace("'", "") for row in rows)]) + "\n"


def write(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("values", [FLOATS, WHOLE], ids=["floats", "whole"])
def test_default_names_of_pandas(tmp_path, columns, indexed, values):
    values = values[:, :columns]
    path = write(tmp_path, frame(values, range(columns), range(len(values)) if indexed else None))
    examples, names = read_examples(path)
    if values.dtype.kind == "i" and columns == 1 and not indexed:
        # So few numbers do not tell 0 above whole numbers from one of them; then --header decides.
        assert names == () and len(examples) == 13
        examples, names = read_examples(path, header=True)
    assert names == tuple(map(str, range(columns)))
    np.testing.assert_array_equal(examples, values.astype(np.float32))


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("label", [None, "name"])
def test_default_names_are_told_from_rows_by_how_rare_such_rows_are(tmp_path, columns, label):
    """pandas writes 0,1 above whole numbers; where 0 and 1 are frequent, nobody can tell."""
    numbers = np.random.default_rng(1).integers(0, 900, size=(300, columns))
    labels = [f"s{row}" for row in range(300)] if label else None
    drop = ["1"] if label else []
    names = tuple(map(str, range(columns)))
    path = write(tmp_path, frame(numbers, range(columns), labels, index_name=label))
    if columns > 1 or label:
        values, layout = read_values(path, drop=["name"] if label else [])
        assert layout.columns == names and len(values) == 300
    # Frequent, rising or falling from the first line on, or a single column, which may well begin with 0.
    for few in (numbers % 2, np.sort(numbers, axis=0), -np.sort(numbers, axis=0), *([] if columns > 1 or label else [numbers])):
        path = write(tmp_path, frame(few, range(columns), labels, index_name=label))
        if columns == 3:
            assert len(read_values(path, drop=["name"] if label else [])[0]) == 300
            continue
        values, layout = read_values(path, drop=drop)
        assert layout.columns == () and len(values) == 301
        assert any("are read as a row: use --header if they are names" in note for note in layout.notes)


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("2003,2002,2001", True),
        ("2001,2002", True),
        ("0.5,1.0,1.5", True),
        ("400.0,400.5,401.0", True),
        ("0.5,1.0,1.75", False),
        ("5,5", False),  # names differ
    ],
)
def test_a_first_line_unlike_those_below_is_said(tmp_path, first, says):
    rows = "".join(",".join(map(repr, row)) + "\n" for row in normal_rows(first.count(",") + 1))
    layout = read_values(write(tmp_path, first + "\n" + rows))[1]
    told = f"the numbers of the first line ({first.replace(',', ', ')}) are read as a row: use --header if they are names"
    assert layout.names == () and (told in layout.notes) == says


@pytest.mark.parametrize("first", ["1,2", "2019,2020", "101,103,107,112,118,121,130,140", "city,2019,2020"])
def test_numbers_that_count_or_rise_above_whole_numbers_are_said(tmp_path, first):
    columns = first.count(",") + 1
    rows = np.random.default_rng(3).integers(10, 900, size=(300, columns)).astype(object)
    rows[:, 0] = [f"s{row}" for row in range(300)] if "city" in first else rows[:, 0]
    path = write(tmp_path, first + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    values, layout = read_values(path, drop=["1"] if "city" in first else [])
    told = f"the numbers of the first line ({first.replace(',', ', ')})".replace("118, 121, 130, 140", "118 and 3 more")
    assert len(values) == 301 and any(told in note and "use --header if they are names" in note for note in layout.notes)


@pytest.mark.parametrize(
    "first", ["NA,3,7,12", "?,1,2,3", "0,1,2,NA", "0,1,2,n/a", "0,,1,2", "3,5,?,8", "0,1,2,setosa", "setosa,0,1,2"]
)
def test_a_row_with_a_missing_value_or_a_repeated_text_is_no_header(tmp_path, first):
    """Nor is it said to be one, which would lose it."""
    rows = np.random.default_rng(3).normal(size=(30, 4)).astype(object)
    if "setosa" in first:
        rows[:, first.split(",").index("setosa")] = ["setosa", "virginica"] * 15
    path = write(tmp_path, first + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"line 1, column \d: expected a number"):
        read_values(path)


def test_names_beside_a_column_of_text_may_be_a_row(tmp_path):
    rows = "".join(f"0.5,{row}.5,1.5,item{row}\n" for row in range(30))
    layout = read_values(write(tmp_path, "0,1,2,itemA\n" + rows), drop=["itemA"])[1]
    assert layout.columns == ("0", "1", "2")
    assert "the numbers of the first line (0, 1, 2, itemA) are read as names: use --no-header if they are a row" in layout.notes


def test_rows_that_are_constant_are_not_evenly_spaced(tmp_path):
    rows = "".join(",".join(map(repr, row)) + "\n0,0,0\n" for row in normal_rows(3))
    layout = read_values(write(tmp_path, "0.5,1.0,1.5\n" + rows))[1]
    assert any("(0.5, 1.0, 1.5) are read as a row: use --header" in note for note in layout.notes)


def normal_rows(columns):
    return np.random.default_rng(2).normal(size=(40, columns)).tolist()


@pytest.mark.parametrize(("text", "columns"), [("a,2\n", "a"), ("name,p,50\n", "name")])
def test_text_in_a_line_that_is_read_as_a_row_is_told_of_the_option(tmp_path, text, columns):
    rows = "".join(f"{'s' if 'p' in text else ''}{row}" + text.count(",") * f",{row}.5" + "\n" for row in range(10))
    path = write(tmp_path, text + rows)
    with pytest.raises(ValueError, match=rf"line 1, column 1: expected .*\(use --header if it holds names\), got '{columns}'"):
        read_values(path)
    with pytest.raises(ValueError, match=r"line 1, column 1: expected .*only a header line may contain text"):
        read_values(path, header=False)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        # Numbers as names.
        ('"0","1"\n3,4\n5,6\n', ("0", "1")),
        ('"2019","2020"\n3,4\n5,6\n', ("2019", "2020")),
        ("2019,2020,2021\n0.5,0.25,1.5\n0.75,0.1,2.5\n", ("2019", "2020", "2021")),
        ("1,2,3\n0.5,0.25,1.5\n0.75,0.1,2.5\n", ("1", "2", "3")),
        ("0,1\n5,0.25\n7,0.1\n", ("0", "1")),
        ("0;1\n0,5;0,25\n0,75;0,1\n", ("0", "1")),
        ("target,0,1\n1,0.5,0.25\n0,0.75,0.5\n", ("target", "0", "1")),
        ("label,1,2,3\n1,4,5,6\n0,7,8,9\n", ("label", "1", "2", "3")),
        ("0,k\n0.5,1\n1.5,2\n", ("0", "k")),
        ("0,1,2\n0.5,1e-05,-3.0\n1.5,2.5,3.5\n", ("0", "1", "2")),
        (",0,1,3,4\n2,1,5,7,2\n2,2,0,4,4\n", ("", "0", "1", "3", "4")),
        (",2001,2002,2004,2010\n0.5,1,2.5,7,2\n0.25,2,0,4,4.5\n", ("", "2001", "2002", "2004", "2010")),
        (",400.5,401.0,401.5\n2,1,2.5,7\n2,2,0,4\n", ("", "400.5", "401.0", "401.5")),
        ("Unnamed: 0,400.5,401.0\n2,1,2.5\n2,2,0\n", ("Unnamed: 0", "400.5", "401.0")),
        (",a,5\n2,1,2.5\n2,2,0\n", ("", "a", "5")),
        ("2001,2002,2005\n0.5,0.25,1.5\n0.75,1e3,2.5\n", ("2001", "2002", "2005")),
        ("0,2,3\n0.5,0.25,1.5\n0.75,0.1,2.5\n", ("0", "2", "3")),
        ("2001;2002;2005\n0,5;0,25;1,5\n0,75;0,1;2,5\n", ("2001", "2002", "2005")),
        ("target,2001,2005,2010\n1,4,5,6\n0,7,8,9\n", ("target", "2001", "2005", "2010")),
        # Data: what is left of the table then.
        ("2001,2002,2005\n0.5,0.25,1.5\n0.75,1,2.5\n", ()),
        ("2001,2002,2005\n4,7,1\n", ()),
        ("2001,2001,2005\n0.5,0.25,1.5\n", ()),
        ("2001,2005\n0.5,0.25\n", ()),
        ("1,2\n3,-4.5\n", ()),
        ("1,2,3\n4,5,6\n7,8,9\n", ()),
        ("0,1,2\n3,4,5\n6,7,8\n", ()),
        ("0,1,2,3\n1,2,3,4\n2,3,4,5\n3,4,5,6\n", ()),
        ("0,1\n3,4\n5,6\n", ()),
        ("0,1\n0.5,0.866\n1,0\n", ()),
        ("0.0,1.0,2.0\n0.5,0.25,1.5\n", ()),
        ("3,1,2\n0.5,0.25,1.5\n", ()),
        ("2019,2020,2021\n4,0.25,1.5\n", ()),
        ("0,1,2\n", ()),
        ('"1","2"\n"3","4"\n', ()),
        ("0\n0.5\n1\n1.5\n", ()),
    ],
)
def test_numbers_in_the_first_line(tmp_path, text, names):
    path = write(tmp_path, text)
    examples, found = read_examples(path)
    assert found == names
    separator = ";" if ";" in text else ","
    _, rows = read_slowly(path, separator, header=bool(names), decimal="," if separator == ";" else ".")
    np.testing.assert_array_equal(examples, np.array(rows, np.float32))


def test_the_decision_can_be_overruled(tmp_path):
    path = write(tmp_path, "0,1,2\n3,4,5\n6,7,9\n")
    assert read_examples(path)[1] == ("0", "1", "2")
    assert read_examples(path, header=False)[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 9]]
    assert read_examples(path, keep=["*"])[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 9]]
    path = write(tmp_path, "a,5\n1,2\n3,4\n")
    with pytest.raises(ValueError, match="line 1, column 1: expected a number"):
        read_examples(path)
    assert read_examples(path, header=True)[1] == ("a", "5")
    np.save(tmp_path / "array.npy", FLOATS)
    with pytest.raises(ValueError, match="expected no header option, got header=True; only text files"):
        read_examples(tmp_path / "array.npy", header=True)


INDICES = {"from 0": range(12), "from 1": range(1, 13), "filtered": [0, 2, 3, 5, 8, 9, 12, 20, 21, 22, 30, 31], "shuffled": [
    int(row) for row in random.permutation(12)
]}  # fmt: skip


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("index_name", ["", "Unnamed: 0"])
@pytest.mark.parametrize("names", [("a", "b", "c", "d"), range(4)])
def test_an_index_without_a_name_is_left_out(tmp_path, index, index_name, names):
    path = write(tmp_path, frame(FLOATS, names, INDICES[index], index_name=index_name))
    dataset = load_dataset(str(path))
    assert dataset.columns == tuple(map(str, names))
    counts = index in ("from 0", "from 1")
    keep = "1" if "a" in names else repr(index_name)  # "1" is the name of another column
    said = (
        "counts the rows: left out"
        if counts
        else f"holds distinct whole numbers, as an index does: left out; keep it with --keep {keep}"
    )
    assert dataset.table.describe() == f"header: yes, 4 columns; unnamed column 1 {said}"
    kept = load_dataset(str(path), keep=[index_name])
    assert kept.columns == (index_name, *map(str, names))
    assert kept.table.describe() == "header: yes, 5 columns"


def test_a_file_saved_twice_has_two_indices(tmp_path):
    values = np.column_stack([np.arange(12), FLOATS[:, :2]])
    rows = "".join(f"{row},{row},{a!r},{b!r}\n" for row, (_, a, b) in enumerate(values.tolist()))
    values, layout = read_values(write(tmp_path, ",Unnamed: 0,a,b\n" + rows))
    np.testing.assert_array_equal(values, FLOATS[:, :2])
    assert layout.describe() == "header: yes, 2 columns; columns 1, 'Unnamed: 0' count the rows: left out"


@pytest.mark.parametrize("start", [0, 1, 1000])
def test_a_column_with_a_name_that_counts_is_kept_with_a_note(tmp_path, start):
    values = np.column_stack([FLOATS[:, 0], np.arange(start, start + 12)])
    path = tmp_path / "table.csv"
    np.savetxt(path, values, delimiter=",", header="a,id", comments="")
    dataset = load_dataset(str(path))
    assert dataset.columns == ("a", "id")
    assert dataset.table.describe() == (
        "header: yes, 2 columns; column 'id' counts the rows and is kept: use --drop id if it is only an index"
    )
    assert load_dataset(str(path), keep=["id"]).table.describe() == "header: yes, 2 columns"
    assert load_dataset(str(path), drop=["id"]).columns == ("a",)
    np.savetxt(path, values, delimiter=",")
    assert "; column 2 counts the rows and is kept" in load_dataset(str(path)).table.describe()


def test_an_unnamed_column_of_measurements_is_kept(tmp_path):
    path = write(tmp_path, frame(FLOATS, ["a", "b", "c", "d"], FLOATS[:, 0].tolist()))
    assert load_dataset(str(path)).columns == ("", "a", "b", "c", "d")


def test_a_parquet_index_is_left_out(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    columns = {"a": FLOATS[:, 0], "b": FLOATS[:, 1], "__index_level_0__": np.arange(12)}
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), tmp_path / "table.parquet")
    dataset = load_dataset(str(tmp_path / "table.parquet"))
    assert dataset.columns == ("a", "b")
    assert dataset.table.describe() == "header: yes, 2 columns; unnamed column 3 counts the rows: left out"


@pytest.mark.parametrize(("first", "header"), [('"2.55e-02","-1.5"', False), ('"7","3"', True), ('"7","a"', True)])
def test_quoted_numbers_are_names_only_if_they_are_whole(tmp_path, first, header):
    (tmp_path / "t.csv").write_text(f"{first}\n" + "1.5,2.5\n" * 8)
    examples, names = read_examples(tmp_path / "t.csv")
    assert (bool(names), len(examples)) == (header, 8 if header else 9)


@pytest.mark.parametrize("lines", [["\t", "a\tb", "1\t2", "3\t4"], ["a\tb", "\t", "1\t2"], ["1\t2", "3\t4", "\t"]])
def test_a_line_of_tabs_is_a_row_of_empty_cells(tmp_path, lines):
    """As a line of commas is, and not a blank line."""
    for name, separator in (("t.tsv", "\t"), ("t.csv", "\t"), ("c.csv", ",")):
        (tmp_path / name).write_text("\n".join(lines).replace("\t", separator) + "\n")
        with pytest.raises(ValueError, match=r"expected a number in every cell"):
            read_examples(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        ",1.5,2.5\n,3.5,4.5\n1,2,3\n",  # missing values
        ",2001,2002,2004\n,0.5,1.5,2.5\n1.5,0.5,1.5,2.5\n",
        ",1.5,1.5\n1,2,3\n",
        "1,,3,7\n0.5,0.5,1.5,2.5\n",
    ],
)
def test_an_empty_cell_in_a_row_is_not_the_name_of_an_index(tmp_path, text):
    with pytest.raises(ValueError, match=r"line 1, column \d: expected a number in every cell"):
        read_examples(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0,1\n3,1\n2,0\n5,4\n", True),  # two columns of counts, as pandas names them, or a row
        ("0\n3\n2\n5\n", True),
        ("2018,2019,2020\n3,1,4\n2,0,1\n5,4,2\n", True),
        ("2018,2019,2020\n2017,2018,2021\n2019,2020,2019\n", False),  # years among years
        ("0,1,2\n3,4,5\n6,7,8\n", False),  # goes on in the next lines
        ("1,7\n3,1\n2,0\n", False),
        ("7,2\n3,1\n2,0\n", False),
    ],
)
def test_a_first_line_that_is_read_as_a_row_but_may_be_names_is_said(tmp_path, text, says):
    (tmp_path / "t.csv").write_text(text)
    first = text.partition("\n")[0].replace(",", ", ")
    layout = read_values(tmp_path / "t.csv")[1]
    told = f"the numbers of the first line ({first}) are read as a row: use --header if they are names"
    assert layout.names == () and (told in layout.notes) == says
    assert told not in read_values(tmp_path / "t.csv", header=False)[1].notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2001,2002,2005\n0.5,0.25,1.5\n", "2001, 2002, 2005"),
        ("0,1,2\n5,3,9\n7,7,1\n", "0, 1, 2"),
        ("0,1,2,3,4,5,6\n" + "0.5," * 6 + "0.5\n", "0, 1, 2, 3, 4 and 2 more"),
        (",1.5,2.5\n0.5,0.25,1.5\n", "1.5, 2.5"),  # its first number may be missing
        (",7,2\n1,0,1\n1,1,2\n", "7, 2"),
        (",7,2\n3,0,1\n1,1,2\n", ""),
        (",0,1\n0,0.5,1.5\n1,0.25,2\n", ""),
        ("a,1,2\n0,0.5,1.5\n1,0.25,2\n", ""),
    ],
)
def test_a_guess_is_said(tmp_path, text, said):
    path = write(tmp_path, text)
    notes = " ".join(read_values(path)[1].notes)
    assert ("first line" in notes) == bool(said)
    assert not said or f"the numbers of the first line ({said}) are read as names: use --no-header if they are a row" in notes
    assert "first line" not in " ".join(read_values(path, header=True)[1].notes)


def test_an_index_of_texts_leaves_no_doubt(tmp_path):
    layout = read_values(write(tmp_path, ",0,1\nx,0.5,1.5\ny,0.25,2\n"), drop=[""])[1]
    assert layout.columns == ("0", "1") and not layout.notes


def test_a_row_that_may_be_names_is_said(tmp_path):
    assert not read_values(write(tmp_path, "5.5,3.5,9.5\n5,3,9\n7,7,1\n"), keep=["*"])[1].notes
    layout = read_values(write(tmp_path, "0,1,2\n5,3,9\n7,7,1\n"), keep=["*"])[1]
    assert layout.notes == ("the numbers of the first line (0, 1, 2) are read as a row: use --header if they are names",)


def test_an_index_of_several_levels_is_left_out(tmp_path):
    rows = "".join(f"{row // 6},{row % 6},{a!r},{b!r}\n" for row, (a, b, *_) in enumerate(FLOATS.tolist()))
    values, layout = read_values(write(tmp_path, ",,a,b\n" + rows))
    np.testing.assert_array_equal(values, FLOATS[:, :2])
    assert layout.describe() == (
        "header: yes, 2 columns; columns 1, 2 together hold distinct whole numbers, as an index does: left out"
    )
    with pytest.raises(ValueError, match=r"got none for columns 1, 2; name them, or leave them out with --drop 1 --drop 2"):
        read_values(write(tmp_path, ",,a,b\n" + rows + rows))
    assert read_values(tmp_path / "table.csv", drop=["1", "2"])[1].columns == ("a", "b")
    with pytest.raises(ValueError, match=r"line 2, column 1: .* got 'x'; leave columns 1, 2 out with --drop 1 --drop 2"):
        read_values(write(tmp_path, ",,a,b\nx,u,1,2\nx,v,3,4\n"))


@pytest.mark.parametrize("digits", [2, 17])
def test_an_unnamed_column_that_rises_evenly_is_pointed_out(tmp_path, digits):
    index = [float(f"{0.1 * row:.{digits}g}") for row in range(12)]
    values, layout = read_values(write(tmp_path, frame(FLOATS, ["a", "b", "c", "d"], index)))
    assert values.shape == (12, 5)
    assert layout.notes == ("unnamed column 1 rises evenly, as an index does, and is kept: use --drop 1 if it is only an index",)
    assert not read_values(tmp_path / "table.csv", keep=[""])[1].notes
    assert not read_values(write(tmp_path, frame(FLOATS, ["a", "b", "c", "d"], [row**1.1 for row in index])))[1].notes

"""Tables as files: their values, names, separators, encodings, quirks and formats."""

import gzip
import io
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fuzz.cases import Case
from fuzz.fits import right_fit
from fuzz.reference import NONE, Reading, Readings, read_table
from fuzz.scores import right_scores

FORMATS = ["{:.6g}", "{:.17g}", "{:.2e}", "{:.0f}"]
ODD_NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "1e39",
    "3.4e38",
    "1e-45",
    "1e300",
    "1e999",
    "-0",
    "+1.5",
    ".5",
    "5.",
    "1_000",
    "0x10",
    "1d5",
    "１",
    "1,5",
]
ODD_WORDS = [
    "",
    " ",
    "  2 ",
    '"',
    '"3"',
    "\x1b[31m",
    "a\tb",
    "\x00",
    "é",
    "2024-01-31",
    "9" * 400,
    "=1+1",
    "−1",
    "NA",
    "null",
    "true",
    "#",
    "-",
]
HOSTILE = st.sampled_from([*ODD_NUMBERS, *ODD_WORDS])
NAMES = st.one_of(
    st.sampled_from(
        ["a", "b", "x y", "ä", "Unnamed: 0", "", "a,b", 'say "x"', "\x1b[2Jname", "1", "2020", "nan", "line\nbreak", "\u202ex"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
ENDINGS = st.sampled_from(["\n", "\r\n", "\n", "\r"])


@st.composite
def delimited(draw: Any, columns: list[str], rows: int, calm: bool, related: str = "") -> tuple[bytes, str]:
    """A text file with such columns and its name.

    calm:     only with what the documents say is read.
    related:  adds a column that is constant, twice the first, or the sum of all others.
    """
    # Drawn as a whole: Hypothesis would make many cells alike, and a table of constants is refused for that alone.
    values = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(rows, len(columns))) * draw(
        st.sampled_from([1, 9, 300])
    )
    if related:
        added = {"constant": np.full(rows, 7.0), "double": 2 * values[:, 0], "sum": values.sum(1)}[related]
        values, columns = np.column_stack([values, added]), [*columns, "extra"]
    cell = "{:.17g}".format if related else draw(st.sampled_from(FORMATS[:3] if calm else FORMATS)).format
    table = [[cell(value) for value in row] for row in values]
    if not calm and rows and columns:
        for _ in range(draw(st.integers(0, 2))):
            table[draw(st.integers(0, rows - 1))][draw(st.integers(0, len(columns) - 1))] = draw(HOSTILE)
    suffix = draw(st.sampled_from([".csv", ".csv", ".csv", ".tsv", ".csv.gz", ".CSV"]))
    separator = "\t" if suffix == ".tsv" else draw(st.sampled_from([",", ",", ";", "\t"]))
    counts = draw(st.integers(0, 3)) == 0
    header = draw(st.sampled_from(["names", "names", "names", "numbers", "none"]))
    if counts:
        table = [[str(index), *row] for index, row in enumerate(table)]
    names = list(columns) if header == "names" else [str(index) for index in range(len(columns))]
    if header != "none":
        first = draw(st.sampled_from(["", "Unnamed: 0"]))
        table.insert(0, [first, *names] if counts else names)
    lines = [_line(row, separator, draw(st.integers(0, 4)) == 0) for row in table]
    if draw(st.integers(0, 5)) == 0:
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(["", "", "   ", separator * 2, "# comment"])))
    end = "\n" if calm else draw(ENDINGS)
    text = end.join(lines) + (end if draw(st.booleans()) else "")
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig"] if calm else ["utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    content = text.encode(encoding, errors="replace")
    if not calm and draw(st.integers(0, 6)) == 0:
        content = draw(damaged(content))
    if suffix == ".csv.gz":
        content = gzip.compress(content, mtime=0)
        content = content[:-9] if not calm and draw(st.integers(0, 5)) == 0 else content
    return content, f"data{suffix}"


def _line(row: list[str], separator: str, quoted: bool) -> str:
    quote = {separator, '"', "\n", "\r"}
    cells = ('"' + cell.replace('"', '""') + '"' if quoted or quote & set(cell) else cell for cell in row)
    return separator.join(cells)


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """The content with a byte changed, a part cut out or doubled, or bytes put in."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    length = draw(st.integers(0, 40))
    return draw(
        st.sampled_from(
            [
                content[:at],
                content[:at] + content[at + length :],
                content[: at + length] + content[at:],
                content[:at] + draw(st.binary(min_size=1, max_size=4)) + content[at:],
                content[:at] + bytes([(content[at : at + 1] or b"\0")[0] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :],
            ]
        )
    )


@st.composite
def arrays(draw: Any) -> tuple[bytes, str, np.ndarray | None]:
    """A .npy, .npz or .parquet file, its name, and the array in it; None if there is none of numbers."""
    dtype = draw(st.sampled_from(["f8", "f4", "f2", "i8", "i4", "u4", "i2", "u1", "?", "c8", ">f8", "U3", "O", "M8[s]"]))
    shape = draw(st.sampled_from([(5, 2), (5, 2), (5, 2), (1, 2), (0, 2), (5,), (5, 3), (5, 2, 1), (), (5, 0)]))
    values = np.array(draw(st.lists(st.integers(-20, 120), min_size=15, max_size=15)))[: int(np.prod(shape))].reshape(shape)
    array = (values / 7 if "f" in dtype else values).astype(dtype)
    if draw(st.booleans()):
        array = np.asfortranarray(array)
    if array.size and array.dtype.kind == "f" and draw(st.integers(0, 3)) == 0:
        array.flat[0] = draw(st.sampled_from([np.nan, np.inf, 6e4, -0.0]))
    suffix = draw(st.sampled_from([".npy", ".npz", ".parquet"]))
    if suffix == ".parquet" and (array.ndim != 2 or dtype in ("c8", ">f8", "U3", "O", "M8[s]")):
        suffix = ".npy"
    stream = io.BytesIO()
    truth = array if array.dtype.kind in "biuf" else None
    if suffix == ".npy":
        np.save(stream, array, allow_pickle=True)
    elif suffix == ".npz":
        names = draw(st.sampled_from([["data"], ["x"], ["other"], ["data", "more"], ["p", "q"]]))
        draw(st.sampled_from([np.savez, np.savez_compressed]))(stream, **dict.fromkeys(names, array))
        truth = None if names == ["p", "q"] else truth
    else:
        _save_parquet(stream, array, draw(st.sampled_from([("a", "b", "c"), ("b", "a", "c"), ("0", "1", "2"), ("x", "y", "z")])))
    content = stream.getvalue()
    if draw(st.integers(0, 4)) == 0:
        content, truth = draw(damaged(content)), None
    return content, f"data{suffix}", truth


def _save_parquet(stream: io.BytesIO, array: np.ndarray, names: tuple[str, ...]) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {name: pyarrow.array(np.ascontiguousarray(column)) for name, column in zip(names, array.T, strict=False)}
    parquet.write_table(pyarrow.table(columns), stream)


def _array_readings(content: bytes, name: str, truth: np.ndarray | None) -> Readings | None:
    """The right readings for the run of two columns; None if the damage may have been without effect."""
    if truth is None:
        return None
    rows = truth.astype(np.float64)
    if name.endswith(".parquet"):
        import pyarrow.parquet

        names = pyarrow.parquet.read_table(io.BytesIO(content)).column_names
        if not {"a", "b"} <= set(names):
            return NONE if not set(names) <= {"0", "1"} else Readings([Reading((), rows.tolist())], True)
        rows = rows[:, [names.index("a"), names.index("b")]]
    if rows.ndim != 2 or rows.shape[1] != 2 or not len(rows) or not np.isfinite(rows).all():
        return NONE
    return Readings([Reading((), rows.tolist())], len(set(rows[:, 0])) < 2 or truth.dtype.kind == "b")


@st.composite
def scored(draw: Any) -> Case:
    """A call of `score` on a table, for a run with the columns a and b."""
    calm = draw(st.booleans())
    if draw(st.integers(0, 3)) == 0:
        content, name, truth = draw(arrays())
        readings = _array_readings(content, name, truth)
    else:
        others = [["b", "a"], ["a", "b", "extra"], ["c", "b", "a"], ["a"], ["x", "y"]]
        columns = draw(st.sampled_from([*others, *[["a", "b"]] * 6]))
        if draw(st.integers(0, 5)) == 0:
            columns = [*columns, draw(NAMES)]
        content, name = draw(delimited(columns, draw(st.integers(0 if draw(st.booleans()) else 1, 8)), calm))
        readings = read_table(content, name.lower(), ("a", "b"))
    how = draw(st.sampled_from(["stdout", "stdout", "json", "file"]))
    output = (
        draw(st.sampled_from(["out.csv", "out.csv", "out.csv", "out.npy", "out.parquet", "out.txt"])) if how == "file" else None
    )
    more = ["-o", output] if output else ["--json"] if how == "json" else []
    right = None if readings is None else right_scores("table", readings.readings, output, how == "json")
    must = calm and readings is not None and bool(readings.readings) and not readings.refusable and output in (None, "out.csv")
    return Case("table", ("score", "run", name, *more), "table", {name: content}, must_succeed=must, right=right)


@st.composite
def fitted(draw: Any) -> Case:
    """A call of `fit` on a table, with few steps."""
    calm = draw(st.integers(0, 2)) > 0
    width = draw(st.integers(1, 4))
    columns = [chr(97 + index) for index in range(width)] if calm else [draw(NAMES) for _ in range(width)]
    related = draw(st.sampled_from(["", "", "constant", "double", "sum"]))
    rows = draw(st.sampled_from([0, 1, 3, 4, 5, 12, 30, 30, 40]))
    content, name = draw(delimited(columns, rows, calm, related))
    readings = read_table(content, name.lower())
    few = ("--set", "epochs=1", "--set", "layers=1", "--run", "new", "-q")
    must = calm and rows >= 12 and bool(readings.readings) and not readings.refusable and related in ("", "constant")
    return Case("table", ("fit", name, *few), files={name: content}, must_succeed=must, right=right_fit(readings.readings))


tables = st.one_of(scored(), scored(), scored(), scored(), scored(), scored(), scored(), scored(), scored(), fitted())

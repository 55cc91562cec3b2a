"""A slow reader of text tables that shares nothing with the package's: the csv module and Python's floats."""

import csv
import gzip


def read_slowly(path, separator=",", header=True, decimal="."):
    """Returns the names of a table, if it has a header, and its cells: floats, or text where there is no number."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    rows = [row for row in csv.reader(text.splitlines(keepends=True), delimiter=separator, skipinitialspace=True) if row]
    names = [cell.strip() for cell in rows.pop(0)] if header else []
    return names, [[_cell(cell, decimal) for cell in row] for row in rows]


def _cell(text, decimal):
    try:
        return float(text.replace(decimal, ".") if decimal != "." else text)
    except ValueError:
        return text

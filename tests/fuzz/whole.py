"""Says whether a file is what its name says."""

import csv
import io
import json
import tomllib
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import load


def what_is_not_whole(name: str, content: bytes) -> str:
    """Returns why a file is not a whole file of the kind that its name says; empty if it is."""
    check = CHECKS.get(Path(name).suffix.lower())
    try:
        if check:
            check(content)
    except Exception as error:  # each format has its own
        return f"{type(error).__name__}: {error}"
    return ""


def _csv(content: bytes) -> None:
    rows = list(csv.reader(io.StringIO(content.decode(), newline=""), strict=True))
    if not rows or not content.endswith(b"\n") or len({len(row) for row in rows}) != 1:
        raise ValueError("expected lines with the same number of cells")


def _png(content: bytes) -> None:
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        image.load()


def _parquet(content: bytes) -> None:
    from pyarrow import parquet

    parquet.read_table(io.BytesIO(content))


CHECKS = {
    ".csv": _csv,
    ".npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
    ".png": _png,
    ".parquet": _parquet,
    ".safetensors": load,
    ".json": json.loads,
    ".jsonl": lambda content: [json.loads(line) for line in content.splitlines()],
    ".toml": lambda content: tomllib.loads(content.decode()),
}

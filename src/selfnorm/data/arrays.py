"""Reads your own examples: NumPy arrays, tables, image folders."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.data.images import IMAGE_SUFFIXES, read_images
from selfnorm.data.layout import EVERYTHING, TableLayout, understand
from selfnorm.data.numpy_files import read_numpy
from selfnorm.data.resolution import as_resolved, centre_and_spread, expect_distinguishable
from selfnorm.data.safe_files import STANDARD_INPUT
from selfnorm.data.tables import TABLE_SUFFIXES, TEXT_SUFFIXES, ArrayTable, Table, is_table, open_table

IMAGE_CHANNELS = (1, 3, 4)
Form = Literal["exact", "stored", "resolved"]


def read_examples(
    path: str | Path, *, header: bool | None = None, drop: Sequence[str] = (), keep: Sequence[str] = (), exact: bool = False
) -> tuple[Tensor, tuple[str, ...]]:
    """Returns all examples of a file, (N, *shape), and the names of a table's columns, if the file has them.

    uint8 (N, C, H, W) for images: a folder of them, or a uint8 array of shape (N, H, W), (N, C, H, W) or (N, H, W, C).
    float32 for everything else: .npy, .npz (its array "data" or "x", or its only one), .csv, .tsv, both also as .gz, .parquet.
    float64 where float32 would round too much (`as_resolved`), and always if `exact`. NaN, infinities, text, empty cells and
    pickled objects raise ValueError with their location.

    header:  whether the first line of a text file holds names; by default decided by what the lines look like.
    drop:    columns of a table to leave out, by name, or by number, from 1, where there are no names.
    keep:    columns to keep that would be left out: an index without a name.
    """
    path = Path(path).expanduser()
    values, layout = read_values(path, header, drop, keep)
    labels = layout.short_labels if layout else ()
    return as_examples(str(path), values, "exact" if exact else "resolved", labels), layout.columns if layout else ()


def read_values(
    path: Path, header: bool | None = None, drop: Sequence[str] = (), keep: Sequence[str] = ()
) -> tuple[NDArray[Any], TableLayout | None]:
    """Returns the numbers of a file as they are stored, and the layout of a table; see `read_examples`."""
    found = open_examples(path, header, numeric_names=EVERYTHING not in keep)
    if not isinstance(found, np.ndarray):
        return understand(str(path), found, drop, keep)
    if drop or set(keep) - {EVERYTHING}:
        raise ValueError(f"{path}: expected drop and keep only for tables, got an array of shape {found.shape}")
    return found, None


def open_examples(
    path: Path, header: bool | None = None, *, numeric_names: bool = True, expected: Collection[str] | None = None
) -> Table | NDArray[Any]:
    """Returns a file as a table if it is one, also an array of two axes, else as an array; see `open_table`."""
    if not path.exists():
        raise ValueError(f"read_examples: expected the path of a file or of a folder of images, got nothing at {path}")
    if header is not None and path != STANDARD_INPUT and not path.name.lower().endswith(TEXT_SUFFIXES):
        raise ValueError(f"{path}: expected no header option, got header={header}; only text files have a line of names")
    if is_table(path) and not path.is_dir():
        return open_table(path, header, numeric_names, expected)
    if is_image_path(path):
        return read_images(path)
    suffix = path.suffix.lower()
    if suffix in (".npy", ".npz"):
        array = read_numpy(path)
        return ArrayTable(array) if array.ndim == 2 and array.size and array.dtype.kind in "biuf" else array
    endings = ", ".join((".npy", ".npz", *TABLE_SUFFIXES))
    raise ValueError(f"{path}: expected {endings}, or a folder of images, got {suffix or 'no ending'}")


def is_image_path(path: Path) -> bool:
    """Returns whether a path stands for images: a folder of them, or one."""
    return path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES


def as_examples(who: str, array: NDArray[np.generic], form: Form, labels: Sequence[str] = ()) -> Tensor:
    """Returns the array as examples: uint8 images if it is uint8 with three or four axes, else real numbers.

    form:  of real numbers. "exact": float64. "stored": float32 if that holds every number of the array's type, else float64.
           "resolved": float32 if that resolves the numbers (`as_resolved`), else float64.
    labels:  what errors call each column.
    """
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{who}: expected at least one example, as an array of shape (N, …), got shape {array.shape}")
    if array.ndim < 3 or array.dtype.kind == "f":
        values = _real(who, array, form, labels)
        return torch.from_numpy(values[:, None] if array.ndim == 1 else values)
    if array.dtype != np.uint8 or array.ndim > 4:
        raise ValueError(
            f"{who}: expected images as uint8 of shape (N, H, W), (N, C, H, W) or (N, H, W, C), got {array.dtype} of shape "
            f"{array.shape}; convert images with .astype(np.uint8) and real numbers with .astype(np.float64)"
        )
    if array.ndim == 3:
        array = array[:, None]
    elif array.shape[3] in IMAGE_CHANNELS and array.shape[1] not in IMAGE_CHANNELS:
        array = np.moveaxis(array, 3, 1)
    return torch.from_numpy(np.ascontiguousarray(array))


def _real(who: str, array: NDArray[np.generic], form: Form, labels: Sequence[str]) -> NDArray[np.floating]:
    if not (finite := np.isfinite(array)).all():
        raise _not_finite(who, array, finite)
    if form == "resolved" or (form == "stored" and array.dtype.kind in "iu"):
        expect_distinguishable(who, array, labels)
    wide = form == "exact" or (form == "stored" and not np.can_cast(array.dtype, np.float32))
    values = np.ascontiguousarray(array, dtype=np.float64) if wide else as_resolved(array)
    if form != "exact" and values.dtype == np.float64:
        centre, _ = centre_and_spread(values.reshape(len(values), -1))
        if (far := np.abs(centre) > np.finfo(np.float32).max).any():  # single values beyond may be outliers
            held = np.abs(values) <= np.finfo(np.float32).max
            raise _not_finite(who, array, held | ~far.reshape(values.shape[1:]))
    return values


def _not_finite(who: str, array: NDArray[np.generic], good: NDArray[np.bool_]) -> ValueError:
    index = tuple(int(i) for i in np.unravel_index(good.argmin(), array.shape))
    where = f"row {index[0]}" + (f", column {', '.join(map(str, index[1:]))}" if index[1:] else "")
    return ValueError(
        f"{who}: expected finite numbers that float32 can hold, got {array[index]} in {where}, counted from 0; "
        "remove these rows or fill them in first"
    )

"""Reads your own examples: NumPy arrays, tables, image folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.data.images import IMAGE_SUFFIXES, read_images
from selfnorm.data.numpy_files import read_numpy
from selfnorm.data.tables import read_csv, read_parquet

IMAGE_CHANNELS = (1, 3, 4)


def read_examples(path: str | Path) -> tuple[Tensor, tuple[str, ...]]:
    """Returns all examples of a file, (N, *shape), and the names of a table's columns, if the file has them.

    uint8 (N, C, H, W) for images: a folder of them, or a uint8 array of shape (N, H, W), (N, C, H, W) or (N, H, W, C).
    float32 for everything else: .npy, .npz (its array "data" or "x", or its only one), .csv, .tsv, .parquet. NaN, infinities,
    text, empty cells and pickled objects raise ValueError with their location.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"read_examples: expected the path of a file or of a folder of images, got nothing at {path}")
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in IMAGE_SUFFIXES:
        return torch.from_numpy(read_images(path)), ()
    if suffix in (".npy", ".npz"):
        return _examples(str(path), read_numpy(path)), ()
    if suffix in (".csv", ".tsv", ".parquet"):
        values, columns = read_parquet(path) if suffix == ".parquet" else read_csv(path)
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise ValueError(
                f"{path}: expected distinct column names, got {', '.join(map(repr, twice))} more than once; rename them"
            )
        return _examples(str(path), values), columns
    raise ValueError(f"{path}: expected .npy, .npz, .csv, .tsv, .parquet, or a folder of images, got {suffix or 'no ending'}")


def _examples(who: str, array: NDArray[np.generic]) -> Tensor:
    """Returns the array as examples: uint8 images if it is uint8 with three or four axes, else float32."""
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{who}: expected at least one example, as an array of shape (N, …), got shape {array.shape}")
    if array.ndim < 3 or array.dtype.kind == "f":
        values = _float32(who, array)
        return torch.from_numpy(values[:, None] if array.ndim == 1 else values)
    if array.dtype != np.uint8 or array.ndim > 4:
        raise ValueError(
            f"{who}: expected images as uint8 of shape (N, H, W), (N, C, H, W) or (N, H, W, C), got {array.dtype} of shape "
            f"{array.shape}; convert images with .astype(np.uint8) and real numbers with .astype(np.float32)"
        )
    if array.ndim == 3:
        array = array[:, None]
    elif array.shape[3] in IMAGE_CHANNELS and array.shape[1] not in IMAGE_CHANNELS:
        array = np.moveaxis(array, 3, 1)
    return torch.from_numpy(np.ascontiguousarray(array))


def _float32(who: str, array: NDArray[np.generic]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(array, dtype=np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        index = tuple(int(i) for i in np.unravel_index(finite.argmin(), values.shape))
        where = f"row {index[0]}" + (f", column {', '.join(map(str, index[1:]))}" if index[1:] else "")
        raise ValueError(
            f"{who}: expected finite numbers that float32 can hold, got {array[index]} in {where}, counted from 0; "
            "remove these rows or fill them in first"
        )
    _expect_resolution(who, array, values)
    return values


def _expect_resolution(who: str, array: NDArray[np.generic], values: NDArray[np.float32]) -> None:
    """Raises ValueError if float32 is too coarse for a column: 1e8 ± 1 would be rounded to a handful of values."""
    if array.ndim != 2 or array.dtype.itemsize <= 4:
        return
    for column in range(array.shape[1]):
        wide = array[:, column].astype(np.float64)
        lost, spread = np.abs(wide - values[:, column]).max(), wide.std()
        if lost > 1e-3 * spread > 0:
            raise ValueError(
                f"{who}: expected columns whose values float32 can resolve, got column {column} (counted from 0), around "
                f"{wide.mean():g} with a standard deviation of {spread:.2g}; subtract a constant from it first"
            )

"""Reads your own examples: NumPy arrays, tables, image folders."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.data.images import IMAGE_SUFFIXES, read_images
from selfnorm.data.resolution import as_resolved, centre_and_spread
from selfnorm.data.tables import read_csv, read_parquet

IMAGE_CHANNELS = (1, 3, 4)


def read_examples(path: str | Path, exact: bool = False) -> tuple[Tensor, tuple[str, ...]]:
    """Returns all examples of a file, (N, *shape), and the names of a table's columns, if the file has them.

    uint8 (N, C, H, W) for images: a folder of them, or a uint8 array of shape (N, H, W), (N, C, H, W) or (N, H, W, C).
    float32 for everything else: .npy, .npz (its array "data" or "x", or its only one), .csv, .tsv, .parquet; float64 where
    float32 would round too much (`as_resolved`), and always if `exact`. NaN, infinities, text, empty cells and pickled objects
    raise ValueError with their location.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"read_examples: expected the path of a file or of a folder of images, got nothing at {path}")
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in IMAGE_SUFFIXES:
        return torch.from_numpy(read_images(path)), ()
    if suffix in (".npy", ".npz"):
        return _examples(str(path), _read_numpy(path), exact), ()
    if suffix in (".csv", ".tsv", ".parquet"):
        values, columns = read_parquet(path) if suffix == ".parquet" else read_csv(path)
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise ValueError(
                f"{path}: expected distinct column names, got {', '.join(map(repr, twice))} more than once; rename them"
            )
        return _examples(str(path), values, exact), columns
    raise ValueError(f"{path}: expected .npy, .npz, .csv, .tsv, .parquet, or a folder of images, got {suffix or 'no ending'}")


def _read_numpy(path: Path) -> NDArray[np.generic]:
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            keys = list(loaded)
            key = next((key for key in ("data", "x") if key in keys), keys[0] if len(keys) == 1 else None)
            if key is not None:
                return np.asarray(loaded[key])
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: expected an array of numbers, got a file that cannot be read as one ({error}); pickled objects are never "
            "loaded because they can run code: save numbers with np.save"
        ) from error
    raise ValueError(f'{path}: expected one array, or one named "data" or "x", got {", ".join(keys) or "none"}')


def _examples(who: str, array: NDArray[np.generic], exact: bool) -> Tensor:
    """Returns the array as examples: uint8 images if it is uint8 with three or four axes, else real numbers."""
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{who}: expected numbers, integer or real, got an array of {array.dtype}")
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{who}: expected at least one example, as an array of shape (N, …), got shape {array.shape}")
    if array.ndim < 3 or array.dtype.kind == "f":
        values = _real(who, array, exact)
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


def _real(who: str, array: NDArray[np.generic], exact: bool) -> NDArray[np.floating]:
    """Returns the numbers in float64 if `exact`, else in the type that resolves them."""
    if not (finite := np.isfinite(array)).all():
        raise _not_finite(who, array, finite)
    values = np.ascontiguousarray(array, dtype=np.float64) if exact else as_resolved(array)
    if not exact and values.dtype == np.float64:
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

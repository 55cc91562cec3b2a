"""Loads built-in data sets by name, and your own by path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfnorm.data import cifar10, imagenet32, mnist, small
from selfnorm.data.arrays import _examples, read_examples, read_values
from selfnorm.data.dataset import Dataset, permutation
from selfnorm.data.layout import EVERYTHING, TableLayout, constant_columns, without_constants
from selfnorm.data.locate import OnProgress
from selfnorm.data.prepare import prepare, with_notes
from selfnorm.runtime.checks import did_you_mean

__all__ = ["NAMES", "Dataset", "load_dataset", "read_examples", "reads_folder"]

_LOADERS: dict[str, Callable[[str | Path | None, OnProgress | None], Dataset]] = {
    "mnist": mnist.load_mnist,
    "cifar10": cifar10.load_cifar10,
    "imagenet32": imagenet32.load_imagenet32,
}
NAMES: tuple[str, ...] = ("digits", *_LOADERS, *small.TOYS)


def reads_folder(name: str) -> bool:
    """Returns whether a data set of this name or path is read from a data folder: mnist, cifar10 and imagenet32 are."""
    return name in _LOADERS


def load_dataset(
    name: str,
    data_dir: str | Path | None = None,
    *,
    levels: int | None = None,
    header: bool | None = None,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    on_progress: OnProgress | None = None,
) -> Dataset:
    """Returns a built-in data set, given one of `NAMES`, or your own, given the path of a file or of a folder of images.

    data_dir:     the folder that holds the files of mnist, cifar10, imagenet32, an error for others; by default
                  $SELFNORM_DATA. With neither, they are taken from the user's cache folder, into which mnist and cifar10 are
                  downloaded on first use.
    levels:       the number of grey levels in your own 8-bit images, if not 256.
    header:       whether the first line of your own text file holds names; by default decided by what the lines look like.
    drop, keep:   columns of your own table to leave out, and to keep where they would be left out: columns without a name that
                  count the rows, and columns with one value in all rows. Each by name, or by number, from 1, where there are no
                  names. keep=["*"] keeps all of them, and reads a first line with a number in it as data.
    on_progress:  called as on_progress(what, done, total) during a download or a conversion; total may be None.

    Your own examples are split 80/10/10, always in the same way. A built-in name takes precedence over a file of that name:
    write `./digits` to load the file.

    >>> load_dataset("digits").shape
    (1, 8, 8)
    """
    if data_dir is not None and not reads_folder(name):
        what = "which needs no files" if name in NAMES else "which is a path of its own"
        raise ValueError(
            f"load_dataset: expected no data folder for {name}, {what}, got {data_dir}; leave out --data (data_dir), "
            f"which is for {', '.join(_LOADERS)}"
        )
    if name in NAMES:
        if header is not None or drop or set(keep) - {EVERYTHING}:
            raise ValueError(f"load_dataset: expected header, drop and keep only for your own tables, got them for {name}")
        dataset = _LOADERS[name](data_dir, on_progress) if name in _LOADERS else small.load_small(name)
        if levels not in (None, dataset.levels):
            has = "holds real numbers" if dataset.levels is None else f"has {dataset.levels}"
            raise ValueError(f"load_dataset: expected no levels for {name}, which {has}, got levels={levels}; leave it out")
        return dataset
    path = Path(name).expanduser()
    if not name or not path.exists():
        raise ValueError(
            f"load_dataset: expected one of {', '.join(NAMES)}, or the path of a file or of a folder of images, "
            f"got {name!r}, which is neither{did_you_mean(name.lower(), NAMES)}"
        )
    return _load_own_examples(path, levels, header, drop, keep)


def _load_own_examples(path: Path, levels: int | None, header: bool | None, drop: Sequence[str], keep: Sequence[str]) -> Dataset:
    values, table = read_values(path, header, drop, keep)
    total = len(values) if values.ndim else 0
    if levels is not None and (values.ndim < 3 or values.dtype != np.uint8):
        raise ValueError(
            f"{path}: expected no levels for real numbers, got levels={levels}; only integer images have levels: "
            "an image folder, or a uint8 array of shape (N, H, W), (N, C, H, W) or (N, H, W, C)"
        )
    if table is not None and total >= 4:
        values, table = without_constants(str(path), values, table, keep)
    examples, notes = prepare(_examples(str(path), values), table.columns if table is not None else ())
    total = len(examples)
    if total < 4:
        raise ValueError(f"{path}: expected at least 4 examples to split into training, validation and test, got {total}")
    if examples.dtype == torch.uint8:
        levels = 256 if levels is None else levels
    held_out = max(1, total // 10)
    order = torch.from_numpy(permutation(total))
    train, validation, test = order.split([total - 2 * held_out, held_out, held_out])
    columns = table.columns if table is not None else ()
    if table is not None:
        _expect_variety(path, examples[train], table)
    parts = (examples[train], examples[validation], examples[test])
    return with_notes(Dataset(path.resolve().name, *parts, levels, columns, table), notes)


def _expect_variety(path: Path, train: Tensor, table: TableLayout) -> None:
    """Raises ValueError, naming the columns, if the training rows of a table have constant columns, which have no density."""
    if constant := constant_columns(train.numpy()):
        names = table.labels([table.used[index] for index in constant])
        raise ValueError(
            f"{path}: expected columns that vary, got the same value in all {len(train)} training rows of {names}; a "
            "constant has no density: remove it, or leave it out with drop"
        )

"""Loads built-in data sets by name, and your own by path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from selfnorm.data import cifar10, imagenet32, mnist, small
from selfnorm.data.arrays import read_examples
from selfnorm.data.dataset import Dataset, permutation
from selfnorm.data.locate import OnProgress
from selfnorm.data.prepare import prepare, with_notes
from selfnorm.runtime.checks import did_you_mean

__all__ = ["NAMES", "Dataset", "load_dataset", "read_examples"]

_LOADERS: dict[str, Callable[[str | Path | None, OnProgress | None], Dataset]] = {
    "mnist": mnist.load_mnist,
    "cifar10": cifar10.load_cifar10,
    "imagenet32": imagenet32.load_imagenet32,
}
NAMES: tuple[str, ...] = ("digits", *_LOADERS, *small.TOYS)


def load_dataset(
    name: str,
    data_dir: str | Path | None = None,
    *,
    levels: int | None = None,
    on_progress: OnProgress | None = None,
) -> Dataset:
    """Returns a built-in data set, given one of `NAMES`, or your own, given the path of a file or of a folder of images.

    data_dir:     the folder that holds the files of mnist, cifar10, imagenet32; by default $SELFNORM_DATA. With neither, they
                  are taken from the user's cache folder, into which mnist and cifar10 are downloaded on first use.
    levels:       the number of grey levels in your own 8-bit images, if not 256.
    on_progress:  called as on_progress(what, done, total) during a download or a conversion; total may be None.

    Your own examples are split 80/10/10, always in the same way. A built-in name takes precedence over a file of that name:
    write `./digits` to load the file.

    >>> load_dataset("digits").shape
    (1, 8, 8)
    """
    if name in NAMES:
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
    return _load_own_examples(path, levels)


def _load_own_examples(path: Path, levels: int | None) -> Dataset:
    examples, columns = read_examples(path)
    examples, notes = prepare(examples, columns)
    total = len(examples)
    if total < 4:
        raise ValueError(f"{path}: expected at least 4 examples to split into training, validation and test, got {total}")
    if examples.dtype == torch.uint8:
        levels = 256 if levels is None else levels
    elif levels is not None:
        raise ValueError(
            f"{path}: expected no levels for real numbers, got levels={levels}; only integer images have levels: "
            "an image folder, or a uint8 array of shape (N, H, W), (N, C, H, W) or (N, H, W, C)"
        )
    held_out = max(1, total // 10)
    order = torch.from_numpy(permutation(total))
    train, validation, test = order.split([total - 2 * held_out, held_out, held_out])
    _expect_variety(path, examples[train], columns)
    return with_notes(Dataset(path.resolve().name, examples[train], examples[validation], examples[test], levels, columns), notes)


def _expect_variety(path: Path, train: Tensor, columns: tuple[str, ...]) -> None:
    """Raises ValueError, naming the columns, if a table has constant columns, which have no density."""
    if train.dim() != 2:
        return
    constant = (train == train[0]).all(0).nonzero().flatten().tolist()
    if constant:
        names = ", ".join(repr(columns[index]) if columns else str(index) for index in constant)
        raise ValueError(
            f"{path}: expected columns that vary, got the same value in all {len(train)} training rows of column {names}; a "
            "constant has no density: remove it"
        )

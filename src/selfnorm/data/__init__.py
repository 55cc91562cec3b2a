"""Data sets by name, and the user's own by path."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from selfnorm.data import cifar10, imagenet32, mnist, small
from selfnorm.data.arrays import read_examples
from selfnorm.data.dataset import Dataset, permutation
from selfnorm.data.locate import Progress

__all__ = ["NAMES", "Dataset", "load_dataset", "read_examples"]

_FROM_FILES: dict[str, Callable[[str | Path | None, Progress | None], Dataset]] = {
    "mnist": mnist.load,
    "cifar10": cifar10.load,
    "imagenet32": imagenet32.load,
}
NAMES: tuple[str, ...] = ("digits", *_FROM_FILES, *small.TOYS)


def load_dataset(
    name: str,
    data_dir: str | Path | None = None,
    *,
    levels: int | None = None,
    on_progress: Progress | None = None,
) -> Dataset:
    """A built-in data set by its name, one of `NAMES`, or the user's own by the path of a file or a folder of images.

    data_dir:     the folder that holds the files of mnist, cifar10, imagenet32; by default $SELFNORM_DATA. With neither, they
                  are taken from the user's cache folder, into which mnist and cifar10 are downloaded on first use.
    levels:       how many grey levels the user's own 8-bit images have, if not 256.
    on_progress:  called as on_progress(what, done, total) during a download or a conversion; total may be None.

    The user's own examples are split 80/10/10, always in the same way. A built-in name goes before a file of that name, which
    `./digits` means.

    >>> load_dataset("digits").shape
    (1, 8, 8)
    """
    if name in NAMES:
        dataset = _FROM_FILES[name](data_dir, on_progress) if name in _FROM_FILES else small.make(name)
        if levels not in (None, dataset.levels):
            has = "holds real numbers" if dataset.levels is None else f"has {dataset.levels}"
            raise ValueError(f"load_dataset: expected no levels with {name}, which {has}, got levels={levels}")
        return dataset
    path = Path(name).expanduser()
    if not name or not path.exists():
        close = difflib.get_close_matches(name.lower(), NAMES, n=1)
        raise ValueError(
            f"load_dataset: expected one of {', '.join(NAMES)}, or the path of a file or of a folder of images, "
            f"got {name!r}, which is neither" + (f"; did you mean {close[0]}?" if close else "")
        )
    return _own(path, levels)


def _own(path: Path, levels: int | None) -> Dataset:
    examples, columns = read_examples(path)
    total = len(examples)
    if total < 4:
        raise ValueError(f"{path}: expected at least 4 examples, to split into training, validation and test, got {total}")
    if examples.dtype == torch.uint8:
        levels = 256 if levels is None else levels
    elif levels is not None:
        raise ValueError(
            f"{path}: expected no levels with real numbers, got levels={levels}; only integer images have levels: "
            "an image folder, or a uint8 array of shape (N, H, W), (N, C, H, W) or (N, H, W, C)"
        )
    held_out = max(1, total // 10)
    order = torch.from_numpy(permutation(total))
    train, validation, test = order.split([total - 2 * held_out, held_out, held_out])
    _expect_variety(path, examples[train], columns)
    return Dataset(path.resolve().name, examples[train], examples[validation], examples[test], levels, columns)


def _expect_variety(path: Path, train: Tensor, columns: tuple[str, ...]) -> None:
    """Refuse a table with a constant column, by name: it has no density."""
    if train.dim() != 2:
        return
    constant = (train == train[0]).all(0).nonzero().flatten().tolist()
    if constant:
        names = ", ".join(repr(columns[index]) if columns else str(index) for index in constant)
        raise ValueError(
            f"{path}: expected columns that vary, got the same value in all {len(train)} training rows of column {names}; a "
            "constant has no density, so leave it out"
        )

"""Loads built-in data sets by name, and your own by path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from selfnorm.data import cifar10, imagenet32, mnist, small
from selfnorm.data.arrays import read_examples
from selfnorm.data.dataset import Dataset
from selfnorm.data.locate import OnProgress, data_folder
from selfnorm.data.own import TableOptions, load_own_examples
from selfnorm.runtime.checks import did_you_mean

__all__ = ["NAMES", "Dataset", "load_dataset", "paths_read", "read_examples", "reads_folder"]

_LOADERS: dict[str, Callable[[str | Path | None, OnProgress | None], Dataset]] = {
    "mnist": mnist.load_mnist,
    "cifar10": cifar10.load_cifar10,
    "imagenet32": imagenet32.load_imagenet32,
}
_PATHS: dict[str, Callable[[Path], list[Path]]] = {
    "mnist": mnist.mnist_paths,
    "cifar10": cifar10.cifar10_paths,
    "imagenet32": imagenet32.imagenet32_paths,
}
NAMES: tuple[str, ...] = ("digits", *_LOADERS, *small.TOYS)


def reads_folder(name: str) -> bool:
    """Returns whether a data set of this name or path is read from a data folder: mnist, cifar10 and imagenet32 are."""
    return name in _LOADERS


def paths_read(name: str, data_dir: str | Path | None = None) -> list[Path]:
    """Returns the files and folders that a data set may read, whether they exist or not, and those that it converts them to."""
    if name not in NAMES:
        return [Path(name).expanduser()]
    if not reads_folder(name):
        return []
    try:
        folder, _ = data_folder(name, data_dir)
    except ValueError:  # it is no longer there
        return []
    return _PATHS[name](folder)


def load_dataset(
    name: str,
    data_dir: str | Path | None = None,
    *,
    levels: int | None = None,
    header: bool | None = None,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    set_outliers_aside: bool = True,
    check_columns: bool = False,
    on_progress: OnProgress | None = None,
) -> Dataset:
    """Returns a built-in data set, given one of `NAMES`, or your own, given the path of a file or of a folder of images.

    data_dir:     the folder that holds the files of mnist, cifar10, imagenet32, an error for others; by default
                  $SELFNORM_DATA. With neither, they are taken from the user's cache folder, into which mnist and cifar10 are
                  downloaded on first use.
    levels:       the number of grey levels in your own 8-bit images, if not 256.
    header:       whether the first line of your own text file holds names; by default decided by what the lines look like.
    drop, keep:   columns of your own table to leave out, and to keep although they would be left out, as an index without a
                  name is. Each by name, or by number, from 1, where there are no names. keep=["*"] keeps all columns and all
                  rows, and reads a first line with a number in it as data. A kept column with one value in all training rows
                  is an error, since it has no density.
    set_outliers_aside:  whether to leave out rows of your own data that lie far from all others (`gross_outliers`).
    check_columns:       whether to raise ValueError if columns of your own table have no density that can be learned: linear
                         functions of others, or numbers that vary by rounding alone.
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
        if header is not None or drop or keep:
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
    options = TableOptions(header, drop, keep)
    return load_own_examples(path, levels, options, set_outliers_aside=set_outliers_aside, check_columns=check_columns)

"""The `Dataset` record: training, validation and test examples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.data.layout import TableLayout

SPLIT_SEED = 0
LARGE_PART_BYTES = 1 << 26  # hashing this much takes a tenth of a second


def fingerprint(dataset: Dataset) -> str:
    """Returns a short text that identifies the data: sizes, and a digest of all examples, or of 1000 of each large part."""
    digest = hashlib.sha256()
    for part in (dataset.train, dataset.validation, dataset.test):
        if part.nbytes > LARGE_PART_BYTES:
            part = part[torch.arange(1000) * (len(part) - 1) // 999]
        digest.update(part.numpy().tobytes())
    return f"{len(dataset.train)}/{len(dataset.validation)}/{len(dataset.test)} {digest.hexdigest()[:16]}"


def is_image(shape: tuple[int, ...], levels: int | None) -> bool:
    """Returns whether examples of this shape can be shown as pictures."""
    return levels is not None and len(shape) == 3


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test examples as stored, (N, *shape), on the CPU.

    uint8 grey levels, or real numbers: in float32, or in float64 where that would round too much.

    levels:   the number of grey levels, 0 … levels − 1, of integer data; None for real numbers.
    columns:  a table's column names, if its file has them.
    table:    how the columns of a table were understood; None for data that are no table.
    notes:    lines about what was left out of the data, and whether it is too small; shown and logged when training starts.
    """

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    levels: int | None = None
    columns: tuple[str, ...] = ()
    table: TableLayout | None = None
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.shape[1:])

    def narrowed(self) -> Dataset:
        """Returns the data set in float32, as earlier versions read all real numbers."""
        if self.train.dtype != torch.float64:
            return self
        return replace(self, train=self.train.float(), validation=self.validation.float(), test=self.test.float())

    def __post_init__(self) -> None:
        who = f"Dataset({self.name!r})"
        if self.levels is not None and not 2 <= self.levels <= 256:
            raise ValueError(f"{who}: expected 2 to 256 levels, since values are stored as bytes, got levels={self.levels}")
        wide = self.levels is None and self.train.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32 if self.levels is None else torch.uint8
        for part in ("train", "validation", "test"):
            x: Tensor = getattr(self, part)
            if x.dtype != dtype:
                raise ValueError(f"{who}: expected {part} in {dtype} with levels={self.levels}, got {x.dtype}")
            if x.dim() < 2 or x.numel() == 0:
                raise ValueError(f"{who}: expected at least one example in {part}, shape (N, …), got {tuple(x.shape)}")
            if tuple(x.shape[1:]) != self.shape:
                raise ValueError(
                    f"{who}: expected examples of shape {self.shape} in every part, got {tuple(x.shape[1:])} in {part}"
                )
            # With 256 levels every byte is valid, so large sets and memory maps are not read for this check.
            if self.levels is not None and self.levels < 256 and int(x.max()) >= self.levels:
                raise ValueError(
                    f"{who}: expected levels 0 to {self.levels - 1}, got {int(x.max())} in {part}; "
                    "pass a larger levels=, or divide the values first"
                )
        if self.columns and (len(self.columns),) != self.shape:
            raise ValueError(f"{who}: expected one column name for each entry of the shape {self.shape}, got {len(self.columns)}")


def permutation(total: int) -> NDArray[np.int64]:
    """Returns a fixed permutation of 0 … total − 1, from the one generator whose stream NumPy has promised never to change."""
    return np.random.RandomState(SPLIT_SEED).permutation(total).astype(np.int64, copy=False)

"""A data set in three parts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SEED = 0
LARGE = 1 << 26  # bytes, which take a tenth of a second to digest


def fingerprint(dataset: Dataset) -> str:
    """A short text that differs, almost surely, for other data: sizes, and a digest of all examples, or of many if large."""
    digest = hashlib.sha256()
    for part in (dataset.train, dataset.validation, dataset.test):
        if part.nbytes > LARGE:
            part = part[torch.arange(1000) * (len(part) - 1) // 999]
        digest.update(part.numpy().tobytes())
    return f"{len(dataset.train)}/{len(dataset.validation)}/{len(dataset.test)} {digest.hexdigest()[:16]}"


def is_image(shape: tuple[int, ...], levels: int | None) -> bool:
    """Whether examples of that shape are pictures to be shown."""
    return levels is not None and len(shape) == 3


@dataclass(frozen=True, eq=False)
class Dataset:
    """Three parts of one data set, as stored: uint8 grey levels or float32 numbers, of shape (N, *shape), on the CPU.

    levels:   integer data holds 0 … levels − 1; None for real numbers.
    columns:  a table's column names, where its file has them.
    """

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    levels: int | None = None
    columns: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """One example's shape."""
        return tuple(self.train.shape[1:])

    def __post_init__(self) -> None:
        who = f"Dataset({self.name!r})"
        if self.levels is not None and not 2 <= self.levels <= 256:
            raise ValueError(f"{who}: expected 2 to 256 levels, which is what a byte holds, got levels={self.levels}")
        dtype = torch.float32 if self.levels is None else torch.uint8
        for part in ("train", "validation", "test"):
            x: Tensor = getattr(self, part)
            if x.dtype != dtype:
                raise ValueError(f"{who}: expected {part} in {dtype} with levels={self.levels}, got {x.dtype}")
            if x.dim() < 2 or x.numel() == 0:
                raise ValueError(f"{who}: expected {part} to hold examples, shape (N, …), got {tuple(x.shape)}")
            if tuple(x.shape[1:]) != self.shape:
                raise ValueError(f"{who}: expected every part's examples alike, {self.shape}, got {tuple(x.shape[1:])} in {part}")
            # Every byte is below 256: large sets, memory maps among them, are not read for that.
            if self.levels is not None and self.levels < 256 and int(x.max()) >= self.levels:
                raise ValueError(
                    f"{who}: expected levels 0 to {self.levels - 1}, got {int(x.max())} in {part}; "
                    "give a larger levels=, or divide the values first"
                )
        if self.columns and (len(self.columns),) != self.shape:
            raise ValueError(f"{who}: expected one column name for each of {self.shape} numbers, got {len(self.columns)}")


def permutation(total: int) -> NDArray[np.int64]:
    """A fixed order of 0 … total − 1. By the one generator whose stream NumPy has promised never to change."""
    return np.random.RandomState(SEED).permutation(total).astype(np.int64, copy=False)

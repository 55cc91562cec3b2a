"""Whether float32 can hold a column, and the origin from which it can."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.data.labels import namer

LARGEST_ROUNDING = 1e-3  # relative to the spread of a column
SPREADS = (1e-30, 1e30)  # that float32 can standardise
WIDE_SPREADS = (1e-130, 1e130)  # that float64 can, so that no row is beyond `FARTHEST`


def as_resolved(x: NDArray[np.generic]) -> NDArray[np.floating]:
    """Returns numbers of any type, (N, …), in float32 if that resolves every entry of the shape, else in float64.

    float32 resolves an entry if it moves each value by at most a thousandth of the spread of the entry, or of the value's own
    distance from the centre. The spread is that of the middle half of the rows: an outlier must not hide what the others lose.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = np.ascontiguousarray(x, dtype=np.float32)
        if (x.dtype.kind in "bf" and x.dtype.itemsize <= 4) or x.dtype.itemsize <= 2:
            return narrow
        wide = np.ascontiguousarray(x, dtype=np.float64)
        if not np.isfinite(narrow).all():
            return wide
        flat, rounded = wide.reshape(len(wide), -1), narrow.reshape(len(wide), -1)
        width = max(1, (1 << 22) // len(flat))
        for start in range(0, flat.shape[1], width):
            block = flat[:, start : start + width]
            centre, spread = centre_and_spread(block)
            lost = np.abs(block - rounded[:, start : start + width])
            if ((lost > LARGEST_ROUNDING * np.maximum(spread, np.abs(block - centre))) & (spread > 0)).any():
                return wide
    return narrow


def expect_distinguishable(who: str, x: NDArray[np.generic], labels: Sequence[str] = ()) -> None:
    """Raises ValueError, naming the column, if float64 rounds the numbers of x, (N, …), too much.

    Such are times in nanoseconds, and sums that would all be 1 without rounding.

    labels:  what to call each column, as in `Dependence.described`.
    """
    if x.dtype.kind not in "iuf" or x.dtype.itemsize < 8 or not x.size:
        return
    flat = x.reshape(len(x), -1)
    for index in _hardly_spread(flat):
        column = flat[:, index]
        # The distances from the least are exact also for whole numbers that float64 cannot hold.
        least = column.min()
        some = (column - least if x.dtype.kind == "f" else (column - least).astype(np.uint64)).astype(np.float64)
        spread = float(centre_and_spread(some[:, None])[1][0])
        step = float(np.spacing(np.abs(np.median(column.astype(np.float64)))))
        if 0 < spread < step / 2 / LARGEST_ROUNDING:
            raise ValueError(
                f"{who}: expected numbers that float64 can tell apart, got a spread of {spread:.3g} around {float(least):.6g} in "
                f"{_column(labels, index)}, where float64 rounds to multiples of {step:.3g}; subtract a constant before "
                "anything is rounded, or leave this out if it varies by rounding alone"
            )


def _hardly_spread(x: NDArray[np.generic]) -> list[int]:
    """Returns the columns of x, (N, D), that float64 may not resolve, and all whose whole numbers it may not hold."""
    found: list[int] = []
    width = max(1, (1 << 22) // len(x))
    for start in range(0, x.shape[1], width):
        block = x[:, start : start + width].astype(np.float64)
        centre, spread = centre_and_spread(block)
        coarse = (spread > 0) & (spread < np.spacing(np.abs(centre)) / LARGEST_ROUNDING)
        found += (start + np.flatnonzero(coarse | (np.abs(block).max(0) > 2.0**53))).tolist()
    return found


def centre_and_spread(x: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the median of each column of x, (N, D), and the standard deviation of a normal column with the same quartiles.

    Computed from about 10,000 of the rows. The spread of a column with equal quartiles is its standard deviation.
    """
    some = x[:: max(1, len(x) // 10_000)]
    with np.errstate(over="ignore", invalid="ignore"):
        low, centre, high = np.quantile(some, (0.25, 0.5, 0.75), axis=0)
        spread = np.where((x == x[0]).all(0), 0.0, x.std(0, dtype=np.float64))  # rounding would give a constant some
        return centre, np.where(high > low, (high - low) / 1.349, spread)


def origin_of(train: Tensor) -> Tensor | None:
    """Returns a point near the centre of float64 examples, one number for each entry of their shape.

    The distances from it are what a flow in float32 is trained on. It is a multiple of a power of two near the spread, so that
    the distances are exact in float64, and the same if all examples move by such a multiple. None for examples in float32.
    """
    if train.dtype != torch.float64:
        return None
    centre, spread = centre_and_spread(train.flatten(1).numpy())
    unit = np.exp2(np.ceil(np.log2(np.where(spread > 0, spread, 1.0))))
    return torch.from_numpy(unit * np.round(centre / unit)).reshape(train.shape[1:])


def from_origin(x: Tensor, origin: Tensor | None) -> Tensor:
    """Returns the examples as training sees them: their distances from the origin, in float32, if there is one."""
    return x if origin is None else (x - origin).float()


def expect_spread(who: str, train: Tensor, labels: Sequence[str], spreads: tuple[float, float] = SPREADS) -> None:
    """Raises ValueError, naming the column, if the standard deviation of real-valued examples is too small or too large.

    labels:   what to call each column, as in `Dependence.described`.
    spreads:  the smallest and the largest.
    """
    flat = train.flatten(1).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        units = np.where((largest := np.abs(flat).max(0)) > 0, largest, 1)  # squares would leave the range of numbers first
        spread = np.array([unit * (column / unit).std(dtype=np.float64) for unit, column in zip(units, flat.T, strict=True)])
        usual = (spread >= spreads[0]) & (spread <= spreads[1])
    for index in np.flatnonzero(~usual & (flat != flat[0]).any(0))[:1]:  # constants are told of elsewhere
        raise ValueError(
            f"{who}: expected columns with a standard deviation from {spreads[0]:g} to {spreads[1]:g}, got "
            f"{spread[index]:.2g} in {_column(labels, int(index))}; change its unit"
        )


def _column(labels: Sequence[str], index: int) -> str:
    label = namer(labels)(index)
    return label if label.startswith("column") else f"column {label}"

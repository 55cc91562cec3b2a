"""Whether float32 can hold a column, and the origin from which it can."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.data.labels import entry_label, namer

LARGEST_ROUNDING = 1e-3  # relative to the spread of a column
FEWEST_STEPS = 10  # of rounding, in the spread of a column; its variance is then wrong by 0.08 %
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
    """Raises ValueError, naming the column, if the type of the numbers of x, (N, …), rounds a column too much.

    Whole numbers count as float64. Examples are times in nanoseconds, and sums that would all be 1 but for rounding.

    labels:  what to call each column, as in `Dependence.described`.
    """
    is_table_of_floats = x.dtype.kind == "f" and x.dtype.itemsize == 4 and x.ndim <= 2
    if not x.size or not (is_table_of_floats or (x.dtype.kind in "iuf" and x.dtype.itemsize >= 8)):
        return
    kind: type[np.floating] = np.float32 if is_table_of_floats else np.float64
    name = kind.__name__
    flat = x.reshape(len(x), -1)
    for index in _perhaps_coarse(flat, kind):
        column = flat[:, index]
        if (column == column[0]).all():
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            if x.dtype.kind == "f":
                floats = column.astype(kind, copy=False)
                centre = float(np.quantile(floats, 0.5, method="nearest"))
                distance = (floats - kind(centre)).astype(np.float64)
            else:  # the distances from the least are exact, also of numbers that float64 cannot hold
                centre = float(np.median(column.astype(np.float64)))
                distance = (column - column.min()).astype(np.uint64).astype(np.float64)
            distance.sort()
            apart = max(1, len(distance) // 200)  # on each side, since these may be outliers
            low, high = distance[min(apart, len(distance) - 1)], distance[-min(apart + 1, len(distance))]
            widths = 2 * NormalDist().inv_cdf(1 - min(apart + 0.5, 0.45 * len(distance)) / len(distance))
            spread = float((high - low) / widths if high > low else distance.std())
            step = float(np.spacing(kind(abs(centre))))
        if 0 < spread < FEWEST_STEPS * step:
            where = entry_label(map(int, np.unravel_index(index, x.shape[1:]))) if x.ndim > 2 else _column(labels, index)
            raise ValueError(
                f"{who}: expected numbers that {name} can tell apart, got a spread of {spread:.3g} around {centre:.6g} in "
                f"{where}, where {name} rounds to multiples of {step:.3g}; subtract a constant before "
                "anything is rounded, or leave the column out if it varies by rounding alone"
            )


def _perhaps_coarse(x: NDArray[np.generic], kind: type[np.floating]) -> list[int]:
    """Returns the columns of x, (N, D), in which a sample of the rows spans few steps of a type; near 0 these are tiny."""
    some = x[:: max(1, len(x) // 200)].astype(np.float64)
    centre, spread = centre_and_spread(some)
    coarse = spread <= 4 * FEWEST_STEPS * np.spacing(np.abs(centre).astype(kind))
    columns: list[int] = np.flatnonzero(coarse & (centre != 0)).tolist()
    return columns


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

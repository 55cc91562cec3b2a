"""Writes samples to files, in the format that the name asks for, batch by batch."""

from __future__ import annotations

import csv
import io
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.data.dataset import is_image
from selfnorm.report import figures
from selfnorm.runtime.files import byte_count, is_stream, written_output

MAX_PIXELS = 20_000_000  # of a picture
SAMPLE_ENDINGS = (".png", ".csv", ".npy")
# Of a number in a table, with its separator: 0 to 255, or nine digits, of which few need an exponent.
LEVEL_BYTES, NUMBER_BYTES = 2, 10
# With as many digits as it takes to read the same number back.
NUMBER_FORMATS: dict[type[np.generic], str] = {np.uint8: "%d", np.float32: "%.9g", np.float64: "%.17g"}


def sample_endings(shape: tuple[int, ...], levels: int | None) -> tuple[str, ...]:
    """Returns the endings of the files that samples can be written to; the first is the usual one."""
    return SAMPLE_ENDINGS if is_image(shape, levels) else SAMPLE_ENDINGS[1:]


def expect_room(path: Path, n: int, shape: tuple[int, ...], levels: int | None) -> None:
    """Raises ValueError unless n samples fit into a picture, or, at the least size that their table can have, on the disk."""
    suffix = path.suffix.lower()
    if suffix == ".png":
        pixels = figures.grid_pixels(n, *shape[1:])
        if pixels > MAX_PIXELS:
            raise ValueError(
                f"{path}: expected a picture of at most {MAX_PIXELS:,} pixels, got {n:,} samples with {pixels:,}; write .npy"
            )
        return
    if is_stream(path):
        return
    a_number = (1 if levels else 4) if suffix == ".npy" else LEVEL_BYTES if levels else NUMBER_BYTES
    size, free = n * math.prod(shape) * a_number, shutil.disk_usage(path.parent).free
    if size > free:
        raise ValueError(
            f"{path}: expected samples that fit on the disk, which has {byte_count(free)} left, got {n:,} that take about "
            f"{byte_count(size)}; draw fewer or choose another disk"
        )


def write_samples(
    path: Path,
    batches: Iterable[Tensor],
    n: int,
    shape: tuple[int, ...],
    levels: int | None,
    columns: tuple[str, ...],
    *,
    is_new: bool = False,
) -> None:
    """Writes n samples, given in batches, in the format of the file's suffix; only a picture holds them all in memory.

    .png: a grid of images; .csv, also for a stream without a suffix: a table; .npy: an array, of uint8 for images.
    """
    suffix = path.suffix.lower()
    with written_output(path, is_new=is_new) as file:
        if suffix == ".png":
            assert levels is not None
            file.write(figures.image_grid_bytes(torch.cat(list(batches)), levels))
        elif suffix == ".npy":
            _write_array(file, (_values(batch, levels) for batch in batches), (n, *shape))
        else:
            names = columns or tuple(f"x{index}" for index in range(math.prod(shape)))
            _write_table(file, (_values(batch, levels) for batch in batches), names)


def _values(batch: Tensor, levels: int | None) -> NDArray[np.generic]:
    values: NDArray[np.generic] = (batch if levels is None else batch.floor().clamp(0, levels - 1).to(torch.uint8)).numpy()
    return values


def _write_array(file: BinaryIO, batches: Iterable[NDArray[np.generic]], shape: tuple[int, ...]) -> None:
    for index, batch in enumerate(batches):
        if not index:
            header = {"descr": npy.dtype_to_descr(batch.dtype), "fortran_order": False, "shape": shape}
            npy.write_array_header_1_0(file, header)
        file.write(batch.tobytes())


def _write_table(file: BinaryIO, batches: Iterable[NDArray[np.generic]], names: tuple[str, ...]) -> None:
    header = io.StringIO()
    csv.writer(header, lineterminator="\n").writerow(names)
    file.write(header.getvalue().encode())
    for batch in batches:
        number = NUMBER_FORMATS[batch.dtype.type]
        np.savetxt(file, batch.reshape(len(batch), math.prod(batch.shape[1:])), delimiter=",", fmt=number)

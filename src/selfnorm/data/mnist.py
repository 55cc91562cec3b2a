"""MNIST, from the publisher's idx files."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from numpy.typing import NDArray

from selfnorm.data.dataset import Dataset
from selfnorm.data.download import Expected, fetch_gzip
from selfnorm.data.locate import Progress, data_folder, locate, missing

URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
PLACES = ("MNIST/raw", "raw", "mnist", "")
TRAIN, TEST = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"
COUNTS = {TRAIN: 60_000, TEST: 10_000}
CHECKSUMS = {
    TRAIN: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TEST: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
}
VALIDATION = 10_000
IMAGES = 2051  # an idx file's first number: unsigned bytes, three axes
HEADER = struct.Struct(">4I")
SIDE = 28


def load(data_dir: str | Path | None = None, on_progress: Progress | None = None) -> Dataset:
    """(N, 1, 28, 28), 256 levels: 50,000 for training, the training file's last 10,000 for validation, 10,000 for the test."""
    folder, ours = data_folder("mnist", data_dir)
    files = locate(folder, PLACES, list(COUNTS), ("", ".gz"))
    if not files and ours:
        files = [_download(folder / PLACES[0] / name, on_progress) for name in COUNTS]
    if not files:
        raise missing("mnist", folder / PLACES[0], list(COUNTS), f"{URL} (unpacked, or as .gz)")
    train, test = (torch.from_numpy(_read(file, count)) for file, count in zip(files, COUNTS.values(), strict=True))
    return Dataset("mnist", train[:-VALIDATION], train[-VALIDATION:], test, levels=256)


def _download(target: Path, on_progress: Progress | None) -> Path:
    if not target.exists():
        expected = Expected(HEADER.size + COUNTS[target.name] * SIDE * SIDE, CHECKSUMS[target.name])
        fetch_gzip("mnist", f"{URL}{target.name}.gz", target, expected, on_progress, list(COUNTS))
    return target


def _read(path: Path, count: int) -> NDArray[np.uint8]:
    """The images of one idx file, read straight into their array."""
    expected = (IMAGES, count, SIDE, SIDE)
    images = np.empty((count, 1, SIDE, SIDE), np.uint8)
    try:
        with cast("IO[bytes]", gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            header = file.read(HEADER.size)
            found = HEADER.unpack(header) if len(header) == HEADER.size else header
            if found != expected:
                raise ValueError(f"{path}: expected an idx file that starts with the numbers {expected}, got {found!r}")
            done = _fill(file, images)
            extra = file.read(1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: expected a whole gzip file, got a damaged one ({error}); get it again") from error
    if done != images.size or extra:
        got = "more" if extra else f"{done:,}"
        raise ValueError(f"{path}: expected {images.size:,} bytes after its header, got {got}; get the file again")
    return images


def _fill(file: IO[bytes], images: NDArray[np.uint8]) -> int:
    """Read until the array is full or the file at its end; the number of bytes read."""
    room, done = images.reshape(-1).data, 0
    while step := file.readinto(room[done:]):  # type: ignore[attr-defined]  # every binary reader has it
        done += step
    return done

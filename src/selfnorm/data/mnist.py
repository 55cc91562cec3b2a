"""Loads MNIST from the publisher's idx files."""

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
from selfnorm.data.locate import OnProgress, data_folder, locate, missing_files_error, paths_in
from selfnorm.data.safe_files import expect_regular

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_SUBFOLDERS = ("MNIST/raw", "raw", "mnist", "")
MNIST_ENDINGS = ("", ".gz")
TRAIN_FILE, TEST_FILE = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"
IMAGES_IN_FILE = {TRAIN_FILE: 60_000, TEST_FILE: 10_000}
MNIST_CHECKSUMS = {
    TRAIN_FILE: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TEST_FILE: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
}
MNIST_VALIDATION_SIZE = 10_000
IDX_MAGIC = 2051  # the first number of an idx file of unsigned bytes with three axes
IDX_HEADER = struct.Struct(">4I")
MNIST_SIDE = 28


def load_mnist(data_dir: str | Path | None = None, on_progress: OnProgress | None = None) -> Dataset:
    """Returns MNIST, (N, 1, 28, 28), 256 levels: 50,000 training, 10,000 validation (the training file's last), 10,000 test."""
    folder, is_cache = data_folder("mnist", data_dir)
    files = locate(folder, MNIST_SUBFOLDERS, list(IMAGES_IN_FILE), MNIST_ENDINGS)
    if not files and is_cache:
        files = [_download(folder / MNIST_SUBFOLDERS[0] / name, on_progress) for name in IMAGES_IN_FILE]
    if not files:
        raise missing_files_error(
            "mnist", folder, MNIST_SUBFOLDERS, list(IMAGES_IN_FILE), f"{MNIST_URL} (unpacked, or as .gz)", MNIST_ENDINGS
        )
    train, test = (
        torch.from_numpy(_read_idx_images(file, count)) for file, count in zip(files, IMAGES_IN_FILE.values(), strict=True)
    )
    return Dataset("mnist", train[:-MNIST_VALIDATION_SIZE], train[-MNIST_VALIDATION_SIZE:], test, levels=256)


def mnist_paths(folder: Path) -> list[Path]:
    """Returns the paths below a data folder at which MNIST is looked for."""
    return paths_in(folder, MNIST_SUBFOLDERS, list(IMAGES_IN_FILE), MNIST_ENDINGS)


def _download(target: Path, on_progress: OnProgress | None) -> Path:
    if not target.exists():
        expected = Expected(IDX_HEADER.size + IMAGES_IN_FILE[target.name] * MNIST_SIDE * MNIST_SIDE, MNIST_CHECKSUMS[target.name])
        fetch_gzip("mnist", f"{MNIST_URL}{target.name}.gz", target, expected, on_progress, list(IMAGES_IN_FILE))
    return target


def _read_idx_images(path: Path, count: int) -> NDArray[np.uint8]:
    """Returns the images of one idx file, (count, 1, 28, 28)."""
    expected = (IDX_MAGIC, count, MNIST_SIDE, MNIST_SIDE)
    expect_regular(path, f"replace it with the file from {MNIST_URL}")  # which a download does not do
    images = np.empty((count, 1, MNIST_SIDE, MNIST_SIDE), np.uint8)
    try:
        with cast("IO[bytes]", gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            header = file.read(IDX_HEADER.size)
            found = IDX_HEADER.unpack(header) if len(header) == IDX_HEADER.size else header
            if found != expected:
                raise ValueError(f"{path}: expected an idx file that starts with the numbers {expected}, got {found!r}")
            done = _fill(file, images)
            extra = file.read(1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: expected a whole gzip file, got a damaged one ({error}); download it again") from error
    if done != images.size or extra:
        got = "more" if extra else f"{done:,}"
        raise ValueError(f"{path}: expected {images.size:,} bytes after its header, got {got}; download the file again")
    return images


def _fill(file: IO[bytes], images: NDArray[np.uint8]) -> int:
    """Reads until the array is full or the file ends; returns the number of bytes read."""
    room, done = images.reshape(-1).data, 0
    while step := file.readinto(room[done:]):  # type: ignore[attr-defined]  # every binary reader has it
        done += step
    return done

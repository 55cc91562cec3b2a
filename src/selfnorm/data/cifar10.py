"""Loads CIFAR-10 from the publisher's binary version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from selfnorm.data.dataset import Dataset
from selfnorm.data.download import Expected, fetch_tar
from selfnorm.data.locate import OnProgress, data_folder, locate, missing_files_error, paths_in

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SUBFOLDER = "cifar-10-batches-bin"
CIFAR10_SUBFOLDERS = (CIFAR10_SUBFOLDER, "")
CIFAR10_PICKLES_SUBFOLDER = "cifar-10-batches-py"
CIFAR10_CHECKSUMS = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
IMAGES_PER_FILE = 10_000
CIFAR10_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32  # the label, then the pixels by channel, row and column


def load_cifar10(data_dir: str | Path | None = None, on_progress: OnProgress | None = None) -> Dataset:
    """Returns CIFAR-10, (N, 3, 32, 32), 256 levels: 40,000 training, 10,000 validation (the fifth file), 10,000 test images."""
    folder, is_cache = data_folder("cifar10", data_dir)
    names = list(CIFAR10_CHECKSUMS)
    files = locate(folder, CIFAR10_SUBFOLDERS, names)
    if not files and is_cache:
        expected = {
            f"{CIFAR10_SUBFOLDER}/{name}": Expected(IMAGES_PER_FILE * RECORD_BYTES, checksum)
            for name, checksum in CIFAR10_CHECKSUMS.items()
        }
        fetch_tar("cifar10", CIFAR10_URL, folder, expected, on_progress)
        files = [folder / CIFAR10_SUBFOLDER / name for name in names]
    if not files:
        pickles = next(
            (place for place in (folder / CIFAR10_PICKLES_SUBFOLDER, folder) if (place / "data_batch_1").exists()), None
        )
        if pickles:
            raise ValueError(
                f"cifar10: expected the binary version, {CIFAR10_SUBFOLDER}/*.bin, in {folder}, got the Python version in "
                f"{pickles}, which is not read because pickles can run code; get {CIFAR10_URL}"
            )
        raise missing_files_error("cifar10", folder, CIFAR10_SUBFOLDERS, names, CIFAR10_URL)
    images = np.empty((len(files), IMAGES_PER_FILE, *CIFAR10_SHAPE), np.uint8)
    for file, batch in zip(files, images, strict=True):
        _read_batch_file(file, batch)
    examples = torch.from_numpy(images)
    return Dataset("cifar10", examples[:4].flatten(0, 1), examples[4], examples[5], levels=256)


def cifar10_paths(folder: Path) -> list[Path]:
    """Returns the paths below a data folder at which CIFAR-10 is looked for."""
    return paths_in(folder, CIFAR10_SUBFOLDERS, list(CIFAR10_CHECKSUMS))


def _read_batch_file(path: Path, batch: NDArray[np.uint8]) -> None:
    size = path.stat().st_size
    if size != IMAGES_PER_FILE * RECORD_BYTES:
        raise ValueError(
            f"{path}: expected {IMAGES_PER_FILE:,} records of {RECORD_BYTES} bytes, {IMAGES_PER_FILE * RECORD_BYTES:,} in all, "
            f"got {size:,} bytes; download the file again from {CIFAR10_URL}"
        )
    records = np.fromfile(path, np.uint8).reshape(IMAGES_PER_FILE, RECORD_BYTES)
    batch[:] = records[:, 1:].reshape(batch.shape)

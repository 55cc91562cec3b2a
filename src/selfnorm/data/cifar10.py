"""CIFAR-10, from the publisher's binary version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from selfnorm.data.dataset import Dataset
from selfnorm.data.download import Expected, fetch_tar
from selfnorm.data.locate import Progress, data_folder, locate, missing

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PLACE = "cifar-10-batches-bin"
PICKLES = "cifar-10-batches-py"
CHECKSUMS = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
PER_FILE = 10_000
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # the label, then the pixels by channel, row and column


def load(data_dir: str | Path | None = None, on_progress: Progress | None = None) -> Dataset:
    """(N, 3, 32, 32), 256 levels: the first 40,000 for training, the fifth file's 10,000 for validation, 10,000 for the test."""
    folder, ours = data_folder("cifar10", data_dir)
    names = list(CHECKSUMS)
    files = locate(folder, (PLACE, ""), names)
    if not files and ours:
        expected = {f"{PLACE}/{name}": Expected(PER_FILE * RECORD, checksum) for name, checksum in CHECKSUMS.items()}
        fetch_tar("cifar10", URL, folder, expected, on_progress)
        files = [folder / PLACE / name for name in names]
    if not files:
        pickles = next((place for place in (folder / PICKLES, folder) if (place / "data_batch_1").exists()), None)
        if pickles:
            raise ValueError(
                f"cifar10: expected the binary version, {PLACE}/*.bin, in {folder}, got the Python version in {pickles}, "
                f"whose pickles can run code and are not read; get {URL}"
            )
        raise missing("cifar10", folder / PLACE, names, URL)
    images = np.empty((len(files), PER_FILE, *SHAPE), np.uint8)
    for file, batch in zip(files, images, strict=True):
        _read(file, batch)
    examples = torch.from_numpy(images)
    return Dataset("cifar10", examples[:4].flatten(0, 1), examples[4], examples[5], levels=256)


def _read(path: Path, batch: NDArray[np.uint8]) -> None:
    size = path.stat().st_size
    if size != PER_FILE * RECORD:
        raise ValueError(
            f"{path}: expected {PER_FILE:,} records of {RECORD} bytes, {PER_FILE * RECORD:,} in all, got {size:,} bytes; "
            f"get the file again, from {URL}"
        )
    records = np.fromfile(path, np.uint8).reshape(PER_FILE, RECORD)
    batch[:] = records[:, 1:].reshape(batch.shape)

"""Loads ImageNet at 32 × 32 as memory maps, converted once, so that its 1.3 million images need not fit in memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.data.dataset import Dataset, permutation
from selfnorm.data.images import image_files, read_image
from selfnorm.data.locate import OnProgress, cache_folder, data_folder, locate, missing_files_error, paths_in
from selfnorm.data.numpy_files import DAMAGE, read_array_header
from selfnorm.data.safe_files import expect_fits_memory, expect_regular
from selfnorm.runtime.files import replacing_file

IMAGENET32_SOURCE = "https://image-net.org/download-images (downsampled, 32 × 32, npz format), which asks for an account"
IMAGENET32_SUBFOLDERS = ("imagenet32", "")
BATCH_FILES = (*(f"train_data_batch_{number}.npz" for number in range(1, 11)), "val_data.npz")
IMAGE_FOLDERS = ("train_32x32", "valid_32x32")
IMAGENET32_SHAPE = (3, 32, 32)
IMAGENET32_VALIDATION_SIZE = 20_000
IMAGES_AT_ONCE = 4096  # held in memory during a conversion
CONVERTED_PARTS = ("train", "validation", "test")
CONVERTED_FILES = ("sources.json", *(f"{part}.npy" for part in CONVERTED_PARTS))
CONVERTED_FOLDER = "selfnorm-imagenet32"
CONVERTED_LAYOUT = 1  # increase it when the format of the converted files changes


def load_imagenet32(data_dir: str | Path | None = None, on_progress: OnProgress | None = None) -> Dataset:
    """Returns ImageNet32, (N, 3, 32, 32), 256 levels, from the publisher's .npz batches or the folders train_32x32, valid_32x32.

    20,000 random images of the training set (a tenth, if that is less) are held out for validation, and the publisher's
    validation set is the test set: 1,261,167 / 20,000 / 50,000 from the batches. The paper's 1,261,149 come from the folders.
    The first call converts the images into a folder next to them, or in the user's cache if that folder is not writable.
    """
    folder, _ = data_folder("imagenet32", data_dir)
    *train, test = _sources(folder)
    record = {"layout": CONVERTED_LAYOUT, "sources": [_stamp(source) for source in (*train, test)]}
    next_to_sources, in_cache = _conversions(test.parent)
    parts = _open_converted(next_to_sources, record) or _open_converted(in_cache, record)
    if not parts:
        target = next_to_sources if _writable(next_to_sources) else in_cache
        target.mkdir(parents=True, exist_ok=True)
        _convert(train, test, target, record, on_progress)
        parts = _open_converted(target, record)
        if not parts:
            raise ValueError(
                f"imagenet32: expected {target} to hold the images just converted, got others; if another process is converting "
                "them, wait for it and try again"
            )
    return Dataset("imagenet32", *parts, levels=256)


def imagenet32_paths(folder: Path) -> list[Path]:
    """Returns the paths at which ImageNet32 is looked for below a data folder, and those of its conversions."""
    conversions = [path for place in IMAGENET32_SUBFOLDERS for path in _conversions(folder / place)]
    return [*paths_in(folder, IMAGENET32_SUBFOLDERS, (*BATCH_FILES, *IMAGE_FOLDERS)), *conversions]


def _conversions(place: Path) -> tuple[Path, Path]:
    """Returns the folders for the conversion of sources in a place: next to them, and in the user's cache."""
    key = hashlib.sha256(os.fsencode(place.resolve())).hexdigest()[:12]
    return place / CONVERTED_FOLDER, cache_folder() / f"imagenet32-{key}"


def _sources(folder: Path) -> list[Path]:
    """Returns the training sources in order, then the test source: .npz files, or folders of images."""
    if files := locate(folder, IMAGENET32_SUBFOLDERS, BATCH_FILES):
        return files
    for place in IMAGENET32_SUBFOLDERS:
        folders = [folder / place / name for name in IMAGE_FOLDERS]
        if all(source.is_dir() for source in folders):
            return folders
    raise missing_files_error(
        "imagenet32",
        folder,
        IMAGENET32_SUBFOLDERS,
        BATCH_FILES,
        f"{IMAGENET32_SOURCE}; or put the folders {' and '.join(IMAGE_FOLDERS)} there",
    )


def _stamp(source: Path) -> list[Any]:
    """Returns what identifies a version of a source: name, size, time. A folder's time changes when files come or go, which
    is much faster to check than each of a million files."""
    status = source.stat()
    return [source.name, status.st_size, status.st_mtime_ns]


def _open_converted(folder: Path, record: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the three parts as memory maps, or None unless the folder holds a finished conversion of these sources."""
    try:
        expect_regular(folder / "sources.json")
        complete = _record_bytes(record)
        with (folder / "sources.json").open("rb") as file:
            if file.read(len(complete) + 1) != complete:
                return None
        train, validation, test = (_open_part(folder / f"{part}.npy") for part in CONVERTED_PARTS)
    except (OSError, *DAMAGE):
        return None
    return train, validation, test


def _record_bytes(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode()


def _open_part(path: Path) -> Tensor:
    """Returns a converted part as a memory map; raises OSError or one of `DAMAGE` if the file is not one."""
    expect_regular(path)
    with path.open("rb") as file:
        shape, by_column, dtype = read_array_header(file)
        if dtype != np.uint8 or by_column or shape[1:] != IMAGENET32_SHAPE:
            raise ValueError(f"{dtype} of shape {shape}")
        if os.fstat(file.fileno()).st_size - file.tell() != math.prod(shape):
            raise EOFError("another size than its header says")
        # Copy on write: torch needs writable pages, and the file must not change.
        return torch.from_numpy(np.memmap(file, np.uint8, "c", file.tell(), shape))


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _convert(train: list[Path], test: Path, folder: Path, record: dict[str, Any], on_progress: OnProgress | None) -> None:
    """Writes the three parts, then the record that marks them as complete. Plain writes raise OSError on a full disk; writing
    through a memory map would kill the process."""
    for name in CONVERTED_FILES:
        if (folder / name).exists():
            expect_regular(folder / name, "remove it")  # it is not replaced
    total, tests = sum(map(_count_images, train)), _count_images(test)
    held_out = np.zeros(total, bool)
    held_out[permutation(total)[: min(IMAGENET32_VALIDATION_SIZE, total // 10)]] = True
    sizes = dict(zip(CONVERTED_PARTS, (total - int(held_out.sum()), int(held_out.sum()), tests), strict=True))
    if not all(sizes.values()):
        raise ValueError(f"imagenet32: expected at least 10 training and 1 test image in {test.parent}, got {total} and {tests}")
    with ExitStack() as stack:
        files = {part: stack.enter_context(replacing_file(folder / f"{part}.npy")) for part in CONVERTED_PARTS}
        for part, file in files.items():
            npy.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (sizes[part], *IMAGENET32_SHAPE)})
        done = 0
        for source in (*train, test):
            for rows in _read_rows(source):
                if source is test:
                    files["test"].write(rows.data)
                else:
                    chosen = held_out[done : done + len(rows)]
                    files["train"].write(rows[~chosen].data)
                    files["validation"].write(rows[chosen].data)
                done += len(rows)
                if on_progress:
                    on_progress("converting imagenet32", done, total + tests)
        (folder / "sources.json").unlink(missing_ok=True)
    with replacing_file(folder / "sources.json") as file:
        file.write(_record_bytes(record))


def _count_images(source: Path) -> int:
    """Returns the number of images in a source, without reading them."""
    if source.is_dir():
        return len(image_files(source))
    with _open_batch(source) as (_, count, _):
        return count


def _read_rows(source: Path) -> Iterator[NDArray[np.uint8]]:
    """Yields the images of a source in order, flattened, a few at a time: uint8 (n, 3072)."""
    width = int(np.prod(IMAGENET32_SHAPE))
    if source.is_dir():
        files = image_files(source)
        for start in range(0, len(files), IMAGES_AT_ONCE):
            yield np.stack([_read_32x32_image(file) for file in files[start : start + IMAGES_AT_ONCE]]).reshape(-1, width)
        return
    with _open_batch(source) as (file, count, by_column):
        step = count if by_column else IMAGES_AT_ONCE
        expect_fits_memory(source, 2 * step * width)
        for start in range(0, count, step):
            size = min(step, count - start)
            content = file.read(size * width)
            if len(content) != size * width:
                raise EOFError("a file that ends too early")
            rows = np.frombuffer(content, np.uint8)
            yield np.ascontiguousarray(rows.reshape(width, size).T) if by_column else rows.reshape(size, width)
        if file.read(1):  # reading to the end also verifies the archive's own checksum
            raise EOFError("more data than its header says")


def _read_32x32_image(file: Path) -> NDArray[np.uint8]:
    image = read_image(file)
    if image.shape[1:] != IMAGENET32_SHAPE[1:]:
        raise ValueError(
            f"{file}: expected an image of {IMAGENET32_SHAPE[1]} × {IMAGENET32_SHAPE[2]} pixels, "
            f"got {image.shape[1]} × {image.shape[2]}"
        )
    return np.broadcast_to(image, IMAGENET32_SHAPE)  # repeats a grey image in all channels


@contextmanager
def _open_batch(path: Path) -> Iterator[tuple[IO[bytes], int, bool]]:
    """Yields the "data" array of a batch file, open at its first value, the number of images, and whether it is column-major."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as file:
            shape, by_column, dtype = read_array_header(file)
            if dtype != np.uint8 or len(shape) != 2 or shape[1] != np.prod(IMAGENET32_SHAPE):
                raise TypeError(f"{dtype} of shape {shape}")
            yield file, shape[0], by_column
    except DAMAGE as error:
        raise ValueError(f'{path}: expected a whole .npz file with "data", uint8 of shape (N, 3072), got {error}') from error

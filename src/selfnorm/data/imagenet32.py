"""ImageNet at 32 × 32, converted once into memory maps: its 1.3 million images are never all in memory."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
import zlib
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
from selfnorm.data.locate import Progress, cache_folder, data_folder, locate, missing
from selfnorm.runtime.files import replacing_file

URL = "https://image-net.org/download-images (downsampled, 32 × 32, npz format), which asks for an account"
PLACES = ("imagenet32", "")
BATCHES = (*(f"train_data_batch_{number}.npz" for number in range(1, 11)), "val_data.npz")
FOLDERS = ("train_32x32", "valid_32x32")
SHAPE = (3, 32, 32)
VALIDATION = 20_000
ROWS = 4096  # images held in memory at a time
PARTS = ("train", "validation", "test")
CONVERTED = "selfnorm-imagenet32"
LAYOUT = 1  # raise it when what a conversion writes is to change


def load(data_dir: str | Path | None = None, on_progress: Progress | None = None) -> Dataset:
    """(N, 3, 32, 32), 256 levels, from the publisher's .npz batches, or from the image folders train_32x32, valid_32x32.

    20,000 random images of the training set (a tenth, where that is less) are for validation, the others for training, and the
    publisher's validation set is the test: 1,261,167 / 20,000 / 50,000 from the batches; the paper's 1,261,149 are the folders'.
    The first call converts them, into a folder beside them, or in the user's cache if nothing can be written there.
    """
    folder, _ = data_folder("imagenet32", data_dir)
    *train, test = _sources(folder)
    record = {"layout": LAYOUT, "sources": [_stamp(source) for source in (*train, test)]}
    beside = test.parent / CONVERTED
    key = hashlib.sha256(str(test.parent.resolve()).encode()).hexdigest()[:12]
    ours = cache_folder() / f"imagenet32-{key}"
    parts = _open(beside, record) or _open(ours, record)
    if not parts:
        target = beside if _writable(beside) else ours
        target.mkdir(parents=True, exist_ok=True)
        _convert(train, test, target, record, on_progress)
        parts = _open(target, record)
        if not parts:
            raise ValueError(f"imagenet32: expected {target} to hold the converted images, got others; is another run at it?")
    return Dataset("imagenet32", *parts, levels=256)


def _sources(folder: Path) -> list[Path]:
    """The training sources in order, then the test's: .npz files, or folders of images."""
    if files := locate(folder, PLACES, BATCHES):
        return files
    for place in PLACES:
        folders = [folder / place / name for name in FOLDERS]
        if all(source.is_dir() for source in folders):
            return folders
    raise missing("imagenet32", folder / PLACES[0], BATCHES, f"{URL}; or put the folders {' and '.join(FOLDERS)} there")


def _stamp(source: Path) -> list[Any]:
    """What tells a changed source. A folder's own time changes with every name in it; to ask each of a million files is slow."""
    status = source.stat()
    return [source.name, status.st_size, status.st_mtime_ns]


def _open(folder: Path, record: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The three parts as memory maps, if the folder holds a finished conversion of these very sources."""
    try:
        if json.loads((folder / "sources.json").read_text()) != record:
            return None
        # Copy on write: to torch the pages are writable, which it insists on, and the file never changes.
        train, validation, test = (torch.from_numpy(np.load(folder / f"{part}.npy", mmap_mode="c")) for part in PARTS)
    except (OSError, ValueError):
        return None
    return train, validation, test


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _convert(train: list[Path], test: Path, folder: Path, record: dict[str, Any], on_progress: Progress | None) -> None:
    """Write the three parts, then the record that says they are whole. By plain writes: a full disk is an OSError with these,
    where writing through a memory map would kill the process."""
    total, tests = sum(map(_count, train)), _count(test)
    held_out = np.zeros(total, bool)
    held_out[permutation(total)[: min(VALIDATION, total // 10)]] = True
    sizes = dict(zip(PARTS, (total - int(held_out.sum()), int(held_out.sum()), tests), strict=True))
    if not all(sizes.values()):
        raise ValueError(f"imagenet32: expected at least 10 training and 1 test image in {test.parent}, got {total} and {tests}")
    with ExitStack() as stack:
        files = {part: stack.enter_context(replacing_file(folder / f"{part}.npy")) for part in PARTS}
        for part, file in files.items():
            npy.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (sizes[part], *SHAPE)})
        done = 0
        for source in (*train, test):
            for rows in _rows(source):
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
        file.write(json.dumps(record).encode())


def _count(source: Path) -> int:
    """How many images a source has, without reading them."""
    if source.is_dir():
        return len(image_files(source))
    with _batch(source) as (_, count, _):
        return count


def _rows(source: Path) -> Iterator[NDArray[np.uint8]]:
    """A source's images in order, flattened, a few at a time."""
    width = int(np.prod(SHAPE))
    if source.is_dir():
        files = image_files(source)
        for start in range(0, len(files), ROWS):
            yield np.stack([_image(file) for file in files[start : start + ROWS]]).reshape(-1, width)
        return
    with _batch(source) as (file, count, by_column):
        step = count if by_column else ROWS
        for start in range(0, count, step):
            size = min(step, count - start)
            content = file.read(size * width)
            if len(content) != size * width:
                raise EOFError("it ends too soon")
            rows = np.frombuffer(content, np.uint8)
            yield np.ascontiguousarray(rows.reshape(width, size).T) if by_column else rows.reshape(size, width)
        if file.read(1):  # at the end, the archive's own checksum is compared too
            raise EOFError("more than its header says")


def _image(file: Path) -> NDArray[np.uint8]:
    image = read_image(file)
    if image.shape[1:] != SHAPE[1:]:
        raise ValueError(f"{file}: expected an image of {SHAPE[1]} × {SHAPE[2]} pixels, got {image.shape[1]} × {image.shape[2]}")
    return np.broadcast_to(image, SHAPE)  # a grey one is the same in all channels


@contextmanager
def _batch(path: Path) -> Iterator[tuple[IO[bytes], int, bool]]:
    """A batch's "data" member, open at its first value, the number of its images, and whether it is stored by column."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as file:
            version = npy.read_magic(file)
            header = npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
            shape, by_column, dtype = header
            if dtype != np.uint8 or len(shape) != 2 or shape[1] != np.prod(SHAPE):
                raise TypeError(f"{dtype} of shape {shape}")
            yield file, shape[0], by_column
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: expected a whole .npz file with "data", uint8 of shape (N, 3072), got {error}') from error

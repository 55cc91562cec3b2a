"""Reads .npy and .npz files without NumPy's loader: sizes are checked from the headers, and no object is ever unpickled."""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from selfnorm.data.safe_files import expect_fits_memory, expect_regular
from selfnorm.runtime.checks import one_line, shortened

ARCHIVE_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
# What NumPy writes; others let the file choose how much memory they take.
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
MAX_HEADER_BYTES = 10_000  # NumPy's own limit
CHUNK = 1 << 20  # bytes
# What headers and archives that are damaged, or made to do harm, raise. The last three: nested or endless Python literals.
DAMAGE = (
    ValueError,
    TypeError,
    OverflowError,
    KeyError,
    EOFError,
    RuntimeError,  # an encrypted archive; NotImplementedError, for versions of archives, is one
    zipfile.BadZipFile,
    zlib.error,
    SyntaxError,
    tokenize.TokenError,
    MemoryError,
)


def read_numpy(path: Path) -> NDArray[np.generic]:
    """Returns the array of numbers in a .npy file, or that of a .npz file: "data" or "x", or its only one."""
    expect_regular(path)
    with path.open("rb") as file:
        if file.read(4) not in ARCHIVE_MAGIC:
            file.seek(0)
            return _read_array(path, file, os.fstat(file.fileno()).st_size)
        with _naming_damage(path):
            archive = zipfile.ZipFile(file)
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        keys = list(members)
        key = next((key for key in ("data", "x") if key in keys), keys[0] if len(keys) == 1 else None)
        if key is None:
            raise ValueError(
                f'{path}: expected one array, or one named "data" or "x", got {shortened(", ".join(keys)) or "none"}'
            )
        with _naming_damage(path):
            if members[key].compress_type not in COMPRESSIONS:
                raise ValueError("an unusual compression")
            content = archive.open(members[key])
        with content:
            return _read_array(path, content, members[key].file_size)


def read_array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads the header of a .npy file up to its first value, and returns the shape, whether the order is by column, the dtype.

    Raises one of `DAMAGE` for a header that is damaged, or longer than `MAX_HEADER_BYTES`.
    """
    start = file.read(npy.MAGIC_LEN)
    if not start.startswith(npy.MAGIC_PREFIX) or len(start) < npy.MAGIC_LEN:
        raise ValueError("no array in NumPy's format")
    length = file.read(2 if start[-2] == 1 else 4)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size:,} bytes")
    header = io.BytesIO(start + length + file.read(size))
    version = npy.read_magic(header)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format, which no array of numbers needs")
    shape, by_column, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(header)
    if any(isinstance(side, bool) or side < 0 for side in shape):
        raise ValueError(f"the shape {shape}")
    return shape, by_column, dtype


def _read_array(path: Path, file: IO[bytes], length: int) -> NDArray[np.generic]:
    """Reads an array from a file of this length in bytes."""
    with _naming_damage(path):
        shape, by_column, dtype = read_array_header(file)
        if dtype.hasobject:
            raise ValueError("pickled objects")
    if dtype.kind not in "biuf":
        raise ValueError(f"{path}: expected numbers, integer or real, got an array of {shortened(str(dtype))}")
    size, left = math.prod(shape) * dtype.itemsize, length - file.tell()
    with _naming_damage(path):
        if size != left:
            raise EOFError(f"{left:,} bytes of values instead of {size:,}")
    # Images are split; numbers are converted to float64, and copied while they are checked and split (measured).
    is_images = dtype == np.uint8 and len(shape) > 2
    expect_fits_memory(path, 2 * size if is_images else size + (16 if dtype.kind == "f" else 24) * math.prod(shape))
    with _naming_damage(path):
        array: NDArray[np.generic] = np.empty(shape[::-1] if by_column else shape, dtype)
        room = array.reshape(-1).view(np.uint8).data
        done = 0
        while done < size:
            read = file.readinto(room[done : done + CHUNK])  # type: ignore[attr-defined]  # every binary reader has it
            if not read:
                raise EOFError(f"{done:,} bytes of values instead of {size:,}")
            done += read
        file.read(1)  # an archive checks its checksum at the end
    return array.T if by_column else array


@contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        why = shortened(one_line(error))  # it may quote the header
        raise ValueError(
            f"{path}: expected an array of numbers, got a file that cannot be read as one ({why}); pickled objects are never "
            "loaded because they can run code: save numbers with np.save"
        ) from error

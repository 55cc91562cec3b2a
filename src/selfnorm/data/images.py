"""Folders of images of one size."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.locate import require

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
GREY = ("1", "L", "LA")
COLOUR = ("RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB")


def read_images(path: Path) -> NDArray[np.uint8]:
    """All images below a folder, in the order of their names, or one image file: (N, 1, H, W) if grey, (N, 3, H, W) in colour.

    All must have one size, and be grey or in colour together. What is no image, or hidden, is passed over; transparency is
    left out.
    """
    files = image_files(path) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: expected a folder with images ({', '.join(SUFFIXES)}) in it, got none")
    first = read_image(files[0])
    images = np.empty((len(files), *first.shape), np.uint8)
    for file, image in zip(files, images, strict=True):
        found = read_image(file)
        if found.shape != first.shape:
            raise ValueError(f"{file}: expected {_size(first)}, as {files[0]} is, got {_size(found)}; bring all images to one")
        image[:] = found
    return images


def image_files(folder: Path) -> list[Path]:
    """The image files below a folder, at any depth, sorted by path."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".") and name.lower().endswith(SUFFIXES)]
    return sorted(found)


def read_image(file: Path) -> NDArray[np.uint8]:
    """One image: (1, H, W) if grey, (3, H, W) in colour."""
    pillow = require("PIL.Image", str(file), "pillow")
    with warnings.catch_warnings():
        # Pillow warns of an image too large to be honest from the size in its header, and refuses only twice that.
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            with pillow.open(file) as image:
                return _pixels(file, image)
        except (pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
            raise ValueError(f"{file}: expected at most {pillow.MAX_IMAGE_PIXELS:,} pixels, got more ({error})") from error
        except (OSError, SyntaxError, EOFError) as error:  # Pillow calls a broken PNG a SyntaxError
            raise ValueError(f"{file}: expected an image, got a file that cannot be read as one ({error})") from error


def _pixels(file: Path, image: Any) -> NDArray[np.uint8]:
    if image.mode in GREY:
        return np.asarray(image.convert("L"))[None]
    if image.mode not in COLOUR:
        raise ValueError(f"{file}: expected 8-bit grey or colour, got Pillow's mode {image.mode}; save such data as .npy")
    if "transparency" in image.info:  # Pillow wants a palette's transparency unpacked before it is dropped
        image = image.convert("RGBA")
    return np.ascontiguousarray(np.moveaxis(np.asarray(image.convert("RGB")), 2, 0))


def _size(image: NDArray[np.uint8]) -> str:
    channels, height, width = image.shape
    return f"{'grey' if channels == 1 else 'colour'} of {height} × {width}"

"""Reads folders of images of one size."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfnorm.data.locate import require_module
from selfnorm.data.safe_files import expect_fits_memory, expect_regular, files_below, is_among, would_be_among

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
# Pillow goes by a file's content, and for some formats starts other programs, such as Ghostscript for PostScript.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MAX_IMAGE_PIXELS = 89_478_485  # Pillow's default, which a program may have changed
GREY_MODES = ("1", "L", "LA")
COLOUR_MODES = ("RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB")


def read_images(path: Path) -> NDArray[np.uint8]:
    """Returns all images below a folder, sorted by path, or one image file: (N, 1, H, W) if grey, (N, 3, H, W) in colour.

    All images must have the same size, and be all grey or all in colour. Hidden files and other files are skipped;
    transparency is dropped, and so are all frames but the first, with a warning.
    """
    files = image_files(path) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: expected a folder with images ({', '.join(IMAGE_SUFFIXES)}), got none")
    first = read_image(files[0])
    expect_fits_memory(path, 2 * len(files) * first.size)  # as much again while they are split
    images = np.empty((len(files), *first.shape), np.uint8)
    animated = []
    for file, image in zip(files, images, strict=True):
        found, has_frames = _read_first_frame(file)
        animated += [file] if has_frames else []
        if found.shape != first.shape:
            raise ValueError(
                f"{file}: expected {_describe_size(first)}, like {files[0]}, got {_describe_size(found)}; "
                + ("resize all images to the same size" if len(found) == len(first) else "make all images grey, or all colour")
            )
        image[:] = found
    if animated:
        warnings.warn(
            f"{path}: {len(animated)} of {len(files)} images have several frames, of which only the first is used; one of them "
            f"is {animated[0]}",
            stacklevel=2,
        )
    return images


def image_files(folder: Path) -> list[Path]:
    """Returns the image files below a folder, at any depth, sorted by path."""
    return files_below(folder, IMAGE_SUFFIXES, "images")


def belongs_to_images(file: Path, folder: Path) -> bool:
    """Returns whether writing a file would change or add one of `image_files`, by whatever name it is written."""
    if would_be_among(file, folder, IMAGE_SUFFIXES):
        return True
    return file.is_file() and is_among(file, folder, IMAGE_SUFFIXES, "images")


def read_image(file: Path) -> NDArray[np.uint8]:
    """Returns one image: (1, H, W) if grey, (3, H, W) in colour."""
    return _read_first_frame(file)[0]


def _read_first_frame(file: Path) -> tuple[NDArray[np.uint8], bool]:
    """Returns one image, and whether the file has more than one."""
    pillow = require_module("PIL.Image", str(file), "pillow")
    expect_regular(file)
    with warnings.catch_warnings():
        # Pillow only warns about images larger than its limit, and raises an error above twice the limit.
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            with pillow.open(file, formats=IMAGE_FORMATS) as image:
                if math.prod(image.size) <= MAX_IMAGE_PIXELS:
                    return _decode_pixels(file, image), getattr(image, "is_animated", False)
        except (pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
            raise ValueError(f"{file}: expected at most {pillow.MAX_IMAGE_PIXELS:,} pixels, got more ({error})") from error
        except pillow.UnidentifiedImageError:
            formats = ", ".join(IMAGE_FORMATS)
            raise ValueError(f"{file}: expected an image, got a file that cannot be read as one of {formats}") from None
        except _UnusableImageError as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # a broken file makes Pillow raise many types: SyntaxError for PNG, struct.error for TIFF
            raise ValueError(f"{file}: expected an image, got a file that cannot be read as one ({error})") from error
    raise ValueError(f"{file}: expected at most {MAX_IMAGE_PIXELS:,} pixels, got {math.prod(image.size):,}")


class _UnusableImageError(Exception):
    """An image that can be read, but not used."""


def _decode_pixels(file: Path, image: Any) -> NDArray[np.uint8]:
    if image.mode in GREY_MODES:
        return np.asarray(image.convert("L"))[None]
    if image.mode not in COLOUR_MODES:
        raise _UnusableImageError(
            f"{file}: expected 8-bit grey or colour, got Pillow's mode {image.mode}; save it as .npy instead"
        )
    if "transparency" in image.info:  # a palette's transparency must be unpacked before Pillow can drop it
        image = image.convert("RGBA")
    return np.ascontiguousarray(np.moveaxis(np.asarray(image.convert("RGB")), 2, 0))


def _describe_size(image: NDArray[np.uint8]) -> str:
    channels, height, width = image.shape
    return f"a {'grey' if channels == 1 else 'colour'} image of {height} × {width} pixels"

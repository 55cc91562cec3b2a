"""Writes samples to files, in the format that the name asks for."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfnorm.data.dataset import is_image
from selfnorm.report import figures
from selfnorm.runtime.files import replacing


def write_samples(path: Path, samples: Tensor, levels: int | None, columns: tuple[str, ...]) -> None:
    """Writes samples in the format of the file's suffix: .png, a grid of images; .csv, a table; .npy, an array (uint8 images)."""
    if not path.parent.is_dir():  # writing a figure would create it
        raise OSError(f"{path}: expected a folder to write it to, got none at {path.parent}")
    suffix = path.suffix.lower()
    image = is_image(tuple(samples.shape[1:]), levels)
    if suffix == ".png" and image:
        assert levels is not None
        figures.image_grid(path, samples, levels)
        return
    endings = [*([".png"] if image else []), ".csv", ".npy"]
    if suffix not in endings:
        raise ValueError(f"{path}: expected the suffix {', '.join(endings)} for these samples, got {suffix or 'none'!r}")
    values = samples.floor().clamp(0, levels - 1).to(torch.uint8) if levels is not None else samples
    with replacing(path) as temporary:
        if suffix == ".npy":
            np.save(temporary, values.numpy())
            return
        names = columns or tuple(f"x{index}" for index in range(math.prod(samples.shape[1:])))
        with temporary.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerow(names)
            digits = "%d" if levels else "%.17g" if values.dtype == torch.float64 else "%.9g"
            np.savetxt(stream, values.flatten(1).numpy(), delimiter=",", fmt=digits)

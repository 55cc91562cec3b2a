"""Loads data sets that need no files: scikit-learn's handwritten digits, and toy densities in the plane."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from selfnorm.data.dataset import SPLIT_SEED, Dataset, permutation
from selfnorm.data.locate import require_module

TOY_PARTS = (10_000, 2_000, 2_000)


def load_small(name: str) -> Dataset:
    """Returns the data set of this name: digits, or one of `TOYS`."""
    return _digits() if name == "digits" else _toy(name)


def _digits() -> Dataset:
    """Returns 1797 digits of 8 × 8 pixels and 17 grey levels: 1297 for training, 250 for validation, 250 for testing."""
    images = require_module("sklearn.datasets", "digits", "scikit-learn").load_digits().images
    examples = torch.from_numpy(images.astype(np.uint8)[permutation(len(images)), None])
    train, validation, test = examples.split([len(examples) - 500, 250, 250])
    return Dataset("digits", train, validation, test, levels=17)


def _toy(name: str) -> Dataset:
    """Returns a toy density by name: points in the plane, all within about 5 of the origin."""
    x = TOYS[name](sum(TOY_PARTS), torch.Generator().manual_seed(SPLIT_SEED))
    train, validation, test = x.split(TOY_PARTS)
    return Dataset(name, train, validation, test)


def _uniform(n: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator, dtype=torch.float32)


def _one_of(k: int, n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(k, (n,), generator=generator).to(torch.float32)


def _blurred(x: Tensor, y: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    points = torch.stack([x, y], 1)
    return points + noise * torch.randn(points.shape, generator=generator, dtype=torch.float32)


def _moons(n: int, generator: torch.Generator) -> Tensor:
    """Draws from two interleaving half circles."""
    angle, side = math.pi * _uniform(n, generator), 1 - 2 * _one_of(2, n, generator)
    return _blurred(2 * side * angle.cos() - side, side * (2 * angle.sin() - 0.5), 0.2, generator)


def _rings(n: int, generator: torch.Generator) -> Tensor:
    """Draws from four concentric circles, of radius 1 to 4."""
    angle, radius = 2 * math.pi * _uniform(n, generator), 1 + _one_of(4, n, generator)
    return _blurred(radius * angle.cos(), radius * angle.sin(), 0.1, generator)


def _checkerboard(n: int, generator: torch.Generator) -> Tensor:
    """Draws uniformly from the eight dark squares of a 4 × 4 board, from −4 to 4."""
    column, pair = _one_of(4, n, generator), _one_of(2, n, generator)
    row = 2 * pair + (column % 2)
    return torch.stack([2 * (column + _uniform(n, generator)) - 4, 2 * (row + _uniform(n, generator)) - 4], 1)


def _spirals(n: int, generator: torch.Generator) -> Tensor:
    """Draws from two arms, one and a half turns each, evenly filled along their length."""
    radius, side = 4 * _uniform(n, generator).sqrt(), 1 - 2 * _one_of(2, n, generator)
    angle = 0.75 * math.pi * radius
    return _blurred(side * radius * angle.cos(), side * radius * angle.sin(), 0.1, generator)


TOYS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "moons": _moons,
    "rings": _rings,
    "checkerboard": _checkerboard,
    "spirals": _spirals,
}

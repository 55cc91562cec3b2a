"""How a linear layer's matrix falls into independent square blocks, so that one exact mechanism serves every layer.

A dense matrix is one block. A convolution has one for each group; 1×1 kernels repeat a small one at every pixel, circular padding
has a small one for each frequency, and zero padding needs one as large as the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from selfnorm.linalg.convmatrix import Geometry, circular_symbols, conv_matrix


class BlockForm(Protocol):
    """A change of basis after which W is block-diagonal. Forms that are equal make equal blocks of equal weights."""

    @property
    def copies(self) -> int:
        """How often each block stands on the diagonal."""
        ...

    def blocks(self, weight: Tensor) -> Tensor:
        """The blocks (…, m, m), in the weight's precision."""
        ...

    def rounding(self, weight: Tensor) -> Tensor | float:
        """How far rounding may have moved a block's entries, by column (…, m); 0 where they are the weight's own."""
        ...

    def split(self, x: Tensor) -> Tensor:
        """A batch (N, …) as columns (…, m, n) for the blocks to act on."""
        ...

    def join(self, columns: Tensor) -> Tensor:
        """The way back to a real batch."""
        ...


@dataclass(frozen=True)
class Dense:
    """A plain matrix on (N, D)."""

    copies: int = 1

    def blocks(self, weight: Tensor) -> Tensor:
        return weight

    def rounding(self, weight: Tensor) -> float:
        return 0.0

    def split(self, x: Tensor) -> Tensor:
        return x.mT

    def join(self, columns: Tensor) -> Tensor:
        return columns.mT


@dataclass(frozen=True)
class ZeroPadded:
    """A zero-padded convolution: T(w), a block of C/groups·H·W rows for each group."""

    size: tuple[int, int, int]
    geometry: Geometry
    copies: int = 1

    def blocks(self, weight: Tensor) -> Tensor:
        return conv_matrix(weight, self.size[1:], self.geometry)

    def rounding(self, weight: Tensor) -> float:
        return 0.0

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.geometry.groups, -1)).flatten(2).permute(1, 2, 0)

    def join(self, columns: Tensor) -> Tensor:
        return columns.permute(2, 0, 1).reshape(columns.shape[-1], *self.size)


@dataclass(frozen=True)
class Circular:
    """A circular convolution: a block of C/groups rows for each group and frequency."""

    size: tuple[int, int, int]
    geometry: Geometry
    copies: int = 1

    def blocks(self, weight: Tensor) -> Tensor:
        return circular_symbols(weight, self.size[1:], self.geometry)

    def rounding(self, weight: Tensor) -> Tensor:
        # Each entry is a sum over taps, and may cancel.
        taps = weight.shape[-2] * weight.shape[-1]
        sums = weight.abs().sum((-2, -1)).unflatten(0, (self.geometry.groups, -1))
        return taps * torch.finfo(weight.dtype).eps * sums.amax(1, keepdim=True)

    def split(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).unflatten(1, (self.geometry.groups, -1)).flatten(3).permute(1, 3, 2, 0)

    def join(self, columns: Tensor) -> Tensor:
        return torch.fft.ifft2(columns.permute(3, 0, 2, 1).reshape(columns.shape[-1], *self.size)).real


@dataclass(frozen=True)
class PerPixel:
    """A 1×1 convolution: the same block of C/groups rows for each group, at every pixel."""

    size: tuple[int, int, int]
    groups: int

    @property
    def copies(self) -> int:
        return self.size[1] * self.size[2]

    def blocks(self, weight: Tensor) -> Tensor:
        return weight.flatten(1).unflatten(0, (self.groups, -1))

    def rounding(self, weight: Tensor) -> float:
        return 0.0

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1)).permute(1, 2, 0, 3, 4).flatten(2)

    def join(self, columns: Tensor) -> Tensor:
        examples = columns.shape[-1] // self.copies
        pixels = columns.unflatten(-1, (examples, *self.size[1:]))
        return pixels.permute(2, 0, 1, 3, 4).reshape(examples, *self.size)

"""Block-diagonal forms of linear layers, so that one implementation of exact log-determinants and inverses serves every layer.

A `BlockForm` changes the basis so that the matrix W (D, D) of a layer becomes block-diagonal. The distinct blocks B_i have m rows
each and occur `copies` times:

    log|det W| = copies · Σ_i log|det B_i|          join(B_i · split(x)_i) = W x

    form          layer                                blocks (…, m, m)                    copies
    Dense         plain matrix                         (D, D)                              1
    PerPixel      1×1 convolution                      (groups, C/groups, C/groups)        H·W
    Circular      convolution with circular padding    (groups, H·W, C/groups, C/groups)   1, complex, a block per frequency
    ZeroPadded    convolution with zero padding        (groups, m, m), m = C/groups·H·W    1

Factorising costs O(m³) per block: zero padding needs blocks as large as the image, the other convolutions only small ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from selfnorm.linalg.convmatrix import Geometry, circular_symbols, conv_matrix


class BlockForm(Protocol):
    """A change of basis after which W is block-diagonal. Equal forms make equal blocks from equal weights."""

    @property
    def copies(self) -> int:
        """The number of times each block occurs on the diagonal."""
        ...

    def blocks(self, weight: Tensor) -> Tensor:
        """Returns the distinct blocks (…, m, m), in the precision of the weight."""
        ...

    def rounding(self, weight: Tensor) -> Tensor | float:
        """Returns a bound on the rounding error of the entries, per column (…, m); 0 if they are copied from the weight."""
        ...

    def split(self, x: Tensor) -> Tensor:
        """Returns a batch (N, …) as columns (…, m, n) that the blocks can multiply; n is N·copies."""
        ...

    def join(self, columns: Tensor) -> Tensor:
        """Inverse of `split`: returns columns (…, m, n) as a real batch (N, …)."""
        ...


@dataclass(frozen=True)
class Dense:
    """A plain matrix (D, D) acting on (N, D): one block."""

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
    """A zero-padded convolution on images of size (C, H, W): per group one block of T(w), with C/groups·H·W rows."""

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
    """A circular convolution on images of size (C, H, W): per group and frequency one complex block of C/groups rows."""

    size: tuple[int, int, int]
    geometry: Geometry
    copies: int = 1

    def blocks(self, weight: Tensor) -> Tensor:
        return circular_symbols(weight, self.size[1:], self.geometry)

    def rounding(self, weight: Tensor) -> Tensor:
        # Each entry is a sum over taps, which may cancel.
        taps = weight.shape[-2] * weight.shape[-1]
        sums = weight.abs().sum((-2, -1)).unflatten(0, (self.geometry.groups, -1))
        return taps * torch.finfo(weight.dtype).eps * sums.amax(1, keepdim=True)

    def split(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).unflatten(1, (self.geometry.groups, -1)).flatten(3).permute(1, 3, 2, 0)

    def join(self, columns: Tensor) -> Tensor:
        return torch.fft.ifft2(columns.permute(3, 0, 2, 1).reshape(columns.shape[-1], *self.size)).real


@dataclass(frozen=True)
class PerPixel:
    """A 1×1 convolution on images of size (C, H, W): per group one block of C/groups rows, the same at every pixel."""

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

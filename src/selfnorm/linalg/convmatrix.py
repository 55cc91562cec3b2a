"""Same-size convolutions as matrices.

A same-size convolution is a sum over taps, T(w) = Σ_kl w[:, :, k, l] ⊗ S_k ⊗ S_l, where S_k is the 0/1 matrix that shifts an axis
by the offset of tap k and drops (zero padding) or wraps (circular padding) what leaves the image. Everything that the layers need
follows from this formula: the matrix (`conv_matrix`), its transpose T(w)ᵀ = T(flip w), how often each tap is used (`tap_counts`,
the sum of the entries of S_k), and, for circular padding, the Fourier symbols that make T(w) block-diagonal (`circular_symbols`).

Kernels have shape (C, C/groups, kh, kw) as in torch. A group has contiguous channels, so T(w) is block-diagonal over groups.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

PaddingMode = Literal["zeros", "circular"]
# Up to this many channels, torch's gradient for the input of a convolution takes 2 to 4 times as long as a convolution on a CPU.
MAX_FLIP_CHANNELS = 8


class Geometry(NamedTuple):
    """The properties of a same-size convolution other than its kernel."""

    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    padding_mode: PaddingMode = "zeros"


def convolve(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """Returns T(w)x for a batch of images (N, C, H, W). Cost: O(N·HW·C²/groups·kh·kw)."""
    few = x.device.type == "cpu" and w.shape[0] <= MAX_FLIP_CHANNELS and _kernel_size(w) != (1, 1)
    if few and x.requires_grad and geometry.padding_mode == "zeros" and not torch.compiler.is_compiling():
        return _Convolution.apply(x, w, geometry)
    return _convolve(x, w, geometry)


def _convolve(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    x, padding = _pad(x, _kernel_size(w), geometry)
    return F.conv2d(x, w, padding=padding, dilation=geometry.dilation, groups=geometry.groups)


class _Convolution(torch.autograd.Function):
    """Returns zero-padded T(w)x; its gradient for x is a convolution with flip w. Supports both modes of autograd, any order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
        return _convolve(x, w, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, ctx.geometry = inputs
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        wants_x, wants_w, _ = ctx.needs_input_grad
        grad_x = convolve(grad, flip(w, ctx.geometry.groups), ctx.geometry) if wants_x else None
        grad_w = kernel_gradient(x, grad, _kernel_size(w), ctx.geometry) if wants_w else None
        return grad_x, grad_w, None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, w_tangent: Tensor | None, _: None) -> Tensor:
        x, w = ctx.saved_tensors
        terms = [_convolve(a, b, ctx.geometry) for a, b in ((x_tangent, w), (x, w_tangent)) if a is not None and b is not None]
        return sum(terms[1:], terms[0])


def kernel_gradient(x: Tensor, grad_z: Tensor, kernel_size: tuple[int, int], geometry: Geometry) -> Tensor:
    """Returns Σ_n ∂⟨T(w)x_n, grad_z_n⟩/∂w: the gradient of the kernel, given grad_z (N, C, H, W), that of T(w)x."""
    channels = x.shape[1]
    x, padding = _pad(x, kernel_size, geometry)
    shape = (channels, channels // geometry.groups, *kernel_size)
    return conv2d_weight(x, shape, grad_z, padding=padding, dilation=geometry.dilation, groups=geometry.groups)


def flip(w: Tensor, groups: int = 1) -> Tensor:
    """Returns the kernel of the transpose, T(flip w) = T(w)ᵀ: in each group, channels are swapped and both axes mirrored."""
    channels, per_group, kh, kw = w.shape
    blocks = w.reshape(groups, channels // groups, per_group, kh, kw)
    return blocks.transpose(1, 2).flip(-2, -1).reshape(channels, per_group, kh, kw)


def resize_kernel(w: Tensor, kernel_size: tuple[int, int]) -> Tensor:
    """Returns w, cut or padded with zeros around its centre to another odd size."""
    kh, kw = _kernel_size(w)
    rows, columns = (kernel_size[0] - kh) // 2, (kernel_size[1] - kw) // 2
    return F.pad(w, (columns, columns, rows, rows))  # negative padding cuts


def dirac(channels: int, kernel_size: tuple[int, int], groups: int = 1) -> Tensor:
    """Returns the kernel of the identity map, (channels, channels/groups, *kernel_size)."""
    identity = torch.eye(channels // groups).repeat(groups, 1)
    return resize_kernel(identity[:, :, None, None], kernel_size)


def tap_counts(
    kernel_size: tuple[int, int], size: tuple[int, int], geometry: Geometry, device: torch.device | None = None
) -> Tensor:
    """Returns how often each tap occurs in T(w) for one pair of channels, (kh, kw): m in the paper."""
    rows, columns = (
        _axis_counts(taps, length, dilation, geometry.padding_mode, device)
        for taps, length, dilation in zip(kernel_size, size, geometry.dilation, strict=True)
    )
    return torch.outer(rows, columns)


def conv_matrix(w: Tensor, size: tuple[int, int], geometry: Geometry) -> Tensor:
    """Returns the blocks of T(w), (groups, D, D) with D = C/groups·H·W. Cost: O(groups·D²·kh).

    Block g acts on the flattened channels of group g, (N, D).
    """
    rows, columns = (
        _shifts(taps, length, dilation, geometry.padding_mode, w)
        for taps, length, dilation in zip(_kernel_size(w), size, geometry.dilation, strict=True)
    )
    kernel = _grouped(w, geometry.groups)
    # (groups, out, in, kh, kw) -> shift columns, then rows -> (groups, out, H, W, in, H', W')
    wide = torch.einsum("goikl,lvw->goikvw", kernel, columns)
    matrix = torch.einsum("goikvw,khj->gohvijw", wide, rows)
    block = kernel.shape[1] * math.prod(size)
    return matrix.reshape(geometry.groups, block, block)


def tap_sums(blocks: Tensor, kernel_size: tuple[int, int], size: tuple[int, int], geometry: Geometry) -> Tensor:
    """Returns, for each tap, the sum of the entries of `blocks` (groups, D, D) where T(w) holds that tap: (C, C/groups, kh, kw).

    This is the adjoint of `conv_matrix`: ⟨M, T(w)⟩ = ⟨tap_sums(M), w⟩. Each tap occupies diagonals, and only these are read.
    Cost: O(C²/groups·HW·kh·kw).
    """
    matrix = blocks.unflatten(2, (-1, *size)).unflatten(1, (-1, *size))  # (groups, out, H, W, in, H', W')
    rows, columns = (
        _diagonals(taps, length, dilation, geometry.padding_mode)
        for taps, length, dilation in zip(kernel_size, size, geometry.dilation, strict=True)
    )
    sums = []
    for row, column in itertools.product(rows, columns):
        parts = [matrix.diagonal(down, 2, 5).diagonal(right, 2, 4).sum((-2, -1)) for down in row for right in column]
        sums.append(functools.reduce(torch.add, parts))  # (groups, out, in)
    return torch.stack(sums, -1).unflatten(-1, kernel_size).flatten(0, 1)


def circular_symbols(w: Tensor, size: tuple[int, int], geometry: Geometry) -> Tensor:
    """Returns the blocks of T(w) in the Fourier basis, for circular padding. Cost: O(HW·C²·kh).

    Shape: (groups, H·W, C/groups, C/groups), complex; one block for each group and frequency.
    """
    rows, columns = (
        _phases(taps, length, dilation, w)
        for taps, length, dilation in zip(_kernel_size(w), size, geometry.dilation, strict=True)
    )
    kernel = _grouped(w, geometry.groups).to(rows.dtype)
    wide = torch.einsum("goikl,lv->gvoik", kernel, columns)
    return torch.einsum("gvoik,kh->ghvoi", wide, rows).flatten(1, 2)


def least_squares_inverse(w: Tensor, kernel_size: tuple[int, int], groups: int = 1) -> Tensor:
    """Returns the kernel r that minimises ‖r ⋆ w − δ‖, the best inverse of this size away from the border of the image.

    Exact for 1×1 kernels. Dilation has no effect: both kernels live on the same dilated lattice. Cost: in each group one
    least-squares problem of C/groups·(kh+rh−1)·(kw+rw−1) equations for C/groups·rh·rw unknowns.
    """
    kh, kw = _kernel_size(w)
    plane = (kernel_size[0] + kh - 1, kernel_size[1] + kw - 1)
    # r ⋆ w is linear in r. On a plane just large enough to hold the composed kernel, row (i, a, b) of `composed` is w applied to
    # a unit at tap (i, a, b) of r, and the target is the kernel of the identity.
    kernel = _grouped(w, groups)
    channels = kernel.shape[1]
    taps = torch.eye(channels * math.prod(kernel_size), dtype=w.dtype, device=w.device)
    taps = resize_kernel(taps.reshape(-1, channels, *kernel_size), plane)
    target = resize_kernel(dirac(channels, (1, 1)).to(taps), plane).flatten(1)
    solutions = []
    for group in kernel:
        composed = F.conv2d(taps, flip(group), padding=(kh // 2, kw // 2)).flatten(1)
        solutions.append(torch.linalg.lstsq(composed.T, target.T).solution.T.reshape(-1, channels, *kernel_size))
    return torch.cat(solutions)


def _kernel_size(w: Tensor) -> tuple[int, int]:
    return w.shape[-2], w.shape[-1]


def _grouped(w: Tensor, groups: int) -> Tensor:
    """Returns w as (groups, C/groups, C/groups, kh, kw)."""
    return w.reshape(groups, w.shape[0] // groups, *w.shape[1:])


def _offsets(taps: int, dilation: int, device: torch.device | None) -> Tensor:
    """Returns the distance of each tap from the centre of the kernel, (taps,); `step` is the dilation."""
    return (torch.arange(taps, device=device) - taps // 2) * dilation


def _pad(x: Tensor, kernel_size: tuple[int, int], geometry: Geometry) -> tuple[Tensor, tuple[int, int]]:
    """Returns the input, wrapped around if circular, and the zero padding that torch's convolution has to add."""
    rows, columns = (dilation * (taps // 2) for taps, dilation in zip(kernel_size, geometry.dilation, strict=True))
    if geometry.padding_mode == "zeros" or rows == columns == 0:
        return x, (rows, columns)
    return F.pad(x, (columns, columns, rows, rows), mode="circular"), (0, 0)


def _axis_counts(taps: int, length: int, dilation: int, mode: PaddingMode, device: torch.device | None) -> Tensor:
    """Returns how many outputs along an axis read the image through each tap, (taps,)."""
    offsets = _offsets(taps, dilation, device)
    if mode == "circular":
        return torch.full_like(offsets, length)
    return (length - offsets.abs()).clamp(min=0)


def _shifts(taps: int, length: int, dilation: int, mode: PaddingMode, like: Tensor) -> Tensor:
    """Returns S (taps, length, length): S[k, i, j] = 1 where output i reads input j through tap k."""
    position = torch.arange(length, device=like.device)
    reads = position[None, :, None] + _offsets(taps, dilation, like.device)[:, None, None]
    if mode == "circular":
        reads = reads % length
    return (reads == position).to(like.dtype)


def _diagonals(taps: int, length: int, dilation: int, mode: PaddingMode) -> list[tuple[int, ...]]:
    """Returns, for each tap k, the diagonals of S_k (length, length) that hold ones: two if the tap wraps around."""
    offsets = [(tap - taps // 2) * dilation for tap in range(taps)]
    if mode == "circular":
        return [(offset % length, offset % length - length) for offset in offsets]
    return [(offset,) for offset in offsets]


def _phases(taps: int, length: int, dilation: int, like: Tensor) -> Tensor:
    """Returns (taps, length): a tap at offset d multiplies frequency f by exp(2πi·f·d/length)."""
    angle = torch.outer(_offsets(taps, dilation, like.device), torch.arange(length, device=like.device)) % length
    angle = angle.to(like.dtype) * (2 * math.pi / length)
    return torch.polar(torch.ones_like(angle), angle)

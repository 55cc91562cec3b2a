"""A convolution whose inverse R is tracked: one kernel for the forward pass and one for R's part, two for the backward pass.

If W = T(w) is a convolution, a row of RW is flip(w) ⋆ (that row of R, seen as an image). So the product of Newton–Schulz and the
pass after it are one kernel, `error_of_convolution`. Where TF32 is allowed, its products are made of three TF32 ones, since I −
RW is a small difference of large numbers.

The gradient of log|det T(w)|, with R for T(w)⁻¹, is for each tap (o, i, k, l) the sum of the entries of Rᵀ where T(w) holds that
tap: R[(i, p + offset of (k, l)), (o, p)] over the pixels p that read a pixel through it. `tap_means` reads these H·W·C²·kh·kw
numbers only, and depends on the forward pass only. Float32; images and kernels as `choice.small_images` says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.conv.convolution import conv_backward, conv_forward
from selfnorm.kernels.conv.tiles import convolved, image_constants, image_tile, image_tiles, tap_offset
from selfnorm.kernels.dispatch import allows_tf32
from selfnorm.kernels.numerics import index_type, quotient_and_remainder
from selfnorm.kernels.vectors import fill_vector
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.context import current_step


class FusedTrackedConv2d(torch.autograd.Function):
    """x (N, C, H, W), w, b (C,) or None, R -> w ⋆ x + b, and zeros (N,) whose gradient for w is that of log|det T(w)|.

    R, the tracked inverse, stands for T(w)⁻¹. Its part of the gradient is computed alongside the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, R: Tensor) -> tuple[Tensor, Tensor]:
        # One allocation, so that all memory that lives as long as log_det exists when the branch writes to it.
        log_det, of_log_det = x.new_empty(x.shape[0] + w.numel()).tensor_split([x.shape[0]])
        of_log_det = of_log_det.view(w.shape)
        with current_step().on_side_stream():  # neither is needed before the end of the step
            tap_means(R, w, (x.shape[2], x.shape[3]), of_log_det, log_det)
        ctx.save_for_backward(x, w, of_log_det)
        return conv_forward(x, w, b)[0], log_det

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        refuse_second_derivative()
        x, w, of_log_det = ctx.saved_tensors
        grad_x, grad_w, grad_b = conv_backward(
            x, w, grad_z, grad_log_det=grad_log_det, inverse_transposed=of_log_det, wants_x=ctx.needs_input_grad[0]
        )
        return grad_x, grad_w, grad_b if ctx.needs_input_grad[2] else None, None


def error_of_convolution(R: Tensor, w: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns E = I − R T(w) (D, D) for images of this size, and partial sums of E² (D,): one kernel."""
    images = R.contiguous().view(-1, w.shape[1], *size)
    error, squares = torch.empty_like(images), R.new_empty(R.shape[0])
    shape = image_constants(images) | {"PRECISION": "tf32x3" if allows_tf32() else "ieee"}
    _convolution_error_kernel[(R.shape[0],)](
        images, w.contiguous(), error, squares, KH=w.shape[2], KW=w.shape[3], **shape, **image_tiles(images)
    )  # fmt: skip
    return error.view_as(R), squares


def tap_means(R: Tensor, w: Tensor, size: tuple[int, int], out: Tensor, zeros: Tensor) -> None:
    """Writes ∂log|det T(w)|/∂w / HW to `out` (like w), for images of this size, and 0 to all of `zeros` (N,): one kernel.

    R: the inverse of T(w) (D, D), or of a 1×1 kernel's matrix (C, C), whose HW copies T(w) then is.
    """
    channels, pixels = w.shape[1], size[0] * size[1]
    # With few taps there are only a few programs, each with long sums; with many, a program takes several taps.
    columns = 1 if w.numel() <= 512 else 8
    _tap_means_kernel[(triton.cdiv(w.numel(), columns),)](
        R.contiguous(), out, zeros, zeros.numel(), C=channels, H=size[0], W=size[1], KH=w.shape[2], KW=w.shape[3],
        PIXELS=min(triton.next_power_of_2(pixels), 1024 // columns), COLUMNS=columns, INDEX=index_type(R.numel()), num_warps=4,
    )  # fmt: skip


@triton.jit
def _convolution_error_kernel(
    images, kernel, error, squares,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A row of R for each program."""
    n = tl.program_id(0)
    image = n.to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    total = tl.zeros((OUT, PIXELS), tl.float32)
    for start in range(0, H * W, PIXELS):
        pixel, places, valid = image_tile(0, start, out, C, H, W, PIXELS)
        product = convolved(images + image, kernel, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION)
        off = tl.where(valid, tl.where(places == n, 1.0, 0.0) - product, 0.0)
        tl.store(error + image + places, off, mask=valid)
        total += off * off
    tl.store(squares + n, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def _tap_means_kernel(
    R, means, zeros, examples, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Some of w's entries for each program."""
    TAPS: tl.constexpr = KH * KW
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < C * C * TAPS
    o, i, tap = column // (C * TAPS), column // TAPS % C, column % TAPS
    if TAPS > 1:
        down, right = tap_offset(tap, KH, KW, TAPS)
        # From row (i, p + offset), column (o, p); with p both move by one.
        first = (i * (H * W) + down * W + right).to(INDEX) * (C * H * W) + o * (H * W)
        found = tl.zeros((PIXELS, COLUMNS), tl.float32)
        for start in range(0, H * W, PIXELS):
            pixel = start + tl.arange(0, PIXELS)
            row, place = quotient_and_remainder(pixel, W, H * W + PIXELS)
            row, place = row[:, None] + down[None, :], place[:, None] + right[None, :]
            inside = (pixel < H * W)[:, None] & valid[None, :] & (row >= 0) & (row < H) & (place >= 0) & (place < W)
            found += tl.load(R + first[None, :] + (pixel.to(INDEX) * (C * H * W + 1))[:, None], mask=inside, other=0.0)
        mean = tl.sum(found, axis=0) / (H * W)
    else:
        mean = tl.load(R + i * C + o, mask=valid, other=0.0)
    tl.store(means + column, mean, mask=valid)
    if tl.program_id(0) == 0:
        fill_vector(zeros, examples, 0.0)

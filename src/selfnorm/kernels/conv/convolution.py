"""One convolution of small images, z = w ⋆ x + b: one kernel for the forward pass, two for the backward pass.

    g_x = flip(w) ⋆ g,    ∂w = Σ_n corr(x, g) + HW·h·s,    ∂b = Σ_n Σ_pixels g,    h = Σ g_log_det

for the gradient g of z. s is the log-determinant's gradient at one pixel: 1 / w[c, c, centre] on the diagonal if T(w) is
triangular, W⁻ᵀ if w is a 1×1 kernel W, and what the caller passes otherwise. No program needs a whole image, so tiles are
`batch_tiles`. In the backward pass one program computes g_x and another one the rest, which reads g once more than a single
program would.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.conv.tiles import (
    batch_sum_tiles,
    batch_tile,
    batch_tiles,
    column_sums,
    convolved,
    image_constants,
    kernel_sides,
    patches,
    share_tiles,
    store_taps,
    unrolled,
)
from selfnorm.kernels.dense.small_determinants import repeated_slogdet
from selfnorm.kernels.vectors import fill_vector, vector_sum
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.context import current_step

LogDetOf = Literal["triangular", "mixing"]


class FusedConv(torch.autograd.Function):
    """x (N, C, H, W), w, b or None -> w ⋆ x + b, and log|det T(w)| (N,) or None.

    log_det_of:  which matrix to take the log-determinant of: "triangular", a triangular T(w); "mixing", that of a 1×1 kernel, by
                 one more kernel that runs alongside the others; None, no log-determinant.
    taps:        which entries of w count (bool, like w), or None for all.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, log_det_of: LogDetOf | None = None, taps: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        log_det: Tensor | None
        inverse_transposed: Tensor | None = None
        if log_det_of == "mixing":
            with current_step().on_side_stream(w):  # not needed before the end of the step
                log_det, inverse_transposed = repeated_slogdet(w.flatten(1), x.shape[2] * x.shape[3], x.shape[0])
            z, _ = conv_forward(x, w, b, taps)
        else:
            z, log_det = conv_forward(x, w, b, taps, log_det_of == "triangular")
        ctx.save_for_backward(x, w, taps, inverse_transposed)
        ctx.has_bias, ctx.has_log_det = b is not None, log_det_of is not None
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(
        ctx: Any, grad_z: Tensor, grad_log_det: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor | None, None, None]:
        refuse_second_derivative()
        x, w, taps, inverse_transposed = ctx.saved_tensors
        grad_x, grad_w, grad_b = conv_backward(
            x, w, grad_z, taps, grad_log_det if ctx.has_log_det else None, inverse_transposed, ctx.needs_input_grad[0]
        )
        return grad_x, grad_w, grad_b if ctx.has_bias else None, None, None


def conv_forward(
    x: Tensor, kernel: Tensor, bias: Tensor | None, taps: Tensor | None = None, triangular: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns z = w ⋆ x + b for x (N, C, H, W), and HW·Σ_c log|w[c, c, centre]| (N,) if T(w) is triangular.

    Reads x once, writes z once.
    taps: which entries of the kernel count (bool, like the kernel); the others are taken as 0.
    """
    x, kernel, taps = x.contiguous(), kernel.contiguous(), _bytes(taps)
    bias = None if bias is None else bias.contiguous()
    z, log_det = torch.empty_like(x), x.new_empty(x.shape[0]) if triangular else None
    tiles = batch_tiles(x, kernel)
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    _conv_forward[(triton.cdiv(pixels, tiles["PIXELS"]),)](
        x, kernel, taps, bias, z, log_det, pixels, x.shape[0],
        **kernel_sides(kernel), **image_constants(x), **tiles,
    )  # fmt: skip
    return z, log_det


def conv_backward(
    x: Tensor,
    kernel: Tensor,
    grad_z: Tensor,
    taps: Tensor | None = None,
    grad_log_det: Tensor | None = None,
    inverse_transposed: Tensor | None = None,
    wants_x: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Returns the gradients for x, the kernel and the bias (C,), by two kernels.

    The first kernel reads g twice and x once, and writes g_x. grad_log_det: the gradient (N,) for the log-determinant, or None.
    inverse_transposed: s, one value for each of the kernel's entries and in their order; None if T(w) is triangular.
    """
    x, kernel, grad_z, taps = x.contiguous(), kernel.contiguous(), grad_z.contiguous(), _bytes(taps)
    grad_x = torch.empty_like(x) if wants_x else None
    grad_k, grad_b = torch.empty_like(kernel), x.new_empty(x.shape[1])
    tiles = batch_tiles(x, kernel)
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    each, rows = share_tiles(pixels, tiles)
    partial = x.new_empty(rows, kernel.numel() + x.shape[1])
    sides = kernel_sides(kernel)
    shape = image_constants(x)
    _conv_backward[(rows, 2 if wants_x else 1)](
        x, kernel, taps, grad_z, grad_x, partial, pixels, EACH=each, **sides, **shape, **tiles
    )  # fmt: skip
    del shape["PRECISION"]
    grad_log_det = None if grad_log_det is None else grad_log_det.contiguous()
    _conv_finish[(triton.cdiv(partial.shape[1], 32),)](
        partial, kernel, taps, grad_log_det, inverse_transposed, grad_k, grad_b, rows, x.shape[0],
        **sides, **shape, **batch_sum_tiles(rows, x.shape[0]),
    )  # fmt: skip
    return grad_x, grad_k, grad_b


def _bytes(taps: Tensor | None) -> Tensor | None:
    return None if taps is None else taps.contiguous().view(torch.uint8)


@triton.jit
def _conv_forward(
    x_ptr, kernel_ptr, taps_ptr, bias_ptr, z_ptr, log_det_ptr, pixels, examples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    out = tl.arange(0, OUT)
    image, pixel, places, valid = batch_tile(tl.program_id(0), pixels, out, C, H, W, PIXELS)
    z = convolved(x_ptr + image, kernel_ptr, taps_ptr, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, False, PRECISION)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + out, mask=out < C, other=0.0)[:, None]
    tl.store(z_ptr + places, z, mask=valid)
    if log_det_ptr is not None:
        if tl.program_id(0) == 0:
            diagonal = tl.load(kernel_ptr + out * ((C + 1) * KH * KW) + KH * KW // 2, mask=out < C, other=1.0)
            log_det = H * W * tl.sum(tl.log(tl.abs(diagonal)), axis=0)
            fill_vector(log_det_ptr, examples, log_det)


@triton.jit
def _conv_backward(
    x_ptr, kernel_ptr, taps_ptr, grad_z_ptr, grad_x_ptr, partial_ptr, pixels, EACH: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TAPS: tl.constexpr = KH * KW
    out, k = tl.arange(0, OUT), tl.arange(0, DEPTH)
    row = tl.program_id(0)
    if tl.program_id(1) == 1:
        for step in range(EACH):
            image, pixel, places, valid = batch_tile(row * EACH + step, pixels, out, C, H, W, PIXELS)
            grad_x = convolved(
                grad_z_ptr + image, kernel_ptr, taps_ptr, pixel, out,
                C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION,
            )  # fmt: skip
            if grad_x_ptr is not None:
                tl.store(grad_x_ptr + places, grad_x, mask=valid)
    else:
        partial = partial_ptr + row.to(tl.int64) * (C * C * TAPS + C)
        arriving = tl.zeros((OUT, PIXELS), tl.float32)
        for first in tl.range(0, TAPS, DEPTH // WIDTH, loop_unroll_factor=unrolled(TAPS, DEPTH // WIDTH, C, PRECISION)):
            total = tl.zeros((OUT, DEPTH), tl.float32)
            products = tl.zeros((OUT, PIXELS), tl.float32)  # of a single channel
            for step in range(EACH):
                image, pixel, places, valid = batch_tile(row * EACH + step, pixels, out, C, H, W, PIXELS)
                grad = tl.load(grad_z_ptr + places, mask=valid, other=0.0)
                if first == 0:
                    arriving += grad
                taken = patches(x_ptr + image, pixel, k, first, C, H, W, KH, KW, WIDTH)
                if C == 1:
                    products += taken * grad
                else:
                    total = tl.dot(grad, tl.trans(taken), total, input_precision=PRECISION)
            store_taps(partial, total, products, k, first, out, C, TAPS, WIDTH, PRECISION)
        tl.store(partial + C * C * TAPS + out, tl.sum(arriving, axis=1), mask=out < C)


@triton.jit
def _conv_finish(
    partial_ptr, kernel_ptr, taps_ptr, grad_log_det_ptr, inverse_ptr, grad_k_ptr, grad_b_ptr, rows, examples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, EXAMPLE_STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up the rows and the log-determinant's term. Columns are the kernel's entries, then the bias."""
    TAPS: tl.constexpr = KH * KW
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = column_sums(partial_ptr, column, C * C * TAPS + C, rows, ROWS, STEPS, COLUMNS)
    of_kernel = column < C * C * TAPS
    tl.store(grad_b_ptr + column - C * C * TAPS, total, mask=(column >= C * C * TAPS) & (column < C * C * TAPS + C))
    if grad_log_det_ptr is not None:
        weight = H * W * vector_sum(grad_log_det_ptr, examples, 1, ROWS, EXAMPLE_STEPS)
        if inverse_ptr is not None:
            total += weight * tl.load(inverse_ptr + column, mask=of_kernel, other=0.0)
        else:
            diagonal = of_kernel & (column % TAPS == TAPS // 2) & (column // (C * TAPS) == column // TAPS % C)
            total += tl.where(diagonal, weight / tl.load(kernel_ptr + column, mask=diagonal, other=1.0), 0.0)
    if taps_ptr is not None:
        total = tl.where(tl.load(taps_ptr + column, mask=of_kernel, other=0) != 0, total, 0.0)
    tl.store(grad_k_ptr + column, total, mask=of_kernel)

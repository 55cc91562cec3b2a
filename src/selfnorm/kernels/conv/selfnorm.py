"""The self-normalizing convolution of small images: one kernel for the forward pass, two for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.conv.tiles import (
    column_sums,
    convolved,
    correlate,
    image_constants,
    image_sum_tiles,
    image_tile,
    image_tiles,
    tap_offset,
)
from selfnorm.kernels.vectors import vector_sum
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative


class FusedSelfNormConv2d(torch.autograd.Function):
    """x (N, C, H, W), kernels w, r, b or None -> w ⋆ x + b, zeros (N,), ‖r ⋆ w ⋆ x − x‖² (N, 1).

    The zeros carry the log-determinant's gradient. `selfnorm_conv_backward` has the formulas of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, inverse_likelihood: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, z, error, log_det, squares = selfnorm_conv_forward(x, w, r, b)
        ctx.save_for_backward(x, z, error, w, r)
        ctx.has_bias, ctx.inverse_likelihood = b is not None, inverse_likelihood
        return out, log_det, squares

    @staticmethod
    @backward_in_full_precision
    def backward(
        ctx: Any, grad_z: Tensor, grad_log_det: Tensor, grad_reconstruction: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None, None]:
        refuse_second_derivative()
        x, z, error, w, r = ctx.saved_tensors
        grad_x, grad_w, grad_r, grad_b = selfnorm_conv_backward(
            x, z, error, w, r, grad_z, grad_log_det, grad_reconstruction, ctx.inverse_likelihood, ctx.needs_input_grad[0]
        )
        return grad_x, grad_w, grad_r, grad_b if ctx.has_bias else None, None


def selfnorm_conv_forward(x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns w ⋆ x + b, z = w ⋆ x, e = r ⋆ z − x, zeros (N,) and ‖e‖² (N, 1), for x (N, C, H, W): one kernel.

    Reads x and writes three tensors of its size. Without a bias the first two results are one tensor.
    """
    x, w, r = x.contiguous(), w.contiguous(), r.contiguous()
    z, error = torch.empty_like(x), torch.empty_like(x)
    out = z if bias is None else torch.empty_like(x)
    log_det, squares = x.new_empty(x.shape[0]), x.new_empty(x.shape[0], 1)
    _selfnorm_conv_forward[(x.shape[0],)](
        x, w, r, bias, out, z, error, log_det, squares,
        KH=w.shape[2], KW=w.shape[3], RH=r.shape[2], RW=r.shape[3],
        **image_constants(x), **image_tiles(x, taps=_most_taps(w, r)),
    )  # fmt: skip
    return out, z, error, log_det, squares


def selfnorm_conv_backward(
    x: Tensor,
    z: Tensor,
    error: Tensor,
    w: Tensor,
    r: Tensor,
    grad_z: Tensor,
    grad_log_det: Tensor,
    grad_squares: Tensor,
    inverse_likelihood: bool = True,
    input_gradient: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Returns the self-normalizing gradients for x, w, r and the bias (C,), by two kernels.

        g_x = flip(w) ⋆ g_z,    g_w = s_w·g_z + 2g_s·flip(r) ⋆ e,    g_r = 2g_s·e − s_r·g_x
        ∂w = Σ_n corr(x, g_w) + s_w·h·flip(r)·m,    ∂r = Σ_n corr(z, g_r) − s_r·h·flip(w)·m,    ∂b = Σ_n Σ_pixels g_z

    with h = Σ g_log_det and s_w, s_r the `likelihood_shares`. One-sided, g_x is left out and None is returned if there is no
    `input_gradient`. In the first kernel each tile of pixels has two programs, one for w's gradient and one for r's; g_w and g_r
    are never stored.
    """
    x, w, r, grad_z = x.contiguous(), w.contiguous(), r.contiguous(), grad_z.contiguous()
    tiles = image_tiles(x, 64, _most_taps(w, r))
    rows = x.shape[0] * triton.cdiv(x.shape[2] * x.shape[3], tiles["PIXELS"])
    partial = x.new_empty(rows, w.numel() + r.numel() + x.shape[1])
    grad_x = torch.empty_like(x) if inverse_likelihood or input_gradient else None
    grad_w, grad_r, grad_b = torch.empty_like(w), torch.empty_like(r), x.new_empty(x.shape[1])
    sides: dict[str, Any] = {"KH": w.shape[2], "KW": w.shape[3], "RH": r.shape[2], "RW": r.shape[3]}
    sides["INVERSE_LIKELIHOOD"] = inverse_likelihood
    shape = image_constants(x)
    _selfnorm_conv_backward[(rows, 2)](
        x, z, error, w, r, grad_z, grad_squares.contiguous(), grad_x, partial, **sides, **shape, **tiles
    )  # fmt: skip
    del shape["PRECISION"]
    _selfnorm_conv_finish[(triton.cdiv(partial.shape[1], 32),)](
        partial, w, r, grad_log_det.contiguous(), grad_w, grad_r, grad_b, x.shape[0], rows,
        **sides, **shape, **image_sum_tiles(rows),
    )  # fmt: skip
    return grad_x, grad_w, grad_r, grad_b


def _most_taps(*kernels: Tensor) -> int:
    return max(kernel.shape[2] * kernel.shape[3] for kernel in kernels)


@triton.jit
def _selfnorm_conv_forward(
    x_ptr, w_ptr, r_ptr, bias_ptr, out_ptr, z_ptr, error_ptr, log_det_ptr, squares_ptr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One image per program. r reads the z that all of the program's threads wrote, hence the barrier in between."""
    n = tl.program_id(0)
    image = n.to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    for start in range(0, H * W, PIXELS):
        pixel, places, valid = image_tile(image, start, out, C, H, W, PIXELS)
        z = convolved(x_ptr + image, w_ptr, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, False, PRECISION)
        tl.store(z_ptr + places, z, mask=valid)
        if bias_ptr is not None:
            tl.store(out_ptr + places, z + tl.load(bias_ptr + out, mask=out < C, other=0.0)[:, None], mask=valid)
    tl.debug_barrier()
    squares = tl.zeros((OUT, PIXELS), tl.float32)
    for start in range(0, H * W, PIXELS):
        pixel, places, valid = image_tile(image, start, out, C, H, W, PIXELS)
        back = convolved(z_ptr + image, r_ptr, None, pixel, out, C, H, W, RH, RW, PIXELS, OUT, WIDTH, DEPTH, False, PRECISION)
        error = tl.where(valid, back - tl.load(x_ptr + places, mask=valid, other=0.0), 0.0)
        tl.store(error_ptr + places, error, mask=valid)
        squares += error * error
    tl.store(squares_ptr + n, tl.sum(tl.sum(squares, axis=1), axis=0))
    tl.store(log_det_ptr + n, 0.0)


@triton.jit
def _selfnorm_conv_backward(
    x_ptr, z_ptr, error_ptr, w_ptr, r_ptr, grad_z_ptr, grad_squares_ptr, grad_x_ptr, partial_ptr,
    INVERSE_LIKELIHOOD: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (H * W + PIXELS - 1) // PIXELS
    W_NUMEL: tl.constexpr = C * C * KH * KW
    R_NUMEL: tl.constexpr = C * C * RH * RW
    n = tl.program_id(0) // BLOCKS
    image = n.to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    pixel, places, valid = image_tile(image, tl.program_id(0) % BLOCKS * PIXELS, out, C, H, W, PIXELS)
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * (W_NUMEL + R_NUMEL + C)
    twice = 2 * tl.load(grad_squares_ptr + n)
    if tl.program_id(1) == 0:
        grad_z = tl.load(grad_z_ptr + places, mask=valid, other=0.0)
        tl.store(partial + W_NUMEL + R_NUMEL + out, tl.sum(grad_z, axis=1), mask=out < C)
        back = convolved(error_ptr + image, r_ptr, None, pixel, out, C, H, W, RH, RW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION)
        if INVERSE_LIKELIHOOD:
            grad_z /= 2
        grad = tl.where(valid, grad_z + twice * back, 0.0)
        correlate(x_ptr + image, grad, partial, pixel, out, C, H, W, KH, KW, WIDTH, DEPTH, PRECISION)
    else:
        grad = twice * tl.load(error_ptr + places, mask=valid, other=0.0)
        if grad_x_ptr is not None:
            grad_x = convolved(
                grad_z_ptr + image, w_ptr, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION
            )
            tl.store(grad_x_ptr + places, grad_x, mask=valid)
            if INVERSE_LIKELIHOOD:
                grad = tl.where(valid, grad - grad_x / 2, 0.0)
        correlate(z_ptr + image, grad, partial + W_NUMEL, pixel, out, C, H, W, RH, RW, WIDTH, DEPTH, PRECISION)


@triton.jit
def _flip_times_count(
    other, at, valid,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
):  # fmt: skip
    """flip(other)·m at entries of a kernel (C, C, KH, KW), with other (C, C, OH, OW) cropped or padded to that size.

    Where the mask `valid` is false, `at` may be any number and the result is arbitrary.
    """
    TAPS: tl.constexpr = KH * KW
    tap = at % TAPS
    down, right = tap_offset(tap, KH, KW)
    row, column = OH // 2 - down, OW // 2 - right
    valid = valid & (row >= 0) & (row < OH) & (column >= 0) & (column < OW)
    turned = ((at // TAPS % C) * C + at // (TAPS * C)) * (OH * OW) + row * OW + column
    count = tl.maximum(H - tl.abs(down), 0) * tl.maximum(W - tl.abs(right), 0)
    return tl.load(other + turned, mask=valid, other=0.0) * count


@triton.jit
def _selfnorm_conv_finish(
    partial_ptr, w_ptr, r_ptr, grad_log_det_ptr, grad_w_ptr, grad_r_ptr, grad_b_ptr, n, rows, INVERSE_LIKELIHOOD: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up the rows and the log-determinant's terms. Columns are w's entries, then r's, then the bias."""
    W_NUMEL: tl.constexpr = C * C * KH * KW
    R_NUMEL: tl.constexpr = C * C * RH * RW
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = column_sums(partial_ptr, column, W_NUMEL + R_NUMEL + C, rows, ROWS, STEPS, COLUMNS)
    share = vector_sum(grad_log_det_ptr, n, 1, ROWS, STEPS)
    if INVERSE_LIKELIHOOD:
        share /= 2
    of_w = column < W_NUMEL
    tl.store(grad_w_ptr + column, total + share * _flip_times_count(r_ptr, column, of_w, C, H, W, KH, KW, RH, RW), mask=of_w)
    at = column - W_NUMEL
    of_r = (at >= 0) & (at < R_NUMEL)
    of_likelihood = 0.0
    if INVERSE_LIKELIHOOD:
        of_likelihood = share * _flip_times_count(w_ptr, at, of_r, C, H, W, RH, RW, KH, KW)
    tl.store(grad_r_ptr + at, total - of_likelihood, mask=of_r)
    at = at - R_NUMEL
    tl.store(grad_b_ptr + at, total, mask=(at >= 0) & (at < C))

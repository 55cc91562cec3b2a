"""The first terms of a convolution's exponential, for small images: one kernel for the forward pass, three for the backward pass.

With t_0 = x and t_i = k ⋆ t_{i−1} / i, the series is z = x + t_1 + … + t_I + b. For the gradient g of z and

    s_I = g / I,    s_i = (g + flip(k) ⋆ s_{i+1}) / i

the gradients are g_x = g + flip(k) ⋆ s_1 and ∂k = Σ_n Σ_i corr(t_{i−1}, s_i), and Σ_n Σ_pixels g for the bias. The
log-determinant is HW times the sum of the diagonal k[c, c, centre]. A program processes one image (`image_tiles`), so a chain of
I convolutions is one kernel. ∂k needs no whole image: there a program takes some taps and a tile of all the batch's pixels
(`batch_tiles`).
"""

from __future__ import annotations

from typing import Any

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
    image_tile,
    image_tiles,
    kernel_sides,
    patches,
    share_tiles,
    store_taps,
    unrolled,
)
from selfnorm.kernels.vectors import vector_sum
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative


class FusedConvSeries(torch.autograd.Function):
    """x (N, C, H, W), k, b, terms -> Σ_{i ≤ terms} T(k)ⁱx / i! + b, and its log-determinant (N,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, b: Tensor, terms: int) -> tuple[Tensor, Tensor]:
        z, log_det, kept = series_forward(x, k, b, terms)
        ctx.save_for_backward(x, k, kept)
        ctx.terms = terms
        return z, log_det

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        refuse_second_derivative()
        x, k, kept = ctx.saved_tensors
        return *series_backward(x, k, kept, grad_z, grad_log_det, ctx.terms), None


def series_forward(x: Tensor, kernel: Tensor, bias: Tensor | None, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns z = x + t_1 + … + t_terms + b, its log-determinant (N,), and t_1 … t_{terms−1} (terms − 1, N, C, H, W).

    One kernel, which reads x once and writes z and the terms.
    """
    x, kernel = x.contiguous(), kernel.contiguous()
    z, log_det = torch.empty_like(x), x.new_empty(x.shape[0])
    kept = x.new_empty(terms - 1, *x.shape)
    _series_forward[(x.shape[0],)](
        x, kernel, bias, z, kept, log_det, x.numel(), TERMS=terms,
        **kernel_sides(kernel), **image_constants(x), **_series_tiles(x, kernel),
    )  # fmt: skip
    return z, log_det, kept


def series_backward(
    x: Tensor, kernel: Tensor, kept: Tensor, grad_z: Tensor, grad_log_det: Tensor, terms: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `series_forward` for x, the kernel and the bias (C,), by three kernels."""
    x, kernel, grad_z = x.contiguous(), kernel.contiguous(), grad_z.contiguous()
    sides, shape = kernel_sides(kernel), image_constants(x)
    grad_x, grad_k, grad_b = torch.empty_like(x), torch.empty_like(kernel), x.new_empty(x.shape[1])
    scaled = x.new_empty(terms - 1, *x.shape)  # s_1 … s_{terms−1}
    _series_backward[(x.shape[0],)](
        kernel, grad_z, grad_x, scaled, x.numel(), TERMS=terms, **sides, **shape, **_series_tiles(x, kernel)
    )
    tiles = batch_tiles(x, kernel)
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    each, rows = share_tiles(pixels, tiles)
    groups = triton.cdiv(kernel.shape[2] * kernel.shape[3], tiles["DEPTH"] // tiles["WIDTH"])
    partial = x.new_empty(rows, kernel.numel() + x.shape[1])
    _series_correlate[(rows, groups)](
        x, kept, scaled, grad_z, partial, x.numel(), pixels, TERMS=terms, EACH=each, **sides, **shape, **tiles
    )
    del shape["PRECISION"]
    _series_finish[(triton.cdiv(partial.shape[1], 32),)](
        partial,
        grad_log_det.contiguous(),
        grad_k,
        grad_b,
        rows,
        x.shape[0],
        **sides,
        **shape,
        **batch_sum_tiles(rows, x.shape[0]),
    )
    return grad_x, grad_k, grad_b


def _series_tiles(x: Tensor, kernel: Tensor) -> dict[str, Any]:
    return image_tiles(x, taps=kernel.shape[2] * kernel.shape[3])


@triton.jit
def _series_forward(
    x_ptr, kernel_ptr, bias_ptr, z_ptr, kept_ptr, log_det_ptr, numel, TERMS: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One image per program. A term reads the previous term, which all threads wrote, hence the barrier in between.

    Terms are not unrolled: each waits for the one before it anyway, and there would be too much to compile.
    """
    ONE_TILE: tl.constexpr = H * W <= PIXELS
    n = tl.program_id(0)
    image = n.to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    total = tl.zeros((OUT, PIXELS), tl.float32)  # if there is only one tile; otherwise z itself holds the sum
    source = x_ptr + image
    for i in range(1, TERMS + 1):
        tl.debug_barrier()
        kept = kept_ptr + (i - 1) * tl.cast(numel, tl.int64)
        for start in range(0, H * W, PIXELS):
            pixel, places, valid = image_tile(image, start, out, C, H, W, PIXELS)
            term = convolved(source, kernel_ptr, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, False, PRECISION)
            term = term / i
            tl.store(kept + places, term, mask=valid & (i < TERMS))
            if i == 1:
                term += tl.load(x_ptr + places, mask=valid, other=0.0)
                if bias_ptr is not None:
                    term += tl.load(bias_ptr + out, mask=out < C, other=0.0)[:, None]
            if ONE_TILE:
                total += term
            else:
                term += tl.load(z_ptr + places, mask=valid & (i > 1), other=0.0)
                tl.store(z_ptr + places, term, mask=valid)
        source = kept + image
    if ONE_TILE:
        pixel = tl.arange(0, PIXELS)
        valid = (out < C)[:, None] & (pixel < H * W)[None, :]
        tl.store(z_ptr + image + (out * (H * W))[:, None] + pixel[None, :], total, mask=valid)
    diagonal = tl.load(kernel_ptr + out * ((C + 1) * KH * KW) + KH * KW // 2, mask=out < C, other=0.0)
    tl.store(log_det_ptr + n, H * W * tl.sum(diagonal, axis=0))


@triton.jit
def _series_backward(
    kernel_ptr, grad_z_ptr, grad_x_ptr, scaled_ptr, numel, TERMS: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One image per program: s_{TERMS−1} down to s_1, and g_x. The first product reads g itself, since s_TERMS = g / TERMS."""
    image = tl.program_id(0).to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    source = grad_z_ptr
    for step in range(TERMS):
        i = TERMS - step  # the term to backpropagate through
        if i == 1:
            target = grad_x_ptr
        else:
            target = scaled_ptr + (i - 2) * tl.cast(numel, tl.int64)
        tl.debug_barrier()
        for start in range(0, H * W, PIXELS):
            pixel, places, valid = image_tile(image, start, out, C, H, W, PIXELS)
            grad = convolved(
                source + image, kernel_ptr, None, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION
            )
            grad = grad / tl.where(step == 0, TERMS, 1) + tl.load(grad_z_ptr + places, mask=valid, other=0.0)
            tl.store(target + places, grad / tl.maximum(i - 1, 1), mask=valid)
        source = target


@triton.jit
def _series_correlate(
    x_ptr, kept_ptr, scaled_ptr, grad_z_ptr, partial_ptr, numel, pixels, TERMS: tl.constexpr, EACH: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some taps of Σ_i corr(t_{i−1}, s_i) over some tiles of pixels; the program of the first taps also sums g there."""
    row = partial_ptr + tl.program_id(0).to(tl.int64) * (C * C * KH * KW + C)
    first = tl.program_id(1) * (DEPTH // WIDTH)
    out, k = tl.arange(0, OUT), tl.arange(0, DEPTH)
    total = tl.zeros((OUT, DEPTH), tl.float32)
    products = tl.zeros((OUT, PIXELS), tl.float32)  # of a single channel, summed at the end
    arriving = tl.zeros((OUT, PIXELS), tl.float32)
    for step in range(EACH):
        image, pixel, places, valid = batch_tile(tl.program_id(0) * EACH + step, pixels, out, C, H, W, PIXELS)
        last = tl.load(grad_z_ptr + places, mask=valid, other=0.0)
        arriving += last
        source = x_ptr + image
        for i in tl.range(1, TERMS + 1, loop_unroll_factor=unrolled(TERMS, 1, C, PRECISION)):
            further = (i - 1) * tl.cast(numel, tl.int64)
            grad = tl.load(scaled_ptr + further + places, mask=valid & (i < TERMS), other=0.0)
            if i == TERMS:
                grad = last / TERMS
            taken = patches(source, pixel, k, first, C, H, W, KH, KW, WIDTH)
            source = kept_ptr + further + image
            if C == 1:
                products += taken * grad
            else:
                total = tl.dot(grad, tl.trans(taken), total, input_precision=PRECISION)
    store_taps(row, total, products, k, first, out, C, KH * KW, WIDTH, PRECISION)
    tl.store(row + C * C * KH * KW + out, tl.sum(arriving, axis=1), mask=(out < C) & (tl.program_id(1) == 0))


@triton.jit
def _series_finish(
    partial_ptr, grad_log_det_ptr, grad_k_ptr, grad_b_ptr, rows, examples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, EXAMPLE_STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up the rows and the log-determinant's term. Columns are the kernel's entries, then the bias."""
    TAPS: tl.constexpr = KH * KW
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = column_sums(partial_ptr, column, C * C * TAPS + C, rows, ROWS, STEPS, COLUMNS)
    tl.store(grad_b_ptr + column - C * C * TAPS, total, mask=(column >= C * C * TAPS) & (column < C * C * TAPS + C))
    diagonal = (column % TAPS == TAPS // 2) & (column // (C * TAPS) == column // TAPS % C)
    total += tl.where(diagonal, H * W * vector_sum(grad_log_det_ptr, examples, 1, ROWS, EXAMPLE_STEPS), 0.0)
    tl.store(grad_k_ptr + column, total, mask=column < C * C * TAPS)

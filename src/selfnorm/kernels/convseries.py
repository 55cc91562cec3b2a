"""One convolution of small images, or the first terms of a convolution's exponential: what `conv.py`'s tiles make beside it.

With t_0 = x and t_i = k ⋆ t_{i−1} / i, the series is z = x + t_1 + … + t_I + b. For g arriving at z and

    s_I = g / I,    s_i = (g + flip(k) ⋆ s_{i+1}) / i

the gradients are g_x = g + flip(k) ⋆ s_1 and ∂k = Σ_n Σ_i corr(t_{i−1}, s_i), and for the bias Σ_n Σ_pixels g.
A single convolution, z = k ⋆ x + b, is I = 1 without the x and the g that are added: g_x = flip(k) ⋆ s_1, s_1 = g.

The log-determinant is a sum of h over the diagonal k[c, c, centre], each as often as there are pixels: of k itself for a series,
of log|k| for a convolution whose matrix is triangular. An image is a program's, so a chain of I convolutions is one kernel, and
the images' shares of ∂k are written side by side and added in their order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.conv import column_sums, convolved, patches, places_in_kernel, shape_of, summing, tiling, total_of


def series_forward(
    x: Tensor, kernel: Tensor, bias: Tensor | None, terms: int, taps: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """z = x + t_1 + … + t_terms + b, its log-determinant (N,), and t_1 … t_{terms−1} (terms − 1, N, C, H, W), in one kernel.

    terms = 0 stands for the convolution k ⋆ x + b. `taps` (bool, like the kernel) says which entries count; the others are 0.
    Reads x once, writes z and the terms.
    """
    x, kernel, taps = x.contiguous(), kernel.contiguous(), _bytes(taps)
    z, log_det = torch.empty_like(x), x.new_empty(x.shape[0])
    kept = x.new_empty(max(terms - 1, 0), *x.shape)
    _series_forward[(x.shape[0],)](
        x, kernel, taps, bias, z, kept, log_det, x.numel(), TERMS=terms, **_sides(kernel), **shape_of(x), **tiling(x)
    )  # fmt: skip
    return z, log_det, kept


def series_backward(
    x: Tensor,
    kernel: Tensor,
    kept: Tensor,
    grad_z: Tensor,
    grad_log_det: Tensor,
    terms: int,
    taps: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for x, the kernel and the bias (C,), of `series_forward` with the same terms and taps, in three kernels."""
    x, kernel, grad_z, taps = x.contiguous(), kernel.contiguous(), grad_z.contiguous(), _bytes(taps)
    sides, shape = _sides(kernel), shape_of(x)
    grad_x, grad_k, grad_b = torch.empty_like(x), torch.empty_like(kernel), x.new_empty(x.shape[1])
    scaled = x.new_empty(terms, *x.shape) if terms else grad_z[None]  # s_1 … s_terms
    _series_backward[(x.shape[0],)](kernel, taps, grad_z, grad_x, scaled, x.numel(), TERMS=terms, **sides, **shape, **tiling(x))
    tiles = tiling(x, pixels=64)
    groups = triton.cdiv(kernel.shape[2] * kernel.shape[3], tiles["DEPTH"] // tiles["WIDTH"])
    partial = x.new_empty(x.shape[0], kernel.numel() + x.shape[1])
    _series_correlate[(x.shape[0], groups)](x, kept, scaled, grad_z, partial, x.numel(), TERMS=terms, **sides, **shape, **tiles)
    del shape["PRECISION"]
    _series_finish[(triton.cdiv(partial.shape[1], 32),)](
        partial, kernel, taps, grad_log_det.contiguous(), grad_k, grad_b, x.shape[0], TERMS=terms,
        **sides, **shape, **summing(x.shape[0]),
    )  # fmt: skip
    return grad_x, grad_k, grad_b


def _bytes(taps: Tensor | None) -> Tensor | None:
    return None if taps is None else taps.contiguous().view(torch.uint8)


def _sides(kernel: Tensor) -> dict[str, Any]:
    return {"KH": kernel.shape[2], "KW": kernel.shape[3]}


@triton.jit
def _series_forward(
    x_ptr, kernel_ptr, taps_ptr, bias_ptr, z_ptr, kept_ptr, log_det_ptr, numel, TERMS: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An image for each program. A term reads what all threads wrote of the one before it, so these meet in between."""
    COUNT: tl.constexpr = TERMS if TERMS > 0 else 1
    n = tl.program_id(0)
    image = n.to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    for i in tl.static_range(1, COUNT + 1):
        if i == 1:
            source = x_ptr + image
        else:
            tl.debug_barrier()
            source = kept_ptr + (i - 2) * tl.cast(numel, tl.int64) + image
        for start in range(0, H * W, PIXELS):
            pixel = start + tl.arange(0, PIXELS)
            there = (pixel < H * W)[:, None] & (out < C)[None, :]
            places = pixel[:, None] + (out * (H * W))[None, :]
            term = convolved(
                source, kernel_ptr, taps_ptr, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, False, PRECISION
            )
            term = term / i
            if i < TERMS:
                tl.store(kept_ptr + (i - 1) * tl.cast(numel, tl.int64) + image + places, term, mask=there)
            if i > 1:
                term += tl.load(z_ptr + image + places, mask=there, other=0.0)
            else:
                if TERMS > 0:
                    term += tl.load(x_ptr + image + places, mask=there, other=0.0)
                if bias_ptr is not None:
                    term += tl.load(bias_ptr + out, mask=out < C, other=0.0)[None, :]
            tl.store(z_ptr + image + places, term, mask=there)
    diagonal = tl.load(kernel_ptr + out * (C * KH * KW) + out * (KH * KW) + KH * KW // 2, mask=out < C, other=1.0)
    diagonal = tl.where(out < C, diagonal, 0.0) if TERMS > 0 else tl.log(tl.abs(diagonal))
    tl.store(log_det_ptr + n, H * W * tl.sum(diagonal, axis=0))


@triton.jit
def _series_backward(
    kernel_ptr, taps_ptr, grad_z_ptr, grad_x_ptr, scaled_ptr, numel, TERMS: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An image for each program: s_TERMS down to s_1, and g_x. The first product reads g itself: s_TERMS is but g / TERMS."""
    COUNT: tl.constexpr = TERMS if TERMS > 0 else 1
    image = tl.program_id(0).to(tl.int64) * (C * H * W)
    out = tl.arange(0, OUT)
    for step in tl.static_range(0, COUNT):
        i = COUNT - step  # the term that is gone back through
        if step == 0:
            source = grad_z_ptr + image
        else:
            tl.debug_barrier()
            source = scaled_ptr + (i - 1) * tl.cast(numel, tl.int64) + image
        for start in range(0, H * W, PIXELS):
            pixel = start + tl.arange(0, PIXELS)
            there = (pixel < H * W)[:, None] & (out < C)[None, :]
            places = pixel[:, None] + (out * (H * W))[None, :]
            grad = convolved(
                source, kernel_ptr, taps_ptr, pixel, out, C, H, W, KH, KW, PIXELS, OUT, WIDTH, DEPTH, True, PRECISION
            )
            if TERMS > 0:
                arriving = tl.load(grad_z_ptr + image + places, mask=there, other=0.0)
                if step == 0:
                    grad = grad / TERMS
                    tl.store(scaled_ptr + (TERMS - 1) * tl.cast(numel, tl.int64) + image + places, arriving / TERMS, mask=there)
                grad += arriving
            if i == 1:
                tl.store(grad_x_ptr + image + places, grad, mask=there)
            else:
                tl.store(scaled_ptr + (i - 2) * tl.cast(numel, tl.int64) + image + places, grad / (i - 1), mask=there)


@triton.jit
def _series_correlate(
    x_ptr, kept_ptr, scaled_ptr, grad_z_ptr, partial_ptr, numel, TERMS: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXELS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some taps of Σ_i corr(t_{i−1}, s_i) for one image, and once for each image the sum of g over pixels."""
    COUNT: tl.constexpr = TERMS if TERMS > 0 else 1
    image = tl.program_id(0).to(tl.int64) * (C * H * W)
    row = partial_ptr + tl.program_id(0).to(tl.int64) * (C * C * KH * KW + C)
    first = tl.program_id(1) * (DEPTH // WIDTH)
    out, k = tl.arange(0, OUT), tl.arange(0, DEPTH)
    total = tl.zeros((DEPTH, OUT), tl.float32)
    products = tl.zeros((PIXELS, OUT), tl.float32)  # of a single channel, added up only in the end
    arriving = tl.zeros((PIXELS, OUT), tl.float32)
    for start in range(0, H * W, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        inside = (pixel < H * W)[:, None] & (out < C)[None, :]
        places = image + pixel[:, None] + (out * (H * W))[None, :]
        arriving += tl.load(grad_z_ptr + places, mask=inside, other=0.0)
        for i in tl.static_range(1, COUNT + 1):
            if i == 1:
                source = x_ptr + image
            else:
                source = kept_ptr + (i - 2) * tl.cast(numel, tl.int64) + image
            grad = tl.load(scaled_ptr + (i - 1) * tl.cast(numel, tl.int64) + places, mask=inside, other=0.0)
            taken = patches(source, pixel, k, first, C, H, W, KH, KW, WIDTH)
            if C == 1:
                products += taken * grad
            else:
                total = tl.dot(tl.trans(taken), grad, total, input_precision=PRECISION)
    if C == 1:
        total = tl.sum(products, axis=0)[:, None]
    offsets, there = places_in_kernel(k, first, out, C, KH * KW, WIDTH, False)
    tl.store(row + offsets, total, mask=there)
    tl.store(row + C * C * KH * KW + out, tl.sum(arriving, axis=0), mask=(out < C) & (tl.program_id(1) == 0))


@triton.jit
def _series_finish(
    partial_ptr, kernel_ptr, taps_ptr, grad_log_det_ptr, grad_k_ptr, grad_b_ptr, rows, TERMS: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The images' sums, with the log-determinant's term; the columns are the kernel's entries, then the bias's."""
    TAPS: tl.constexpr = KH * KW
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = column_sums(partial_ptr, column, C * C * TAPS + C, rows, ROWS, STEPS, COLUMNS)
    of_kernel = column < C * C * TAPS
    tl.store(grad_b_ptr + column - C * C * TAPS, total, mask=(column >= C * C * TAPS) & (column < C * C * TAPS + C))
    diagonal = of_kernel & (column % TAPS == TAPS // 2) & (column // (C * TAPS) == column // TAPS % C)
    slope = H * W * total_of(grad_log_det_ptr, rows, ROWS, STEPS)
    if TERMS == 0:
        slope = slope / tl.load(kernel_ptr + column, mask=diagonal, other=1.0)
    total += tl.where(diagonal, slope, 0.0)
    if taps_ptr is not None:
        total = tl.where(tl.load(taps_ptr + column, mask=of_kernel, other=0) != 0, total, 0.0)
    tl.store(grad_k_ptr + column, total, mask=of_kernel)

"""The rational-quadratic spline with parameters for every element: value and log-slope, their gradients, and the inverse.

In the bin from (left, bottom) to (right, top) with slopes s and n at its ends, w its width, h its height, m = h/w and
t = (x − left)/w, q = t(1 − t):

    D = m + (s + n − 2m)·q       v = (m·t² + s·q) / D       z = bottom + h·v
    Q = n·t² + 2m·q + s·(1 − t)²                         dz/dx = Q·(m/D)² = S

Gradients, with a for that of z and b for that of log S:

    by t:  a·w·S + b·(Q_t/Q − 2D_t/D)                     Q_t = 2(n·t + m(1 − 2t) − s(1 − t)),  D_t = (s + n − 2m)(1 − 2t)
    by m:  a·h/D·(t² − v(1 − 2q)) + b·(2/m + 2q/Q − 2(1 − 2q)/D)
    by s:  a·h/D·q(1 − v) + b·((1 − t)²/Q − 2q/D)         by n:  −a·h/D·q·v + b·(t²/Q − 2q/D)

The inverse finds the bin by z and then the root t in [0, 1] of z(t) = z, a quadratic equation.

t and m depend on the bin's corners, and those on a softmax of raw widths and heights; a knot belongs to two bins. Gradients for
an element's knots are summed over the examples before they go through that softmax.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from selfnorm.kernels.elementwise.shared import ENOUGH_PROGRAMS, fast_exp, row_tiles
from selfnorm.kernels.elementwise.spline_knots import (
    add_triples,
    bin_edges,
    find_bin,
    knot_slopes,
    knots,
    raw_slopes,
    softmax_shares,
    store_softmax_gradient,
)
from selfnorm.runtime.autograd import refuse_second_derivative


class FusedSpline(torch.autograd.Function):
    """x (N, *shape), raw widths, heights (*shape, bins), slopes (*shape, bins − 1), bound, smallest -> z, log_det (N,).

    One kernel forward, one backward; only the inputs are kept between them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float, smallest: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, widths, heights, slopes)
        ctx.bound, ctx.smallest = bound, smallest
        z, log_det = spline(*_flat(x, widths, heights, slopes), bound, smallest)
        return z.view(x.shape), log_det

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        refuse_second_derivative()
        flat = _flat(*ctx.saved_tensors)
        grads = spline_backward(*flat, ctx.bound, ctx.smallest, grad_z.reshape(flat[0].shape).contiguous(), grad_log_det)
        grad_x, grad_widths, grad_heights, grad_slopes = (
            grad.view(like.shape) for grad, like in zip(grads, ctx.saved_tensors, strict=True)
        )
        return grad_x, grad_widths, grad_heights, grad_slopes, None, None


def spline(x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float, smallest: float) -> tuple[Tensor, Tensor]:
    """Returns z (N, E) and Σ log dz/dx over each example's elements (N,).

    Reads x, writes z, and reads the parameters once per program.
    x: (N, E). widths, heights: raw, (E, bins). slopes: raw, (E, bins − 1). All contiguous. smallest: the least share of
    [−bound, bound] that a bin takes, and the least slope at a knot.
    """
    (examples, elements), bins = x.shape, widths.shape[1]
    tiles = row_tiles(examples, elements)
    grid = tiles.grid(examples, elements)
    z, parts = torch.empty_like(x), x.new_empty(grid[1], examples)
    _spline[grid](
        *(x, widths, heights, slopes, z, parts, examples, elements, bound),
        *(smallest, _slope_offset(smallest), bins, tiles.rows, tiles.columns, tiles.steps),
        num_warps=tiles.warps,
    )
    return z, parts[0] if grid[1] == 1 else parts.sum(0)


def spline_backward(
    x: Tensor,
    widths: Tensor,
    heights: Tensor,
    slopes: Tensor,
    bound: float,
    smallest: float,
    grad_z: Tensor,
    grad_log_det: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of Σ grad_z·z + Σ grad_log_det·log_det for x, widths, heights and slopes, shaped like these.

    The first six as for `spline`; grad_z: (N, E), contiguous; grad_log_det: (N,), with any stride. Reads x and grad_z, writes the
    first result. A program takes a few elements of all examples. For many examples of few elements several programs share the
    examples, and a second pass adds up their results.
    """
    (examples, elements), bins = x.shape, widths.shape[1]
    columns = min(8 if elements >= 8 * ENOUGH_PROGRAMS and bins <= 8 else 4, next_power_of_2(elements))
    rows = min(max(next_power_of_2(examples), 32), 128)
    programs, blocks = cdiv(elements, columns), cdiv(examples, rows)
    steps = cdiv(blocks, min(blocks, cdiv(ENOUGH_PROGRAMS, programs)))
    grad_x, parts = torch.empty_like(x), x.new_empty(cdiv(blocks, steps), elements * (3 * bins - 1))
    _spline_backward[programs, len(parts)](
        *(x, widths, heights, slopes, grad_z, grad_log_det, grad_x, parts),
        *(examples, elements, grad_log_det.stride(0), bound),
        *(smallest, _slope_offset(smallest), bins, rows, columns, steps),
        num_warps=min(max(rows * columns // (128 if bins <= 8 else 64), 1), 8),
    )
    grads = (parts[0] if len(parts) == 1 else parts.sum(0)).split([widths.numel(), heights.numel(), slopes.numel()])
    return grad_x, grads[0].view_as(widths), grads[1].view_as(heights), grads[2].view_as(slopes)


def spline_inverse(z: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float, smallest: float) -> Tensor:
    """Returns the inverse of `spline`: x like z (N, …), without a gradient.

    Reads z, writes x, and reads the parameters once per program.
    widths, heights: raw, (…, bins). slopes: raw, (…, bins − 1). All with any strides.
    """
    shape = z.shape
    z, widths, heights, slopes = _flat(z, widths, heights, slopes)
    (examples, elements), bins = z.shape, widths.shape[1]
    columns = min(next_power_of_2(elements), 32)  # so that one sample makes many programs, each with one memory access per row
    rows = min(next_power_of_2(examples), 512 // columns)
    x = torch.empty_like(z)
    _spline_inverse[cdiv(examples, rows), cdiv(elements, columns)](
        *(z, widths, heights, slopes, x, examples, elements, bound),
        *(smallest, _slope_offset(smallest), bins, rows, columns),
        num_warps=max(rows * columns // 128, 1),
    )
    return x.view(shape)


def _flat(x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the same as (N, E), (E, bins) twice and (E, bins − 1), contiguous."""
    elements = x[0].numel()
    widths, heights, slopes = (value.reshape(elements, value.shape[-1]).contiguous() for value in (widths, heights, slopes))
    return x.reshape(-1, elements).contiguous(), widths, heights, slopes


def _slope_offset(smallest: float) -> float:
    """Returns the offset for which softplus(raw + offset) is 1 − smallest at a raw slope of 0."""
    return math.log(math.expm1(1 - smallest))


@triton.jit(do_not_specialize=["N", "E"])
def _spline(
    x_ptr,
    widths_ptr,
    heights_ptr,
    slopes_ptr,
    z_ptr,
    log_det_ptr,
    N,
    E,
    bound,
    SMALLEST: tl.constexpr,
    OFFSET: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        elements = (tl.program_id(1) * STEPS + step) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (rows[:, None] < N) & (elements[None, :] < E)
        at = rows.to(tl.int64)[:, None] * E + elements[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        inside = tl.abs(x) < bound

        xs, zs, slopes = knots(widths_ptr, heights_ptr, slopes_ptr, elements, E, bound, SMALLEST, OFFSET, BINS)
        inner = tl.where(inside, x, 0.0)
        _, left, right, bottom, top, slope, next_slope = find_bin(inner, xs, zs, slopes, BINS)

        per_width, height = 1.0 / (right - left), top - bottom
        mean, t = height * per_width, (inner - left) * per_width
        q = t * (1.0 - t)
        per_denominator = 1.0 / (mean + (slope + next_slope - 2.0 * mean) * q)
        z = bottom + height * ((mean * t * t + slope * q) * per_denominator)
        ratio = mean * per_denominator
        numerator = next_slope * t * t + 2.0 * mean * q + slope * (1.0 - t) * (1.0 - t)
        tl.store(z_ptr + at, tl.where(inside, z, x), mask=mask)
        # In this order the product stays in range for any slope.
        total += tl.where(mask & inside, tl.log(numerator * ratio * ratio), 0.0)
    tl.store(log_det_ptr + tl.program_id(1).to(tl.int64) * N + rows, tl.sum(total, 1), mask=rows < N)


@triton.jit(do_not_specialize=["N", "E", "stride"])
def _spline_backward(
    x_ptr,
    widths_ptr,
    heights_ptr,
    slopes_ptr,
    grad_z_ptr,
    grad_log_det_ptr,
    grad_x_ptr,
    grad_ptr,
    N,
    E,
    stride,
    bound,
    SMALLEST: tl.constexpr,
    OFFSET: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    elements = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # As `knots`, but the shares and the raw slopes are needed again.
    of_widths, of_heights = softmax_shares(widths_ptr, elements, E, BINS), softmax_shares(heights_ptr, elements, E, BINS)
    xs = bin_edges(of_widths, bound, SMALLEST, BINS)
    zs = bin_edges(of_heights, bound, SMALLEST, BINS)
    raw = raw_slopes(slopes_ptr, elements, E, OFFSET, BINS)
    slopes = knot_slopes(raw, tl.zeros_like(xs[0]) + 1.0, SMALLEST, BINS)

    sums_x, sums_z, sums_slope = (), (), ()  # for each inner knot
    for _ in tl.static_range(BINS - 1):
        sums_x += (tl.zeros([ROWS, COLUMNS], tl.float32),)
        sums_z += (tl.zeros([ROWS, COLUMNS], tl.float32),)
        sums_slope += (tl.zeros([ROWS, COLUMNS], tl.float32),)
    for step in range(STEPS):
        rows = (tl.program_id(1) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        mask = (rows[:, None] < N) & (elements[None, :] < E)
        at = rows.to(tl.int64)[:, None] * E + elements[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        grad_z = tl.load(grad_z_ptr + at, mask=mask, other=0.0)
        grad_log_det = tl.load(grad_log_det_ptr + rows.to(tl.int64) * stride, mask=rows < N, other=0.0)[:, None]
        inside = tl.abs(x) < bound
        a = tl.where(inside, grad_z, 0.0)
        b = tl.where(inside, grad_log_det, 0.0)
        inner = tl.where(inside, x, 0.0)
        index, left, right, bottom, top, slope, next_slope = find_bin(inner, xs, zs, slopes, BINS)

        per_width, height = 1.0 / (right - left), top - bottom
        mean, t = height * per_width, (inner - left) * per_width
        u = 1.0 - t
        q = t * u
        bend = slope + next_slope - 2.0 * mean
        denominator = mean + bend * q
        numerator = next_slope * t * t + 2.0 * mean * q + slope * u * u
        per_denominator, per_numerator = 1.0 / denominator, 1.0 / numerator
        v = (mean * t * t + slope * q) * per_denominator
        ratio = mean * per_denominator

        by_t = 2.0 * ((next_slope * t + mean * (u - t) - slope * u) * per_numerator - bend * (u - t) * per_denominator)
        grad_x = a * (numerator * ratio * ratio) + b * by_t * per_width  # by x, which is by t, divided by the width
        tl.store(grad_x_ptr + at, tl.where(inside, grad_x, grad_z), mask=mask)

        rise = a * height * per_denominator
        by_log_mean = rise * mean * (t * t - v * (1.0 - 2.0 * q)) + 2.0 * b * (
            1.0 + mean * q * per_numerator - (1.0 - 2.0 * q) * ratio
        )  # by m, times m: mean slope grows with height and falls with width
        by_slope = rise * q * (1.0 - v) + b * (u * u * per_numerator - 2.0 * q * per_denominator)
        by_next_slope = b * (t * t * per_numerator - 2.0 * q * per_denominator) - rise * q * v
        by_left = by_log_mean * per_width - grad_x * u
        by_right = -by_log_mean * per_width - grad_x * t
        by_top = a * v + by_log_mean / height
        by_bottom = a - by_top

        next_x, next_z, next_s = (), (), ()
        for k in tl.static_range(BINS - 1):
            starts, ends = index == k + 1, index == k  # the knot between bins k and k + 1
            next_x += (sums_x[k] + tl.where(starts, by_left, tl.where(ends, by_right, 0.0)),)
            next_z += (sums_z[k] + tl.where(starts, by_bottom, tl.where(ends, by_top, 0.0)),)
            next_s += (sums_slope[k] + tl.where(starts, by_slope, tl.where(ends, by_next_slope, 0.0)),)
        sums_x, sums_z, sums_slope = next_x, next_z, next_s

    of_xs, of_zs, of_slopes = (), (), ()
    for k in tl.static_range(BINS - 1):
        of_x, of_z, of_slope = tl.reduce((sums_x[k], sums_z[k], sums_slope[k]), 0, add_triples)
        of_xs += (of_x,)
        of_zs += (of_z,)
        of_slopes += (of_slope,)
    size = tl.cast(E, tl.int64) * BINS
    out = grad_ptr + tl.program_id(1) * (3 * size - E)
    factor = 2.0 * bound * (1.0 - SMALLEST * BINS)
    store_softmax_gradient(out, elements, E, of_widths, of_xs, factor, BINS)
    store_softmax_gradient(out + size, elements, E, of_heights, of_zs, factor, BINS)
    pointers = out + 2 * size + elements.to(tl.int64) * (BINS - 1)
    for k in tl.static_range(BINS - 1):
        tl.store(pointers + k, of_slopes[k] / (1.0 + fast_exp(-raw[k])), mask=elements < E)


@triton.jit(do_not_specialize=["N", "E"])
def _spline_inverse(
    z_ptr,
    widths_ptr,
    heights_ptr,
    slopes_ptr,
    x_ptr,
    N,
    E,
    bound,
    SMALLEST: tl.constexpr,
    OFFSET: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    elements = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows[:, None] < N) & (elements[None, :] < E)
    at = rows.to(tl.int64)[:, None] * E + elements[None, :]
    z = tl.load(z_ptr + at, mask=mask, other=0.0)
    inside = tl.abs(z) < bound

    xs, zs, slopes = knots(widths_ptr, heights_ptr, slopes_ptr, elements, E, bound, SMALLEST, OFFSET, BINS)
    inner = tl.where(inside, z, 0.0)
    _, bottom, top, left, right, slope, next_slope = find_bin(inner, zs, xs, slopes, BINS)

    width, height, rise = right - left, top - bottom, inner - bottom
    mean = height / width
    bent = rise * (slope + next_slope - 2.0 * mean)
    # a·t² + b·t + c = 0; the root in [0, 1], in the form without cancellation, as in the plain code
    a = height * (mean - slope) + bent
    b = height * slope - bent
    c = -mean * rise
    t = 2.0 * c / (-b - tl.sqrt(tl.maximum(b * b - 4.0 * a * c, 0.0)))
    t = tl.where(t < 0.0, 0.0, tl.where(t > 1.0, 1.0, t))  # NaN stays NaN
    tl.store(x_ptr + at, tl.where(inside, left + width * t, z), mask=mask)

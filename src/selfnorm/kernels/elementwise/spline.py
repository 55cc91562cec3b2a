"""Fused kernels for the rational-quadratic spline with parameters for every element: value and log-slope, their gradients, and
the inverse.

In the bin from (left, bottom) to (right, top) with slopes s and n at its ends, w its width, h its height, m = h/w and
t = (x − left)/w, q = t(1 − t):

    D = m + (s + n − 2m)·q       v = (m·t² + s·q) / D       z = bottom + h·v
    Q = n·t² + 2m·q + s·(1 − t)²                         dz/dx = Q·(m/D)² = S

Gradients, with a for that of z and b for that of log S:

    by t:  a·w·S + b·(Q_t/Q − 2D_t/D)                     Q_t = 2(n·t + m(1 − 2t) − s(1 − t)),  D_t = (s + n − 2m)(1 − 2t)
    by m:  a·h/D·(t² − v(1 − 2q)) + b·(2/m + 2q/Q − 2(1 − 2q)/D)
    by s:  a·h/D·q(1 − v) + b·((1 − t)²/Q − 2q/D)         by n:  −a·h/D·q·v + b·(t²/Q − 2q/D)

The inverse takes the bin by z, and of it the root t in [0, 1] of z(t) = z, a quadratic equation.

t and m depend on the bin's corners, and those on a softmax of raw widths and heights; a knot belongs to two bins. What the
examples say about an element's knots is summed before it goes through that softmax.

An element's knots are held in registers, which suits up to about 16 bins.

No autograd here: these are plain functions of float32 tensors. Sums are taken in a fixed order.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from selfnorm.kernels.elementwise.activation import ENOUGH_PROGRAMS, exp, log1p, row_tiles


@triton.jit
def _softmax(raw_ptr, elements, E, BINS: tl.constexpr):
    """The softmax of an element's raw numbers: a tuple of BINS, each like `elements`."""
    pointers = raw_ptr + elements.to(tl.int64) * BINS
    raw = ()
    for k in tl.static_range(BINS):
        raw += (tl.load(pointers + k, mask=elements < E, other=0.0),)
    largest = raw[0]
    for k in tl.static_range(1, BINS):
        largest = tl.maximum(largest, raw[k])
    total = tl.zeros_like(largest)
    powers = ()
    for k in tl.static_range(BINS):
        power = exp(raw[k] - largest)
        total += power
        powers += (power,)
    per_total = 1.0 / total
    shares = ()
    for k in tl.static_range(BINS):
        shares += (powers[k] * per_total,)
    return shares


@triton.jit
def _edges(softmax, bound, SMALLEST: tl.constexpr, BINS: tl.constexpr):
    """From −bound to bound, BINS + 1 of them; the last is put in by hand, since the shares' sum is only 1 to rounding."""
    edges = (tl.zeros_like(softmax[0]) - bound,)
    share = tl.zeros_like(softmax[0])
    for k in tl.static_range(BINS - 1):
        share += SMALLEST + (1.0 - SMALLEST * BINS) * softmax[k]
        edges += (2.0 * bound * share - bound,)
    edges += (tl.zeros_like(softmax[0]) + bound,)
    return edges


@triton.jit
def _raw_slopes(slopes_ptr, elements, E, OFFSET: tl.constexpr, BINS: tl.constexpr):
    pointers = slopes_ptr + elements.to(tl.int64) * (BINS - 1)
    raw = ()
    for k in tl.static_range(BINS - 1):
        raw += (tl.load(pointers + k, mask=elements < E, other=0.0) + OFFSET,)
    return raw


@triton.jit
def _knot_slopes(raw, end, SMALLEST: tl.constexpr, BINS: tl.constexpr):
    """`end` at both ends, SMALLEST + softplus between them: BINS + 1."""
    slopes = (end,)
    for k in tl.static_range(BINS - 1):
        slopes += (SMALLEST + tl.maximum(raw[k], 0.0) + log1p(exp(-tl.abs(raw[k]))),)
    slopes += (end,)
    return slopes


@triton.jit
def _bin(x, xs, zs, slopes, BINS: tl.constexpr):
    """Where x falls: the bin's number, left, right, bottom, top and its slopes at both ends."""
    index = tl.zeros_like(x).to(tl.int32)
    left, right, bottom, top = xs[0][None, :], xs[1][None, :], zs[0][None, :], zs[1][None, :]
    slope, next_slope = slopes[0][None, :], slopes[1][None, :]
    for k in tl.static_range(1, BINS):
        beyond = x >= xs[k][None, :]
        index += beyond.to(tl.int32)
        left = tl.where(beyond, xs[k][None, :], left)
        right = tl.where(beyond, xs[k + 1][None, :], right)
        bottom = tl.where(beyond, zs[k][None, :], bottom)
        top = tl.where(beyond, zs[k + 1][None, :], top)
        slope = tl.where(beyond, slopes[k][None, :], slope)
        next_slope = tl.where(beyond, slopes[k + 1][None, :], next_slope)
    return index, left, right, bottom, top, slope, next_slope


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

        xs = _edges(_softmax(widths_ptr, elements, E, BINS), bound, SMALLEST, BINS)
        zs = _edges(_softmax(heights_ptr, elements, E, BINS), bound, SMALLEST, BINS)
        raw = _raw_slopes(slopes_ptr, elements, E, OFFSET, BINS)
        slopes = _knot_slopes(raw, tl.zeros_like(xs[0]) + 1.0, SMALLEST, BINS)
        inner = tl.where(inside, x, 0.0)
        _, left, right, bottom, top, slope, next_slope = _bin(inner, xs, zs, slopes, BINS)

        per_width, height = 1.0 / (right - left), top - bottom
        mean, t = height * per_width, (inner - left) * per_width
        q = t * (1.0 - t)
        per_denominator = 1.0 / (mean + (slope + next_slope - 2.0 * mean) * q)
        z = bottom + height * ((mean * t * t + slope * q) * per_denominator)
        ratio = mean * per_denominator
        numerator = next_slope * t * t + 2.0 * mean * q + slope * (1.0 - t) * (1.0 - t)
        tl.store(z_ptr + at, tl.where(inside, z, x), mask=mask)
        # In this order the product stays in range however large a slope may be.
        total += tl.where(mask & inside, tl.log(numerator * ratio * ratio), 0.0)
    tl.store(log_det_ptr + tl.program_id(1).to(tl.int64) * N + rows, tl.sum(total, 1), mask=rows < N)


@triton.jit
def _store_softmax_gradient(out_ptr, elements, E, softmax, of_edges, factor, BINS: tl.constexpr):
    """The raw numbers' gradient from the inner edges'; `factor` is an edge's growth with the softmax before it.

    An edge moves with every share left of it. A softmax ignores what is added to all its gradients alike, so a share's may be
    minus the sum over the edges left of it instead of the sum over those to its right.
    """
    pointers = out_ptr + elements.to(tl.int64) * BINS
    of_share = tl.zeros_like(softmax[0])
    mean = tl.zeros_like(softmax[0])
    for k in tl.static_range(1, BINS):
        of_share -= of_edges[k - 1]
        mean += softmax[k] * of_share
    of_share = tl.zeros_like(softmax[0])
    tl.store(pointers, -factor * softmax[0] * mean, mask=elements < E)
    for k in tl.static_range(1, BINS):
        of_share -= of_edges[k - 1]
        tl.store(pointers + k, factor * softmax[k] * (of_share - mean), mask=elements < E)


@triton.jit
def _add_three(a, b, c, more_a, more_b, more_c):
    """Sums of three at a time, which wait for the other threads once and not thrice."""
    return a + more_a, b + more_b, c + more_c


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
    of_widths, of_heights = _softmax(widths_ptr, elements, E, BINS), _softmax(heights_ptr, elements, E, BINS)
    xs = _edges(of_widths, bound, SMALLEST, BINS)
    zs = _edges(of_heights, bound, SMALLEST, BINS)
    raw = _raw_slopes(slopes_ptr, elements, E, OFFSET, BINS)
    slopes = _knot_slopes(raw, tl.zeros_like(xs[0]) + 1.0, SMALLEST, BINS)

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
        index, left, right, bottom, top, slope, next_slope = _bin(inner, xs, zs, slopes, BINS)

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
        of_x, of_z, of_slope = tl.reduce((sums_x[k], sums_z[k], sums_slope[k]), 0, _add_three)
        of_xs += (of_x,)
        of_zs += (of_z,)
        of_slopes += (of_slope,)
    size = tl.cast(E, tl.int64) * BINS
    out = grad_ptr + tl.program_id(1) * (3 * size - E)
    factor = 2.0 * bound * (1.0 - SMALLEST * BINS)
    _store_softmax_gradient(out, elements, E, of_widths, of_xs, factor, BINS)
    _store_softmax_gradient(out + size, elements, E, of_heights, of_zs, factor, BINS)
    pointers = out + 2 * size + elements.to(tl.int64) * (BINS - 1)
    for k in tl.static_range(BINS - 1):
        tl.store(pointers + k, of_slopes[k] / (1.0 + exp(-raw[k])), mask=elements < E)


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

    xs = _edges(_softmax(widths_ptr, elements, E, BINS), bound, SMALLEST, BINS)
    zs = _edges(_softmax(heights_ptr, elements, E, BINS), bound, SMALLEST, BINS)
    raw = _raw_slopes(slopes_ptr, elements, E, OFFSET, BINS)
    slopes = _knot_slopes(raw, tl.zeros_like(xs[0]) + 1.0, SMALLEST, BINS)
    inner = tl.where(inside, z, 0.0)
    _, bottom, top, left, right, slope, next_slope = _bin(inner, zs, xs, slopes, BINS)

    width, height, rise = right - left, top - bottom, inner - bottom
    mean = height / width
    bent = rise * (slope + next_slope - 2.0 * mean)
    # a·t² + b·t + c = 0, and of its roots the one in [0, 1] in the form that cancels nothing, as in the plain code
    a = height * (mean - slope) + bent
    b = height * slope - bent
    c = -mean * rise
    t = 2.0 * c / (-b - tl.sqrt(tl.maximum(b * b - 4.0 * a * c, 0.0)))
    t = tl.where(t < 0.0, 0.0, tl.where(t > 1.0, 1.0, t))  # and a NaN stays one
    tl.store(x_ptr + at, tl.where(inside, left + width * t, z), mask=mask)


def spline(x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float, smallest: float) -> tuple[Tensor, Tensor]:
    """z (N, E) and Σ log dz/dx over each example's elements (N,). Reads x, writes z; the parameters once for each program.

    x: (N, E). widths, heights: raw, (E, bins). slopes: raw, (E, bins − 1). All contiguous. smallest: the least share of
    [−bound, bound] that a bin has, and the least slope at a knot.
    """
    (examples, elements), bins = x.shape, widths.shape[1]
    tiles = row_tiles(examples, elements)
    grid = tiles.grid(examples, elements)
    z, parts = torch.empty_like(x), x.new_empty(grid[1], examples)
    _spline[grid](
        *(x, widths, heights, slopes, z, parts, examples, elements, bound),
        *(smallest, _offset(smallest), bins, tiles.rows, tiles.columns, tiles.steps),
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
    """Gradients of Σ grad_z·z + Σ grad_log_det·log_det by x, widths, heights and slopes, shaped like these.

    The first six as for `spline`; grad_z: (N, E), contiguous; grad_log_det: (N,) of any stride. Reads x and grad_z, writes the
    first result. A program takes a few elements of all examples; for many examples of few elements several programs share the
    examples, and a second pass adds up.
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
        *(smallest, _offset(smallest), bins, rows, columns, steps),
        num_warps=min(max(rows * columns // (128 if bins <= 8 else 64), 1), 8),
    )
    grads = (parts[0] if len(parts) == 1 else parts.sum(0)).split([widths.numel(), heights.numel(), slopes.numel()])
    return grad_x, grads[0].view_as(widths), grads[1].view_as(heights), grads[2].view_as(slopes)


def spline_inverse(z: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float, smallest: float) -> Tensor:
    """x (N, E) of which `spline` makes z (N, E); the rest as there. Reads z, writes x; the parameters once for each program."""
    (examples, elements), bins = z.shape, widths.shape[1]
    columns = min(next_power_of_2(elements), 32)  # one sample still makes many programs, and they one memory access a row
    rows = min(next_power_of_2(examples), 512 // columns)
    x = torch.empty_like(z)
    _spline_inverse[cdiv(examples, rows), cdiv(elements, columns)](
        *(z, widths, heights, slopes, x, examples, elements, bound),
        *(smallest, _offset(smallest), bins, rows, columns),
        num_warps=max(rows * columns // 128, 1),
    )
    return x


def _offset(smallest: float) -> float:
    """softplus(raw + offset) is 1 − smallest for a raw slope of 0."""
    return math.log(math.expm1(1 - smallest))

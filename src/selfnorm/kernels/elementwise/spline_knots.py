"""The knots of a rational-quadratic spline inside of a kernel: from raw parameters to bins, and gradients back.

An element's knots are held in registers, which suits up to about 16 bins.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from selfnorm.kernels.elementwise.shared import fast_exp, series_log1p


@triton.jit
def softmax_shares(raw_ptr, elements, E, BINS: tl.constexpr):
    """The softmax of each element's raw numbers: a tuple of BINS, each like `elements`."""
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
        power = fast_exp(raw[k] - largest)
        total += power
        powers += (power,)
    per_total = 1.0 / total
    shares = ()
    for k in tl.static_range(BINS):
        shares += (powers[k] * per_total,)
    return shares


@triton.jit
def bin_edges(softmax, bound, SMALLEST: tl.constexpr, BINS: tl.constexpr):
    """The BINS + 1 edges from −bound to bound. The last is exact, while the sum of the shares is 1 only up to rounding."""
    edges = (tl.zeros_like(softmax[0]) - bound,)
    share = tl.zeros_like(softmax[0])
    for k in tl.static_range(BINS - 1):
        share += SMALLEST + (1.0 - SMALLEST * BINS) * softmax[k]
        edges += (2.0 * bound * share - bound,)
    edges += (tl.zeros_like(softmax[0]) + bound,)
    return edges


@triton.jit
def raw_slopes(slopes_ptr, elements, E, OFFSET: tl.constexpr, BINS: tl.constexpr):
    """The raw slopes of the inner knots, plus OFFSET: a tuple of BINS − 1."""
    pointers = slopes_ptr + elements.to(tl.int64) * (BINS - 1)
    raw = ()
    for k in tl.static_range(BINS - 1):
        raw += (tl.load(pointers + k, mask=elements < E, other=0.0) + OFFSET,)
    return raw


@triton.jit
def knot_slopes(raw, end, SMALLEST: tl.constexpr, BINS: tl.constexpr):
    """The slopes at the BINS + 1 knots: `end` at both ends, SMALLEST + softplus between them."""
    slopes = (end,)
    for k in tl.static_range(BINS - 1):
        slopes += (SMALLEST + tl.maximum(raw[k], 0.0) + series_log1p(fast_exp(-tl.abs(raw[k]))),)
    slopes += (end,)
    return slopes


@triton.jit
def knots(
    widths_ptr, heights_ptr, slopes_ptr, elements, E, bound, SMALLEST: tl.constexpr, OFFSET: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """The x, the z and the slopes of each element's knots: tuples of BINS + 1."""
    xs = bin_edges(softmax_shares(widths_ptr, elements, E, BINS), bound, SMALLEST, BINS)
    zs = bin_edges(softmax_shares(heights_ptr, elements, E, BINS), bound, SMALLEST, BINS)
    raw = raw_slopes(slopes_ptr, elements, E, OFFSET, BINS)
    return xs, zs, knot_slopes(raw, tl.zeros_like(xs[0]) + 1.0, SMALLEST, BINS)


@triton.jit
def find_bin(x, xs, zs, slopes, BINS: tl.constexpr):
    """The bin that x falls into: its number, left, right, bottom, top and the slopes at both ends."""
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


@triton.jit
def store_softmax_gradient(out_ptr, elements, E, softmax, of_edges, factor, BINS: tl.constexpr):
    """Stores the gradient of the raw numbers, given that of the inner edges; `factor` is ∂edge/∂softmax of a share left of it.

    An edge moves with every share left of it. Adding one number to all gradients of a softmax changes nothing, so a share's
    gradient may be minus the sum over the edges left of it instead of the sum over those to its right.
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
def add_triples(a, b, c, more_a, more_b, more_c):
    """Sums of three numbers at a time, so that threads wait for each other once instead of three times."""
    return a + more_a, b + more_b, c + more_c

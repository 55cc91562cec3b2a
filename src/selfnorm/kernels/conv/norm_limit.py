"""Scales a convolution's kernel so that a bound of its norm is at most a limit: k = w·min(1, limit / σ(w)), and its gradient.

σ(w) = max over frequencies ω of (tr (ŵ*ŵ)^p)^(1/2p), p = 2^squarings, for the Fourier symbols ŵ(ω) = Σ_taps w e^{−iθ}, C × C.
Complex matrices are represented by real ones of twice the size, [[Re, −Im], [Im, Re]], whose traces are doubled. With G = ŵ*ŵ at
the worst frequency and P any multiple of G^(p−1), the product of all the powers that squaring passes through,

    ∂σ/∂w = σ·Re(ŵP e^{iθ}) / tr GP,    ∂L/∂w = g·limit/σ − (limit/σ²)·⟨g, w⟩·∂σ/∂w    for the gradient g of k, if σ > limit.

Three kernels: one with a program for each frequency, one with a single program for the worst frequency, and one for the gradient;
O(HW·C³) in all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative

MAX_NORM_CHANNELS = 16  # more would not fit into a program's registers


class NormLimitedKernel(torch.autograd.Function):
    """w (C, C, kh, kw), torus, squarings, limit -> k = w·min(1, limit/σ(w)). C ≤ `MAX_NORM_CHANNELS`.

    Two kernels forward, of which the second also differentiates σ if it is above the limit; one backward.
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, torus: tuple[int, int], squarings: int, limit: float) -> Tensor:
        k, sigma, slope = limit_norm_forward(w, torus, squarings, limit)
        ctx.save_for_backward(w, sigma, slope)
        ctx.limit = limit
        return k

    @staticmethod
    @backward_in_full_precision
    def backward(ctx: Any, grad_k: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        w, sigma, slope = ctx.saved_tensors
        return limit_norm_backward(w, sigma, slope, grad_k, ctx.limit), None, None, None


def limit_norm_forward(w: Tensor, sides: tuple[int, int], squarings: int, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns k (C, C, kh, kw), σ (1,) and ∂σ/∂w (C, C, kh, kw), which is written only if σ > limit.

    sides: those of the torus on which the convolution is circular.
    """
    w = w.contiguous()
    frequencies = sides[0] * (sides[1] // 2 + 1)  # the other symbols are complex conjugates of these
    norms, sigma = w.new_empty(frequencies), w.new_empty(1)
    k, slope = torch.empty_like(w), torch.empty_like(w)
    half = max(8, triton.next_power_of_2(w.shape[0]))
    shape: dict[str, Any] = {"C": w.shape[0], "KH": w.shape[2], "KW": w.shape[3], "HIGH": sides[0], "WIDE": sides[1]}
    shape |= {"HALF": half, "SQUARINGS": squarings, "num_warps": 1 if half == 8 else 4}
    _frequency_norms[(frequencies,)](w, norms, **shape)
    _limit_norm[(1,)](w, norms, k, sigma, slope, limit, BLOCK=512, **shape)
    return k, sigma, slope


def limit_norm_backward(w: Tensor, sigma: Tensor, slope: Tensor, grad_k: Tensor, limit: float) -> Tensor:
    """Returns the gradient for w, given the results of `limit_norm_forward` and the gradient for k."""
    w, grad_k = w.contiguous(), grad_k.contiguous()
    grad_w = torch.empty_like(w)
    _limit_norm_backward[(1,)](w, sigma, slope, grad_k, grad_w, limit, NUMEL=w.numel(), BLOCK=1024)
    return grad_w


@triton.jit
def _tap_phase(frequency, tap, KW: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """θ of a tap at a frequency, with whole turns removed in each direction."""
    PER_ROW: tl.constexpr = WIDE // 2 + 1
    down = ((tap // KW) * (frequency // PER_ROW)) % HIGH
    right = ((tap % KW) * (frequency % PER_ROW)) % WIDE
    return 6.283185307179586 * (down / HIGH + right / WIDE)


@triton.jit
def _fourier_symbol(
    w_ptr, frequency, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """ŵ and iŵ as real matrices (2·HALF, 2·HALF), padded with zeros."""
    at = tl.arange(0, 2 * HALF)
    out, into = (at % HALF)[:, None], (at % HALF)[None, :]
    same = (at // HALF)[:, None] == (at // HALF)[None, :]
    sign = tl.where((at // HALF)[:, None] > (at // HALF)[None, :], 1.0, -1.0)
    valid = (out < C) & (into < C)
    real = tl.zeros((2 * HALF, 2 * HALF), tl.float32)
    imaginary = tl.zeros((2 * HALF, 2 * HALF), tl.float32)
    for tap in tl.static_range(KH * KW):
        angle = _tap_phase(frequency, tap, KW, HIGH, WIDE)
        values = tl.load(w_ptr + (out * C + into) * (KH * KW) + tap, mask=valid, other=0.0)
        real += values * tl.cos(angle)
        imaginary -= values * tl.sin(angle)
    return tl.where(same, real, sign * imaginary), tl.where(same, -imaginary, sign * real)


@triton.jit
def _complex_trace(matrix, SIZE: tl.constexpr):
    """The trace of the complex matrix that a real matrix represents, clamped above 0."""
    at = tl.arange(0, SIZE)
    diagonal = tl.where(at[:, None] == at[None, :], matrix, 0.0)
    return tl.maximum(tl.sum(tl.sum(diagonal, axis=1), axis=0) / 2, 1.1754943508222875e-38)


@triton.jit
def _frequency_norms(
    w_ptr, norms_ptr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    HALF: tl.constexpr, SQUARINGS: tl.constexpr,
):  # fmt: skip
    """(tr (ŵ*ŵ)^p)^(1/2p) for each frequency."""
    frequency = tl.program_id(0)
    symbol, _ = _fourier_symbol(w_ptr, frequency, C, KH, KW, HIGH, WIDE, HALF)
    power = tl.dot(tl.trans(symbol), symbol, input_precision="ieee")
    trace = _complex_trace(power, 2 * HALF)
    log_norm = tl.log(trace)
    share = 1.0
    for _squaring in range(SQUARINGS):
        # log tr M² = 2·log tr M + log tr (M / tr M)²: rescaled at each squaring, the powers stay within range.
        power = power / trace
        power = tl.dot(power, power, input_precision="ieee")
        trace = _complex_trace(power, 2 * HALF)
        share = share / 2
        log_norm += tl.log(trace) * share
    tl.store(norms_ptr + frequency, tl.exp(log_norm / 2))


@triton.jit
def _limit_norm(
    w_ptr, norms_ptr, k_ptr, sigma_ptr, slope_ptr, limit, BLOCK: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    HALF: tl.constexpr, SQUARINGS: tl.constexpr,
):  # fmt: skip
    NUMEL: tl.constexpr = C * C * KH * KW
    sigma, worst = -1.0, 0
    for start in range(0, HIGH * (WIDE // 2 + 1), BLOCK):
        at = start + tl.arange(0, BLOCK)
        norms = tl.load(norms_ptr + at, mask=at < HIGH * (WIDE // 2 + 1), other=-1.0)
        largest = tl.max(norms, axis=0)
        worst = tl.where(largest > sigma, start + tl.argmax(norms, axis=0), worst)
        sigma = tl.maximum(largest, sigma)
    tl.store(sigma_ptr, sigma)
    scale = tl.where(sigma > limit, limit / sigma, 1.0)
    for start in range(0, NUMEL, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        tl.store(k_ptr + entry, scale * tl.load(w_ptr + entry, mask=entry < NUMEL, other=0.0), mask=entry < NUMEL)
    if sigma > limit:
        symbol, turned = _fourier_symbol(w_ptr, worst, C, KH, KW, HIGH, WIDE, HALF)
        gram = tl.dot(tl.trans(symbol), symbol, input_precision="ieee")
        power = gram / _complex_trace(gram, 2 * HALF)
        product = power
        for _squaring in range(SQUARINGS - 1):
            power = tl.dot(power, power, input_precision="ieee")
            power = power / _complex_trace(power, 2 * HALF)
            product = tl.dot(product, power, input_precision="ieee")
            product = product / _complex_trace(product, 2 * HALF)
        factor = sigma / _complex_trace(tl.dot(gram, product, input_precision="ieee"), 2 * HALF)
        real = tl.dot(symbol, product, input_precision="ieee") * factor
        minus_imaginary = tl.dot(turned, product, input_precision="ieee") * factor
        side = tl.arange(0, 2 * HALF)
        valid = (side < C)[:, None] & (side < C)[None, :]
        for tap in range(KH * KW):
            angle = _tap_phase(worst, tap, KW, HIGH, WIDE)
            slope = real * tl.cos(angle) + minus_imaginary * tl.sin(angle)
            tl.store(slope_ptr + (side[:, None] * C + side[None, :]) * (KH * KW) + tap, slope, mask=valid)


@triton.jit
def _limit_norm_backward(w_ptr, sigma_ptr, slope_ptr, grad_k_ptr, grad_w_ptr, limit, NUMEL: tl.constexpr, BLOCK: tl.constexpr):
    sigma = tl.load(sigma_ptr)
    held = sigma > limit
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, NUMEL, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        grad = tl.load(grad_k_ptr + entry, mask=entry < NUMEL, other=0.0)
        products += grad * tl.load(w_ptr + entry, mask=entry < NUMEL, other=0.0)
    scale = tl.where(held, limit / sigma, 1.0)
    weight = scale / sigma * tl.sum(products, axis=0)
    for start in range(0, NUMEL, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        grad = scale * tl.load(grad_k_ptr + entry, mask=entry < NUMEL, other=0.0)
        slope = tl.load(slope_ptr + entry, mask=entry < NUMEL, other=0.0)
        tl.store(grad_w_ptr + entry, tl.where(held, grad - weight * slope, grad), mask=entry < NUMEL)

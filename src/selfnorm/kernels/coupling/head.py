"""The head of a coupling network: from the columns of its last convolution to z, its log-determinant and their gradients.

The 2C outputs of the last convolution are in the order h₀, h₂, … (of the log-scales), h₁, h₃, … (of the shifts). Each kernel
reads and writes each of its tensors once; a program processes one example.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfnorm.kernels.numerics import quotient_and_remainder


def affine_head(
    columns: Tensor, bias: Tensor, log_scale: Tensor, x: Tensor, stay: int, *, inverse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns z, the affine map of x that the last convolution's columns describe, its log_det, and h for the backward pass.

        h = (scatter(columns) + bias)·exp(3·log_scale)
        log s = 2·tanh(h_even/2),   z = x·exp(log s) + h_odd,   log_det = Σ log s;

    or, with `inverse`, (x − h_odd)·exp(−log s) in place of z.

    columns: (NHW, ≥ 18C) float32. x: (N, stay + C, H, W), with any strides; its first `stay` channels are copied.
    z is like x, log_det (N,), h (NHW, 2C).
    """
    n, channels, height, width = x.shape
    changing = channels - stay
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty(n * height * width, 2 * changing, dtype=x.dtype, device=x.device)
    log_det = torch.empty(n, dtype=x.dtype, device=x.device)
    _affine_head[(n,)](
        columns, bias, log_scale, x, *x.stride(), out, h, log_det, C=changing, STAY=stay, H=height, W=width, K=columns.shape[1],
        INVERSE=inverse, PIXELS=_pixels_per_step(height * width, changing), CHANNELS=triton.next_power_of_2(changing),
        STAYING=triton.next_power_of_2(max(stay, 1)), num_warps=8,
    )  # fmt: skip
    return out, log_det, h


def affine_head_backward(
    grad_z: Tensor, grad_log_det: Tensor, x: Tensor, h: Tensor, log_scale: Tensor, grad_x: Tensor, stay: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of scatter(columns), (NHW, 2C), and of bias and log_scale for each example, (N, 2, 2C).

    The gradient of x's channels from `stay` on is written into grad_x (N, stay + C, H, W), contiguous.
    """
    n, channels, height, width = x.shape
    changing = channels - stay
    grad_y = torch.empty_like(h)
    sums = torch.empty(n, 2, 2 * changing, dtype=x.dtype, device=x.device)
    _affine_head_backward[(n,)](
        grad_z, *grad_z.stride(), grad_log_det, *grad_log_det.stride(), x, *x.stride(), h, log_scale, grad_x, grad_y, sums,
        C=changing, STAY=stay, H=height, W=width, PIXELS=_pixels_per_step(height * width, changing),
        CHANNELS=triton.next_power_of_2(changing), num_warps=8,
    )  # fmt: skip
    return grad_y, sums


def _pixels_per_step(size: int, channels: int) -> int:
    """Returns the number of pixels of an example that a program processes at once."""
    return min(max(1024 // triton.next_power_of_2(channels), 16), triton.next_power_of_2(size))


@triton.jit
def _accurate_tanh(u):
    # Near 0, (1 − a)/(1 + a) loses digits that the series keeps.
    a = tl.exp(-2 * tl.abs(u))
    far = (1 - a) / (1 + a)
    v = u * u
    near = u * (1 - v * (1 / 3 - v * (2 / 15 - v * (17 / 315 - v * (62 / 2835)))))
    return tl.where(tl.abs(u) < 0.3, near, tl.where(u < 0, -far, far))


@triton.jit
def _affine_head(
    columns, bias, log_scale, x, stride_n, stride_c, stride_y, stride_x, out, h, log_det,
    C: tl.constexpr, STAY: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, INVERSE: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, STAYING: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, CHANNELS)
    of = j < C
    bias_even = tl.load(bias + 2 * j, mask=of, other=0.0)
    bias_odd = tl.load(bias + 2 * j + 1, mask=of, other=0.0)
    scale_even = tl.exp(3 * tl.load(log_scale + 2 * j, mask=of, other=0.0))
    scale_odd = tl.exp(3 * tl.load(log_scale + 2 * j + 1, mask=of, other=0.0))
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for start in range(0, H * W, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        y, u = quotient_and_remainder(pixel, W, H * W + PIXELS)
        known = (pixel < H * W)[:, None] & of[None, :]
        even = tl.zeros([PIXELS, CHANNELS], tl.float32)
        odd = tl.zeros([PIXELS, CHANNELS], tl.float32)
        for tap in tl.static_range(9):
            inside = (y >= tap // 3 - 1) & (y < H + tap // 3 - 1) & (u >= tap % 3 - 1) & (u < W + tap % 3 - 1)
            row = n * (H * W) + pixel - (tap // 3 - 1) * W - (tap % 3 - 1)
            source = columns + row[:, None] * K + tap * 2 * C + j[None, :]
            even += tl.load(source, mask=known & inside[:, None], other=0.0)
            odd += tl.load(source + C, mask=known & inside[:, None], other=0.0)
        even = (even + bias_even[None, :]) * scale_even[None, :]
        odd = (odd + bias_odd[None, :]) * scale_odd[None, :]
        kept = h + (n * (H * W) + pixel)[:, None] * (2 * C) + j[None, :]
        tl.store(kept, even, mask=known)
        tl.store(kept + C, odd, mask=known)
        log_s = 2 * _accurate_tanh(even / 2)
        total += tl.where(known, log_s, 0.0)
        place = (n * stride_n + y.to(tl.int64) * stride_y + u.to(tl.int64) * stride_x)[:, None]
        target = (n * ((STAY + C) * H * W) + pixel)[:, None]
        change = tl.load(x + place + ((STAY + j).to(tl.int64) * stride_c)[None, :], mask=known, other=0.0)
        if INVERSE:
            changed = (change - odd) * tl.exp(-log_s)
        else:
            changed = change * tl.exp(log_s) + odd
        tl.store(out + target + ((STAY + j) * (H * W))[None, :], changed, mask=known)
        if STAY > 0:
            i = tl.arange(0, STAYING)
            copied = (pixel < H * W)[:, None] & (i < STAY)[None, :]
            stay = tl.load(x + place + (i.to(tl.int64) * stride_c)[None, :], mask=copied, other=0.0)
            tl.store(out + target + (i * (H * W))[None, :], stay, mask=copied)
    tl.store(log_det + n, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def _affine_head_backward(
    grad_z, z_n, z_c, z_y, z_x, grad_log_det, det_n, x, stride_n, stride_c, stride_y, stride_x,
    h, log_scale, grad_x, grad_y, sums,
    C: tl.constexpr, STAY: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, CHANNELS)
    of = j < C
    scale_even = tl.exp(3 * tl.load(log_scale + 2 * j, mask=of, other=0.0))
    scale_odd = tl.exp(3 * tl.load(log_scale + 2 * j + 1, mask=of, other=0.0))
    grad_det = tl.load(grad_log_det + n * det_n)
    bias_even = tl.zeros([PIXELS, CHANNELS], tl.float32)
    bias_odd = tl.zeros([PIXELS, CHANNELS], tl.float32)
    logs_even = tl.zeros([PIXELS, CHANNELS], tl.float32)
    logs_odd = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for start in range(0, H * W, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        y, u = quotient_and_remainder(pixel, W, H * W + PIXELS)
        y, u = y.to(tl.int64), u.to(tl.int64)
        known = (pixel < H * W)[:, None] & of[None, :]
        channel = (STAY + j).to(tl.int64)
        place = (n * z_n + y * z_y + u * z_x)[:, None] + (channel * z_c)[None, :]
        dz = tl.load(grad_z + place, mask=known, other=0.0)
        place = (n * stride_n + y * stride_y + u * stride_x)[:, None] + (channel * stride_c)[None, :]
        value = tl.load(x + place, mask=known, other=0.0)
        rows = (n * (H * W) + pixel)[:, None] * (2 * C) + j[None, :]
        even = tl.load(h + rows, mask=known, other=0.0)
        odd = tl.load(h + rows + C, mask=known, other=0.0)
        half = _accurate_tanh(even / 2)
        dx = dz * tl.exp(2 * half)
        target = (n * ((STAY + C) * H * W) + pixel)[:, None] + ((STAY + j) * (H * W))[None, :]
        tl.store(grad_x + target, dx, mask=known)
        d_even = tl.where(known, (dx * value + grad_det) * (1 - half * half), 0.0)
        tl.store(grad_y + rows, d_even * scale_even[None, :], mask=known)
        tl.store(grad_y + rows + C, dz * scale_odd[None, :], mask=known)
        bias_even += d_even
        bias_odd += dz
        logs_even += d_even * even
        logs_odd += dz * odd
    to = sums + n * (4 * C) + 2 * j
    tl.store(to, tl.sum(bias_even, axis=0) * scale_even, mask=of)
    tl.store(to + 1, tl.sum(bias_odd, axis=0) * scale_odd, mask=of)
    tl.store(to + 2 * C, 3 * tl.sum(logs_even, axis=0), mask=of)
    tl.store(to + 2 * C + 1, 3 * tl.sum(logs_odd, axis=0), mask=of)

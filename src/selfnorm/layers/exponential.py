"""The convolution exponential: invertible for any kernel, equally fast in both directions, with a trace as log-determinant."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selfnorm.bijection import Chain, Surrogate, located
from selfnorm.kernels.conv.choice import conv_kernels_fit
from selfnorm.layers.exact import Conv1x1
from selfnorm.layers.fusable import FusableLayer
from selfnorm.layers.linear import odd_kernel
from selfnorm.linalg.convmatrix import Geometry, convolve
from selfnorm.linalg.factors import to_float64
from selfnorm.runtime.autograd import in_full_precision
from selfnorm.runtime.checks import expect_like, expect_shape, positive_int
from selfnorm.runtime.rounding import note_bias, note_condition

# At this norm the omitted terms amount to at most 1.07e-4·‖x‖ after 6 and 3e-12·‖x‖ after 13.
MAX_NORM = 0.9
LARGEST_CONDITION = math.exp(2 * MAX_NORM)  # a bound: ‖exp(±T)‖ ≤ exp ‖T‖
TRAINING_TERMS, EXACT_TERMS = 6, 13
SQUARINGS = 8


class ConvExponential(FusableLayer):
    """z = exp(T(k))x + b = x + k ⋆ x + k ⋆ k ⋆ x / 2! + … + b with k = w·min(1, 0.9/σ(w)), σ(w) ≥ ‖T(w)‖ (see `norm_bound`).

    log_det = HW·Σ_c k[c, c, centre], the trace of T(k), is exact for the whole series. `forward` and `inverse` (the same with
    −k) sum 13 terms, which leaves only rounding; `surrogate` sums 6. Parameters: weight (C, C, kh, kw), Xavier-normal noise of
    gain 0.01 at first, which makes the map nearly the identity; bias (C,). Takes images of any size. Since ‖T(w)‖ grows with the
    size, the k of a large w depends on it a little. Cost: one convolution for each term, and O(HW·C³) for σ.
    Hoogeboom et al. (2020), "The Convolution Exponential and Generalized Sylvester Flows".

    >>> layer = ConvExponential(2, 3)
    >>> x = torch.randn(5, 2, 6, 4)
    >>> z, log_det = layer(x)
    >>> bool(torch.allclose(layer.inverse(z)[0], x, atol=1e-5))
    True
    """

    surrogate_is_exact = False
    takes_context = False
    notes_rounding = True

    def __init__(self, channels: int, kernel_size: int | Sequence[int] = 3) -> None:
        super().__init__()
        self.channels = positive_int("ConvExponential", "channels", channels)
        self.kernel_size = odd_kernel("ConvExponential", "kernel_size", kernel_size)
        noise = nn.init.xavier_normal_(torch.empty(self.channels, self.channels, *self.kernel_size), gain=0.01)
        self.weight = nn.Parameter(noise)
        self.bias = nn.Parameter(torch.zeros(self.channels))

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}"

    @in_full_precision
    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k = self._kernel_for(x)
        note_condition(self, LARGEST_CONDITION, x)
        z = _exponential(x, k, EXACT_TERMS) + self.bias[:, None, None]
        note_bias(self.bias, z)
        return z, _trace_log_det(x, k)

    @in_full_precision
    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k = -self._kernel_for(z)
        note_condition(self, LARGEST_CONDITION, z)
        return _exponential(z - self.bias[:, None, None], k, EXACT_TERMS), _trace_log_det(z, k)

    @in_full_precision
    def _fused(self, x: Tensor, *, context: Tensor | None) -> Surrogate | None:
        self._check_input(x)
        if not conv_kernels_fit(x, self.weight, self.bias):
            return None
        from selfnorm.kernels.conv.series import FusedConvSeries

        return Surrogate.exact(*FusedConvSeries.apply(x, self._fused_norm_limited_weight(x), self.bias, TRAINING_TERMS))

    @in_full_precision
    def _plain(self, x: Tensor, *, context: Tensor | None) -> Surrogate:
        k = self._kernel_for(x)
        z = _exponential(x, k, TRAINING_TERMS) + self.bias[:, None, None]
        return Surrogate.exact(z, _trace_log_det(x, k))

    def _check_input(self, x: Tensor) -> None:
        expect_shape(self, x, self.channels, "H", "W")
        expect_like(self, x, self.weight)

    def _kernel_for(self, x: Tensor) -> Tensor:
        """Returns k = w·min(1, 0.9/σ(w)) for images of x's size."""
        self._check_input(x)
        sigma = norm_bound(self.weight, (x.shape[2], x.shape[3]))
        return self.weight * (MAX_NORM / sigma.clamp_min(MAX_NORM))

    def _fused_norm_limited_weight(self, x: Tensor) -> Tensor:
        """Returns the same k, by Triton kernels if there are few channels."""
        from selfnorm.kernels.conv.norm_limit import MAX_NORM_CHANNELS, NormLimitedKernel

        if self.channels > MAX_NORM_CHANNELS:
            return self._kernel_for(x)
        return NormLimitedKernel.apply(self.weight, _torus(self.weight, (x.shape[2], x.shape[3])), SQUARINGS, MAX_NORM)


class ExpConv2d(Chain):
    """z = exp(T(k))(Wx + a) + b: a `Conv1x1`, since an exponential of small norm hardly mixes channels, and a `ConvExponential`.

    mix:  whether to include the 1×1. Its C × C matrix is all that a training step factorises. Hoogeboom et al. (2020).

    >>> layer = ExpConv2d(2, 3)
    >>> layer.surrogate(torch.randn(5, 2, 6, 4)).z.shape
    torch.Size([5, 2, 6, 4])
    """

    def __init__(self, channels: int, kernel_size: int | Sequence[int] = 3, mix: bool = True) -> None:
        with located(type(self).__name__):
            super().__init__(*([Conv1x1(channels)] if mix else []), ConvExponential(channels, kernel_size))


def norm_bound(w: Tensor, size: tuple[int, int], squarings: int = SQUARINGS) -> Tensor:
    """Returns σ(w) ≥ ‖T(w)‖ for a zero-padded convolution of images of this size; differentiable, and never reads the device.

    T(w) is cut out of the circular convolution on a torus so large that nothing wraps around into the image, H + ⌊kh/2⌋ by
    W + ⌊kw/2⌋. So its norm is at most the circular one's, the largest ‖ŵ(ω)‖ of the Fourier symbols ŵ(ω), C × C. The gap closes
    as images grow: for 3×3 kernels it was 4 to 11 % on 7×7 images and under 1 % on 28×28. ‖ŵ‖ itself is bounded by the Schatten
    norm (tr (ŵ*ŵ)^p)^(1/2p), p = 2^squarings = 256, at most C^(1/512) times too large, under 1 % up to 150 channels. The whole
    bound takes only matrix products: O(HW·C³).

    Power iteration, the usual choice, finds lower bounds, and slowly, since the largest singular values lie close together.
    When Adam at 1e-3 drove a kernel against the limit, the norm was up to 14 % above it with 1 iteration after each step and up
    to 4 % with 16; with this bound it was 1 to 2 % below (`benchmarks/norm.py`).
    """
    # Half of the frequencies: the other symbols are complex conjugates. The position of the kernel's centre only adds a phase.
    symbols = torch.fft.rfft2(w, s=_torus(w, size)).flatten(2).permute(2, 0, 1)  # (frequencies, C, C)
    with torch.no_grad():
        worst = _schatten(symbols, squarings).argmax(0, keepdim=True)
    # Only the largest has a gradient. Computing it again costs less than backpropagating through all of them.
    return _schatten(symbols.index_select(0, worst), squarings).squeeze(0)


def _torus(w: Tensor, size: tuple[int, int]) -> tuple[int, int]:
    """Returns the sides of the smallest torus on which nothing wraps around into an image of this size."""
    return max(size[0] + w.shape[2] // 2, w.shape[2]), max(size[1] + w.shape[3] // 2, w.shape[3])


def _schatten(matrices: Tensor, squarings: int) -> Tensor:
    """Returns (tr (A*A)^p)^(1/2p) of each of the matrices (…, C, C), with p = 2^squarings."""
    power = matrices.mH @ matrices
    trace = _hermitian_trace(power)
    log_norm = trace.log()
    for squaring in range(1, squarings + 1):
        # log tr M² = 2·log tr M + log tr (M / tr M)²: rescaled at each squaring, the powers stay within range.
        power = power / trace[..., None, None]
        power = power @ power
        trace = _hermitian_trace(power)
        log_norm = log_norm + trace.log() / 2**squaring
    return (log_norm / 2).exp()


def _hermitian_trace(matrices: Tensor) -> Tensor:
    """Returns the traces of Hermitian matrices, clamped above 0: a kernel of zeros has neither a logarithm nor a gradient."""
    return matrices.diagonal(dim1=-2, dim2=-1).real.sum(-1).clamp_min(torch.finfo(matrices.dtype).tiny)


def _exponential(x: Tensor, k: Tensor, terms: int) -> Tensor:
    """Returns Σ_{i ≤ terms} T(k)ⁱx / i!."""
    total = term = x
    for i in range(1, terms + 1):
        term = convolve(term, k / i, Geometry())
        total = total + term
    return total


def _trace_log_det(x: Tensor, k: Tensor) -> Tensor:
    """Returns tr T(k) for each example of x (N,): only the kernel's centre maps a pixel to itself, at every pixel."""
    centre = k[:, :, k.shape[2] // 2, k.shape[3] // 2]
    return (x.shape[2] * x.shape[3] * to_float64(centre.diagonal()).sum()).to(x).repeat(x.shape[0])

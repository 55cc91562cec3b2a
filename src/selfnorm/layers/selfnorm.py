"""The paper's layers: linear and convolutional maps that learn their own inverse and train without a determinant.

Let R ≈ W⁻¹ be the learned inverse and e = RWx − x its error. Let g_z, g_log_det and g_rec be the loss's gradients for the three
outputs Wx, log_det and ‖e‖², and g_x = Wᵀg_z the one for the input. Then the gradients are (Keller et al., 2021, eqs. 10–11 and
appendix A.1, as a loss to be minimised)

    ∂W = ½(g_z xᵀ + g_log_det·Rᵀ) + 2 g_rec Rᵀe xᵀ
    ∂R = −½(g_x (Wx)ᵀ + g_log_det·Wᵀ) + 2 g_rec e (Wx)ᵀ

summed over the batch: the determinant's gradient W⁻ᵀ has become Rᵀ, and O(D³) has become O(D²) per example. The one-sided
objective, `inverse_likelihood=False`, leaves R to the reconstruction and gives W the whole likelihood:

    ∂W = g_z xᵀ + g_log_det·Rᵀ + 2 g_rec Rᵀe xᵀ
    ∂R = 2 g_rec e (Wx)ᵀ

Everything else (x, the bias) gets its full gradient, and the reconstruction reaches no earlier layer. Because the
log-determinant's gradient comes in through a per-example output, it scales with the loss like every other term.
`docs/derivation.md` has the derivation, `docs/stability.md` the reason for the one-sided objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm.bijection import Surrogate
from selfnorm.kernels.conv.choice import small_images
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.linear import ConvMap, DenseMap, convolve_without_gradient, odd_kernel
from selfnorm.layers.stored_inverse import StoredInverse
from selfnorm.linalg.blocks import Dense, PerPixel
from selfnorm.linalg.convmatrix import (
    Geometry,
    PaddingMode,
    convolve,
    flip,
    kernel_gradient,
    least_squares_inverse,
    resize_kernel,
    tap_counts,
)
from selfnorm.linalg.factors import invert
from selfnorm.linalg.iterations import transposed
from selfnorm.linalg.learned import likelihood_shares
from selfnorm.runtime.autograd import backward_in_full_precision, refuse_second_derivative
from selfnorm.runtime.checks import describe
from selfnorm.runtime.context import current_step

# On a CPU, multiplying a transposed view uses all threads, while a transposed copy works in cache-friendly tiles on one. For
# wider matrices, and for rows that lie a multiple of many cache lines apart, the copy is faster.
MAX_TRANSPOSED_VIEW = 2048


class _SelfNormalizing(StoredInverse):
    """Training of W and R together, for any shape. Abstract."""

    surrogate_is_exact = False
    # Whether R takes half of the likelihood's gradient, as in the paper. A loss chooses, through the step context.
    inverse_likelihood = True

    @property
    def reconstruction_names(self) -> tuple[str, ...]:
        return ("",)

    def _plain(self, x: Tensor) -> Surrogate:
        z, log_det, reconstruction = self.self_normalize(x)
        return Surrogate(z + self.broadcast_bias(), log_det, reconstruction)

    def _remembered_objective(self) -> bool:
        """Returns `inverse_likelihood` of the current step, and keeps it for a pass outside of the loss, as when activation
        checkpointing computes this layer again."""
        chosen = current_step().inverse_likelihood
        if chosen is not None:
            self.inverse_likelihood = chosen
        return self.inverse_likelihood

    def self_normalize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns Wx, zeros (N,) that carry the log-determinant's gradient, and ‖RWx − x‖² (N, 1)."""
        raise NotImplementedError


class SelfNormLinear(_SelfNormalizing, DenseMap):
    """z = Wx + b, W any D × D matrix, with a learned inverse R; training costs O(D²) per example, and no determinant.

    Parameters: weight (D, D), I + Xavier-normal noise of gain 0.01 at first; weight_inv (D, D), Wᵀ at first; bias (D,).
    `forward` and `inverse` stay exact: they factorise W once for each set of weights, O(D³). Keller et al. (2021), section 4.1.
    A `Loss` decides whether R takes half of the likelihood's gradient. Before any `Loss` has used the
    layer, it does, as in the paper.

    >>> layer = SelfNormLinear(3)
    >>> z, log_det, reconstruction = layer.surrogate(torch.randn(5, 3))
    >>> z.shape, log_det.shape, reconstruction.shape
    (torch.Size([5, 3]), torch.Size([5]), torch.Size([5, 1]))
    """

    def __init__(self, features: int, bias: bool = True) -> None:
        super().__init__(features, bias)
        self.weight_inv = nn.Parameter(transposed(self.weight.detach()))

    def _fused(self, x: Tensor) -> Surrogate | None:
        if not usable(x, self.weight, self.weight_inv, self.bias):
            return None
        from selfnorm.kernels.dense.selfnorm import FusedSelfNormLinear

        return Surrogate(
            *FusedSelfNormLinear.apply(x, self.weight, self.weight_inv, self.bias, self._remembered_objective(), current_step())
        )

    def self_normalize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _SelfNormLinear.apply(x, self.weight, self.weight_inv, self._remembered_objective())

    def multiply_inverse(self, R: Tensor, z: Tensor) -> Tensor:
        return z @ R.mT

    def inverse_of(self, weight: Tensor) -> Tensor:
        return invert(describe(self), weight, Dense())


class SelfNormConv2d(_SelfNormalizing, ConvMap):
    """z = w ⋆ x + b, a same-size convolution, with a learned inverse convolution r; training needs no determinant.

    Parameters: weight (C, C/groups, kh, kw), the identity's kernel + Xavier-normal noise of gain 0.01 at first, or a random
    rotation if 1×1; weight_inv (C, C/groups, rh, rw), flip(w) at first; bias (C,). r may be larger than w
    (`inverse_kernel_size`), since the inverse of a small kernel reaches further; both share dilation, groups and padding.
    `forward` and `inverse` stay exact, at the cost that `ExactConv2d` names, once for each set of weights and image size.
    Keller et al. (2021), sections 4.2 and A.4. A `Loss` decides whether r takes half of the likelihood's gradient, as for
    `SelfNormLinear`.

    >>> layer = SelfNormConv2d(2, 3, inverse_kernel_size=5)
    >>> layer.surrogate(torch.randn(5, 2, 8, 6)).z.shape
    torch.Size([5, 2, 8, 6])
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int | Sequence[int],
        inverse_kernel_size: int | Sequence[int] | None = None,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: PaddingMode = "zeros",
        bias: bool = True,
    ) -> None:
        super().__init__(channels, kernel_size, stride, dilation, groups, padding_mode, bias)
        self.inverse_kernel_size = (
            self.kernel_size
            if inverse_kernel_size is None
            else odd_kernel(type(self).__name__, "inverse_kernel_size", inverse_kernel_size)
        )
        learned = resize_kernel(flip(self.weight.detach(), self.geometry.groups), self.inverse_kernel_size)
        self.weight_inv = nn.Parameter(learned.clone(memory_format=torch.contiguous_format))

    def extra_repr(self) -> str:
        return super().extra_repr() + f", inverse_kernel_size={self.inverse_kernel_size}"

    def check_shape(self, x: Tensor) -> None:
        super().check_shape(x)
        self.check_fit("inverse_kernel_size", self.inverse_kernel_size, x)

    def _fused(self, x: Tensor) -> Surrogate | None:
        fits = self.geometry == Geometry() and small_images(x, self.weight, self.weight_inv)
        if not fits or not usable(x, self.weight, self.weight_inv, self.bias):
            return None
        from selfnorm.kernels.conv.selfnorm import FusedSelfNormConv2d

        return Surrogate(*FusedSelfNormConv2d.apply(x, self.weight, self.weight_inv, self.bias, self._remembered_objective()))

    def self_normalize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _SelfNormConv2d.apply(x, self.weight, self.weight_inv, self.geometry, self._remembered_objective())

    def multiply_inverse(self, R: Tensor, z: Tensor) -> Tensor:
        return convolve_without_gradient(z, R, self.geometry)

    def inverse_of(self, weight: Tensor) -> Tensor:
        groups = self.geometry.groups
        if self.kernel_size == (1, 1):
            blocks = invert(describe(self), weight, PerPixel((self.channels, 1, 1), groups))
            return resize_kernel(blocks.flatten(0, 1)[:, :, None, None], self.inverse_kernel_size)
        return least_squares_inverse(weight, self.inverse_kernel_size, groups)


class _SelfNormLinear(torch.autograd.Function):
    """x (N, D), W, R (D, D) -> Wx, zeros (N,), ‖RWx − x‖² (N, 1), with the gradients above: 6 matrix products in all.

    One-sided, 5 suffice where the input needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, R: Tensor, inverse_likelihood: bool) -> tuple[Tensor, Tensor, Tensor]:
        z = x @ W.mT
        error = torch.addmm(x, z, R.mT, beta=-1)
        ctx.save_for_backward(x, z, error, W, R)
        ctx.inverse_likelihood = inverse_likelihood
        return z, x.new_zeros(x.shape[0]), error.square().sum(1, keepdim=True)

    @staticmethod
    @backward_in_full_precision
    def backward(
        ctx: Any, grad_z: Tensor, grad_log_det: Tensor, grad_reconstruction: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor, None]:
        refuse_second_derivative()
        x, z, error, W, R = ctx.saved_tensors
        of_w, of_r = likelihood_shares(ctx.inverse_likelihood)
        log_det = grad_log_det.sum()
        grad_error = 2 * grad_reconstruction * error
        grad_x = grad_z @ W if of_r or ctx.needs_input_grad[0] else None
        grad_W = _times_transposed(of_w * log_det, R).addmm_(torch.addmm(grad_z, grad_error, R, beta=of_w).mT, x)
        if grad_x is None or not of_r:
            return grad_x, grad_W, grad_error.mT @ z, None
        grad_R = _times_transposed(-of_r * log_det, W).addmm_(grad_error.sub_(grad_x, alpha=of_r).mT, z)
        return grad_x, grad_W, grad_R, None


def _times_transposed(scale: Tensor, matrix: Tensor) -> Tensor:
    """Returns scale·matrixᵀ, contiguous."""
    rows = matrix.shape[0]
    if matrix.device.type != "cpu" or rows > MAX_TRANSPOSED_VIEW or rows % 64 == 0:
        return transposed(matrix).mul_(scale)
    return torch.mul(matrix.mT, scale, out=matrix.new_empty(matrix.shape))


class _SelfNormConv2d(torch.autograd.Function):
    """x (N, C, H, W), kernels w, r -> w ⋆ x, zeros (N,), ‖r ⋆ w ⋆ x − x‖² (N, 1): the same with T(w), T(r) for W, R.

    Seen from the kernel, T(r)ᵀ is flip(r) times m, the number of times that T(w) holds each tap; r is cut or zero-padded to w's
    size for that, and w to r's. 6 convolutions in all, 5 one-sided where the input needs no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, r: Tensor, geometry: Geometry, inverse_likelihood: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = convolve(x, w, geometry)
        error = convolve(z, r, geometry) - x
        ctx.save_for_backward(x, z, error, w, r)
        ctx.geometry, ctx.inverse_likelihood = geometry, inverse_likelihood
        return z, x.new_zeros(x.shape[0]), error.square().sum((1, 2, 3))[:, None]

    @staticmethod
    @backward_in_full_precision
    def backward(
        ctx: Any, grad_z: Tensor, grad_log_det: Tensor, grad_reconstruction: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        refuse_second_derivative()
        x, z, error, w, r = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        of_w, of_r = likelihood_shares(ctx.inverse_likelihood)
        log_det = grad_log_det.sum()
        grad_error = 2 * grad_reconstruction[:, :, None, None] * error
        towards_w = of_w * grad_z + convolve(grad_error, flip(r, geometry.groups), geometry)
        grad_w = _kernel_terms(x, towards_w, r, w, of_w * log_det, geometry)
        grad_x = convolve(grad_z, flip(w, geometry.groups), geometry) if of_r or ctx.needs_input_grad[0] else None
        if grad_x is None or not of_r:
            return grad_x, grad_w, kernel_gradient(z, grad_error, (r.shape[2], r.shape[3]), geometry), None, None
        grad_r = _kernel_terms(z, grad_error - of_r * grad_x, w, r, -of_r * log_det, geometry)
        return grad_x, grad_w, grad_r, None, None


def _kernel_terms(x: Tensor, grad: Tensor, inverse: Tensor, kernel: Tensor, scale: Tensor, geometry: Geometry) -> Tensor:
    """Returns a kernel's gradient: the data term, from its input x and its output's gradient, plus that of the log-determinant,
    from the other kernel."""
    kernel_size = (kernel.shape[2], kernel.shape[3])
    counts = tap_counts(kernel_size, (x.shape[2], x.shape[3]), geometry, x.device)
    log_det_term = flip(resize_kernel(inverse, kernel_size), geometry.groups) * counts
    return kernel_gradient(x, grad, kernel_size, geometry) + scale * log_det_term

"""The exact twins of the self-normalizing layers: the same maps, trained by the exact gradient of log|det W|."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from selfnorm.bijection import Surrogate
from selfnorm.kernels.conv.choice import conv_kernels_fit
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.linear import ConvMap, DenseMap, LinearMap, drop_stored_inverse
from selfnorm.linalg.blocks import BlockForm
from selfnorm.linalg.factors import log_abs_det
from selfnorm.runtime.context import current_step

SMALL_BLOCK = 64  # rows of a matrix that a kernel can factorise


class _ExactTraining(LinearMap):
    """Training by the exact gradient, the reference for self-normalizing twins: O(m³) per step for blocks of m rows. Abstract."""

    def _plain(self, x: Tensor) -> Surrogate:
        form = self.block_form(x)
        weight = self.weight.view_as(self.weight)  # used here first, so that gradients accumulate on the main stream
        with current_step().on_side_stream(recorded=True):  # needed only at the end of the forward pass
            log_det = _training_log_det(weight, form).repeat(x.shape[0])
        return Surrogate.exact(self._apply_for_training(x, weight), log_det)

    def _apply_for_training(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns Wx + b. A kernel may compute it, so it need not have a second derivative."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_stored_inverse(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class ExactLinear(_ExactTraining, DenseMap):
    """z = Wx + b with W any invertible D × D matrix; trained by the exact gradient, an O(D³) factorisation per step.

    Parameters: weight (D, D), bias (D,). State dicts load in both directions between this layer and
    `SelfNormLinear`.

    >>> import torch
    >>> layer = ExactLinear(3)
    >>> x = torch.randn(5, 3)
    >>> z, log_det = layer(x)
    >>> bool(torch.allclose(layer.inverse(z)[0], x, atol=1e-5))
    True
    """

    def _apply_for_training(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.apply_weight(x, weight) + self.broadcast_bias()


class _ExactConv(_ExactTraining, ConvMap):
    """Convolutions trained by the exact gradient. Abstract."""

    def _fused(self, x: Tensor) -> Surrogate | None:
        if self.kernel_size != (1, 1) or not conv_kernels_fit(x, self.weight, self.bias, self.geometry):
            return None
        from selfnorm.kernels.conv.convolution import FusedConv

        return Surrogate.exact(*FusedConv.apply(x, self.weight, self.bias, "mixing"))

    def _apply_for_training(self, x: Tensor, weight: Tensor) -> Tensor:
        if not conv_kernels_fit(x, self.weight, self.bias, self.geometry):
            return self.apply_weight(x, weight) + self.broadcast_bias()
        from selfnorm.kernels.conv.convolution import FusedConv

        z: Tensor = FusedConv.apply(x, weight, self.bias)[0]
        return z


class ExactConv2d(_ExactConv):
    """z = w ⋆ x + b, a same-size convolution by any invertible kernel; trained by the exact gradient.

    A step factorises T(w): O((C/groups·HW)³) for a zero-padded k×k kernel, O(HW·C³) by Fourier transform for a circular one,
    O(C³) for a 1×1. Parameters: weight (C, C/groups, kh, kw), bias (C,). State dicts load in both
    directions between this layer and `SelfNormConv2d`.

    >>> import torch
    >>> layer = ExactConv2d(2, 3)
    >>> x = torch.randn(5, 2, 6, 4)
    >>> z, log_det = layer(x)
    >>> bool(torch.allclose(layer.inverse(z)[0], x, atol=1e-5))
    True
    """


class Conv1x1(_ExactConv):
    """z = Wx + b at every pixel, W any invertible C × C matrix, initialised as a random rotation (Kingma & Dhariwal, 2018).

    Parameters: weight (C, C, 1, 1), bias (C,): those of `ExactConv2d(channels, 1)`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 1)


def _training_log_det(weight: Tensor, form: BlockForm) -> Tensor:
    """Returns `log_abs_det`; small blocks use a kernel instead of a library made for large ones."""
    blocks = form.blocks(weight)
    if blocks.shape[-1] > SMALL_BLOCK or not usable(blocks):
        return log_abs_det(weight, form)
    from selfnorm.kernels.dense.small_determinants import SmallLogDet

    return form.copies * SmallLogDet.apply(blocks).sum()

"""The exact twins: the same maps as the self-normalizing layers', trained by the exact gradient, determinant and all."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from selfnorm.bijection import Surrogate
from selfnorm.layers.linear import (
    ConvMap,
    DenseMap,
    FusedConv,
    LinearMap,
    drop_kept_inverse,
    in_full_precision,
    training_log_det,
)
from selfnorm.runtime.streams import beside


class _ExactTraining(LinearMap):
    """Training by the exact gradient, as the self-normalizing twins' control: O(m³) a step for each block of m rows. Abstract."""

    @in_full_precision
    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        self.check_input(x)
        form = self.form(x)
        weight = self.weight.view_as(self.weight)  # the branch's use is not the first, so gradients meet on the main line
        with beside(taped=True):  # nobody needs it before the end
            log_det = training_log_det(weight, form).repeat(x.shape[0])
        return Surrogate.exact(self.training_weight(x, weight), log_det)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_kept_inverse(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class ExactLinear(_ExactTraining, DenseMap):
    """z = Wx + b with W any invertible D × D matrix; trained by the exact gradient, an O(D³) factorisation a step.

    Parameters: weight (D, D), bias (D,). The state of a `SelfNormLinear` loads into it, and its own into a `SelfNormLinear`.

    >>> import torch
    >>> layer = ExactLinear(3)
    >>> x = torch.randn(5, 3)
    >>> z, log_det = layer(x)
    >>> bool(torch.allclose(layer.inverse(z)[0], x, atol=1e-5))
    True
    """


class _ExactConv(_ExactTraining, ConvMap):
    """The convolutions among them. Abstract."""

    @in_full_precision
    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        self.check_input(x)
        if self.kernel_size != (1, 1) or not FusedConv.takes(x, self.weight, self.bias, self.geometry):
            return super().surrogate(x, context=context)
        z, log_det = FusedConv.apply(x, self.weight, self.bias, "mixing")
        return Surrogate.exact(z, log_det)


class ExactConv2d(_ExactConv):
    """z = w ⋆ x + b, a same-size convolution by any invertible kernel; trained by the exact gradient.

    A step factorises T(w): O((C/groups·HW)³) for a zero-padded k×k kernel, O(HW·C³) by Fourier transform for a circular one,
    O(C³) for a 1×1. Parameters: weight (C, C/groups, kh, kw), bias (C,). The state of a `SelfNormConv2d` loads into it, and its
    own into a `SelfNormConv2d`.

    >>> import torch
    >>> layer = ExactConv2d(2, 3)
    >>> x = torch.randn(5, 2, 6, 4)
    >>> z, log_det = layer(x)
    >>> bool(torch.allclose(layer.inverse(z)[0], x, atol=1e-5))
    True
    """


class Conv1x1(_ExactConv):
    """z = Wx + b at every pixel, W any invertible C × C matrix, started as a random rotation (Kingma & Dhariwal, 2018).

    Parameters: weight (C, C, 1, 1), bias (C,): those of `ExactConv2d(channels, 1)`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 1)

"""`FusableLayer`: layers with a cheap determinant that have kernels for training and for sampling."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from selfnorm.bijection import Bijection, Surrogate


class FusableLayer(Bijection):
    """A layer that trains by its exact pair, computed by kernels where they apply. Abstract.

    Define `forward` and `inverse` as for any `Bijection`, and `_fused` and `_fused_inverse` if there are kernels.
    """

    def _fused(self, x: Tensor, context: Tensor | None) -> Surrogate | None:
        """Returns the surrogate by kernels, or None where they do not apply. Raises ValueError for a wrong shape."""
        return None

    def _fused_inverse(self, z: Tensor, context: Tensor | None) -> Tensor | None:
        """Returns the inverse without its log-determinant and without gradient, or None where kernels do not apply."""
        return None

    @final
    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        fused = self._fused(x, context)
        return Surrogate.exact(*self.forward(x, context=context)) if fused is None else fused

    @final
    def approx_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        fused = None if torch.is_grad_enabled() else self._fused_inverse(z, context)
        return self.inverse(z, context=context)[0] if fused is None else fused

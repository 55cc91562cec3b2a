"""`FusableLayer`: layers with a cheap determinant that have kernels for training or for sampling."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from selfnorm.bijection import Bijection, Surrogate


class FusableLayer(Bijection):
    """A layer without a learned inverse whose surrogate and inverse are computed by kernels where they apply. Abstract.

    Define `forward` and `inverse` as for any `Bijection`, and `_fused` and `_fused_inverse` if there are kernels. Define `_plain`
    if training should not use the exact `forward`.
    """

    def _fused(self, x: Tensor, *, context: Tensor | None) -> Surrogate | None:
        """Returns the surrogate by kernels, or None where they do not apply. Raises ValueError for a wrong shape."""
        return None

    def _plain(self, x: Tensor, *, context: Tensor | None) -> Surrogate:
        """Returns the surrogate without kernels: by default the exact z and log_det of `forward`."""
        return Surrogate.exact(*self.forward(x, context=context))

    def _fused_inverse(self, z: Tensor, *, context: Tensor | None) -> Tensor | None:
        """Returns the inverse without its log-determinant and without gradient, or None where kernels do not apply."""
        return None

    @final
    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        fused = self._fused(x, context=context)
        return self._plain(x, context=context) if fused is None else fused

    @final
    def approx_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        fused = None if torch.is_grad_enabled() else self._fused_inverse(z, context=context)
        return self.inverse(z, context=context)[0] if fused is None else fused

    @final
    def auto_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        return self.approx_inverse(z, context=context)

"""`StoredInverse`: layers that store an R ≈ W⁻¹ next to W, whether R is learned or tracked."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from selfnorm.layers.linear import LinearMap, drop_stored_inverse
from selfnorm.linalg.factors import to_float64
from selfnorm.linalg.iterations import default_tolerance, refine
from selfnorm.runtime.autograd import in_full_precision
from selfnorm.runtime.checks import describe


class StoredInverse(LinearMap):
    """z = Wx + b with an approximate inverse R at hand: one product instead of a factorisation. Abstract."""

    weight_inv: Tensor

    def apply_inverse(self, z: Tensor) -> Tensor:
        """Returns Rz."""
        raise NotImplementedError

    def inverse_of(self, weight: Tensor) -> Tensor:
        """Returns the weight_inv for a weight, in the weight's precision; raises `SingularWeightError` if there is none."""
        raise NotImplementedError

    @in_full_precision
    def approx_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        self.check_input(z)
        return self.apply_inverse(z - self.broadcast_bias())

    @in_full_precision
    def refined_inverse(self, z: Tensor, *, context: Tensor | None = None, tolerance: float | None = None) -> Tensor:
        """Returns R(z − b), iterated to ‖z − f(x)‖ ≤ tolerance·‖z − b‖; exact, with a warning, if that does not converge."""
        self.check_input(z)
        tolerance = default_tolerance(z.dtype) if tolerance is None else tolerance
        x, residual = refine(self.apply_weight, self.apply_inverse, z - self.broadcast_bias(), tolerance)
        if residual <= tolerance:
            return x
        warnings.warn(
            f"{describe(self)}: refining the stored inverse stopped at a relative residual of {residual:.1e}, above the "
            f"tolerance {tolerance:.1e}: either R is too far from the inverse (the spectral radius of I − RW must be well below "
            f"1), or {z.dtype} resolves no more; using the exact inverse instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return self.inverse(z)[0]

    @in_full_precision
    def reconstruction(self, h: Tensor) -> Tensor:
        """Returns ‖RWh − h‖², (N,), for any h: on white noise its mean estimates ‖RW − I‖²."""
        self.check_input(h)
        return (self.apply_inverse(self.apply_weight(h)) - h).square().flatten(1).sum(1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if "fallbacks" not in self._buffers and prefix + "fallbacks" in state_dict:
            drop_stored_inverse(state_dict, prefix)  # of a tracked twin, whose inverse may have a different shape
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.shape == self.weight.shape and prefix + "weight_inv" not in state_dict:
            # The state of an exact twin.
            if not torch.isfinite(weight).all():
                raise ValueError(f"{describe(self)}: expected finite weights to compute weight_inv from, got non-finite ones")
            state_dict[prefix + "weight_inv"] = self.inverse_of(to_float64(weight)).to(weight)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

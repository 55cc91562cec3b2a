"""The protocol of layers that learn their inverse, and how W and R share the likelihood; `layers.selfnorm` has the layers."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

from torch import Tensor


class LearnedInverse(Protocol):
    """A linear map W with a learned inverse R, on examples of `example_shape`."""

    weight: Tensor
    weight_inv: Tensor
    example_shape: tuple[int, ...]

    def reconstruction(self, h: Tensor) -> Tensor:
        """Returns ‖RWh − h‖², (N,), for any h."""
        ...


def is_learned_inverse(layer: Any) -> TypeGuard[LearnedInverse]:
    """Returns whether a layer has what a `LearnedInverse` has."""
    # Not isinstance: from Python 3.12 on, that does not see the parameters of a module.
    return all(hasattr(layer, name) for name in ("weight", "weight_inv", "example_shape", "reconstruction"))


def likelihood_shares(inverse_likelihood: bool) -> tuple[float, float]:
    """Returns the shares of the likelihood's gradient that W and R take: half each in the paper, one-sided all of it and none."""
    return (0.5, 0.5) if inverse_likelihood else (1.0, 0.0)

"""Protocols of layers that learn their inverse, for polishing and debiasing; `layers.selfnorm` has these layers."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

from torch import Tensor

from selfnorm.linalg.convmatrix import Geometry


def likelihood_shares(inverse_likelihood: bool) -> tuple[float, float]:
    """Returns the shares of the likelihood's gradient that W and R take: half each in the paper, one-sided all of it and none."""
    return (0.5, 0.5) if inverse_likelihood else (1.0, 0.0)


class LearnedInverse(Protocol):
    """A linear map W with a learned inverse R, on examples of `example_shape`."""

    weight: Tensor
    weight_inv: Tensor
    example_shape: tuple[int, ...]

    def extra_repr(self) -> str: ...

    def check_input(self, x: Tensor) -> None: ...

    def apply_weight(self, x: Tensor) -> Tensor: ...

    def apply_inverse(self, z: Tensor) -> Tensor: ...

    def inverse_of(self, weight: Tensor) -> Tensor: ...

    def reconstruction(self, h: Tensor) -> Tensor: ...

    def matrices(self) -> tuple[Tensor, Tensor] | None:
        """Returns W and R as matrices (groups, m, m); None for a `LearnedKernel`."""
        ...


class LearnedKernel(LearnedInverse, Protocol):
    """A `LearnedInverse` with convolution kernels of more than one tap."""

    geometry: Geometry
    inverse_kernel_size: tuple[int, int]


def is_learned_inverse(layer: Any) -> TypeGuard[LearnedInverse]:
    """Returns whether a layer has what a `LearnedInverse` has."""
    # Not isinstance: from Python 3.12 on, that does not see the parameters of a module.
    methods = ("check_input", "apply_weight", "apply_inverse", "inverse_of", "reconstruction", "matrices")
    return all(hasattr(layer, name) for name in ("weight", "weight_inv", "example_shape", *methods))

"""Protocols of layers that learn their inverse, for polishing and debiasing; `layers.selfnorm` has these layers."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from selfnorm.linalg.convmatrix import Geometry


@runtime_checkable
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
        """W and R as matrices (groups, m, m); None for a `LearnedKernel`."""
        ...


class LearnedKernel(LearnedInverse, Protocol):
    """A `LearnedInverse` with convolution kernels of more than one tap."""

    geometry: Geometry
    inverse_kernel_size: tuple[int, int]

"""Whether the convolution kernels can and should replace PyTorch's. Importing this does not import Triton."""

from __future__ import annotations

import math

from torch import Tensor

from selfnorm.kernels.dispatch import usable
from selfnorm.linalg.convmatrix import Geometry

DEFAULT_GEOMETRY = Geometry()


def conv_kernels_fit(x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry = DEFAULT_GEOMETRY) -> bool:
    """Returns whether kernels can compute w ⋆ x + b: usable tensors, small images, zero padding, no dilation and no groups.

    For a 1×1 kernel, padding and dilation do not matter.
    """
    supported = geometry == DEFAULT_GEOMETRY or (geometry.groups == 1 and w.shape[2:] == (1, 1))
    return supported and usable(x, w, b) and small_images(x, w)


def small_images(x: Tensor, *kernels: Tensor) -> bool:
    """Returns whether images (N, C, H, W) and kernels are small enough for one program to process a whole image.

    A library's convolution is faster on anything larger.
    """
    most_channels = 64 if all(kernel.shape[2] * kernel.shape[3] == 1 for kernel in kernels) else 32
    small = x.shape[1] <= most_channels and math.prod(x.shape[1:]) <= 4096
    return small and all(kernel.numel() <= 16384 and kernel.shape[2] * kernel.shape[3] <= 49 for kernel in kernels)

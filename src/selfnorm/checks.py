"""Errors that say who, expected what, and got what. Only shapes and dtypes are read here, never values on a device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def describe(layer: nn.Module) -> str:
    """The layer on one line, such as `SelfNormLinear(784, bias=True)`."""
    return f"{type(layer).__name__}({layer.extra_repr()})"


def expect_shape(layer: nn.Module, x: Tensor, *event: int | str) -> None:
    """Refuse a batch whose shape is not (N, *event); a letter in `event` stands for any size."""
    matches = x.dim() == len(event) + 1 and all(
        isinstance(want, str) or want == got for want, got in zip(event, x.shape[1:], strict=True)
    )
    if not matches:
        expected = ", ".join(["N", *map(str, event)]) + ("" if event else ",")
        raise ValueError(f"{describe(layer)}: expected an input of shape ({expected}), got {tuple(x.shape)}")


def expect_float(who: str, x: Tensor) -> None:
    """Refuse integers: a density needs real numbers, and a cast in silence would hide that pixels were not dequantised."""
    if not x.is_floating_point():
        raise ValueError(
            f"{who}: expected floating-point input, got {x.dtype}; "
            "add uniform noise to integer levels first: x + torch.rand(x.shape)"
        )


def expect_like(layer: nn.Module, x: Tensor, parameter: Tensor) -> None:
    """Refuse an input in another dtype or on another device than the layer's; under autocast, dtypes are torch's business."""
    if x.device != parameter.device or (x.dtype != parameter.dtype and not torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"{describe(layer)}: expected {parameter.dtype} on {parameter.device}, got {x.dtype} on {x.device}; "
            "move one of them with .to()"
        )


def pair(who: str, name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    """A size that may be given once for both axes, as (height, width)."""
    height, width = value if isinstance(value, tuple) else (value, value)
    if not all(isinstance(side, int) and side >= 1 for side in (height, width)):
        raise ValueError(f"{who}: expected {name} of at least 1, got {value}")
    return height, width


def count(who: str, name: str, value: int) -> int:
    """A whole number of at least one."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{who}: expected {name} to be a whole number of at least 1, got {value!r}")
    return value

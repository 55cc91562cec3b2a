"""Checks whose errors name the caller, what was expected, and what was given; parts of error messages.

Only `expect_finite` and `sums_are_finite` read values from the device; the others look at shapes, dtypes and plain numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Protocol, SupportsIndex

import torch
from torch import Tensor, nn

from selfnorm.runtime.autograd import is_vectorised
from selfnorm.runtime.escapes import escaped

SHOWN = 1000  # characters at either end of a very long message
QUOTED = 200  # characters of what a message quotes from a file


class Describable(Protocol):
    """A module, or an object that looks like one."""

    def extra_repr(self) -> str: ...


def describe(layer: Describable) -> str:
    """Returns the layer on one line, such as `SelfNormLinear(784, bias=True)`."""
    return f"{type(layer).__name__}({layer.extra_repr()})"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error message that names the known word most like this one; empty if none is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def one_line(error: BaseException) -> str:
    """Returns the message of an error or warning on one line, or the name of its type if it has none.

    The middle of a very long one, which may quote a damaged file, is left out.
    """
    # Escaped first: some control characters count as spaces.
    return shortened(" ".join(escaped(str(error) or type(error).__name__).split()), 2 * SHOWN)


def shortened(text: str, longest: int = QUOTED) -> str:
    """Returns the text, without its middle if it is longer than `longest`, for a message that quotes a file."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"


def expect_shape(layer: nn.Module, x: Tensor, *event: int | str) -> None:
    """Raises ValueError unless x has shape (N, *event); a letter in `event` stands for any size."""
    matches = x.dim() == len(event) + 1 and all(
        isinstance(want, str) or want == got for want, got in zip(event, x.shape[1:], strict=True)
    )
    if not matches:
        expected = ", ".join(["N", *map(str, event)]) + ("" if event else ",")
        raise ValueError(f"{describe(layer)}: expected an input of shape ({expected}), got {tuple(x.shape)}")


def expect_float(who: str, x: Tensor) -> None:
    """Raises ValueError unless x is a floating-point tensor: a silent cast of integers would hide missing dequantisation."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{who}: expected a torch.Tensor, got {type(x).__name__}; torch.as_tensor makes one")
    if not x.is_floating_point():
        raise ValueError(
            f"{who}: expected floating-point input, got {x.dtype}; "
            "add uniform noise to integer levels first: x + torch.rand(x.shape)"
        )


def expect_like(layer: nn.Module, x: Tensor, other: Tensor) -> None:
    """Raises ValueError unless x has the dtype and device of `other`, with which it will be combined."""
    if x.device != other.device or x.dtype != other.dtype:
        raise ValueError(
            f"{describe(layer)}: expected {other.dtype} on {other.device}, got {x.dtype} on {x.device}; "
            "move one of them with .to()"
        )


def expect_batch(layer: nn.Module, x: Tensor) -> None:
    """Raises ValueError unless x is a floating-point batch (N, …); for layers that take any shape."""
    if x.dim() < 2:
        raise ValueError(f"{describe(layer)}: expected a batch of examples, shape (N, …), got {tuple(x.shape)}")
    if not x.is_floating_point():  # only then, because describing a layer may read its buffers
        expect_float(describe(layer), x)


def expect_finite(who: str, what: str, value: Tensor, hint: Callable[[], str] = str) -> None:
    """Raises ValueError if `value` holds NaN or infinity, with `hint()` appended to the message. Waits for the device.

    Under vmap it checks nothing: a value then stands for a batch, which Python code cannot read.
    """
    if is_vectorised():
        return
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise ValueError(f"{who}: expected a finite {what}, got {bad} non-finite of {value.numel()} values{hint()}")


def sums_are_finite(a: Tensor, b: Tensor) -> bool:
    """Returns False if an entry is not finite, or if a sum overflows; True under vmap. One read of the device."""
    return is_vectorised() or bool(torch.isfinite(a.sum() + b.sum()))


def whole_number(who: str, name: str, value: SupportsIndex, least: int = 0) -> int:
    """Returns `value`, of any integer type, as an int; raises ValueError for a bool, and unless it is at least `least`."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{who}: expected {name} to be a whole number of at least {least}, got {value!r}")
    return number


def positive_int(who: str, name: str, value: SupportsIndex) -> int:
    """Returns `value`, of any integer type, as an int; raises ValueError unless it is at least 1."""
    return whole_number(who, name, value, least=1)


def pair(who: str, name: str, value: int | Sequence[int]) -> tuple[int, int]:
    """Returns (height, width) from a pair, or from one number that holds for both."""
    sides = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(sides) != 2:
        raise ValueError(f"{who}: expected {name} to be a number or (height, width), got {value!r}")
    return positive_int(who, name, sides[0]), positive_int(who, name, sides[1])


def event_shape(who: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of one example as a tuple; a single number means a vector."""
    sides = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not sides:
        raise ValueError(f"{who}: expected a shape with at least one side, got {shape}")
    return tuple(positive_int(who, "every side of the shape", side) for side in sides)

"""Marks of tensors, by which to notice later that torch has changed them, without reading their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class TensorMark(NamedTuple):
    """A tensor, its address and its version. The address alone would not do: another tensor may get the same one later.

    A write through `.data`, into a tensor of inference mode, or by a kernel of one's own changes none of them.
    """

    # A weak reference would keep torch from swapping tensors. None for the result of a computation, whose graph would stay alive.
    tensor: Tensor | None
    address: int
    version: int


def marks_of(tensors: Sequence[Tensor]) -> list[TensorMark]:
    """Returns a mark of each tensor as it is now."""
    return [TensorMark(each if each.is_leaf else None, each.data_ptr(), _version(each)) for each in tensors]


def unchanged(tensors: Sequence[Tensor], marks: Sequence[TensorMark]) -> bool:
    """Returns whether these are the marked tensors, and torch has neither moved nor written them since."""
    return len(tensors) == len(marks) and all(
        mark.tensor is each and mark.address == each.data_ptr() and mark.version == _version(each)
        for mark, each in zip(marks, tensors, strict=True)
    )


def _version(tensor: Tensor) -> int:
    """Returns the number of writes that torch has counted; 0 in inference mode, where it does not count."""
    return 0 if tensor.is_inference() else tensor._version

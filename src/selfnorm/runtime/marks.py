"""Marks of tensors, by which to notice later that torch has changed them, without reading their values."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class TensorMark(NamedTuple):
    """A tensor's identity, address and version. The address alone would not do: another tensor may get the same one.

    A write through `.data`, into a tensor of inference mode, or by a kernel of one's own changes none of them.
    """

    tensor: weakref.ref[Tensor]
    address: int
    version: int


def marks_of(tensors: Sequence[Tensor]) -> list[TensorMark]:
    """Returns a mark of each tensor as it is now."""
    return [TensorMark(weakref.ref(each), each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors]


def unchanged(tensors: Sequence[Tensor], marks: Sequence[TensorMark]) -> bool:
    """Returns whether these are the marked tensors, and torch has neither moved nor written them since."""
    now = marks_of(tensors)
    # Identity first: references are compared by the tensors' values otherwise.
    return len(now) == len(marks) and all(a.tensor is b.tensor and a[1:] == b[1:] for a, b in zip(now, marks, strict=True))

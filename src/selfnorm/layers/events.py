"""Sums over the elements of each example."""

from __future__ import annotations

from torch import Tensor


def sum_event(x: Tensor) -> Tensor:
    """Returns the sum over all dimensions but the batch: (N, …) -> (N,)."""
    return x.flatten(1).sum(1)

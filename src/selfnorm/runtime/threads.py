"""The number of CPU threads that torch computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Context manager that sets the number of CPU threads, and restores it afterwards; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Work beside the main line of a step: on streams of its own, so that what nobody waits for yet fills the card meanwhile.

    with branching(Branches(device)):       # who captures the step
        with beside(x, z):                  # a layer, for work that reads x and z and whose result is needed only later
            ...
        join()                              # whoever needs such results

Without `branching` around them, the other two do nothing. They are for captured graphs, of which the branches are branches then:
outside of one, memory that one stream gives back might be taken by another too early. Inside, whatever a branch reads is
held until `join`. Autograd takes the way back on the streams of the way there; work that it will follow (`taped`) gets streams
that nothing else runs on, because such a node may start before what the main line still reads has been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

STREAMS = 8


@cache
def _streams(device: torch.device, taped: bool) -> list[torch.cuda.Stream]:
    """The same ones for everybody: torch has but 32, and in a graph it does not matter which they were."""
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


class Branches:
    """A few streams, taken in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: list[torch.cuda.Stream] = []
        self._held: list[Tensor] = []

    def take(self, reads: tuple[Tensor, ...], taped: bool) -> torch.cuda.Stream:
        """The next stream, which waits for all that was asked of the current one."""
        streams = _streams(self._device, taped)
        stream = streams[len(self._used) % STREAMS]
        stream.wait_stream(torch.cuda.current_stream())
        self._used.append(stream)
        self._held += reads
        return stream

    def join(self) -> None:
        """Let the current stream wait for all that were taken."""
        for stream in self._used:
            torch.cuda.current_stream().wait_stream(stream)
        self._used, self._held = [], []


_active: Branches | None = None


@contextmanager
def branching(branches: Branches | None, *, joined: bool = True) -> Iterator[None]:
    """Branches are taken from these inside, and joined at the end, unless somebody else will."""
    global _active
    before, _active = _active, branches
    try:
        yield
        if joined:
            join()
    finally:
        _active = before


@contextmanager
def beside(*reads: Tensor, taped: bool = False) -> Iterator[None]:
    """On another stream, if there are any. taped: whether autograd records what is done there."""
    if _active is None:
        yield
        return
    with torch.cuda.stream(_active.take(reads, taped)):
        yield


def join() -> None:
    """Wait, on the current stream, for all work that was done beside it."""
    if _active is not None:
        _active.join()

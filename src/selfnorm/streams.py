"""Work beside the main line of a step: on streams of its own, so that what nobody waits for yet fills the card meanwhile.

    with branching(Branches(device)):       # who runs the step
        with beside():                      # a layer, for work whose result is needed only later
            ...
        join()                              # whoever needs such results

Without `branching` around them, the other two do nothing. In a captured graph the branches are branches of the graph. Autograd
takes the way back on the streams of the way there. What a branch reads must stay alive until the next `join`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

STREAMS = 8


class Branches:
    """A few streams, taken in turn."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]
        self._used: list[torch.cuda.Stream] = []
        self._next = 0

    def take(self) -> torch.cuda.Stream:
        """The next stream, which waits for all that was asked of the current one."""
        stream = self._streams[self._next % STREAMS]
        self._next += 1
        stream.wait_stream(torch.cuda.current_stream())
        self._used.append(stream)
        return stream

    def join(self) -> None:
        """Let the current stream wait for all that were taken."""
        for stream in self._used:
            torch.cuda.current_stream().wait_stream(stream)
        self._used, self._next = [], 0


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
def beside() -> Iterator[None]:
    """On another stream, if there are any."""
    if _active is None:
        yield
        return
    with torch.cuda.stream(_active.take()):
        yield


def join() -> None:
    """Wait, on the current stream, for all work that was done beside it."""
    if _active is not None:
        _active.join()

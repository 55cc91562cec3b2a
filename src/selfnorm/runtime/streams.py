"""`Branches`: CUDA streams for work beside the main line of a step, so that it fills the card while nothing waits for it.

They are meant for captured graphs, where they become branches of the graph. Outside of a graph, memory that one stream gives back
could be reused by another too early; inside, whatever a branch reads is held until `join`. Autograd runs a node's backward pass
on the stream of its forward pass. Work that autograd records therefore gets streams of its own: its backward node may start
before the main line has finished reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from selfnorm.runtime.context import StepContext, step_context

STREAMS = 8


@cache
def _streams(device: torch.device, recorded: bool) -> list[torch.cuda.Stream]:
    """Streams shared by all branches of a device: torch has only 32, and a captured graph does not care which they were."""
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


class Branches:
    """A few streams of a device, taken in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: list[torch.cuda.Stream] = []
        self._held: list[Tensor] = []

    @contextmanager
    def on_side_stream(self, reads: tuple[Tensor, ...], recorded: bool) -> Iterator[None]:
        """A block on the next stream, which first waits for everything queued on the current one."""
        streams = _streams(self._device, recorded)
        stream = streams[len(self._used) % STREAMS]
        stream.wait_stream(torch.cuda.current_stream())
        self._used.append(stream)
        self._held += reads
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Makes the current stream wait for all blocks so far."""
        for stream in self._used:
            torch.cuda.current_stream().wait_stream(stream)
        self._used, self._held = [], []


@contextmanager
def branching(branches: Branches | None, *, joined: bool = True) -> Iterator[StepContext]:
    """A block in which the current step has these branches; they are joined at its end, unless `joined` is False."""
    with step_context(branches=branches) as step:
        yield step
        if joined:
            step.join()

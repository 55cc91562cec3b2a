"""`Branches`: CUDA side streams, for work that can run in parallel with a step's main stream.

They are meant for captured graphs, where they become branches of the graph. Outside of a graph, memory that one stream frees
could be reused by another too early; inside, all tensors that a branch reads are held until `join`. Autograd runs a node's
backward pass on the stream of its forward pass. Work that autograd records therefore gets separate streams: its backward node may
start before the main stream has finished reading.
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
    """Streams shared by all branches of a device: torch has only 32, and a captured graph does not depend on which were used."""
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


class Branches:
    """A few streams of a device, taken in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: list[torch.cuda.Stream] = []
        self._held: list[Tensor] = []

    @contextmanager
    def on_side_stream(self, reads: tuple[Tensor, ...], recorded: bool) -> Iterator[None]:
        """Context manager that runs its block on the next stream, which first waits for all work queued on the current one."""
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
    """Context manager that gives the current step these branches, and joins them at the end unless `joined` is False."""
    with step_context(branches=branches) as step:
        yield step
        if joined:
            step.join()

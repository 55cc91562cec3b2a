"""Work as a CUDA graph, where that can be: then the host's part in its time is gone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from selfnorm.bench.timing import Work

WARM_UP = 3  # calls before a capture: they compile kernels and make libraries allocate


def captured(run: Callable[[], object], device: torch.device, repeats: int = 1) -> Work | None:
    """So many calls as one graph; None off CUDA, and for work that waits for the device, which no graph can hold."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                run()
            with _waiting_is_an_error():  # found out beforehand, since a capture that fails leaves traces
                run()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                run()
        graph.replay()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        _fresh_generator(device)
        return None
    return Work(graph.replay, repeats)


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _fresh_generator(device: torch.device) -> None:
    # After a capture that failed torch's generator may still believe in it, and refuse every draw outside of one.
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):
        torch.cuda.default_generators[index].graphsafe_set_state(torch.Generator(device).graphsafe_get_state())

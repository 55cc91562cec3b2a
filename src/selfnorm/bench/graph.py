"""Work as a CUDA graph, where that can be: then the host's part in its time is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from selfnorm.bench.timing import Work
from selfnorm.runtime.graphs import capturing, generator_kept, waiting_is_an_error

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
            with waiting_is_an_error():  # found out beforehand, since a capture that fails leaves traces
                run()
        torch.cuda.synchronize(device)
        with generator_kept(device), capturing(graph, stream=stream):
            for _ in range(repeats):
                run()
        graph.replay()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    return Work(partial(_replay, graph, run), repeats)


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], object]) -> None:
    """run: only to be held, for the graph works on tensors that nobody else may hold."""
    graph.replay()

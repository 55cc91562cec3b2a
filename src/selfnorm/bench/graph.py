"""Captures work as a CUDA graph, if possible, so that its time does not include launching kernels from the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from selfnorm.bench.timing import Work
from selfnorm.runtime.graphs import capturing, error_on_sync, restoring_generator

CALLS_BEFORE_CAPTURE = 3  # they compile kernels and make libraries allocate their workspaces


def captured(run: Callable[[], object], device: torch.device, repeats: int = 1) -> Work | None:
    """Returns work that replays a graph of `repeats` calls; None without CUDA, or if the work waits for the device."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(CALLS_BEFORE_CAPTURE):
                run()
            with error_on_sync():  # checked first, since a failed capture has side effects
                run()
        torch.cuda.synchronize(device)
        with restoring_generator(device), capturing(graph, stream=stream):
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
    """Replays the graph. `run` is passed only to keep the tensors alive that the graph uses."""
    graph.replay()

"""Capturing CUDA graphs that own all the memory they use, and leave no trace when a capture fails."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, *, pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Context manager that records the device work of its block into the graph instead of running it.

    Other threads may synchronize meanwhile. cuBLAS keeps a workspace for the next product on the same stream. It is cleared
    before the capture, so that the workspace allocated inside belongs to the graph, and again afterwards, so that nothing else
    uses it: graphs may replay at the same time, and a graph must not use memory that is freed when another one is captured.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with (
            no_garbage_collection(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class _CollectionPause:
    """Turns Python's garbage collector off while at least one thread holds the pause."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._was_enabled = True  # before the first holder

    def acquire(self) -> None:
        with self._lock:
            if not self._holders:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders and self._was_enabled:
                gc.enable()


_collection_pause = _CollectionPause()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Context manager that pauses garbage collection within its block, which may run in several threads at once.

    Destroying an older graph during a capture would invalidate that capture (pytorch/pytorch#161037).
    """
    _collection_pause.acquire()
    try:
        yield
    finally:
        _collection_pause.release()


@contextmanager
def error_on_sync() -> Iterator[None]:
    """Context manager that raises RuntimeError if code in its block waits for a CUDA device."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def restoring_generator(device: torch.device) -> Iterator[None]:
    """Context manager that restores the device's default random generator if a capture in its block fails.

    A failed capture may leave the generator in capture mode, where it refuses every draw outside of a capture.
    """
    spare = torch.Generator(device).set_state(torch.cuda.get_rng_state(device))
    try:
        yield
    except RuntimeError:
        which = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[which].graphsafe_set_state(spare.graphsafe_get_state())
        raise

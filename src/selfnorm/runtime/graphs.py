"""Capturing CUDA graphs that own all the memory they use, and leave no traces where they fail."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_captures = 0  # under way
_collecting = True  # before the first of them


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, *, pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """What is asked of the device in this block goes into the graph, and is not done. Other threads may wait for the device
    meanwhile.

    cuBLAS works in memory that it keeps for the next product on the same stream. It is made to forget that before, so that what
    it takes in here belongs to the graph, and after, so that nobody else works in it: graphs may replay at the same time, and
    a graph must not use what is given back when another is captured.
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


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """In this block nothing is collected unasked: an older graph that is destroyed while another is captured spoils it
    (pytorch/pytorch#161037)."""
    global _captures, _collecting
    with _lock:  # captures may be under way in several threads
        if not _captures:
            _collecting = gc.isenabled()
            gc.disable()
        _captures += 1
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if not _captures and _collecting:
                gc.enable()


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """In this block what waits for a CUDA device raises a RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def generator_kept(device: torch.device) -> Iterator[None]:
    """A device's own random generator, whole after a capture in this block that fails: it may still believe in the capture, and
    would refuse every draw outside of one."""
    spare = torch.Generator(device).set_state(torch.cuda.get_rng_state(device))
    try:
        yield
    except RuntimeError:
        which = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[which].graphsafe_set_state(spare.graphsafe_get_state())
        raise

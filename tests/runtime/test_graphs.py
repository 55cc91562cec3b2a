"""Garbage collection is paused during captures, and resumed afterwards."""

import gc

import pytest
import torch

from selfnorm.runtime.graphs import capturing, no_garbage_collection


class Cycle:
    """Refers to itself, so that only garbage collection frees it."""

    def __init__(self, content):
        self.content = content
        self.itself = self


@pytest.mark.parametrize("before", [True, False])
def test_garbage_collection_is_restored(before):
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(KeyError), no_garbage_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()


def test_the_last_of_several_captures_resumes_garbage_collection():
    first, second = no_garbage_collection(), no_garbage_collection()
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.gpu
def test_an_unreferenced_graph_does_not_spoil_the_next_capture():
    x, old, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with capturing(old):
        x * 2
    old.replay()
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)  # collect at every opportunity
    try:
        with capturing(graph):
            Cycle(old)
            del old
            opportunities = [Cycle(None) for _ in range(100)]
            y = x + len(opportunities)
    finally:
        gc.set_threshold(*thresholds)
    graph.replay()
    assert torch.equal(y, torch.full_like(x, 101))

"""Branches beside the main line: nothing without somebody who branches, and held memory until the join."""

import pytest
import torch

from selfnorm.runtime.streams import Branches, beside, branching, join


def test_nothing_happens_without_branches():
    with beside(torch.ones(1)):
        pass
    join()
    with branching(None), beside(taped=True):
        join()


@pytest.mark.gpu
@pytest.mark.parametrize("taped", [False, True])
def test_branches_work_beside_and_are_joined(taped):
    device = torch.device("cuda")
    branches = Branches(device)
    x = torch.randn(2000, 2000, device=device)
    expected = [x @ x for _ in range(3)]
    main = torch.cuda.current_stream()
    with branching(branches):
        found = []
        for _ in range(3):
            with beside(x, taped=taped):
                assert torch.cuda.current_stream() != main
                found.append(x @ x)
        assert sum(held is x for held in branches._held) == 3
        join()
        assert not branches._held
        total = sum(found)
    assert torch.cuda.current_stream() == main
    torch.testing.assert_close(total, sum(expected))


@pytest.mark.gpu
def test_branches_can_be_captured():
    device = torch.device("cuda")
    x, out = torch.randn(500, 500, device=device), torch.zeros(500, 500, device=device)
    (x @ x).sum()
    graph = torch.cuda.CUDAGraph()
    branches = Branches(device)
    with torch.cuda.graph(graph), branching(branches):
        with beside(x):
            square = x @ x
        with beside(x):
            double = 2 * x
        join()
        out.copy_(square + double)
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, x @ x + 2 * x)

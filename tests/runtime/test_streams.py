"""Branches of a step: without any, nothing happens; with them, memory is held until the join."""

import threading

import pytest
import torch

from selfnorm.runtime.context import StepContext, current_step, step_context
from selfnorm.runtime.streams import Branches, branching


def test_nothing_happens_without_branches():
    with current_step().on_side_stream(torch.ones(1)):
        pass
    current_step().join()
    with branching(None) as step, step.on_side_stream(recorded=True):
        step.join()


def test_a_step_context_is_current_in_its_block_and_restored_after_an_error():
    outside = current_step()
    with pytest.raises(KeyError), step_context(inverse_likelihood=True) as outer:
        assert current_step() is outer and outer.inverse_likelihood
        with step_context(kernel_devices=()) as inner:
            assert current_step() is inner and inner.inverse_likelihood and inner.kernel_devices == ()
        assert current_step() is outer
        raise KeyError
    assert current_step() == outside and not outside.inverse_likelihood


def test_a_thread_has_its_own_step_but_shares_precision_and_kernels():
    """Another thread enters and leaves its contexts while this one is inside its own, in every order."""
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other():
        seen.append(current_step())
        with step_context(collector="theirs", precision="bf16"):
            inside.set()
            leave.wait()
        seen.append(current_step())

    thread = threading.Thread(target=other)
    with step_context(inverse_likelihood=True, kernel_devices=("cpu",)) as mine:
        thread.start()
        inside.wait()
        assert current_step() is mine and current_step().collector is None
    assert not current_step().inverse_likelihood and current_step().precision == "bf16"  # which holds for the process
    leave.set()
    thread.join()
    assert [(step.inverse_likelihood, step.collector, step.kernel_devices) for step in seen] == [
        (None, None, ("cpu",)),
        (None, None, ("cuda",)),
    ]
    assert current_step() == StepContext()


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_branches_work_beside_and_are_joined(recorded):
    device = torch.device("cuda")
    branches = Branches(device)
    x = torch.randn(2000, 2000, device=device)
    expected = [x @ x for _ in range(3)]
    main = torch.cuda.current_stream()
    with branching(branches) as step:
        found = []
        for _ in range(3):
            with step.on_side_stream(x, recorded=recorded):
                assert torch.cuda.current_stream() != main
                found.append(x @ x)
        assert sum(held is x for held in branches._held) == 3
        step.join()
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
    with torch.cuda.graph(graph), branching(branches) as step:
        with step.on_side_stream(x):
            square = x @ x
        with step.on_side_stream(x):
            double = 2 * x
        step.join()
        out.copy_(square + double)
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, x @ x + 2 * x)

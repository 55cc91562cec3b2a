"""Adam's flags and counts: which steps change nothing, and which of them are counted."""

import itertools
import math

import pytest
import torch

from selfnorm.train.adam import share_step_count, steps_taken
from selfnorm.train.captured import CapturedStep
from selfnorm.train.step import EagerStep
from support.small_runs import made


def test_adam_counts_once_for_all(device):
    step = made(CapturedStep, device)
    counts = [state["step"] for state in step.optimizer.state.values()]
    assert all(count is counts[0] for count in counts)
    assert len(counts) == len(list(step.loss.parameters()))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of the step-by-step kernels
@pytest.mark.usefixtures("kernels")
def test_flags_and_counts_by_kernels(device):
    from selfnorm.kernels.dense.adam import begin_update, few_and_small, raise_lost

    for failed, late, lost, advance in itertools.product((0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (True, False)):
        flags = [torch.tensor(value, dtype=torch.float32, device=device) for value in (failed, late, lost, 0.5, 7.0)]
        begin_update(*flags, advance=advance)
        frozen = max(failed, late, lost)
        assert [flag.item() for flag in flags[:4]] == [max(failed, late), 0.0, lost, frozen]
        assert flags[4] == 7 - (late > failed) + advance * (1 - frozen)
    ones = torch.ones(3000, dtype=torch.float32, device=device)
    for at, wrong in itertools.product((0, 1023, 1024, 2999), (math.nan, -math.inf, 1e20)):
        bad = ones.clone()
        bad[at] = wrong
        nan, fine = ones[0] * math.nan, ones[0] * 1e20
        for loss, gradients, expected in (
            (fine, [ones, ones[:5], ones[:1]], 0),  # of a loss no square is taken
            (nan, [ones], 1),
            (fine, [ones[:0], ones, bad], 1),
            (fine, [bad, ones], 1),
            (None, [bad], 0),
        ):
            flags = [torch.tensor(value, dtype=torch.float32, device=device) for value in (0, 0, 0, 0.5, 7)]
            begin_update(*flags, loss=loss, gradients=gradients)
            assert [flag.item() for flag in flags] == [expected, 0, 0, expected, 8 - expected]
    assert few_and_small([ones] * 8) and not few_and_small([ones] * 9) and not few_and_small([ones.expand(30, 3000)])
    limits = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float32, device=device)
    for residuals, before, after in (
        ([0.9, 0.4, 1.9], 0, 0),
        ([0.9, 0.4, 1.9], 1, 1),
        ([0.9, 0.5, 1.9], 0, 1),
        ([0.0, 0.0, math.nan], 0, 1),
        ([math.inf, 0.0, 0.0], 0, 1),
    ):
        lost = torch.tensor(float(before), dtype=torch.float32, device=device)
        raise_lost(lost, torch.tensor(residuals, dtype=torch.float32, device=device), limits)
        assert lost == after


def test_a_gradient_whose_square_overflows_is_a_failure(device):
    step = made(CapturedStep, device, recipe="digits-fc-exact")
    step.loss.flow.bijection[3].bias.register_hook(lambda gradient: gradient + 1e20)
    step(0, 0, 1e-3)
    assert step.failed
    assert steps_taken(step.optimizer) == 0
    assert all(torch.isfinite(value).all() for state in step.optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("penalty", ["geco", "mdmm"])
def test_a_step_that_changes_nothing_moves_no_multiplier(device, penalty):
    step = made(CapturedStep, device, f"penalty={penalty}", "weight=100")
    step(0, 0, 1e-3)
    step.lost.fill_(1.0)
    before = {name: value.clone() for name, value in step.loss.penalty.state_dict().items()}
    for index in (1, 2):
        step(0, index, 1e-3)
    assert all(torch.equal(value, before[name]) for name, value in step.loss.penalty.state_dict().items())
    step.unfreeze()
    step(0, 1, 1e-3)
    assert not torch.equal(step.loss.penalty.reconstruction_weight, before["reconstruction_weight"])


@pytest.mark.parametrize("penalty", ["geco", "mdmm"])
def test_an_eager_step_that_failed_moves_no_multiplier(device, penalty):
    step = made(EagerStep, device, f"penalty={penalty}", "weight=100")
    step(0, 0, 1e-3)
    before = {name: value.clone() for name, value in step.loss.penalty.state_dict().items()}
    step.failed.fill_(1.0)
    step(0, 1, 1e-3)
    assert all(torch.equal(value, before[name]) for name, value in step.loss.penalty.state_dict().items())


def test_the_shared_count_goes_on_from_the_highest():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.Adam(parameters, fused=True)
    parameters[2].grad = torch.ones(2)
    optimizer.step()
    assert share_step_count(optimizer, parameters) == 1


def test_an_update_that_failed_itself_is_not_counted(device):
    step = made(CapturedStep, device)
    for index in range(2):
        step(0, index, 1e-3)
    step._adam.flags.late_failure.fill_(1.0)
    step(0, 2, 1e-3)
    assert step.failed
    assert not step._adam.flags.late_failure
    assert steps_taken(step.optimizer) == 1, "the second is the one that failed"

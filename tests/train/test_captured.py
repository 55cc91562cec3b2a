"""Several steps per call, as graphs on a GPU: the same numbers as the eager step's, and what else the loop needs."""

import copy
import math
import os
import signal
import warnings

import pytest
import torch

from selfnorm.data import load_dataset
from selfnorm.data.batches import TrainingBatches
from selfnorm.kernels.dispatch import used_on
from selfnorm.layers.linear import LinearMap
from selfnorm.layers.tracked import TrackedLinear
from selfnorm.linalg.factors import ExactFactors
from selfnorm.runtime.collector import GradientCollector
from selfnorm.runtime.precision import precision
from selfnorm.train import adam as adam_module
from selfnorm.train.adam import steps_taken
from selfnorm.train.captured import CapturedStep, _steps_per_graph, can_be_captured
from selfnorm.train.loop import Trainer
from selfnorm.train.run import resume_run, start_run
from selfnorm.train.step import EagerStep
from selfnorm.train.stopping import DivergedError, StoppedError, StopRequests
from support.small_runs import SMALL, assert_same_runs, digits, made, started


def course(step, steps):
    """The losses of this many steps, and the sums of their metrics."""
    losses, surrogate, errors, taken = [], 0.0, 0.0, 0
    per_epoch = step.batches.steps_per_epoch
    while taken < steps:
        epoch, index = divmod(taken, per_epoch)
        n = min(step.steps_per_call(index), steps - taken)
        metrics = step(epoch, index, *[1e-4 * (1 + (taken + i) / 10) for i in range(n)])
        losses += step.losses.tolist()
        surrogate, errors = surrogate + metrics.surrogate.sum().item(), errors + metrics.reconstruction.sum(0).cpu()
        taken += n
    return losses, surrogate, errors


CASES = [
    ("digits-fc-snf",),
    ("digits-fc-snf", "clip=5.0", "probes=3"),
    ("digits-fc-snf", "penalty=geco", "weight=100", "inverse_likelihood=true"),
    ("digits-fc-snf", "penalty=mdmm", "jitter=1"),
    ("digits-fc-tracked",),
    ("digits-fc-sketch",),
    ("digits-fc-relative",),
    ("digits-fc-lu",),
    ("digits-fc-exact",),
    ("digits-conv-snf",),
    ("digits-conv-tracked",),
    ("digits-conv-emerging",),
    ("digits-conv-exp",),
    ("digits-conv-exact",),
    ("digits-conv-snf", "model=glow", "blocks=2", "steps=2", "hidden=16", "kernel_size=1", "jitter=1"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_losses_are_those_of_the_eager_step(device, case):
    """Over 50 steps: through four epochs of 12 steps, with whole blocks and partial ones at the end of epochs."""
    eager, captured = (made(kind, device, *case[1:], recipe=case[0]) for kind in (EagerStep, CapturedStep))
    expected, got = course(eager, 50), course(captured, 50)
    assert len(got[0]) == 50
    assert got[0] == pytest.approx(expected[0], rel=1e-4)
    assert got[1] == pytest.approx(expected[1], rel=1e-4)
    torch.testing.assert_close(got[2], expected[2], rtol=2e-2, atol=1e-5)
    assert steps_taken(captured.optimizer) == 50
    assert not captured.failed
    assert not captured.lost


def test_a_call_takes_as_many_steps_as_are_left_in_a_block():
    step = made(CapturedStep, torch.device("cpu"))
    assert step.steps_per_call(0) == 1, "the first ones warm up"
    for index in range(3):
        step(0, index, 1e-3)
    # 12 steps in an epoch: two blocks of 5 and one of 2.
    assert [step.steps_per_call(index) for index in (0, 1, 4, 5, 6, 9, 10, 11)] == [5, 1, 1, 5, 1, 1, 1, 1]


def test_graphs_hold_as_many_steps_as_divide_a_block_and_few_modules():
    assert _steps_per_graph(50, 10) == 50
    assert _steps_per_graph(50, 41) == 25
    assert _steps_per_graph(50, 10**6) == 1
    assert _steps_per_graph(7, 300) == 1


def test_any_steps_can_be_taken_again_from_the_middle_of_a_block(device):
    """As after a resume: the noise depends only on the step, not on where the run started."""
    step = made(CapturedStep, device, "probes=2")
    losses = []
    for start in (0, 3, 7, 11):
        step(2, start, 0.0)
        losses.append(step.losses.item())
    whole = made(CapturedStep, device, "probes=2")
    step_by_step = []
    for index in range(12):
        whole(2, index, 0.0)
        step_by_step += whole.losses.tolist()
    assert losses == pytest.approx([step_by_step[index] for index in (0, 3, 7, 11)], rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_no_step_waits_for_the_device(case, never_waiting):
    """Two epochs, once the graphs are captured: with a new block of batches, and every length of a call."""
    step = made(CapturedStep, torch.device("cuda"), *case[1:], recipe=case[0])
    course(step, 3 * step.batches.steps_per_epoch)
    taken = 0
    with never_waiting():
        while taken < 2 * step.batches.steps_per_epoch:
            epoch, index = divmod(taken, step.batches.steps_per_epoch)
            n = step.steps_per_call(index)
            step(3 + epoch, index, *[1e-4] * n)
            taken += n
    assert step.losses.isfinite().all()


@pytest.mark.gpu
def test_no_epoch_waits_for_the_device_before_its_end(never_waiting):
    trainer = started("epochs=5", "validate_every=5", "batch_size=20", device="cuda")
    assert isinstance(trainer._step, CapturedStep)
    steps, quietly = trainer.batches.steps_per_epoch, 0
    with StopRequests() as stop, precision(trainer.recipe.optimiser.precision):
        pieces = trainer.advance(stop)
        while trainer.epoch < 2:
            next(pieces)
        while trainer.epoch < 4:
            index = trainer.progress.step % steps
            if index + trainer._step.steps_per_call(index) == steps:
                next(pieces)  # here the epoch's metrics are read
                continue
            with never_waiting():
                next(pieces)
            quietly += 1
        pieces.close()
    assert quietly > 2


@pytest.fixture
def plain():
    """No kernels, on any device."""
    with used_on():
        yield


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of step-by-step kernels
@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_failed_step_and_those_after_it_change_nothing(device, broken, kind, request):
    request.getfixturevalue("kernels" if kind == "fused" else "plain")
    step = made(CapturedStep, device)
    step(0, 0, 1e-3)
    layer = step.loss.flow.bijection[3]
    good = layer.bias.detach().clone()
    if broken == "loss":
        with torch.no_grad():
            layer.bias[3] = torch.nan
    else:
        handle = layer.bias.register_hook(lambda gradient: gradient * torch.inf)
    before = {name: value.detach().clone() for name, value in step.loss.named_parameters()}
    moments = [value.clone() for state in step.optimizer.state.values() for value in state.values()]
    step(0, 1, 1e-3)
    assert step.failed
    if broken == "loss":
        with torch.no_grad():
            layer.bias.copy_(good)
            before["flow.bijection.3.bias"].copy_(good)
    else:
        handle.remove()
    for index in (2, 3):
        step(0, index, 1e-3)
    assert step.failed, "the flag stays raised, even without its cause"
    assert steps_taken(step.optimizer) == 1
    assert all(torch.equal(value, before[name]) for name, value in step.loss.named_parameters())
    after = [value for state in step.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))


def test_nothing_moves_once_a_tracker_is_lost_until_it_is_recomputed(device, monkeypatch):
    step = made(CapturedStep, device, recipe="digits-fc-tracked")
    layer = step.loss.flow.bijection[3]
    for index in range(3):
        step(0, index, 1e-3)
    original = type(layer).recompute_if_lost
    monkeypatch.setattr(type(layer), "recompute_if_lost", lambda self: None)  # as in a graph, where nothing checks it
    with torch.no_grad():
        layer.weight_inv.mul_(3.0)
    sums = step(0, 3, 1e-3)
    assert math.isfinite(sums.surrogate), "the step itself was taken, with a gradient as bad as its inverse"
    assert step.lost
    frozen = {name: value.detach().clone() for name, value in step.loss.named_parameters()}
    step(0, 4, 1e-3)
    assert steps_taken(step.optimizer) == 4
    assert all(torch.equal(value, frozen[name]) for name, value in step.loss.named_parameters())
    monkeypatch.setattr(type(layer), "recompute_if_lost", original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        layer.recompute_if_lost()
    step.unfreeze()
    step(0, 4, 1e-3)
    assert steps_taken(step.optimizer) == 5
    assert not step.lost
    assert int(layer.fallbacks) == 1
    assert (layer.weight_inv @ layer.weight - torch.eye(64, dtype=torch.float32, device=device)).norm() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [("kind=selfnorm",), ("kind=tracked",), ("kind=selfnorm", "penalty=geco", "weight=100", "probes=2")], ids=str
)
def test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path, case):
    def stopping(record):
        if record["kind"] == "epoch" and record["epoch"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    recipe = digits(*SMALL, *case)
    start_run(recipe, tmp_path / "whole", device="cuda")
    with pytest.raises(StoppedError):
        start_run(recipe, tmp_path / "stopped", device="cuda", report=stopping)
    resume_run(tmp_path / "stopped", device="cuda")
    assert_same_runs(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.gpu
def test_the_exact_likelihood_follows_weights_that_a_graph_has_changed():
    step = made(CapturedStep, torch.device("cuda"))
    x = step.batches.batch(3, 0)
    scores = []
    for epoch in range(3):
        for start in (0, 5):
            step(epoch, start, *[1e-3] * step.steps_per_call(start))
        with torch.no_grad():
            scores.append(step.loss.flow.log_prob(x).mean().item())
            fresh = copy.deepcopy(step.loss.flow)
            for module in fresh.modules():
                if isinstance(module, LinearMap):
                    module._factors = ExactFactors()
            assert scores[-1] == fresh.log_prob(x).mean().item()
    assert len(set(scores)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["loss", "tracker"])
def test_what_goes_wrong_inside_a_graph_is_found_at_the_end_of_the_epoch(kind):
    """In the middle of an epoch, so that a replay encounters it."""
    trainer = Trainer(digits(*SMALL, "kind=tracked", "on_divergence=stop"), load_dataset("digits"), device="cuda")
    trainer.start()
    done = []

    def report(record):
        if record["kind"] == "epoch":
            done.append(record["epoch"])
            with torch.no_grad():
                if kind == "loss" and record["epoch"] == 3:
                    trainer.flow.bijection[6].bias[0] = torch.nan
                if kind == "tracker" and record["epoch"] == 3:
                    trainer.flow.bijection[6].weight_inv.mul_(3.0)

    trainer.report = report
    if kind == "loss":
        with pytest.raises(DivergedError, match=r"epoch 4, step 1: layer 6"):
            trainer.run()
        assert done == [1, 2, 3]
    else:
        with pytest.warns(RuntimeWarning, match="factorised again"):
            trainer.run()
        assert done == [1, 2, 3, 4, 5, 6]
        assert int(trainer.flow.bijection[6].fallbacks) == 1
        assert steps_taken(trainer.optimizer) == trainer.progress.step == trainer.total


@pytest.mark.usefixtures("kernels")
def test_trackers_are_waited_for_before_anything_reads_what_they_write(device, monkeypatch):
    """Trackers may run late, but they are joined and checked before flags are set and weights change."""
    from selfnorm.kernels.dense import adam as kernels

    step, order = made(CapturedStep, device, recipe="digits-fc-tracked"), []

    def noted(name, function):
        return lambda *args, **options: (order.append(name), function(*args, **options))[1]

    for owner, name in (
        (kernels, "raise_lost"),
        (kernels, "begin_update"),
        (adam_module, "update_from_factors"),
        (GradientCollector, "take"),
    ):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    monkeypatch.setattr(step._tracker_branches, "join", noted("join", step._tracker_branches.join))
    monkeypatch.setattr(TrackedLinear, "track", noted("track", TrackedLinear.track))
    monkeypatch.setattr(TrackedLinear, "recompute_if_lost", lambda self: None)
    assert step._tracks_late and step._trackers
    step(0, 0, 1e-3, 1e-3)
    each = ["take", "join", "raise_lost", "begin_update", "update_from_factors", "update_from_factors", "track", "track"]
    assert order == [*each, *each, "join", "raise_lost", "begin_update"]
    waits = []  # what is called before anything is multiplied out
    monkeypatch.setattr(GradientCollector, "take", lambda self, wait=None: waits.append(wait) or [])
    step(0, 2, 1e-3)
    assert waits == [step._wait_for_trackers]


def as_on_a_gpu(monkeypatch, block):
    """The trainer takes captured steps on the CPU, too, and trackers are left alone, as in a graph."""
    monkeypatch.setattr("selfnorm.train.loop.can_be_captured", lambda loss, batches: True)
    monkeypatch.setattr(TrackedLinear, "after_step", lambda self, generator=None: self.track(generator=generator))
    make = TrainingBatches.__init__

    def in_blocks(self, *args, **options):
        make(self, *args, **options)
        self.block = block

    monkeypatch.setattr(TrainingBatches, "__init__", in_blocks)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("index", [1, 6, 12])
def test_an_epoch_in_which_a_tracker_is_lost_is_told_like_any_other(monkeypatch, index):
    as_on_a_gpu(monkeypatch, 4)
    records = []
    trainer = Trainer(digits(*SMALL, "kind=tracked"), load_dataset("digits"), report=records.append)
    trainer.start()
    layer, track = trainer.flow.bijection[6], TrackedLinear.track
    steps = iter(range(10**6))

    def lossy(self, generator=None):
        if self is layer and next(steps) == 24 + index - 1:
            self.weight_inv.mul_(3.0)
        track(self, generator=generator)

    monkeypatch.setattr(TrackedLinear, "track", lossy)
    trainer.run()
    assert [record["epoch"] for record in records if record["kind"] == "epoch"] == [1, 2, 3, 4, 5, 6]
    assert int(layer.fallbacks) == 1
    assert steps_taken(trainer.optimizer) == trainer.total


@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_are_a_setting(monkeypatch, graphs):
    as_on_a_gpu(monkeypatch, 4)
    trainer = Trainer(digits(*SMALL, f"graphs={str(graphs).lower()}"), load_dataset("digits"))
    assert isinstance(trainer._step, CapturedStep if graphs else EagerStep)


def test_a_sketch_that_is_lost_stays_so_until_it_is_recomputed(device):
    step = made(CapturedStep, device, recipe="digits-fc-sketch")
    layer = step.loss.flow.bijection[3]
    inverse = layer.weight_inv.clone()
    layer.residual.fill_(layer.largest_residual)  # though it is a good one, which the next estimate would find
    layer.track()
    assert layer.residual >= layer.largest_residual
    assert torch.equal(layer.weight_inv, inverse)


def test_metrics_are_the_callers_own():
    step = made(CapturedStep, torch.device("cpu"))
    first = step(0, 0, 1e-3)
    kept = [value.clone() for value in first]
    step(0, 1, 1e-3)
    assert all(torch.equal(one, other) for one, other in zip(first, kept, strict=True))


def test_only_single_precision_is_captured():
    step = made(EagerStep, torch.device("cpu"))
    step.batches.examples.device = torch.device("cuda")
    assert can_be_captured(step.loss, step.batches)
    assert not can_be_captured(step.loss.double(), step.batches)

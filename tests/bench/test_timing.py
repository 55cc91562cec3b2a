"""`selfnorm bench`'s timer: candidates take turns, and a failing one does not affect the others.

No test checks how long anything takes, since the machine may be busy.
"""

import weakref

import numpy as np
import pytest
import torch

from selfnorm.bench import conditions, timing
from selfnorm.bench.conditions import Conditions, clock_mhz
from selfnorm.bench.graph import captured
from selfnorm.bench.table import blocks_of
from selfnorm.bench.timing import Effort, Failure, Timing, Work, measure, reason_for, summary
from support.benching import BRIEF

pytestmark = pytest.mark.usefixtures("elsewhere")
CPU = torch.device("cpu")


def test_blocks_are_long_where_there_is_time():
    assert Effort.of(2.0).block == 0.1 and Effort.of(0.1).block == Effort().block


def test_a_timing_is_the_median_between_its_quantiles():
    assert summary([5.0, 1.0, 3.0, 2.0, 4.0]) == Timing(3.0, 1.4, 4.6, 5)
    assert summary([2.0]) == Timing(2.0, 2.0, 2.0, 1)
    times = np.random.default_rng(0).exponential(size=37)
    found = summary(times)
    assert found.low == pytest.approx(np.quantile(times, 0.1)) and found.high == pytest.approx(np.quantile(times, 0.9))
    assert found.low < found.median < found.high


def test_the_timer_counts_units_and_warms_up(monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(
        timing.time, "perf_counter", lambda: float(next(clock))
    )  # advances a second per call, so a block takes one second
    calls = {"one": 0, "five": 0}

    def counting(name):
        def run():
            calls[name] += 1

        return run

    found = measure(
        {"one": Work(counting("one")), "five": Work(counting("five"), 5)}, CPU, Effort(seconds=4.0, warm_up=100.0, block=0.5)
    )
    assert found == {"one": Timing(1.0, 1.0, 1.0, 4), "five": Timing(0.2, 0.2, 0.2, 4)}
    assert calls == {"one": 6 + 4, "five": 6 + 4}  # 2 first calls, then 4 that agree


def test_candidates_take_turns():
    order = []
    measure({name: Work(lambda name=name: order.append(name)) for name in "ab"}, CPU, BRIEF)
    blocks = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    assert blocks[:2] == ["a", "b"] and blocks == ["a", "b"] * (len(blocks) // 2) and len(blocks) >= 6


def test_a_candidate_that_fails_costs_the_others_nothing():
    left = iter([None] * 4)

    def later():
        next(left)

    def at_once():
        raise ValueError("no good")

    found = measure({"at once": Work(at_once), "fine": Work(lambda: None), "later": Work(later)}, CPU, BRIEF)
    assert found["at once"] == Failure("no good") and found["later"] == Failure("StopIteration: StopIteration")
    assert isinstance(found["fine"], Timing) and found["fine"].blocks >= timing.MIN_BLOCKS


def test_a_slow_candidate_gets_few_blocks(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def taking(seconds):
        def run():
            now[0] += seconds

        return Work(run)

    found = measure({"slow": taking(50.0), "fast": taking(0.1)}, CPU, Effort(seconds=2.0, warm_up=1.0, block=0.05))
    assert found["slow"].blocks == timing.MIN_BLOCKS and found["fast"].blocks in (20, 21)


def test_an_interruption_is_no_failure():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure({"stopped": Work(stop)}, CPU, BRIEF)


def test_reasons_are_short_lines():
    assert reason_for(torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")) == "out of memory: Tried to allocate"
    assert reason_for(RuntimeError("")) == "RuntimeError: RuntimeError"
    assert len(reason_for(RuntimeError("x" * 1000))) == 160


def test_what_others_take_of_the_cpu():
    before, after = Conditions(10.0, None, 100.0), Conditions(14.0, None, 106.0)
    assert before.cores_taken(after) == 1.5
    assert before.cores_taken(Conditions(10.1, None, 100.1)) is None, "too short to measure in hundredths"
    assert before.until(after, CPU)["taken by others"].startswith("1.5 of ")
    assert "much faster" in before.until(after, CPU)["taken by others"]
    assert "much faster" not in before.until(Conditions(14.0, None, 100.5), CPU)["taken by others"]
    assert before.until(Conditions(14.0, None, None), CPU) == {"taken by others": None}
    assert before.until(Conditions(14.0, 1980, None), torch.device("cuda")) == {"SM clock": "None MHz before, 1980 MHz after"}


def test_what_linux_says_of_others(monkeypatch):
    """user, nice, system, idle, iowait, irq, softirq, steal; the last two, guest times, are already part of user and nice."""
    monkeypatch.setattr(conditions.Path, "read_text", lambda path: "cpu  100 10 50 9999 999 5 6 29 70 7\ncpu0 1 2 3\n")
    monkeypatch.setattr(conditions.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(conditions.os, "times", lambda: (0.5, 0.25, 0.125, 0.125, 1e9))
    assert Conditions.now(CPU).others == 2.0 - 1.0
    monkeypatch.setattr(conditions.Path, "read_text", lambda path: "cpu  what\n")
    assert Conditions.now(CPU).others is None


def test_a_note_says_over_how_many_blocks():
    three, twenty = Timing(1.0, 1.0, 1.0, 3), Timing(1.0, 1.0, 1.0, 20)
    assert blocks_of([twenty, None, three]) == "3 to 20 blocks"
    assert blocks_of([three, three]) == "3 blocks"
    assert blocks_of([None]) == "no blocks"


def test_only_a_gpu_has_a_clock_and_graphs():
    assert clock_mhz(CPU) is None and captured(lambda: None, CPU) is None


@pytest.mark.gpu
def test_graphs_hold_what_never_waits():
    device = torch.device("cuda")
    total = torch.zeros((), device=device)
    work = captured(lambda: total.add_(1), device, 5)
    before = float(total)
    work.run()
    assert work.units == 5 and float(total) == before + 5
    assert captured(lambda: total.item(), device) is None
    alone = weakref.ref(run := lambda: total.add_(1))
    work = captured(run, device)
    del run
    assert alone() is not None, "the work keeps alive the tensors that its graph uses"
    assert torch.randn(3, device=device).isfinite().all()  # the generator still works
    assert clock_mhz(device) is None or clock_mhz(device) > 100

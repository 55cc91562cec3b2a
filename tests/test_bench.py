"""`selfnorm bench`: tables that are whole whatever fails, floors and slopes that are right, files that can be read back.

No test looks at how long anything takes: the machine may be busy.
"""

import importlib
import json
import math
import subprocess
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benching import BRIEF, stop
from selfnorm import ExactLinear, SelfNormLinear, TrackedLinear
from selfnorm.bench import floor, memory, peers, scaling, steps, timing, training
from selfnorm.bench.floor import Ceilings, Counts, bare_step, count, measure_ceilings, parameter_bytes, saved_bytes
from selfnorm.bench.graph import captured
from selfnorm.bench.models import MODELS, choose, default_models, families
from selfnorm.bench.peers import FC, MISSING, Peer, peers_table
from selfnorm.bench.scaling import Point, crossover, layer_step, rows_of, scaling_table, sizes, slope, times_of
from selfnorm.bench.steps import COLUMNS, steps_table
from selfnorm.bench.table import significant
from selfnorm.bench.timing import Effort, Failure, Timing, Work, clock_mhz, measure, reason_for, summary
from selfnorm.bench.training import training_step
from selfnorm.kernels.dispatch import used_on
from selfnorm.models import fc_flow
from selfnorm.precision import precision
from selfnorm.report.results import build
from selfnorm.train.loop import threads

pytestmark = pytest.mark.usefixtures("elsewhere")
CPU = torch.device("cpu")


# The timer


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
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))  # each look a second later: a block takes one
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
    assert isinstance(found["fine"], Timing) and found["fine"].blocks >= timing.LEAST_BLOCKS


def test_a_slow_candidate_gets_few_blocks(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def taking(seconds):
        def run():
            now[0] += seconds

        return Work(run)

    found = measure({"slow": taking(50.0), "fast": taking(0.1)}, CPU, Effort(seconds=2.0, warm_up=1.0, block=0.05))
    assert found["slow"].blocks == timing.LEAST_BLOCKS and found["fast"].blocks in (20, 21)


def test_an_interruption_is_no_failure():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure({"stopped": Work(stop)}, CPU, BRIEF)


def test_reasons_are_short_lines():
    assert reason_for(torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")) == "out of memory: Tried to allocate"
    assert reason_for(RuntimeError("")) == "RuntimeError: RuntimeError"
    assert len(reason_for(RuntimeError("x" * 1000))) == 160


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
    assert alone() is not None, "the graph works on what only this may hold"
    assert torch.randn(3, device=device).isfinite().all()  # the generator is none the worse
    assert clock_mhz(device) is None or clock_mhz(device) > 100


# Floors


def test_operations_of_a_step_are_counted():
    D, N = 24, 8
    counts = {}
    for kind in (SelfNormLinear, ExactLinear, TrackedLinear):
        layer = kind(D)
        counts[kind] = count(layer_step(layer, torch.randn(N, D)), layer)
    product = 2 * N * D * D
    assert counts[SelfNormLinear].operations == 6 * product
    assert counts[TrackedLinear].operations == 3 * product + 4 * D**3  # forward, two gradients; R and its error
    # An LU, and its factors used for the inverse's columns.
    assert counts[ExactLinear].operations == pytest.approx(3 * product + 2 * D**3 / 3 + 2 * D**3)


def test_bytes_of_a_step_are_counted():
    D, N = 24, 8
    layer = TrackedLinear(D).float()
    found = count(layer_step(layer, torch.randn(N, D, dtype=torch.float32)), layer)
    parameters = 4 * (D * D + D)
    assert parameter_bytes(layer) == parameters
    assert found.moved == 7 * parameters + 2 * 4 * D * D + 2 * found.activations
    assert found.activations >= 4 * 2 * N * D  # x and z at least
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    module = nn.Linear(6, 6, dtype=torch.float32)
    x = torch.randn(5, 6, dtype=torch.float32)

    def step():
        h = x @ module.weight.T  # keeps x
        (h * h.clone()).sum().backward()  # keeps h and its copy

    assert saved_bytes(step, module) == 3 * x.nbytes


def test_the_floor_is_the_slower_of_both_rates():
    assert Counts(100.0, 100.0, 0.0).floor(Ceilings(10.0, 50.0)) == 10.0
    assert Counts(100.0, 100.0, 0.0).floor(Ceilings(50.0, 10.0)) == 10.0


def test_ceilings_are_measured(monkeypatch):
    monkeypatch.setattr(floor, "measure", lambda works, *rest: {name: _taken(work) for name, work in works.items()})
    found = measure_ceilings(CPU)
    assert found == Ceilings(2 * 1536**3, 2 * 4 * 2**25) and str(found) == "a product at 7.25 GFLOP/s, a copy at 268 MB/s"
    monkeypatch.setattr(floor, "measure", lambda works, *rest: dict.fromkeys(works, Failure("too hot")))
    with pytest.raises(RuntimeError, match="too hot"):
        measure_ceilings(CPU)


def _taken(work):
    work.run()
    return Timing(2.0, 1.0, 3.0, 5)


def test_the_bare_step_updates_all_weights():
    run = bare_step(6, 2, 3, CPU)
    cells = {name: cell.cell_contents for name, cell in zip(run.__code__.co_freevars, run.__closure__, strict=True)}
    before = [weight.clone() for weight in cells["weights"]]
    run()
    assert len(before) == 4 and not any(torch.equal(old, new) for old, new in zip(before, cells["weights"], strict=True))


# Models and their steps


def test_models_are_recipes_and_more():
    assert {"mnist-fc-snf", "cifar10-glow-exact", "fc3072-snf", "fc4096-exact", "mnist-fc-bare"} <= MODELS.keys()
    assert MODELS["fc4096-snf"].dimensions == 4096 and MODELS["mnist-fc-bare"].bare
    assert all(model.name == name for name, model in MODELS.items())
    on_cpu, on_gpu = default_models(CPU), default_models(torch.device("cuda"))
    assert not any(model.recipe.model == "glow" for model in on_cpu) and any(model.recipe.data == "digits" for model in on_cpu)
    assert {"mnist-fc-sketch", "mnist-conv-exp", "cifar10-glow-snf"} <= {model.name for model in on_gpu}


def test_patterns_choose_models():
    assert [model.name for model in choose(["digits-fc-snf, moons-*", "digits-fc-s*"])] == [
        "digits-fc-snf",
        "moons-fc-snf",
        "moons-fc-exact",
        "digits-fc-sketch",
    ]
    with pytest.raises(ValueError, match="did you mean digits-fc-snf"):
        choose(["digits-fc-sn"])
    groups = families(choose(["digits-fc-snf", "digits-conv-snf", "digits-fc-exact"]))
    assert [[model.name for model in group] for group in groups] == [["digits-fc-snf", "digits-fc-exact"], ["digits-conv-snf"]]


@pytest.mark.parametrize("name", ["digits-fc-snf", "digits-fc-sketch", "digits-conv-emerging", "moons-fc-snf"])
def test_a_training_step_moves_the_weights(name):
    step = training_step(MODELS[name], CPU)
    before = [parameter.detach().clone() for parameter in step.loss.parameters()]
    step.eager()
    for _ in range(2):
        step.work.run()
    assert step.work.units == 1 and not step.failed() and step.data_bytes == 0
    assert any(not torch.equal(old, new) for old, new in zip(before, step.loss.parameters(), strict=True))
    assert next(step.loss.parameters()).dtype == torch.float32


class Steps:
    """A step that takes one at a time at first, then five at once where a block of ten has as many left."""

    steps_per_epoch = 20

    def __init__(self):
        self.taken = []

    def reach(self, index):
        return 5 if len(self.taken) >= 3 and index % 10 <= 5 else 1

    def __call__(self, epoch, index, *rates):
        self.taken += [(epoch, index + ahead) for ahead in range(len(rates))]


def test_steps_follow_each_other_through_the_epochs():
    fake = Steps()
    run = training._Stepper(fake, fake, 10)
    for calls in range(1, 6):
        run()
        assert len(fake.taken) == 10 * calls
    assert fake.taken == [divmod(step, 20) for step in range(50)]
    with pytest.raises(RuntimeError, match="a whole number of calls, got 1 too many"):
        training._Stepper(fake, fake, 4)()


@pytest.mark.gpu
def test_a_training_step_on_a_gpu_is_many():
    step = training_step(MODELS["digits-fc-tracked"], torch.device("cuda"))
    count(step.eager, step.loss)
    for _ in range(3):
        step.work.run()
    assert step.work.units > 1 and step.data_bytes > 0 and not step.failed()


@pytest.mark.gpu
@pytest.mark.usefixtures("brief")
def test_models_and_layers_that_take_turns_on_a_gpu():
    """Whatever one of them frees, or a capture gives back to the device, the graphs of the others still need."""
    device = torch.device("cuda")
    chosen = [*choose(["digits-fc-*", "digits-conv-*"]), replace(MODELS["mnist-fc-bare"], shape=(1, 8, 8))]
    table, _ = steps_table(chosen, device, effort=BRIEF, memory=False)
    assert not table.failures and len(table.rows) == len(chosen)
    table, points = scaling_table([32, 64, 128], device, effort=BRIEF)
    assert not table.failures and all(point.timing for point in points)
    assert {point.how for point in points if point.kind == "learned"} == {"graph"}


# steps


@pytest.mark.usefixtures("brief")
def test_the_table_of_steps(tmp_path):
    chosen = choose(["digits-fc-snf", "digits-fc-exact", "mnist-fc-bare"])
    chosen[2] = replace(chosen[2], shape=(1, 8, 8))
    lines = []
    table, measured = steps_table(chosen, CPU, effort=BRIEF, memory=False, command="selfnorm bench steps", told=lines.append)
    assert table.columns == COLUMNS and [len(row) for row in table.rows] == [len(COLUMNS)] * 3 and not table.failures
    snf, exact, bare = (dict(zip(COLUMNS, row, strict=True)) for row in table.rows)
    for row in (snf, exact):
        assert row["10 %"] <= row["ms a step"] <= row["90 %"] and row["ms a sample"] > 0 and row["samples/s"] > 0
        assert row["floor / step, %"] == pytest.approx(100 * row["floor, ms"] / row["ms a step"], rel=0.06)
        assert row["in a graph"] is None and row["peak MiB"] is None
    assert exact["exact / this"] == 1 and bare["ms a step"] > 0 and bare["ms a sample"] is None
    assert snf["exact / this"] == pytest.approx(measured[1].step.median / measured[0].step.median, rel=0.01)
    assert [line.split(":")[0] for line in lines] == ["digits-fc-snf", "digits-fc-exact", "mnist-fc-bare"]
    table.write(tmp_path / "deep" / "steps.json")
    assert "| digits-fc-snf | " in build(tmp_path / "deep")
    details = json.loads((tmp_path / "deep" / "steps.json").read_text())["details"]
    assert details[0]["model"] == "digits-fc-snf" and details[0]["operations"] > 0 and details[0]["step_blocks"] >= 3


@pytest.mark.usefixtures("brief")
def test_floors_are_those_of_the_threads_in_use(monkeypatch):
    rates = {1: Ceilings(1e6, 1e15), 3: Ceilings(4e6, 1e15)}
    asked, now = [], []

    def ceilings(device, seconds):
        asked.append(torch.get_num_threads())
        return rates[asked[-1]]

    monkeypatch.setattr(steps, "measure_ceilings", ceilings)
    wide = replace(MODELS["digits-fc-snf"], name="wide", recipe=replace(MODELS["digits-fc-snf"].recipe, threads=None))
    chosen = [MODELS["digits-fc-snf"], wide, MODELS["digits-conv-snf"]]
    with threads(3):
        table, measured = steps_table(chosen, CPU, effort=BRIEF, memory=False, now=now.append)
        assert torch.get_num_threads() == 3
    assert asked == [1, 3] and [each.threads for each in measured] == [1, 3, 1]
    assert measured[0].floor == pytest.approx(4 * measured[1].floor)
    assert [row[COLUMNS.index("threads")] for row in table.rows] == [1, 3, 1] == [each["threads"] for each in table.details]
    assert table.title.endswith("CPU, 1 and 3 threads") and table.source["machine"].endswith("CPU, 1 and 3 threads")
    assert "with 1 thread; " in table.about and "with 3 threads. " in table.about
    assert "how fast a product and a copy are with 3 threads" in now and "steps of wide" in now


@pytest.mark.usefixtures("brief")
def test_no_table_changes_the_draws_of_others(monkeypatch):
    monkeypatch.setattr(peers, "OURS", {FC: (MODELS["digits-fc-snf"],)})
    before = torch.get_rng_state()
    steps_table(choose(["digits-fc-snf"]), CPU, effort=BRIEF, memory=False)
    scaling.scaling_table([4], CPU, effort=BRIEF)
    peers_table([FC], CPU, effort=BRIEF, peers=[])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("brief")
def test_an_interruption_leaves_what_was_measured(monkeypatch):
    make = steps.training_step
    monkeypatch.setattr(steps, "training_step", lambda model, device: stop() if "conv" in model.name else make(model, device))
    before = torch.get_rng_state()
    table, measured = steps_table(choose(["digits-fc-snf", "digits-conv-snf"]), CPU, effort=BRIEF, memory=False)
    assert [row[0] for row in table.rows] == ["digits-fc-snf"] == [each.model.name for each in measured]
    assert table.stopped == "stopped after 1 of 2 models" == table.report()["provenance"]["partial"]
    assert table.report()["title"].endswith("(partial: stopped after 1 of 2 models)")
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(steps, "_measure_samples", stop)  # the steps of this family are measured by then
    table, _ = steps_table(choose(["digits-fc-snf", "digits-fc-exact"]), CPU, effort=BRIEF, memory=False)
    assert [row[1] > 0 for row in table.rows] == [True, True] and table.stopped == "stopped after 0 of 2 models"


@pytest.mark.usefixtures("brief")
def test_a_model_that_fails_leaves_a_row(monkeypatch):
    def make(model, device):
        if model.name == "digits-fc-exact":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")
        step = training_step(model, device)
        return replace(step, failed=lambda: True) if model.name == "digits-fc-lu" else step

    monkeypatch.setattr(steps, "training_step", make)
    table, _ = steps_table(choose(["digits-fc-exact", "digits-fc-lu", "digits-fc-snf"]), CPU, effort=BRIEF, memory=False)
    assert [row[0] for row in table.rows] == ["digits-fc-exact (failed)", "digits-fc-lu (failed)", "digits-fc-snf"]
    assert table.rows[0][1:] == [None] * (len(COLUMNS) - 1) and table.rows[1][1] is None and table.rows[2][1] > 0
    assert table.rows[2][4] is None  # no exact twin to compare with
    assert table.failures[0] == "digits-fc-exact: out of memory: Tried to allocate 1 PiB"
    assert "non-finite" in table.failures[1]


@pytest.mark.usefixtures("brief")
def test_a_flow_that_cannot_sample_keeps_its_step(monkeypatch):
    monkeypatch.setattr(steps, "one_sample", lambda flow, device: lambda: flow.decode(torch.full((1, 64), math.nan)))
    table, _ = steps_table(choose(["digits-fc-snf"]), CPU, effort=BRIEF, memory=False)
    row = dict(zip(COLUMNS, table.rows[0], strict=True))
    assert row["model"] == "digits-fc-snf" and row["ms a step"] > 0 and row["ms a sample"] is None
    assert "no sample" in table.failures[0]


# Memory


def test_memory_of_a_step_in_its_own_process():
    found = memory.memory_of(MODELS["digits-conv-snf"], CPU)
    assert found.needed == 4 * found.weights + found.activations > 0
    assert found.peak is None or found.peak > 0


def test_the_table_of_memory(monkeypatch, tmp_path):
    def fake(model, device):
        if model.name == "digits-fc-lu":
            raise ValueError("no room")
        return memory.Memory(2**20, 2**21, 9 * 2**20 if model.name == "digits-fc-snf" else None)

    monkeypatch.setattr(memory, "memory_of", fake)
    chosen = choose(["digits-fc-snf", "digits-fc-exact", "digits-fc-lu", "mnist-fc-bare"])
    table = memory.memory_table(chosen, CPU, command="selfnorm bench steps --memory")
    assert table.rows == [
        ["digits-fc-snf", 1.0, 1.0, 2.0, 2.0, 6.0, 9.0, 1.5],
        ["digits-fc-exact", 1.0, 1.0, 2.0, 2.0, 6.0, None, None],
        ["digits-fc-lu (failed)", *[None] * 7],
    ]
    assert table.failures == ["digits-fc-lu: no room"]
    table.write(tmp_path / "memory.json")
    assert "digits-fc-snf" in build(tmp_path)


def test_a_process_that_fails_says_why(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "Traceback\nValueError: no good")
    monkeypatch.setattr(memory.subprocess, "run", lambda *args, **options: done)
    with pytest.raises(RuntimeError, match=r"^ValueError: no good$"):
        memory.memory_of(MODELS["digits-fc-snf"], CPU)


def test_the_process_has_our_precision_and_threads(monkeypatch):
    asked = []
    done = subprocess.CompletedProcess([], 0, '{"weights": 1, "activations": 2, "peak": 3}')
    monkeypatch.setattr(memory.subprocess, "run", lambda command, **options: asked.append(command[-2:]) or done)
    for value in ("float32", "tf32", "bf16"):
        with precision(value):
            assert memory.memory_of(MODELS["digits-fc-snf"], CPU) == memory.Memory(1, 2, 3)
    assert asked == [["digits-fc-snf", value] for value in ("float32", "tf32", "bf16")]


def test_a_process_refuses_another_precision():
    command = [sys.executable, "-m", "selfnorm.bench.memory", "digits-fc-snf", "float16"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "expected one of float32, tf32, bf16, got 'float16'" in done.stderr


def test_small_models_have_no_ratio_of_memory():
    assert memory.Memory(2**20, 0, 6 * 2**20).ratio == 1.5 and memory.Memory(2**20 - 1, 0, 6 * 2**20).ratio is None


def test_an_interruption_leaves_the_memory_that_was_measured(monkeypatch):
    found = iter([memory.Memory(1, 2, 3)])
    monkeypatch.setattr(memory, "memory_of", lambda model, device: next(found, None) or stop())
    table = memory.memory_table(choose(["digits-fc-snf", "mnist-fc-bare", "digits-fc-exact"]), CPU)
    assert [row[0] for row in table.rows] == ["digits-fc-snf"] and table.stopped == "stopped after 1 of 2 models"


# scaling


def test_sizes_are_powers_of_two():
    assert sizes(32) == [32] and sizes(64) == [32, 64] and sizes(8192)[-1] == 8192 and len(sizes(8192)) == 9


def test_slopes_are_of_the_upper_half():
    cubic = {2**power: 3e-9 * 8.0**power for power in range(5, 12)}
    assert slope(cubic) == pytest.approx(3)
    launch_bound = dict.fromkeys((32, 64, 128), 1.0) | {size: size**2 / 256**2 for size in (256, 512, 1024, 2048)}
    assert slope(launch_bound) == pytest.approx(2)
    assert slope({32: 1.0}) is None and slope({}) is None and slope({32: 1.0, 64: 4.0}) == pytest.approx(2)


def test_crossovers_are_interpolated_in_logarithms():
    at = [32, 64, 128, 256, 512]
    linear, cubic = {size: size / 100 for size in at}, {size: (size / 100) ** 3 for size in at}
    assert crossover(linear, cubic) == pytest.approx(100)
    assert crossover(cubic, linear) == math.inf
    assert crossover(dict.fromkeys(at, 1.0), dict.fromkeys(at, 2.0)) == 32
    assert crossover({32: 1.0}, {64: 1.0}) is None
    assert crossover({32: 1.0, 64: 1.0}, {32: 2.0}) is None  # one point tells no trend
    # Slower, faster, slower, and faster for good: the last time counts.
    wavering, other = {32: 2.0, 64: 1.0, 128: 4.0, 256: 1.0}, {32: 1.0, 64: 2.0, 128: 1.0, 256: 4.0}
    assert crossover(wavering, other) == pytest.approx(128 * math.sqrt(2))


def test_rows_of_scaling():
    points = [
        Point(kind, "gradient", size, Timing(seconds(size), 0.0, 1.0, 3))
        for kind, seconds in (("learned", lambda D: 1e-3 * (D / 64) ** 2), ("exact", lambda D: 1e-3 * (D / 64) ** 3))
        for size in (32, 64, 128, 256)
    ] + [Point("sketch", "gradient", 32, None, failure="no")]
    assert times_of(points, "with Adam") == {} and set(times_of(points, "gradient")) == {"learned", "exact"}
    rows = rows_of(points, "gradient")
    columns = dict(zip(("D", "part", *scaling.KINDS, "ratio"), zip(*rows, strict=True), strict=True))
    assert columns["D"] == (32, 64, 128, 256, "slope", "faster than exact", "slower than learned")
    assert columns["learned"] == (0.25, 1.0, 4.0, 16.0, 2.0, "from 64", None)
    assert columns["exact"] == (0.125, 1.0, 8.0, 64.0, 3.0, None, "from 64")
    assert columns["ratio"] == (0.5, 1.0, 2.0, 4.0, None, None, None)
    assert columns["sketch"] == (None,) * 7


def test_scaling_measures_all_kinds_and_parts(tmp_path, monkeypatch):
    monkeypatch.setitem(scaling.LINEAR, "lu", lambda features: 1 / 0)
    table, points = scaling.scaling_table([4, 8], CPU, effort=BRIEF, command="selfnorm bench scaling")
    assert len(points) == 2 * 2 * len(scaling.KINDS) and len(table.rows) == 2 * (2 + 3)
    for point in points:
        assert (point.timing is None) == (point.kind == "LU") == bool(point.failure)
    assert len(table.failures) == 4 and table.failures[0] == "LU, D = 4, gradient: ZeroDivisionError: division by zero"
    table.write(tmp_path / "scaling.json")
    assert "| slope | gradient |" in build(tmp_path)


@pytest.mark.parametrize("kind", ["selfnorm", "relative", "tracked", "exact"])
def test_a_layers_step_is_adams_with_kernels_too(device, kind):
    """There gradients stay in factors."""
    pytest.importorskip("triton")
    x, weights = torch.randn(4, 6, dtype=torch.float32, device=device), []
    for where in ((), (device.type,)):
        torch.manual_seed(1)
        layer = scaling.LINEAR[kind](6).to(device, torch.float32)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.01, fused=True, capturable=device.type == "cuda")
        with used_on(*where):
            run = layer_step(layer, x, optimizer)
            for _ in range(3):
                run()
        assert (layer.weight.grad is None) == (bool(where) and kind != "exact")
        weights.append([parameter.detach() for parameter in layer.parameters()])
    for plain, fused in zip(*weights, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


def test_a_layers_step_trains_and_tracks():
    layer = TrackedLinear(6).float()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    before = layer.weight_inv.clone()
    layer_step(layer, torch.randn(4, 6, dtype=torch.float32), optimizer)()
    assert not torch.equal(before, layer.weight_inv) and layer.weight.grad is not None
    assert (layer.weight_inv @ layer.weight.detach() - torch.eye(6)).norm() < 0.05


# peers


def test_peers_that_are_absent_say_so(monkeypatch, tmp_path):
    original = importlib.import_module

    def without(name, *rest):
        if name.split(".")[0] in ("zuko", "nflows", "normflows"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        return original(name, *rest)

    monkeypatch.setattr(peers, "import_module", without)
    monkeypatch.setattr(peers, "installed", lambda library: None)
    monkeypatch.setattr(peers, "OURS", {FC: (MODELS["digits-fc-snf"],)})
    table, rows = peers_table([FC], CPU, effort=BRIEF, command="selfnorm bench peers")
    assert [row[-1] for row in table.rows] == [None, *[MISSING] * 4] and not table.failures
    assert rows[0].step and not any(row.step for row in rows[1:])
    assert table.source["zuko"] is None and table.source["nflows"] is None and "normflows" not in table.source
    table.write(tmp_path / "peers.json")
    assert "| MAF | zuko | 784 | – |" in build(tmp_path)


def test_peers_are_timed_beside_ours(monkeypatch):
    def make():
        flow = fc_flow(784, layers=1, linear="lu")
        return flow, lambda x: -flow.surrogate(x).log_det.mean()

    def broken():
        flow = fc_flow(784, layers=1, linear="lu")
        return flow, lambda x: flow.no_such_thing

    def half_installed():
        raise ImportError("nflows needs umnn", name="umnn")

    monkeypatch.setattr(peers, "OURS", {FC: (MODELS["digits-fc-snf"], MODELS["digits-fc-lu"])})
    monkeypatch.setattr(peers, "installed", lambda library: "1.2.3")
    others = [Peer("zuko", "good", FC, make), Peer("zuko", "broken", FC, broken), Peer("nflows", "half", FC, half_installed)]
    table, rows = peers_table([FC], CPU, effort=BRIEF, peers=others)
    assert [row.name for row in rows] == [
        "selfnorm digits-fc-snf",
        "selfnorm digits-fc-lu",
        "zuko good",
        "zuko broken",
        "nflows half",
    ]
    assert [bool(row.step) for row in rows] == [True, True, True, False, False]
    cells = [dict(zip(peers.COLUMNS, row, strict=True)) for row in table.rows]
    assert cells[0]["this / ours"] == 1 and cells[2]["this / ours"] == significant(rows[2].step.median / rows[0].step.median)
    assert "no_such_thing" in cells[3]["note"] and "needs umnn" in cells[4]["note"]
    assert [line.split(":")[0] for line in table.failures] == ["zuko broken"]
    assert table.source["zuko"] == "1.2.3" and cells[2]["parameters"] == 784 * 785


@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peer.shape == FC], ids=lambda peer: peer.model)
def test_peers_that_are_there_train(peer):
    pytest.importorskip(peer.library)
    flow, loss = peer.make()
    flow.float()
    value = loss(torch.randn(3, 784, dtype=torch.float32))
    value.backward()
    assert value.shape == () and torch.isfinite(value)


def test_the_peers_glow_is_whole():
    pytest.importorskip("normflows")
    flow, loss = peers.normflows_glow((1, 8, 8), 2, 2, hidden=8)
    flow.float()
    value = loss(torch.randn(3, 1, 8, 8, dtype=torch.float32))
    assert value.shape == () and torch.isfinite(value)

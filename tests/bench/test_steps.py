"""`selfnorm bench steps`: tables are complete even if a model fails.

No test checks how long anything takes, since the machine may be busy.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from selfnorm.bench import peers, scaling, steps, training, workloads
from selfnorm.bench.floor import Ceilings, count_step
from selfnorm.bench.peers import FC, peers_table
from selfnorm.bench.scaling import scaling_table
from selfnorm.bench.steps_table import STEP_COLUMNS, steps_table
from selfnorm.bench.training import training_step
from selfnorm.bench.workloads import MODELS, choose, default_models, families
from selfnorm.report.results import build
from selfnorm.runtime.precision import precision
from selfnorm.runtime.threads import cpu_threads
from support.benching import BRIEF, stop

pytestmark = pytest.mark.usefixtures("elsewhere")
CPU = torch.device("cpu")


def test_models_are_recipes_and_more():
    assert {"mnist-fc-snf", "cifar10-glow-exact", "fc3072-snf", "fc4096-exact", "mnist-fc-bare"} <= MODELS.keys()
    assert MODELS["fc4096-snf"].dimensions == 4096 and MODELS["mnist-fc-bare"].bare
    assert all(model.name == name for name, model in MODELS.items())
    on_cpu, on_gpu = default_models(CPU), default_models(torch.device("cuda"))
    assert not any(model.recipe.architecture.model == "glow" for model in on_cpu)
    assert any(model.recipe.data.source == "digits" for model in on_cpu)
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
    """Takes one step per call at first, then five if the block of ten has that many left."""

    steps_per_epoch = 20

    def __init__(self):
        self.taken = []

    def steps_per_call(self, index):
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
    count_step(step.eager, step.loss)
    for _ in range(3):
        step.work.run()
    assert step.work.units > 1 and step.data_bytes > 0 and not step.failed()


@pytest.mark.gpu
@pytest.mark.usefixtures("brief")
def test_models_and_layers_that_take_turns_on_a_gpu():
    """Memory freed by one of them, or returned by a capture, must not be memory that graphs of the others use."""
    device = torch.device("cuda")
    chosen = [*choose(["digits-fc-*", "digits-conv-*"]), replace(MODELS["mnist-fc-bare"], shape=(1, 8, 8))]
    table, _ = steps_table(chosen, device, effort=BRIEF, memory=False)
    assert not table.failures and len(table.rows) == len(chosen)
    table, points = scaling_table([32, 64, 128], device, effort=BRIEF)
    assert not table.failures and all(point.timing for point in points)
    assert {point.how for point in points if point.kind == "learned"} == {"graph"}


@pytest.mark.usefixtures("brief")
def test_the_table_of_steps(tmp_path):
    chosen = choose(["digits-fc-snf", "digits-fc-exact", "mnist-fc-bare"])
    chosen[2] = replace(chosen[2], shape=(1, 8, 8))
    lines = []
    table, measured = steps_table(chosen, CPU, effort=BRIEF, memory=False, command="selfnorm bench steps", on_result=lines.append)
    assert table.columns == STEP_COLUMNS and [len(row) for row in table.rows] == [len(STEP_COLUMNS)] * 3 and not table.failures
    snf, exact, bare = (dict(zip(STEP_COLUMNS, row, strict=True)) for row in table.rows)
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

    def ceilings(device, seconds, in_bf16):
        assert not in_bf16
        asked.append(torch.get_num_threads())
        return rates[asked[-1]]

    monkeypatch.setattr(steps, "measure_ceilings", ceilings)
    wide = replace(MODELS["digits-fc-snf"], name="wide", recipe=MODELS["digits-fc-snf"].recipe.changed(threads=None))
    chosen = [MODELS["digits-fc-snf"], wide, MODELS["digits-conv-snf"]]
    with cpu_threads(3):
        table, measured = steps_table(chosen, CPU, effort=BRIEF, memory=False, on_status=now.append)
        assert torch.get_num_threads() == 3
    assert asked == [1, 3] and [each.threads for each in measured] == [1, 3, 1]
    assert measured[0].floor == pytest.approx(4 * measured[1].floor)
    assert [row[STEP_COLUMNS.index("threads")] for row in table.rows] == [1, 3, 1] == [each["threads"] for each in table.details]
    assert table.title.endswith("CPU, 1 and 3 threads") and table.source["machine"].endswith("CPU, 1 and 3 threads")
    assert "with 1 thread; " in table.about and "with 3 threads. " in table.about
    assert "measuring the speed of a product and a copy with 3 threads" in now and "steps of wide" in now


@pytest.mark.usefixtures("brief")
def test_only_coupling_networks_have_the_floor_of_bfloat16():
    small = MODELS["mnist-glow-snf"].recipe.changed(threads=1, blocks=1, steps=1, hidden=4)
    glow = replace(MODELS["digits-fc-snf"], name="glow", recipe=small)
    with precision("bf16"):
        table, measured = steps_table([MODELS["digits-fc-snf"], glow], CPU, effort=BRIEF, memory=False)
    assert [each.ceilings.in_bf16 for each in measured] == [False, True]
    assert "a product at" in table.about and "a product of bfloat16 numbers at" in table.about
    _, measured = steps_table([glow], CPU, effort=BRIEF, memory=False)
    assert not measured[0].ceilings.in_bf16


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
    monkeypatch.setattr(steps, "_measure_samples", stop)  # after the steps of this family are measured
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
    assert table.rows[0][1:] == [None] * (len(STEP_COLUMNS) - 1) and table.rows[1][1] is None and table.rows[2][1] > 0
    assert table.rows[2][4] is None  # no exact twin to compare with
    assert table.failures[0] == "digits-fc-exact: out of memory: Tried to allocate 1 PiB"
    assert "non-finite" in table.failures[1]


@pytest.mark.usefixtures("brief")
def test_a_flow_that_cannot_sample_keeps_its_step(monkeypatch):
    monkeypatch.setattr(steps, "one_sample", lambda flow, device: lambda: flow.decode(torch.full((1, 64), math.nan)))
    table, _ = steps_table(choose(["digits-fc-snf"]), CPU, effort=BRIEF, memory=False)
    row = dict(zip(STEP_COLUMNS, table.rows[0], strict=True))
    assert row["model"] == "digits-fc-snf" and row["ms a step"] > 0 and row["ms a sample"] is None
    assert "no sample" in table.failures[0]


def test_a_recipe_on_data_of_unknown_shape_breaks_no_other(monkeypatch):
    monkeypatch.setitem(workloads.RECIPES, "own-fc", workloads.RECIPES["digits-fc-snf"].changed(name="own-fc", source="own.csv"))
    known = workloads.known_models()
    assert "own-fc" not in known and "digits-fc-snf" in known

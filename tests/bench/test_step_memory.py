"""`selfnorm bench steps --memory`: the memory of a step, measured in a separate process.

No test checks how long anything takes, since the machine may be busy.
"""

import subprocess
import sys

import pytest
import torch

from selfnorm.bench import step_memory
from selfnorm.bench.workloads import MODELS, choose
from selfnorm.report.results import build
from selfnorm.runtime.precision import precision
from support.benching import stop

pytestmark = pytest.mark.usefixtures("elsewhere")
CPU = torch.device("cpu")


def test_memory_of_a_step_in_its_own_process():
    found = step_memory.memory_of(MODELS["digits-conv-snf"], CPU)
    assert found.needed == 4 * found.weights + found.activations > 0
    assert found.peak is None or found.peak > 0


def test_the_table_of_memory(monkeypatch, tmp_path):
    def fake(model, device):
        if model.name == "digits-fc-lu":
            raise ValueError("no room")
        return step_memory.Memory(2**20, 2**21, 9 * 2**20 if model.name == "digits-fc-snf" else None)

    monkeypatch.setattr(step_memory, "memory_of", fake)
    chosen = choose(["digits-fc-snf", "digits-fc-exact", "digits-fc-lu", "mnist-fc-bare"])
    table = step_memory.memory_table(chosen, CPU, command="selfnorm bench steps --memory")
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
    monkeypatch.setattr(step_memory.subprocess, "run", lambda *args, **options: done)
    with pytest.raises(RuntimeError, match=r"^ValueError: no good$"):
        step_memory.memory_of(MODELS["digits-fc-snf"], CPU)


def test_the_process_has_our_precision_and_threads(monkeypatch):
    asked = []
    done = subprocess.CompletedProcess([], 0, '{"weights": 1, "activations": 2, "peak": 3}')
    monkeypatch.setattr(step_memory.subprocess, "run", lambda command, **options: asked.append(command[-2:]) or done)
    for value in ("float32", "tf32", "bf16"):
        with precision(value):
            assert step_memory.memory_of(MODELS["digits-fc-snf"], CPU) == step_memory.Memory(1, 2, 3)
    assert asked == [["digits-fc-snf", value] for value in ("float32", "tf32", "bf16")]


def test_a_process_refuses_another_precision():
    command = [sys.executable, "-m", "selfnorm.bench.step_memory", "digits-fc-snf", "float16"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "expected one of float32, tf32, bf16, got 'float16'" in done.stderr


def test_small_models_have_no_ratio_of_memory():
    assert step_memory.Memory(2**20, 0, 6 * 2**20).ratio == 1.5 and step_memory.Memory(2**20 - 1, 0, 6 * 2**20).ratio is None


def test_an_interruption_leaves_the_memory_that_was_measured(monkeypatch):
    found = iter([step_memory.Memory(1, 2, 3)])
    monkeypatch.setattr(step_memory, "memory_of", lambda model, device: next(found, None) or stop())
    table = step_memory.memory_table(choose(["digits-fc-snf", "mnist-fc-bare", "digits-fc-exact"]), CPU)
    assert [row[0] for row in table.rows] == ["digits-fc-snf"] and table.stopped == "stopped after 1 of 2 models"

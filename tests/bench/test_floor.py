"""The floor of a step: operations, bytes, and the rates of the machine.

No test checks how long anything takes, since the machine may be busy.
"""

import pytest
import torch
from torch import nn

from selfnorm import ExactLinear, SelfNormLinear, TrackedLinear
from selfnorm.bench import floor
from selfnorm.bench.floor import Ceilings, Counts, bare_step, count_step, measure_ceilings, parameter_bytes, saved_bytes
from selfnorm.bench.scaling import layer_step
from selfnorm.bench.timing import Failure, Timing

pytestmark = pytest.mark.usefixtures("elsewhere")
CPU = torch.device("cpu")


def test_operations_of_a_step_are_counted():
    D, N = 24, 8
    counts = {}
    for kind in (SelfNormLinear, ExactLinear, TrackedLinear):
        layer = kind(D)
        counts[kind] = count_step(layer_step(layer, torch.randn(N, D)), layer)
    product = 2 * N * D * D
    assert counts[SelfNormLinear].operations == 6 * product
    assert counts[TrackedLinear].operations == 3 * product + 4 * D**3  # forward, two gradients; R and its error
    # An LU, and its factors used for the inverse's columns.
    assert counts[ExactLinear].operations == pytest.approx(3 * product + 2 * D**3 / 3 + 2 * D**3)


def test_bytes_of_a_step_are_counted():
    D, N = 24, 8
    layer = TrackedLinear(D).float()
    found = count_step(layer_step(layer, torch.randn(N, D, dtype=torch.float32)), layer)
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
    assert str(measure_ceilings(CPU, in_bf16=True)).startswith("a product of bfloat16 numbers at")
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

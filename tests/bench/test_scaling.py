"""`selfnorm bench scaling`: slopes, crossovers, and the step of a layer.

No test checks how long anything takes, since the machine may be busy.
"""

import math

import pytest
import torch

from selfnorm import TrackedLinear
from selfnorm.bench import scaling
from selfnorm.bench.scaling import Point, crossover, layer_step, rows_of, sizes, slope, times_of
from selfnorm.bench.timing import Timing
from selfnorm.kernels.dispatch import used_on
from selfnorm.report.results import build
from support.benching import BRIEF

pytestmark = pytest.mark.usefixtures("elsewhere")
CPU = torch.device("cpu")


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
    assert crossover({32: 1.0, 64: 1.0}, {32: 2.0}) is None  # one point shows no trend
    # Slower, faster, slower, then faster: the last crossover counts.
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
    """With kernels, gradients stay in factors."""
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

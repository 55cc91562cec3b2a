"""Tests run in float64, from a fixed seed, on the CPU and on whatever accelerator is present."""

import os

import pytest
import torch

from selfnorm.bench.floor import Ceilings
from selfnorm.kernels.dispatch import used_on
from selfnorm.runtime.graphs import waiting_is_an_error
from support.benching import BRIEF
from support.commandline import SHORT, numbers, ok, write_csv

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None

# Where there is no GPU, Triton runs kernels in Python. It must know before any of them is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# The tests' tensors are tiny: more threads would only wait for each other, at length where a core is busy elsewhere.
torch.set_num_threads(1)
# torch lets cuDNN round float32 convolutions to TF32 unless told otherwise; float32 tests mean float32.
torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True)
def float64_and_seed():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["cpu", *([pytest.param(str(ACCELERATOR), marks=pytest.mark.gpu)] if ACCELERATOR else [])])
def device(request):
    return torch.device(request.param)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and ACCELERATOR is None:
        pytest.skip("needs an accelerator")


@pytest.fixture
def kernels(device):
    """Kernels are used on the device, if need be step by step in Python."""
    pytest.importorskip("triton")
    with used_on(device.type):
        yield


@pytest.fixture
def poisoned(monkeypatch):
    """New memory holds NaN, so that what a kernel leaves unwritten is seen."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, original=original, **options: _poison(original(*args, **options)))


def _poison(tensor):
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


@pytest.fixture
def factorisations(monkeypatch):
    """Counts every factorisation, by whatever function it is asked for."""
    calls = []
    for name in ("lu_factor", "lu_factor_ex", "slogdet", "inv", "inv_ex", "solve", "solve_ex", "det", "lu", "svd", "qr"):
        original = getattr(torch.linalg, name)

        def counted(*args, original=original, name=name, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.linalg, name, counted)
    return calls


@pytest.fixture
def never_waiting():
    """A context in which waiting for the device is an error."""
    return waiting_is_an_error


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """A run of images, and what its training printed."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    return folder, ok("train", "digits-fc-snf", *SHORT, "--run", folder, "-q")


@pytest.fixture(scope="session")
def table_run(tmp_path_factory):
    """A run on a table with named columns, and that table's file."""
    folder = tmp_path_factory.mktemp("table")
    file = write_csv(folder / "measured.csv", numbers(200, 3))
    ok("fit", file, "--set", "epochs=4", "--run", folder / "run", "--quiet")
    return folder / "run", file


@pytest.fixture
def elsewhere(tmp_path_factory, monkeypatch):
    """A working folder of its own, so that no test leaves anything in the repository."""
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))


@pytest.fixture
def brief(monkeypatch):
    """No measurement of `selfnorm bench` takes long."""
    monkeypatch.setattr("selfnorm.cli.bench._effort", lambda *args, **options: BRIEF)
    monkeypatch.setattr("selfnorm.bench.steps.measure_ceilings", lambda device, seconds, in_bf16: Ceilings(1e9, 1e9, in_bf16))
    monkeypatch.setattr("selfnorm.bench.steps.BULK", 3)

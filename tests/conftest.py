"""Fixtures for all tests, which run in float64 from a fixed seed, on the CPU and on the accelerator if there is one."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from selfnorm import accurate
from selfnorm.bench.floor import Ceilings
from selfnorm.kernels.dispatch import used_on
from selfnorm.report.provenance import provenance
from selfnorm.runtime.graphs import error_on_sync
from support.benching import BRIEF
from support.commandline import SHORT, numbers, ok, write_csv
from support.counts import add_row, row_of

STARTED = pytest.StashKey[float]()
ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None

# Without a GPU, Triton interprets kernels in Python. This must be set before any kernel is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# The tests use tiny tensors: more threads would only wait for each other, for long if a core is busy.
torch.set_num_threads(1)
# By default torch lets cuDNN round float32 convolutions to TF32; tests in float32 need full precision.
torch.backends.cudnn.allow_tf32 = False
# A shell ignores SIGINT in what it starts in the background, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def float64_and_seed():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["cpu", *([pytest.param(str(ACCELERATOR), marks=pytest.mark.gpu)] if ACCELERATOR else [])])
def device(request):
    return torch.device(request.param)


def pytest_addoption(parser):
    parser.addoption("--counts", metavar="FILE", help="add the numbers of passed, failed and skipped tests to this table")


def pytest_sessionstart(session):
    session.config.stash[STARTED] = time.monotonic()


def pytest_terminal_summary(terminalreporter, config):
    if config.option.counts:
        seconds = time.monotonic() - config.stash[STARTED]
        source = provenance(ACCELERATOR or "cpu", "pytest")
        add_row(Path(config.option.counts), row_of(terminalreporter.stats, seconds, source))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and ACCELERATOR is None:
        pytest.skip("needs an accelerator")


@pytest.fixture
def kernels(device):
    """Uses kernels on the device; without a GPU they run in Triton's interpreter."""
    pytest.importorskip("triton")
    with used_on(device.type):
        yield


@pytest.fixture
def poisoned(monkeypatch):
    """Fills new memory with NaN, which reveals values that a kernel does not write."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, original=original, **options: _poison(original(*args, **options)))


def _poison(tensor):
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


@pytest.fixture
def factorisations(monkeypatch):
    """Lists every call of a factorising function of torch.linalg, by name."""
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
    """Returns a context in which waiting for the device is an error."""
    return error_on_sync


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """A short run on the digits, and the output of its training."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    return folder, ok("train", "digits-fc-snf", *SHORT, "--run", folder, "-q")


@pytest.fixture(scope="session")
def table_run(tmp_path_factory):
    """A short run on a table with named columns, and the file of the table."""
    folder = tmp_path_factory.mktemp("table")
    file = write_csv(folder / "measured.csv", numbers(200, 3))
    ok("fit", file, "--set", "epochs=4", "--run", folder / "run", "--quiet")
    return folder / "run", file


@pytest.fixture
def elsewhere(tmp_path_factory, monkeypatch):
    """Changes to a temporary working folder, so that the test leaves nothing in the repository."""
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))


@pytest.fixture
def brief(monkeypatch):
    """Makes every measurement of `selfnorm bench` short."""
    monkeypatch.setattr("selfnorm.cli.bench._effort", lambda *args, **options: BRIEF)
    monkeypatch.setattr("selfnorm.bench.steps.measure_ceilings", lambda device, seconds, in_bf16: Ceilings(1e9, 1e9, in_bf16))
    monkeypatch.setattr("selfnorm.bench.steps.BULK", 3)


@pytest.fixture
def evaluations(monkeypatch):
    """Lists the flows that were evaluated in float64."""
    calls = []
    original = accurate.in_float64
    monkeypatch.setattr(accurate, "in_float64", lambda module: calls.append(module) or original(module))
    return calls

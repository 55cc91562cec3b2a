"""Workers: what they send arrives unchanged, and however they end is one line."""

import math
import os
import signal
import subprocess
import sys

import pytest

from selfnorm.compare.worker import ForwardedStops, Outcome, _one_line, death_reason, run_in_worker
from selfnorm.train.stopping import DivergedError
from support import work

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_records_arrive_unchanged_and_output_does_not(capfd, monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    records = []
    assert run_in_worker(work.talk, records.append, ForwardedStops()) == Outcome("finished")
    numbers, process = records
    assert math.isnan(numbers["values"][0]) and numbers["values"][1:] == (math.inf, None)
    assert process["pid"] != os.getpid() and process["group"] == process["pid"] and process["pages"] == "0"
    assert capfd.readouterr() == ("", "")


def test_an_exception_is_one_line():
    assert run_in_worker(work.fail, print, ForwardedStops()) == Outcome("failed", "no space left")


def test_a_killed_worker_is_a_failure():
    records = []
    assert run_in_worker(work.die, records.append, ForwardedStops()) == Outcome("failed", "killed by SIGKILL")
    assert records == [{"kind": "dying"}]


@pytest.mark.skipif(os.name != "posix", reason="signals are not forwarded elsewhere")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded(number):
    stop = ForwardedStops()
    outcome = run_in_worker(work.wait_for_a_signal, lambda record: stop._note(number, None), stop)
    assert outcome.kind == "stopped" and outcome.reason.startswith(f"stopped by {number.name}, all saved; ")


@pytest.mark.skipif(os.name != "posix", reason="signals are not forwarded elsewhere")
def test_a_signal_before_the_worker_is_ready_is_forwarded_too(capfd):
    stop, records = ForwardedStops(), []
    stop._note(signal.SIGINT, None)
    assert run_in_worker(work.wait_for_a_signal, records.append, stop).kind == "stopped" and records == []
    assert capfd.readouterr() == ("", "")


def test_an_error_in_the_parent_ends_the_worker():
    def full(record):
        pids.append(record["pid"])
        raise OSError("no space")

    pids = []
    with pytest.raises(OSError, match="no space"):
        run_in_worker(work.announce_and_wait, full, ForwardedStops())
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_script_without_a_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from selfnorm.compare.worker import ForwardedStops, run_in_worker\n"
        "from support import work\n"
        "print('script')\n"
        "print(run_in_worker(work.fail, print, ForwardedStops()).kind)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("script\nfailed\n", "")


def test_lines_about_errors_and_dead_processes():
    assert _one_line(ValueError("no\n space")) == "no space" and _one_line(DivergedError("it grew")) == "it grew"
    try:
        print(1 / 0)
    except ZeroDivisionError as error:
        line = _one_line(error)
    assert line.startswith("division by zero (ZeroDivisionError at test_worker.py:")
    assert death_reason(1, "a\nno space\n") == "no space"
    assert death_reason(-9, "half a li") == "killed by SIGKILL"
    assert death_reason(1, "") == "exit status 1 without a message"


@pytest.mark.skipif(os.name != "posix", reason="closes a stream by its number")
@pytest.mark.parametrize("stream", [1, 2])
def test_a_closed_standard_stream_is_no_signal(stream, tmp_path):
    script = (
        f"import os; os.close({stream})\n"
        "from selfnorm.compare.worker import ForwardedStops, run_in_worker\n"
        "from support import work\n"
        "from pathlib import Path\n"
        f"Path({str(tmp_path / 'kind')!r}).write_text(run_in_worker(work.talk, lambda record: None, ForwardedStops()).kind)\n"
    )
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=60)
    assert (tmp_path / "kind").read_text() == "finished"

"""How the command ends on signals, and when the reader of its output leaves. Real processes, since signals need one each."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from support.commandline import ok

COMMAND = [sys.executable, "-m", "selfnorm"]
MANY = 10_000_000  # samples, which take minutes


@pytest.fixture
def writing(table_run, tmp_path):
    """A process that is writing a file of samples, and its folder; it has written some."""
    command = [*COMMAND, "sample", table_run[0], "-n", str(MANY), "-o", tmp_path / "x.csv"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while not any(path.stat().st_size for path in tmp_path.iterdir()):
            assert process.poll() is None and time.monotonic() < until, process.stderr.read()
            time.sleep(0.02)
        yield process, tmp_path
        process.kill()


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGTERM, 143, "selfnorm: stopped by SIGTERM\n"), (signal.SIGINT, 130, "selfnorm: stopped\n")],
)
def test_a_signal_while_a_file_is_written_leaves_nothing(writing, number, status, said):
    process, folder = writing
    process.send_signal(number)
    assert (process.wait(30), process.stderr.read()) == (status, said)
    assert list(folder.iterdir()) == []


def test_the_next_call_removes_what_a_killed_one_left_but_not_what_is_being_written(writing, table_run):
    process, folder = writing
    (kept,) = folder.iterdir()
    again = ("sample", table_run[0], "-n", 5, "-o", folder / "x.csv", "--force")
    ok(*again)
    assert sorted(folder.iterdir()) == sorted([kept, folder / "x.csv"])
    process.kill()
    process.wait()
    assert kept.exists()
    other = folder / kept.name.replace(".x.", ".x.y.")  # of x.y.csv
    other.touch()
    ok(*again)
    assert sorted(folder.iterdir()) == sorted([other, folder / "x.csv"])


def test_ctrl_c_during_the_imports_is_quiet():
    code = (
        "import sys; sys.argv = ['selfnorm', 'recipes']; from selfnorm.__main__ import main; print('ready', flush=True); main()"
    )
    for delay in (0.05, 0.4):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            assert (process.wait(30), process.stderr.read()) == (130, "selfnorm: stopped\n")


def test_nothing_heavy_is_imported_before_the_command_can_be_stopped():
    code = "import sys, selfnorm.__main__; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False False\n"


@pytest.mark.parametrize(
    "args",
    [("sample", "-n", str(MANY), "-o", "/dev/stdout"), ("score",), ("score", "--json")],
    ids=" ".join,
)
def test_it_ends_quietly_when_the_reader_leaves(table_run, tmp_path, args):
    verb, *options = args
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(20_000, 3)))
    file = [tmp_path / "rows.npy"] if verb == "score" else []
    command = [*COMMAND, verb, table_run[0], *file, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
@pytest.mark.parametrize("options", [("-o", "/dev/full"), ()], ids=" ".join)
def test_a_full_device_is_one_line(table_run, options):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [*COMMAND, "score", *table_run, *options], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No space left on device" in done.stderr
    assert ("/dev/full" if options else "standard output") in done.stderr


RUN = "RUN"
PRINTING = [
    ("--version",),
    ("--help",),
    ("recipes",),
    ("score", *(RUN, "FILE"), "--json"),
    ("eval", RUN),
    ("doctor", RUN, "--json"),
    ("train", "moons-fc-snf", "--set", "epochs=1", "--json", "--run", "NEW"),
]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
@pytest.mark.parametrize("args", PRINTING, ids=lambda args: args[0])
def test_standard_output_that_takes_nothing_is_named(table_run, tmp_path, args):
    paths = {RUN: table_run[0], "FILE": table_run[1], "NEW": tmp_path / "new"}
    call = [*COMMAND, *(paths.get(arg, arg) for arg in args)]
    outcomes = [(">/dev/full", "expected room to write it"), (">&-", "expected an open stream, got a closed one")]
    for redirection, said in outcomes if args[0] in ("--version", "score") else outcomes[:1]:
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {redirection}', "sh", *call], stderr=subprocess.PIPE, text=True, check=False
        )
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.startswith(f"selfnorm: standard output: {said}")


def test_a_file_that_outgrows_the_limit_is_one_line(table_run, tmp_path):
    """A limit on the size of files stands for a full disk."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "sys.argv[0] = 'selfnorm'; from selfnorm.__main__ import main; main()"
    )
    args = ["sample", table_run[0], "-n", "100000", "-o", tmp_path / "x.csv"]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"{tmp_path / 'x.csv'}: expected room to write it" in done.stderr and "repeat the command" in done.stderr
    assert list(tmp_path.iterdir()) == []

"""Functions that tests run in workers, which can import this module but not a test file."""

import math
import os
import signal
import sys
import time

from selfnorm.train.stopping import StopRequests


def talk(report):
    """Sends numbers that JSON cannot hold, and prints."""
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    report({"kind": "numbers", "values": (math.nan, math.inf, None)})
    report({"kind": "process", "group": os.getpgid(0), "pid": os.getpid(), "pages": os.environ["THP_MEM_ALLOC_ENABLE"]})


def fail(report):
    raise ValueError("no space\n left")


def die(report):
    report({"kind": "dying"})
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_signal(report):
    """Waits as a training run does, and stops where it can be saved."""
    with StopRequests() as stop:
        report({"kind": "ready"})
        for _ in range(6000):
            time.sleep(0.01)
            stop.check()


def announce_and_wait(report):
    report({"kind": "pid", "pid": os.getpid()})
    time.sleep(60)

"""Helpers for the tests of `selfnorm bench`."""

from selfnorm.bench.timing import Effort

BRIEF = Effort(seconds=0.001, warm_up=0.001, block=0.0001, most_blocks=5)


def stop(*args):
    """Raises KeyboardInterrupt, as if the user pressed Ctrl-C."""
    raise KeyboardInterrupt

"""The timer of all benchmarks: a warm-up until times settle, then blocks of calls; reports the median and its spread.

On CUDA a block is timed by two events on the device, so gaps between kernels count, too; elsewhere by the host's clock, after
waiting for the device. Candidates take turns, block by block, so that a slow phase of the machine affects all of them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from selfnorm.runtime.checks import one_line
from selfnorm.runtime.device import synchronize

MIN_BLOCKS = 3  # even if a candidate is slow
FIRST_CALLS = 2  # they compile kernels, fill caches and capture graphs, so their times are ignored
MAX_WARM_UP_SECONDS = 30.0  # seconds after which a candidate counts as warm, even if its times still vary


@dataclass(frozen=True)
class Work:
    """Work to be timed.

    run:    does `units` units of work, such as training steps.
    units:  the number of units in one call; times are per unit.
    """

    run: Callable[[], object]
    units: int = 1


@dataclass(frozen=True)
class Timing:
    """Seconds per unit of work: the median over blocks, and the 10 % and 90 % quantiles."""

    median: float
    low: float
    high: float
    blocks: int


@dataclass(frozen=True)
class Failure:
    """The reason why a candidate has no time."""

    reason: str


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    seconds:  total length of the blocks of each candidate, unless `MIN_BLOCKS` take longer.
    warm_up:  the longest warm-up in seconds, not counting the first calls.
    block:    the shortest block in seconds.
    """

    seconds: float = 2.0
    warm_up: float = 1.0
    block: float = 0.01
    most_blocks: int = 200

    @classmethod
    def of(cls, seconds: float) -> Effort:
        """Returns the effort to measure each candidate for about this many seconds."""
        # A block has several steps, so that a step finds the caches as the previous one left them, as in training.
        return cls(seconds=seconds, warm_up=seconds / 2, block=max(cls.block, seconds / 20))


@dataclass
class _Candidate:
    work: Work
    calls: int = 1  # in a block
    times: list[float] = field(default_factory=list)  # seconds of a unit, block by block
    spent: float = 0.0
    failure: Failure | None = None


def measure(works: Mapping[str, Work], device: torch.device, effort: Effort | None = None) -> dict[str, Timing | Failure]:
    """Returns the time of each candidate, or its failure; a candidate that raises does not affect the others."""
    effort = effort or Effort()
    candidates = {name: _Candidate(work) for name, work in works.items()}
    for candidate in candidates.values():
        _try(candidate, lambda candidate: _warm_up(candidate, device, effort))
    for _ in range(effort.most_blocks):
        waiting = [each for each in candidates.values() if not each.failure and not _has_enough(each, effort)]
        if not waiting:
            break
        for candidate in waiting:
            _try(candidate, lambda candidate: _time_a_block(candidate, device))
    return {name: each.failure or summary(each.times) for name, each in candidates.items()}


def summary(times: Iterable[float]) -> Timing:
    """Returns the median and the 10 % and 90 % quantiles."""
    ordered = sorted(times)
    return Timing(statistics.median(ordered), quantile(ordered, 0.1), quantile(ordered, 0.9), len(ordered))


def quantile(ordered: list[float], part: float) -> float:
    """Returns a quantile of sorted values, interpolated linearly."""
    at = part * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def seconds_of(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Returns the seconds that this many calls take, one after another, until the device has finished the last."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        start.record(stream)
        for _ in range(calls):
            run()
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return time.perf_counter() - began


def reason_for(error: BaseException) -> str:
    """Returns an error as one short line."""
    line = one_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        line = "out of memory: " + line.removeprefix("CUDA out of memory. ")
    elif not isinstance(error, ValueError | MemoryError):
        line = f"{type(error).__name__}: {line}"
    return line if len(line) <= 160 else line[:159] + "…"


def _try(candidate: _Candidate, action: Callable[[_Candidate], None]) -> None:
    if candidate.failure is None:
        try:
            action(candidate)
        except Exception as error:
            candidate.failure = Failure(reason_for(error))


def _warm_up(candidate: _Candidate, device: torch.device, effort: Effort) -> None:
    """Calls the candidate until a call takes about as long as the three before it, then sets the number of calls per block."""
    times: list[float] = []
    while not _is_warm(times, effort):
        times.append(seconds_of(candidate.work.run, 1, device))
    candidate.calls = max(1, math.ceil(effort.block / max(min(times[-3:]), 1e-7)))


def _is_warm(times: list[float], effort: Effort) -> bool:
    later = times[FIRST_CALLS:]
    if sum(times) >= MAX_WARM_UP_SECONDS or sum(later) >= effort.warm_up:
        return True
    usual = statistics.median(later[-4:-1]) if len(later) > 3 else math.inf
    return abs(later[-1] - usual) < 0.1 * usual if len(later) > 3 else False


def _time_a_block(candidate: _Candidate, device: torch.device) -> None:
    seconds = seconds_of(candidate.work.run, candidate.calls, device)
    candidate.times.append(seconds / (candidate.calls * candidate.work.units))
    candidate.spent += seconds


def _has_enough(candidate: _Candidate, effort: Effort) -> bool:
    return candidate.spent >= effort.seconds and len(candidate.times) >= MIN_BLOCKS

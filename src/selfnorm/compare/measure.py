"""Measures a finished run: its result, how good its fastest inverse is, and how fast it samples."""

from __future__ import annotations

import statistics
import time
import warnings

import torch

from selfnorm.compare.plan import PlannedRun
from selfnorm.compare.table import ComparedRun
from selfnorm.data.batches import generator_for
from selfnorm.evaluate.health import SAMPLES, round_trip
from selfnorm.evaluate.likelihood import evaluating
from selfnorm.flow import Flow, InaccurateInverseWarning
from selfnorm.runtime.device import synchronize
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.folder import RunFolder
from selfnorm.train.result import Result
from selfnorm.train.trained import Trained

UNTIMED_SAMPLES, TIMED_SAMPLES = 5, 30  # calls of flow.sample(1)


def is_finished(run: PlannedRun) -> bool:
    """Returns whether the run's folder holds its result and, if the run can be resumed, the last file that it writes."""
    folder = RunFolder(run.path)
    try:
        Result.read(folder.result)
    except ValueError:
        return False
    return folder.samples.exists() or not folder.last.exists()


def measure_run(run: PlannedRun, device: torch.device) -> ComparedRun:
    """Returns the run with its result, inverse error and time per sample, or with the reason why its folder cannot be read."""
    try:
        result, trained = Result.read(RunFolder(run.path).result), Trained.open(run.path, device)
    except ValueError as error:
        return ComparedRun(run, failure=str(error))
    generator = generator_for(device, run.recipe.optimiser.seed, "compare")
    with (
        cpu_threads(run.recipe.optimiser.threads),
        evaluating(trained.flow),
        warnings.catch_warnings(action="ignore", category=InaccurateInverseWarning),  # the table has the error
    ):
        z = trained.flow.base.sample(SAMPLES, generator=generator)
        inverse_error = round_trip(trained.flow, z, "learned")
        compared = ComparedRun(run, result, inverse_error, _sample_seconds(trained.flow, device, generator))
    del trained
    if device.type != "cpu":
        torch.accelerator.empty_cache()  # leaves the whole memory to the next run
    return compared


def _sample_seconds(flow: Flow, device: torch.device, generator: torch.Generator) -> float | None:
    """Returns the median time of drawing one sample; None if a sample was not finite."""
    times = []
    try:
        for _ in range(UNTIMED_SAMPLES + TIMED_SAMPLES):
            began = time.perf_counter()
            flow.sample(1, "learned", generator)
            synchronize(device)
            times.append(time.perf_counter() - began)
    except ValueError:
        return None
    return statistics.median(times[UNTIMED_SAMPLES:])

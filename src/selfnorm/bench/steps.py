"""Measures training steps and samples of each model: time, memory, and how close a step comes to its floor."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from selfnorm.bench.floor import Ceilings, Counts, bare_step, count_step, measure_ceilings
from selfnorm.bench.graph import captured
from selfnorm.bench.step_memory import memory_of
from selfnorm.bench.table import LineCallback
from selfnorm.bench.timing import Effort, Failure, Timing, Work, measure, reason_for
from selfnorm.bench.training import FAILED_STEP, TrainingStep, training_step
from selfnorm.bench.workloads import Model, families
from selfnorm.evaluate.sampler import Sampler
from selfnorm.flow import Flow, InaccurateInverseWarning
from selfnorm.runtime.device import synchronize
from selfnorm.runtime.precision import networks_in_bf16
from selfnorm.runtime.threads import cpu_threads

BULK = 1000  # samples drawn in one call
BARE_STEPS = 20  # in one graph


@dataclass
class Measured:
    """The measurements of one model: seconds per step, per single sample, and per sample of a large batch.

    threads:   the number of CPU threads, if the model ran on the CPU.
    ceilings:  the highest rates of the machine with that number of threads.
    """

    model: Model
    threads: int | None = None
    ceilings: Ceilings | None = None
    step: Timing | None = None
    sample: Timing | None = None
    sample_in_graph: Timing | None = None
    bulk: Timing | None = None
    counts: Counts | None = None
    peak: int | None = None  # bytes
    parameters: int | None = None
    steps_per_call: int | None = None  # the number of steps in one call of the work
    failure: str = ""
    complete: bool = False  # whether all of its measurements were finished

    @property
    def floor(self) -> float | None:
        """The floor in seconds, if known."""
        return self.counts.floor(self.ceilings) if self.counts and self.ceilings else None


def measure_steps(
    models: Sequence[Model],
    device: torch.device,
    *,
    effort: Effort | None = None,
    memory: bool = True,
    on_result: LineCallback = str,
    on_status: LineCallback = str,
) -> Iterator[Measured]:
    """Yields the measurements of each model, family by family; models of one family take turns.

    A model that fails does not affect the others. The highest rates of the machine are measured once for each number of CPU
    threads that a family uses, and once more for coupling networks in bfloat16.

    memory:     whether to measure peak memory, too; on a CPU this starts a process for each model.
    on_result:  called with one line for each measured model.
    on_status:  called with one line about what is being measured.
    """
    effort = effort or Effort()
    ceilings: dict[tuple[int | None, bool], Ceilings] = {}
    for family in families(models):
        with cpu_threads(family[0].recipe.optimiser.threads):
            number = torch.get_num_threads() if device.type == "cpu" else None
            at = number, networks_in_bf16() and family[0].has_coupling_networks
            if at not in ceilings:
                on_status(f"measuring the speed of a product and a copy{with_threads(number)}")
                ceilings[at] = measure_ceilings(device, min(2.0, effort.seconds), in_bf16=at[1])
                on_status(f"{ceilings[at]}{with_threads(number)}")
            found = [Measured(model, number, ceilings[at]) for model in family]
            try:
                for each in found if memory else []:
                    on_status(f"{each.model.name}: measuring its peak memory")
                    _attempt_on(each, lambda each: _take_peak(each, device))
                _measure_family(found, device, effort, on_status)
            except KeyboardInterrupt:
                yield from (each for each in found if each.step or each.failure)
                raise
        for each in found:
            each.complete = True
            on_result(_summary_line(each))
        yield from found


def with_threads(number: int | None) -> str:
    """Returns text such as " with 2 threads", or nothing for None."""
    return "" if number is None else f" with {number} thread{'s' * (number > 1)}"


def one_sample(flow: Flow, device: torch.device) -> Callable[[], None]:
    """Returns a function that draws one sample with the flow's fastest inverse, and waits for it."""

    def run() -> None:
        flow.sample(1, inverse="learned")
        synchronize(device)

    return run


def _measure_family(found: list[Measured], device: torch.device, effort: Effort, on_status: LineCallback) -> None:
    steps: dict[str, TrainingStep] = {}
    works: dict[str, Work] = {}
    for each in found:
        on_status(f"{each.model.name}: building it and counting its operations")
        _attempt_on(each, lambda each: _build(each, device, steps, works))
    on_status(f"steps of {_in_turn(works)}")
    for name, timing in measure(works, device, effort).items():
        each = next(each for each in found if each.model.name == name)
        if isinstance(timing, Failure):
            each.failure = timing.reason
        elif name in steps and steps[name].failed():
            each.failure = FAILED_STEP
        else:
            each.step = timing
    flows = {each.model.name: steps[each.model.name].loss.flow for each in found if each.step and each.model.name in steps}
    works.clear()
    steps.clear()  # frees optimisers and graphs; the flows are still needed
    _measure_samples([each for each in found if each.model.name in flows], flows, device, effort, on_status)
    flows.clear()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _build(each: Measured, device: torch.device, steps: dict[str, TrainingStep], works: dict[str, Work]) -> None:
    model, recipe = each.model, each.model.recipe
    if model.bare:
        run = bare_step(model.dimensions, recipe.architecture.layers, recipe.optimiser.batch_size, device)
        works[model.name] = captured(run, device, BARE_STEPS) or Work(run)
        return
    step = training_step(model, device)
    each.counts = count_step(step.eager, step.loss)
    each.parameters = sum(parameter.numel() for parameter in step.loss.parameters())
    each.steps_per_call = step.work.units
    steps[model.name], works[model.name] = step, step.work


def _measure_samples(
    found: list[Measured], flows: dict[str, Flow], device: torch.device, effort: Effort, on_status: LineCallback
) -> None:
    effort = Effort.of(effort.seconds / 2)
    on_status(f"samples of {_in_turn(flows)}")
    for each in found:
        flows[each.model.name].eval()
    singles = {each.model.name: Work(one_sample(flows[each.model.name], device)) for each in found}
    bulks = {each.model.name: Work(_bulk(flows[each.model.name]), BULK) for each in found}
    graphs: dict[str, Work] = {}
    for each in found:
        if graph := _sample_graph(flows[each.model.name], device):
            graphs[each.model.name] = graph
    for works, name in ((singles, "sample"), (graphs, "sample_in_graph"), (bulks, "bulk")):
        with warnings.catch_warnings(action="ignore", category=InaccurateInverseWarning):
            timings = measure(works, device, effort)
        for model, timing in timings.items():
            each = next(each for each in found if each.model.name == model)
            if isinstance(timing, Failure):
                each.failure = each.failure or f"no sample: {timing.reason}"
            else:
                setattr(each, name, timing)


def _in_turn(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed) + (" in turn" if len(listed) > 1 else "")


def _bulk(flow: Flow) -> Callable[[], object]:
    return lambda: flow.sample(BULK, inverse="learned")


def _sample_graph(flow: Flow, device: torch.device) -> Work | None:
    """Returns work that draws a sample with a captured graph and waits for it; None if the sampler cannot be captured."""
    sampler = Sampler(flow, inverse="learned")
    with (
        suppress(ValueError),  # the same error is reported for the eager sample
        warnings.catch_warnings(action="ignore", category=InaccurateInverseWarning),
    ):
        for _ in range(2 if device.type == "cuda" else 0):
            sampler()
    return Work(sampler) if sampler.captured else None


def _take_peak(each: Measured, device: torch.device) -> None:
    if not each.model.bare:
        each.peak = memory_of(each.model, device).peak


def _attempt_on(each: Measured, action: Callable[[Measured], None]) -> None:
    if each.failure:
        return
    try:
        action(each)
    except Exception as error:
        each.failure = reason_for(error)


def _summary_line(each: Measured) -> str:
    if each.step is None:
        return f"{each.model.name}: {each.failure}"
    floor = each.floor
    share = f", floor {100 * floor / each.step.median:.2g} % of it" if floor else ""
    sample = f", {1e3 * each.sample.median:.3g} ms per sample" if each.sample else ""
    return f"{each.model.name}: {1e3 * each.step.median:.3g} ms per step{share}{sample}"

"""The paper's runtime table: what a training step and a sample of each model take, in time and memory, and how near a step is to
the least it could take."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from selfnorm.bench.floor import Ceilings, Counts, bare_step, count, measure_ceilings
from selfnorm.bench.graph import captured
from selfnorm.bench.memory import MIB, memory_of
from selfnorm.bench.models import PAPER_MS, Model, families
from selfnorm.bench.table import BenchTable, Cell, in_full, milli, significant, source_of
from selfnorm.bench.timing import Effort, Failure, Timing, Work, clock_mhz, measure, reason_for, synchronize
from selfnorm.bench.training import TrainingStep, training_step
from selfnorm.flow import Flow
from selfnorm.sampler import Sampler
from selfnorm.train.loop import threads

Told = Callable[[str], object]  # is called with a line about what was just measured
BULK = 1000  # samples at once
BARE_STEPS = 20  # in a graph
COLUMNS = (
    "model",
    "ms a step",
    "10 %",
    "90 %",
    "exact / this",
    "floor, ms",
    "floor / step, %",
    "ms a sample",
    "in a graph",
    "samples/s",
    "peak MiB",
    "paper's ms",
)


@dataclass
class Measured:
    """What was measured of a model. Times in seconds of one step, one sample by itself, and a sample among many."""

    model: Model
    step: Timing | None = None
    sample: Timing | None = None
    sample_in_graph: Timing | None = None
    bulk: Timing | None = None
    counts: Counts | None = None
    peak: int | None = None  # bytes
    parameters: int | None = None
    steps_a_call: int | None = None  # how many a graph has, or a block of batches
    failure: str = ""

    def floor(self, ceilings: Ceilings) -> float | None:
        return None if self.counts is None else self.counts.floor(ceilings)


def measure_steps(
    models: Sequence[Model], device: torch.device, *, effort: Effort | None = None, memory: bool = True, told: Told = str
) -> tuple[list[Measured], Ceilings]:
    """Each model's times, family by family: those of one family take turns. A model that fails costs the others nothing.

    memory:  whether to take peaks, too; on a CPU that is a process for each model.
    told:    is called with a line for each model.
    """
    effort = effort or Effort()
    ceilings = measure_ceilings(device, min(2.0, effort.seconds))
    told(f"ceilings: {ceilings}")
    measured = []
    for family in families(models):
        found = [Measured(model) for model in family]
        with threads(family[0].recipe.threads):
            for each in found if memory else []:
                _attempt(each, lambda each: _take_peak(each, device))
            _measure_family(found, device, effort)
        for each in found:
            told(_line(each, ceilings))
        measured += found
    return measured, ceilings


def steps_table(
    models: Sequence[Model],
    device: torch.device,
    *,
    effort: Effort | None = None,
    memory: bool = True,
    command: str | None = None,
    told: Told = str,
) -> tuple[BenchTable, list[Measured]]:
    before = clock_mhz(device)
    measured, ceilings = measure_steps(models, device, effort=effort, memory=memory, told=told)
    clocks = (before, clock_mhz(device))
    exact = {each.model.family: each.step for each in measured if each.model.recipe.kind == "exact"}
    table = BenchTable(
        title=f"Training steps and samples, on {_machine(device)}",
        about=_about(device, ceilings, memory),
        columns=COLUMNS,
        rows=[_row(each, exact.get(each.model.family), ceilings) for each in measured],
        source=source_of(device, command, clocks),
        details=[_details(each, ceilings) for each in measured],
        failures=[f"{each.model.name}: {each.failure}" for each in measured if each.failure],
    )
    return table, measured


def one_sample(flow: Flow, device: torch.device) -> Callable[[], None]:
    """Draw a sample by the flow's fastest inverse, and wait for it."""

    def run() -> None:
        flow.sample(1)
        synchronize(device)

    return run


def _measure_family(found: list[Measured], device: torch.device, effort: Effort) -> None:
    steps: dict[str, TrainingStep] = {}
    works: dict[str, Work] = {}
    for each in found:
        _attempt(each, lambda each: _build(each, device, steps, works))
    for name, timing in measure(works, device, effort).items():
        each = next(each for each in found if each.model.name == name)
        if isinstance(timing, Failure):
            each.failure = timing.reason
        elif name in steps and steps[name].failed():
            each.failure = "a step had a non-finite loss or gradient, or lost a tracked inverse"
        else:
            each.step = timing
    flows = {each.model.name: steps[each.model.name].loss.flow for each in found if each.step and each.model.name in steps}
    works.clear()
    steps.clear()  # optimiser and graphs may go; the flows stay
    _measure_samples([each for each in found if each.model.name in flows], flows, device, effort)
    flows.clear()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _build(each: Measured, device: torch.device, steps: dict[str, TrainingStep], works: dict[str, Work]) -> None:
    model, recipe = each.model, each.model.recipe
    if model.bare:
        run = bare_step(model.dimensions, recipe.layers, recipe.batch_size, device)
        works[model.name] = captured(run, device, BARE_STEPS) or Work(run)
        return
    step = training_step(model, device)
    each.counts = count(step.eager, step.loss)
    each.parameters = sum(parameter.numel() for parameter in step.loss.parameters())
    each.steps_a_call = step.work.units
    steps[model.name], works[model.name] = step, step.work


def _measure_samples(found: list[Measured], flows: dict[str, Flow], device: torch.device, effort: Effort) -> None:
    effort = Effort.of(effort.seconds / 2)
    for each in found:
        flows[each.model.name].eval()
    singles = {each.model.name: Work(one_sample(flows[each.model.name], device)) for each in found}
    bulks = {each.model.name: Work(_bulk(flows[each.model.name]), BULK) for each in found}
    graphs: dict[str, Work] = {}
    for each in found:
        if graph := _sample_graph(flows[each.model.name], device):
            graphs[each.model.name] = graph
    for works, name in ((singles, "sample"), (graphs, "sample_in_graph"), (bulks, "bulk")):
        for model, timing in measure(works, device, effort).items():
            each = next(each for each in found if each.model.name == model)
            if isinstance(timing, Failure):
                each.failure = each.failure or f"no sample: {timing.reason}"
            else:
                setattr(each, name, timing)


def _bulk(flow: Flow) -> Callable[[], object]:
    return lambda: flow.sample(BULK)


def _sample_graph(flow: Flow, device: torch.device) -> Work | None:
    """A sample by a graph, and the wait for it; None where that cannot be."""
    sampler = Sampler(flow)
    with suppress(ValueError):  # what is wrong with a sample is told of the plain one
        for _ in range(2 if device.type == "cuda" else 0):
            sampler()
    return Work(sampler) if sampler.captured else None


def _take_peak(each: Measured, device: torch.device) -> None:
    if not each.model.bare:
        each.peak = memory_of(each.model, device).peak


def _attempt(each: Measured, action: Callable[[Measured], None]) -> None:
    if each.failure:
        return
    try:
        action(each)
    except Exception as error:
        each.failure = reason_for(error)


def _row(each: Measured, exact: Timing | None, ceilings: Ceilings) -> list[Cell]:
    floor = each.floor(ceilings)
    name = each.model.name + ("" if each.step else " (failed)")
    return [
        name,
        *milli(each.step),
        significant(exact.median / each.step.median) if exact and each.step else None,
        significant(1e3 * floor) if floor else None,
        significant(100 * floor / each.step.median, 2) if floor and each.step else None,
        milli(each.sample)[0],
        milli(each.sample_in_graph)[0],
        significant(1 / each.bulk.median) if each.bulk else None,
        significant(each.peak / MIB) if each.peak is not None else None,
        PAPER_MS.get(each.model.name) if not each.model.bare else None,
    ]


def _details(each: Measured, ceilings: Ceilings) -> dict[str, Any]:
    floor = each.floor(ceilings)
    return {
        "model": each.model.name,
        "batch_size": each.model.recipe.batch_size,
        "parameters": each.parameters,
        "steps_a_call": each.steps_a_call,
        **in_full("step", each.step),
        **in_full("sample", each.sample),
        **in_full("sample_in_graph", each.sample_in_graph),
        **in_full("bulk_sample", each.bulk),
        "floor_ms": 1e3 * floor if floor else None,
        "operations": each.counts and each.counts.operations,
        "moved_bytes": each.counts and each.counts.moved,
        "activation_bytes": each.counts and each.counts.activations,
        "peak_bytes": each.peak,
        "failure": each.failure,
    }


def _line(each: Measured, ceilings: Ceilings) -> str:
    if each.step is None:
        return f"{each.model.name}: {each.failure}"
    floor = each.floor(ceilings)
    share = f", {100 * floor / each.step.median:.2g} % of it the floor" if floor else ""
    sample = f", {1e3 * each.sample.median:.3g} ms a sample" if each.sample else ""
    return f"{each.model.name}: {1e3 * each.step.median:.3g} ms a step{share}{sample}"


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    n = torch.get_num_threads()
    return f"{n} CPU thread{'s' * (n > 1)}" if device.type == "cpu" else device.type.upper()


def _about(device: torch.device, ceilings: Ceilings, memory: bool) -> str:
    cuda = device.type == "cuda"
    return (
        "A step is the whole of it, batch, forward, backward, Adam and tracking, at the recipe's batch size, on made-up data of "
        "the data set's shape"
        + (", in CUDA graphs as in training" if cuda else "")
        + ". Times are medians over blocks of at least 10 ms after a warm-up, with the 10 % and 90 % quantiles of the blocks; "
        "models of a family took turns. Exact / this: how many times as long the exact twin's step takes. Floor: the larger of "
        "operations over the product rate and bytes over the copy rate, measured in this run: "
        f"{ceilings}. Operations are those of products, convolutions and factorisations; bytes are 7 passes over the parameters "
        "(weight and two moments read and written, gradient once), 2 over tracked inverses, and 2 over what is kept for the "
        "backward pass. Bare: the matrix products that the self-normalizing step cannot do without, and Adam. A sample is drawn "
        "by the fastest inverse, one at a time and waited for; "
        + ("in a graph where none of it waits for the device; " if cuda else "a graph is for CUDA; ")
        + f"samples/s: {BULK} at once. Paper's ms: a step of Keller et al. (2021), on a 1080 Ti, CIFAR-10 on a Titan X. "
        + (
            "Peak memory: of building and stepping, data set aside, "
            + ("as torch's allocator counts it, without cuBLAS's workspaces." if cuda else "in a process of its own.")
            if memory
            else "Peak memory was not measured."
        )
    )

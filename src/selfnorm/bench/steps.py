"""The paper's runtime table: what a training step and a sample of each model take, in time and memory, and how near a step is to
the least it could take."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from selfnorm.bench.conditions import Conditions
from selfnorm.bench.floor import Ceilings, Counts, bare_step, count, measure_ceilings
from selfnorm.bench.graph import captured
from selfnorm.bench.models import PAPER_MS, Model, families
from selfnorm.bench.step_memory import MIB, memory_of
from selfnorm.bench.table import (
    BenchTable,
    Cell,
    Note,
    Told,
    blocks_of,
    in_full,
    machine_of,
    measuring,
    milli,
    significant,
    source_of,
)
from selfnorm.bench.timing import Effort, Failure, Timing, Work, measure, reason_for, synchronize
from selfnorm.bench.training import FAILED_STEP, TrainingStep, training_step
from selfnorm.evaluate.sampler import Sampler
from selfnorm.flow import Flow
from selfnorm.runtime.precision import networks_in_bf16
from selfnorm.runtime.threads import cpu_threads

BULK = 1000  # samples at once
BARE_STEPS = 20  # in a graph
COLUMNS = (
    "model",
    "ms a step",
    "10 %",
    "90 %",
    "exact / this",
    "threads",
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
    """What was measured of a model. Times in seconds of one step, one sample by itself, and a sample among many.

    threads:   of the CPU, where the model ran on it.
    ceilings:  what the machine does at best with as many.
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
    steps_a_call: int | None = None  # how many a graph has, or a block of batches
    failure: str = ""
    whole: bool = False  # whether nothing of it was left out

    @property
    def floor(self) -> float | None:
        """Seconds."""
        return self.counts.floor(self.ceilings) if self.counts and self.ceilings else None


def measure_steps(
    models: Sequence[Model],
    device: torch.device,
    *,
    effort: Effort | None = None,
    memory: bool = True,
    told: Told = str,
    now: Told = str,
) -> Iterator[Measured]:
    """Each model's times, family by family: those of one family take turns. A model that fails costs the others nothing. The
    machine's ceilings are measured once for each number of CPU threads that a family runs with, and once more for coupling
    networks in bfloat16.

    memory:  whether to take peaks, too; on a CPU that is a process for each model.
    told:    is called with a line for each model.
    now:     is called with a line for what is being measured.
    """
    effort = effort or Effort()
    ceilings: dict[tuple[int | None, bool], Ceilings] = {}
    for family in families(models):
        with cpu_threads(family[0].recipe.optimiser.threads):
            number = torch.get_num_threads() if device.type == "cpu" else None
            at = number, networks_in_bf16() and family[0].couples
            if at not in ceilings:
                now(f"how fast a product and a copy are{with_threads(number)}")
                ceilings[at] = measure_ceilings(device, min(2.0, effort.seconds), in_bf16=at[1])
                now(f"{ceilings[at]}{with_threads(number)}")
            found = [Measured(model, number, ceilings[at]) for model in family]
            try:
                for each in found if memory else []:
                    now(f"{each.model.name}: its peak memory")
                    _attempt(each, lambda each: _take_peak(each, device))
                _measure_family(found, device, effort, now)
            except KeyboardInterrupt:
                yield from (each for each in found if each.step or each.failure)
                raise
        for each in found:
            each.whole = True
            told(_line(each))
        yield from found


def steps_table(
    models: Sequence[Model],
    device: torch.device,
    *,
    effort: Effort | None = None,
    memory: bool = True,
    command: str | None = None,
    told: Told = str,
    now: Told = str,
) -> tuple[BenchTable, list[Measured]]:
    """The table, and what it is made of. An interruption ends the measuring: the table then holds what was done by then."""
    before, measured = Conditions.now(device), list[Measured]()
    with measuring(device) as stop:
        for each in measure_steps(models, device, effort=effort, memory=memory, told=told, now=now):
            measured.append(each)
    exact = {each.model.family: each.step for each in measured if each.model.recipe.architecture.kind == "exact"}
    used = {each.threads for each in measured if each.threads}
    table = BenchTable(
        title=f"Training steps and samples, on {machine_of(device, used)}",
        notes=_notes(device, measured, memory),
        columns=COLUMNS,
        rows=[_row(each, exact.get(each.model.family)) for each in measured],
        source=source_of(device, command, before, used),
        details=[_details(each) for each in measured],
        failures=[f"{each.model.name}: {each.failure}" for each in measured if each.failure],
        stopped=stop.after(sum(each.whole for each in measured), len(models), "models"),
    )
    return table, measured


def with_threads(number: int | None) -> str:
    return "" if number is None else f" with {number} thread{'s' * (number > 1)}"


def one_sample(flow: Flow, device: torch.device) -> Callable[[], None]:
    """Draw a sample by the flow's fastest inverse, and wait for it."""

    def run() -> None:
        flow.sample(1)
        synchronize(device)

    return run


def _measure_family(found: list[Measured], device: torch.device, effort: Effort, now: Told) -> None:
    steps: dict[str, TrainingStep] = {}
    works: dict[str, Work] = {}
    for each in found:
        now(f"{each.model.name}: building it, counting its operations")
        _attempt(each, lambda each: _build(each, device, steps, works))
    now(f"steps of {_in_turn(works)}")
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
    steps.clear()  # optimiser and graphs may go; the flows stay
    _measure_samples([each for each in found if each.model.name in flows], flows, device, effort, now)
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
    each.counts = count(step.eager, step.loss)
    each.parameters = sum(parameter.numel() for parameter in step.loss.parameters())
    each.steps_a_call = step.work.units
    steps[model.name], works[model.name] = step, step.work


def _measure_samples(found: list[Measured], flows: dict[str, Flow], device: torch.device, effort: Effort, now: Told) -> None:
    effort = Effort.of(effort.seconds / 2)
    now(f"samples of {_in_turn(flows)}")
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


def _in_turn(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed) + (" in turn" if len(listed) > 1 else "")


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


def _row(each: Measured, exact: Timing | None) -> list[Cell]:
    floor = each.floor
    name = each.model.name + ("" if each.step else " (failed)")
    return [
        name,
        *milli(each.step),
        significant(exact.median / each.step.median) if exact and each.step else None,
        each.threads if each.step else None,
        significant(1e3 * floor) if floor else None,
        significant(100 * floor / each.step.median, 2) if floor and each.step else None,
        milli(each.sample)[0],
        milli(each.sample_in_graph)[0],
        significant(1 / each.bulk.median) if each.bulk else None,
        significant(each.peak / MIB) if each.peak is not None else None,
        PAPER_MS.get(each.model.name) if not each.model.bare else None,
    ]


def _details(each: Measured) -> dict[str, Any]:
    floor = each.floor
    return {
        "model": each.model.name,
        "batch_size": each.model.recipe.optimiser.batch_size,
        "parameters": each.parameters,
        "threads": each.threads,
        "steps_a_call": each.steps_a_call,
        **in_full("step", each.step),
        **in_full("sample", each.sample),
        **in_full("sample_in_graph", each.sample_in_graph),
        **in_full("bulk_sample", each.bulk),
        "floor_ms": 1e3 * floor if floor else None,
        "product_flops": each.ceilings and each.ceilings.product,
        "copy_bytes_a_second": each.ceilings and each.ceilings.copy,
        "operations": each.counts and each.counts.operations,
        "moved_bytes": each.counts and each.counts.moved,
        "activation_bytes": each.counts and each.counts.activations,
        "peak_bytes": each.peak,
        "failure": each.failure,
    }


def _line(each: Measured) -> str:
    if each.step is None:
        return f"{each.model.name}: {each.failure}"
    floor = each.floor
    share = f", {100 * floor / each.step.median:.2g} % of it the floor" if floor else ""
    sample = f", {1e3 * each.sample.median:.3g} ms a sample" if each.sample else ""
    return f"{each.model.name}: {1e3 * each.step.median:.3g} ms a step{share}{sample}"


_BARE = (
    "Bare: the matrix products that the self-normalizing step cannot do without, and Adam, each as libraries have it; on a GPU "
    "the step's own kernels, which do several things at once, can be faster than that."
)


def _notes(device: torch.device, measured: Sequence[Measured], memory: bool) -> list[Note]:
    cuda = device.type == "cuda"
    ceilings = dict.fromkeys((each.ceilings, each.threads) for each in measured)
    rates = "; ".join(f"{found}{with_threads(number)}" for found, number in ceilings)
    step, floor = COLUMNS[1:4], COLUMNS[6:8]
    bare = any(each.model.bare for each in measured)
    return [
        Note(
            "A step is the whole of it, batch, forward, backward, Adam and tracking, at the recipe's batch size, on made-up data "
            "of the data set's shape" + (", in CUDA graphs as in training." if cuda else "."),
            step,
        ),
        Note(
            f"Times are medians over {blocks_of(each.step for each in measured)} after a warm-up, with the 10 % and 90 % "
            "quantiles of the blocks; models of a family took turns.",
            step,
        ),
        Note("Exact / this: how many times as long the exact twin's step takes.", ("exact / this",)),
        Note("Threads: of the CPU, as many as the recipe trains with.", ("threads",)),
        Note(
            "Floor: the larger of operations over the product rate and bytes over the copy rate, measured in this run"
            + (f": {rates}. " if rates else ". ")
            + "Operations are those of products, convolutions and factorisations; bytes are 7 passes over the parameters "
            "(weight and two moments read and written, gradient once), 2 over tracked inverses, and 2 over what is kept for the "
            "backward pass.",
            floor,
        ),
        *([Note(_BARE)] if bare else []),
        Note("A sample is drawn by the fastest inverse, one at a time and waited for.", ("ms a sample",)),
        Note("In a graph: where none of it waits for the device.", ("in a graph",)),
        Note(f"Samples/s: {BULK} at once.", ("samples/s",)),
        Note("Paper's ms: a step of Keller et al. (2021), on a 1080 Ti, CIFAR-10 on a Titan X.", ("paper's ms",)),
        Note(
            "Peak memory: of building and stepping, data set aside, "
            + ("as torch's allocator counts it, without cuBLAS's workspaces." if cuda else "in a process of its own."),
            ("peak MiB",),
        )
        if memory
        else Note("Peak memory was not measured."),
    ]

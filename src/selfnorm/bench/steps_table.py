"""Builds the table of `selfnorm bench steps` from the measurements that `selfnorm.bench.steps` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selfnorm.bench import steps
from selfnorm.bench.conditions import Conditions
from selfnorm.bench.step_memory import MIB
from selfnorm.bench.steps import Measured, measure_steps, with_threads
from selfnorm.bench.table import (
    BenchTable,
    Cell,
    LineCallback,
    Note,
    blocks_of,
    measuring,
    milliseconds,
    significant,
    source_of,
    timing_details,
)
from selfnorm.bench.timing import Effort, Timing
from selfnorm.bench.workloads import PAPER_MS, Model
from selfnorm.report.provenance import machine_of

STEP_COLUMNS = (
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


def steps_table(
    models: Sequence[Model],
    device: torch.device,
    *,
    effort: Effort | None = None,
    memory: bool = True,
    command: str | None = None,
    on_result: LineCallback = str,
    on_status: LineCallback = str,
) -> tuple[BenchTable, list[Measured]]:
    """Returns the table and its measurements. Ctrl-C stops the measuring; the table then holds what was finished."""
    before, measured = Conditions.now(device), list[Measured]()
    with measuring(device) as stop:
        for each in measure_steps(models, device, effort=effort, memory=memory, on_result=on_result, on_status=on_status):
            measured.append(each)
    exact = {each.model.family: each.step for each in measured if each.model.recipe.architecture.kind == "exact"}
    used = {each.threads for each in measured if each.threads}
    table = BenchTable(
        title=f"Training steps and samples, on {machine_of(device, used)}",
        notes=_step_notes(device, measured, memory),
        columns=STEP_COLUMNS,
        rows=[_step_row(each, exact.get(each.model.family)) for each in measured],
        source=source_of(device, command, before, used),
        details=[_step_details(each) for each in measured],
        failures=[f"{each.model.name}: {each.failure}" for each in measured if each.failure],
        stopped=stop.after(sum(each.complete for each in measured), len(models), "models"),
    )
    return table, measured


def _step_row(each: Measured, exact: Timing | None) -> list[Cell]:
    floor = each.floor
    name = each.model.name + ("" if each.step else " (failed)")
    return [
        name,
        *milliseconds(each.step),
        significant(exact.median / each.step.median) if exact and each.step else None,
        each.threads if each.step else None,
        significant(1e3 * floor) if floor else None,
        significant(100 * floor / each.step.median, 2) if floor and each.step else None,
        milliseconds(each.sample)[0],
        milliseconds(each.sample_in_graph)[0],
        significant(1 / each.bulk.median) if each.bulk else None,
        significant(each.peak / MIB) if each.peak is not None else None,
        PAPER_MS.get(each.model.name) if not each.model.bare else None,
    ]


def _step_details(each: Measured) -> dict[str, Any]:
    floor = each.floor
    return {
        "model": each.model.name,
        "batch_size": each.model.recipe.optimiser.batch_size,
        "parameters": each.parameters,
        "threads": each.threads,
        "steps_a_call": each.steps_per_call,
        **timing_details("step", each.step),
        **timing_details("sample", each.sample),
        **timing_details("sample_in_graph", each.sample_in_graph),
        **timing_details("bulk_sample", each.bulk),
        "floor_ms": 1e3 * floor if floor else None,
        "product_flops": each.ceilings and each.ceilings.product,
        "copy_bytes_a_second": each.ceilings and each.ceilings.copy,
        "operations": each.counts and each.counts.operations,
        "moved_bytes": each.counts and each.counts.moved,
        "activation_bytes": each.counts and each.counts.activations,
        "peak_bytes": each.peak,
        "failure": each.failure,
    }


_BARE = (
    "Bare: only the matrix products that the self-normalizing step needs, and Adam, each by a library call; on a GPU the step's "
    "own fused kernels can be faster."
)


def _step_notes(device: torch.device, measured: Sequence[Measured], memory: bool) -> list[Note]:
    cuda = device.type == "cuda"
    ceilings = dict.fromkeys((each.ceilings, each.threads) for each in measured)
    rates = "; ".join(f"{found}{with_threads(number)}" for found, number in ceilings)
    step, floor = STEP_COLUMNS[1:4], STEP_COLUMNS[6:8]
    bare = any(each.model.bare for each in measured)
    return [
        Note(
            "A step is a whole training step, batch, forward, backward, Adam and tracking, at the recipe's batch size, on random "
            "data of the data set's shape" + (", in CUDA graphs as in training." if cuda else "."),
            step,
        ),
        Note(
            f"Times are medians over {blocks_of(each.step for each in measured)} after a warm-up, with the 10 % and 90 % "
            "quantiles of the blocks; models of a family took turns.",
            step,
        ),
        Note("Exact / this: how many times as long the step of the exact twin takes.", ("exact / this",)),
        Note("Threads: CPU threads, as many as the recipe trains with.", ("threads",)),
        Note(
            "Floor: the larger of operations / product rate and bytes / copy rate, with the rates measured in this run"
            + (f": {rates}. " if rates else ". ")
            + "Operations are those of products, convolutions and factorisations; bytes are 7 passes over the parameters "
            "(weight and two moments read and written, gradient once), 2 over tracked inverses, and 2 over what is kept for the "
            "backward pass.",
            floor,
        ),
        *([Note(_BARE)] if bare else []),
        Note("Samples are drawn one at a time with the fastest inverse, including the wait for each.", ("ms a sample",)),
        Note("In a graph: a sample as a CUDA graph, if sampling never waits for the device.", ("in a graph",)),
        Note(f"Samples/s: {steps.BULK} in one call.", ("samples/s",)),
        Note("Paper's ms: a step in Keller et al. (2021), on a 1080 Ti, for CIFAR-10 on a Titan X.", ("paper's ms",)),
        Note(
            "Peak memory: while building the model and taking steps, without the data set, "
            + ("as torch's allocator counts it, without cuBLAS's workspaces." if cuda else "in a separate process."),
            ("peak MiB",),
        )
        if memory
        else Note("Peak memory was not measured."),
    ]

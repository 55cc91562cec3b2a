"""Measures the peak memory of a training step, and compares it with the memory that the step needs.

    selfnorm bench steps --memory

The peak covers building the model and taking steps, without the data set and the workspaces of libraries. On CUDA it is torch's
peak of allocated memory. On a CPU it is the peak of the process, so each model runs in a separate process; there a small model
trains first, so that what torch loads on first use is not counted:

    python -m selfnorm.bench.step_memory NAME PRECISION
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from selfnorm.bench.conditions import Conditions
from selfnorm.bench.floor import parameter_bytes, saved_bytes
from selfnorm.bench.table import BenchTable, Cell, LineCallback, Note, measuring, significant, source_of
from selfnorm.bench.timing import reason_for
from selfnorm.bench.training import examples_of, training_step
from selfnorm.bench.workloads import MODELS, Model
from selfnorm.report.provenance import machine_of
from selfnorm.runtime.memory import PeakMemory
from selfnorm.runtime.precision import Precision, networks_in_bf16, precision, products_in_tf32
from selfnorm.runtime.threads import cpu_threads

MIB = 2**20
MIN_BYTES_FOR_RATIO = 4 * MIB  # for a step that needs less, the peak is dominated by other things
MEASURED_CALLS = 3  # of the step; the second or third captures its longest graph
MEMORY_COLUMNS = (
    "model",
    "weights, MiB",
    "gradients",
    "Adam's moments",
    "activations",
    "sum",
    "peak",
    "peak / sum",
)


@dataclass(frozen=True)
class Memory:
    """The bytes of a training step. peak: None if it cannot be measured."""

    weights: int
    activations: int
    peak: int | None

    @property
    def needed(self) -> int:
        """Bytes of weights, gradients, Adam's two moments, and what is kept for the backward pass."""
        return 4 * self.weights + self.activations

    @property
    def ratio(self) -> float | None:
        """The peak over the bytes needed; None if either is unknown or too little is needed to compare."""
        return None if self.peak is None or self.needed < MIN_BYTES_FOR_RATIO else self.peak / self.needed


def memory_of(model: Model, device: torch.device) -> Memory:
    """Returns the memory of a model's training step. Builds the model, and frees it again."""
    if device.type == "cuda":
        return _on_cuda(model, device)
    if device.type != "cpu":
        return Memory(*_needs(model, device), None)
    command = [sys.executable, "-m", "selfnorm.bench.step_memory", model.name, _precision()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return Memory(**json.loads(done.stdout))


def memory_table(
    models: Sequence[Model],
    device: torch.device,
    *,
    command: str | None = None,
    on_result: LineCallback = str,
    on_status: LineCallback = str,
) -> BenchTable:
    """Returns a table with a row for each model, except bare ones, which need the same memory as their flow.

    Ctrl-C stops the measuring; the table then holds what was finished.
    """
    rows: list[list[Cell]] = []
    details, failures, before = [], [], Conditions.now(device)
    whole = [model for model in models if not model.bare]
    used = {model.recipe.optimiser.threads or torch.get_num_threads() for model in whole}
    with measuring(device) as stop:
        for model in whole:
            on_status(f"{model.name}: measuring its peak memory")
            try:
                found = memory_of(model, device)
            except Exception as error:
                failures.append(f"{model.name}: {reason_for(error)}")
                rows.append([f"{model.name} (failed)", *[None] * (len(MEMORY_COLUMNS) - 1)])
                on_result(failures[-1])
                continue
            parts = (found.weights, found.weights, 2 * found.weights, found.activations, found.needed, found.peak)
            cells = (None if part is None else significant(part / MIB, 4) for part in parts)
            rows.append([model.name, *cells, significant(found.ratio)])
            held = {f"{name}_bytes": value for name, value in asdict(found).items()}
            details.append({"model": model.name, **held, "ratio": found.ratio})
            peak = "peak unknown" if found.peak is None else f"{found.peak / MIB:.4g} MiB"
            on_result(f"{model.name}: {peak}" + ("" if found.ratio is None else f", {found.ratio:.2f} times what it needs"))
    return BenchTable(
        title=f"Memory of a training step, on {machine_of(device, used)}",
        notes=[
            Note(
                "In MiB. Sum: weights, gradients, Adam's two moments, and activations, which are all tensors that the forward "
                "pass keeps for the backward pass."
            ),
            Note(
                "Peak: the most memory in use while the model was built and took steps, without the data set, "
                + (
                    "as torch's allocator counts it, without the workspaces of cuBLAS."
                    if device.type == "cuda"
                    else "beyond what the process used after training a small model."
                ),
                ("peak",),
            ),
            Note(f"No ratio where the sum is below {MIN_BYTES_FOR_RATIO // MIB} MiB."),
        ],
        columns=MEMORY_COLUMNS,
        rows=rows,
        source=source_of(device, command, before, used),
        details=details,
        failures=failures,
        stopped=stop.after(len(rows), len(whole), "models"),
    )


def _needs(model: Model, device: torch.device) -> tuple[int, int]:
    """Returns the bytes of weights and activations."""
    step = training_step(model, device)
    return parameter_bytes(step.loss), saved_bytes(step.eager, step.loss)


def _on_cuda(model: Model, device: torch.device) -> Memory:
    needs = _needs(model, device)
    _release()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = training_step(model, device)
    for _ in range(MEASURED_CALLS):
        step.work.run()
    torch.cuda.synchronize(device)
    peak, data = torch.cuda.max_memory_allocated(device), step.data_bytes
    # torch allocates the workspaces of cuBLAS, too. Free them to see their size, now that no graph will use them again.
    held = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    workspaces = held - torch.cuda.memory_allocated(device)
    del step
    _release()
    return Memory(*needs, peak - before - data - workspaces)


def _release() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _precision() -> Precision:
    """Returns the precision in use."""
    if networks_in_bf16():
        return "bf16"
    return "tf32" if products_in_tf32() else "float32"


def _in_this_process(model: Model) -> Memory:
    device = torch.device("cpu")
    small = training_step(MODELS["digits-fc-snf"], device)
    for _ in range(MEASURED_CALLS):
        small.work.run()
    del small
    examples_of(model)  # created first, so that it is not counted
    peak = PeakMemory(device)
    step = training_step(model, device)
    for _ in range(MEASURED_CALLS):
        step.work.run()
    found = peak.mebibytes()
    needs = parameter_bytes(step.loss), saved_bytes(step.eager, step.loss)
    return Memory(*needs, None if found is None else round(found * MIB))


if __name__ == "__main__":
    asked = MODELS[sys.argv[1]]
    with precision(sys.argv[2]), cpu_threads(asked.recipe.optimiser.threads):  # type: ignore[arg-type]
        print(json.dumps(asdict(_in_this_process(asked))))

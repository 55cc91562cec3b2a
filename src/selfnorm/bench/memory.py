"""How much memory a training step takes, against what it cannot do without.

    selfnorm bench steps --memory

The peak is that of building the model and taking steps, data set and libraries' workspaces aside. On CUDA it is what torch had
allocated at most. On a CPU the process's own peak tells, so each model gets a process of its own, in which a small model has
trained first, so that what torch loads by then is not counted:

    python -m selfnorm.bench.memory NAME
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from selfnorm.bench.floor import parameter_bytes, saved_bytes
from selfnorm.bench.models import MODELS, Model
from selfnorm.bench.table import BenchTable, Cell, significant, source_of
from selfnorm.bench.timing import clock_mhz, reason_for
from selfnorm.bench.training import examples_of, training_step
from selfnorm.memory import PeakMemory

Told = Callable[[str], object]  # is called with a line about what was just measured
MIB = 2**20
CALLS = 3  # of a step's work; the second or third captures its longest graph
COLUMNS = (
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
    """Bytes of a training step. peak: None where it cannot be known."""

    weights: int
    activations: int
    peak: int | None

    @property
    def needed(self) -> int:
        """Weights, gradients as large, Adam's two moments, and what is kept for the backward pass."""
        return 4 * self.weights + self.activations


def memory_of(model: Model, device: torch.device) -> Memory:
    """Of a model's training step. Builds the model anew, and frees it again."""
    if device.type == "cuda":
        return _on_cuda(model, device)
    if device.type != "cpu":
        return Memory(*_needs(model, device), None)
    command = [sys.executable, "-m", "selfnorm.bench.memory", model.name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return Memory(**json.loads(done.stdout))


def memory_table(models: Sequence[Model], device: torch.device, *, command: str | None = None, told: Told = str) -> BenchTable:
    """A row for each model, bare ones aside: they hold what their flow holds."""
    rows: list[list[Cell]] = []
    details, failures, before = [], [], clock_mhz(device)
    for model in models:
        if model.bare:
            continue
        try:
            found = memory_of(model, device)
        except Exception as error:
            failures.append(f"{model.name}: {reason_for(error)}")
            rows.append([f"{model.name} (failed)", *[None] * (len(COLUMNS) - 1)])
            told(failures[-1])
            continue
        parts = (found.weights, found.weights, 2 * found.weights, found.activations, found.needed, found.peak)
        ratio = None if found.peak is None else found.peak / found.needed
        rows.append([model.name, *(None if part is None else significant(part / MIB, 4) for part in parts), significant(ratio)])
        details.append({"model": model.name, **{f"{name}_bytes": value for name, value in asdict(found).items()}, "ratio": ratio})
        told(f"{model.name}: " + ("no peak known" if ratio is None else f"{ratio:.2f} times what it needs"))
    return BenchTable(
        title="Memory of a training step",
        about=(
            "In MiB. Sum: weights, gradients, Adam's two moments, and activations, which are all tensors that a step keeps from "
            "its forward for its backward pass. Peak: the most that was held while the model was built and took steps, data set "
            "aside, "
            + (
                "as torch's allocator counts it, without the workspaces of cuBLAS."
                if device.type == "cuda"
                else "above what the process held after training a small model."
            )
        ),
        columns=COLUMNS,
        rows=rows,
        source=source_of(device, command, (before, clock_mhz(device))),
        details=details,
        failures=failures,
    )


def _needs(model: Model, device: torch.device) -> tuple[int, int]:
    """Weights and activations."""
    step = training_step(model, device)
    return parameter_bytes(step.loss), saved_bytes(step.eager, step.loss)


def _on_cuda(model: Model, device: torch.device) -> Memory:
    needs = _needs(model, device)
    _release()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = training_step(model, device)
    for _ in range(CALLS):
        step.work.run()
    torch.cuda.synchronize(device)
    peak, data = torch.cuda.max_memory_allocated(device), step.data_bytes
    # Workspaces are torch's to allocate, too: count them by letting them go, now that no graph that uses them runs again.
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


def _in_this_process(model: Model) -> Memory:
    device = torch.device("cpu")
    small = training_step(MODELS["digits-fc-snf"], device)
    for _ in range(CALLS):
        small.work.run()
    del small
    examples_of(model)  # beforehand, so that it is not counted
    peak = PeakMemory(device)
    step = training_step(model, device)
    for _ in range(CALLS):
        step.work.run()
    found = peak.mebibytes()
    needs = parameter_bytes(step.loss), saved_bytes(step.eager, step.loss)
    return Memory(*needs, None if found is None else round(found * MIB))


if __name__ == "__main__":
    print(json.dumps(asdict(_in_this_process(MODELS[sys.argv[1]]))))

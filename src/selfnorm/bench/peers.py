"""Other libraries' flows beside ours, at the same shapes and in the same run: zuko, nflows, normflows, where they are installed.

None of them is needed for anything else. Their models are built as their documentation does, in their default sizes where there
is no counterpart, and trained by −log_prob, backward and fused Adam, eagerly, as their users do.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

import selfnorm
from selfnorm.bench.conditions import Conditions
from selfnorm.bench.models import MODELS, Model
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
from selfnorm.bench.timing import Effort, Failure, Timing, Work, measure, reason_for
from selfnorm.bench.training import FAILED_STEP, TrainingStep, training_step

Loss = Callable[[Tensor], Tensor]  # of a batch, as a number
BATCH = 100
RATE = 1e-5
MISSING = "not installed"
COLUMNS = ("model", "library", "example", "parameters", "ms a step", "10 %", "90 %", "this / ours", "note")


@dataclass(frozen=True)
class Peer:
    """A model of another library.

    make:  builds it, on the CPU and in the default precision, and its loss.
    """

    library: str
    model: str
    shape: tuple[int, ...]
    make: Callable[[], tuple[nn.Module, Loss]]


@dataclass
class Row:
    """What was measured of a model of ours or of a peer's."""

    library: str
    model: str
    shape: tuple[int, ...]
    version: str | None
    parameters: int | None = None
    step: Timing | None = None
    note: str = ""
    failed: bool = False

    @property
    def name(self) -> str:
        return f"{self.library} {self.model}"


def zuko_flow(kind: str, features: int) -> tuple[nn.Module, Loss]:
    """MAF or NICE, in their default sizes."""
    flow: nn.Module = getattr(import_module("zuko.flows"), kind)(features)
    return flow, lambda x: -flow().log_prob(x).mean()


def nflows_lu(features: int) -> tuple[nn.Module, Loss]:
    """Two LU-factored linear layers with a leaky ReLU between: the counterpart of our fully connected flow."""
    transforms = import_module("nflows.transforms")

    class Leaky(transforms.LeakyReLU):  # type: ignore[name-defined, misc]
        """Theirs, whose log-determinant is always on the CPU, on any device."""

        def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            log_det = (inputs < 0).to(inputs) * math.log(self.negative_slope)
            return nn.functional.leaky_relu(inputs, self.negative_slope), log_det.sum(1)

    return _nflows(
        transforms.CompositeTransform([transforms.LULinear(features), Leaky(0.3), transforms.LULinear(features)]), features
    )


def nflows_coupling(features: int, layers: int = 4, hidden: int = 512) -> tuple[nn.Module, Loss]:
    """Affine couplings with residual networks, halves in turn."""
    transforms, nets = import_module("nflows.transforms"), import_module("nflows.nn.nets")

    def network(inputs: int, outputs: int) -> nn.Module:
        made: nn.Module = nets.ResidualNet(inputs, outputs, hidden_features=hidden)
        return made

    masks = [(torch.arange(features) + layer) % 2 for layer in range(layers)]
    couplings = [transforms.AffineCouplingTransform(mask, network) for mask in masks]
    return _nflows(transforms.CompositeTransform(couplings), features)


def _nflows(transform: nn.Module, features: int) -> tuple[nn.Module, Loss]:
    flows, distributions = import_module("nflows.flows"), import_module("nflows.distributions")
    flow: Any = flows.Flow(transform, distributions.StandardNormal([features]))
    return flow, lambda x: -flow.log_prob(x).mean()


def normflows_glow(shape: tuple[int, int, int], blocks: int, steps: int, hidden: int = 512) -> tuple[nn.Module, Loss]:
    """Glow as in the library's example, without classes."""
    nf = import_module("normflows")
    channels, height, width = shape
    bases, flows, merges = [], [], []
    for block in range(blocks):
        depth = blocks - block  # squeezes that this block's latent has been through
        wide = channels * 2 ** (depth + 1)
        flows.append([*(nf.flows.GlowBlock(wide, hidden) for _ in range(steps)), nf.flows.Squeeze()])
        if block:
            merges.append(nf.flows.Merge())
        latent = (wide if block == 0 else wide // 2, height // 2**depth, width // 2**depth)
        bases.append(nf.distributions.DiagGaussian(latent))
    flow: Any = nf.MultiscaleFlow(bases, flows, merges, class_cond=False)
    return flow, flow.forward_kld


FC, MNIST, CIFAR = (784,), (1, 28, 28), (3, 32, 32)
PEERS = (
    Peer("zuko", "MAF", FC, lambda: zuko_flow("MAF", 784)),
    Peer("zuko", "NICE", FC, lambda: zuko_flow("NICE", 784)),
    Peer("nflows", "LU, 2 layers", FC, lambda: nflows_lu(784)),
    Peer("nflows", "affine coupling, 4 layers", FC, lambda: nflows_coupling(784)),
    Peer("normflows", "Glow 2L-16K", MNIST, lambda: normflows_glow(MNIST, 2, 16)),
    Peer("normflows", "Glow 3L-32K", CIFAR, lambda: normflows_glow(CIFAR, 3, 32)),
)
OURS = {
    FC: (MODELS["mnist-fc-snf"], MODELS["mnist-fc-lu"]),
    MNIST: (MODELS["mnist-glow-snf"], MODELS["mnist-glow-exact"]),
    CIFAR: (MODELS["cifar10-glow-snf"], MODELS["cifar10-glow-exact"]),
}


def installed(library: str) -> str | None:
    """Its version, if it is there."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def measure_peers(
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    effort: Effort | None = None,
    peers: Sequence[Peer] = PEERS,
    told: Told = str,
    now: Told = str,
) -> Iterator[Row]:
    """A training step of each model for examples of these shapes; those of one shape take turns, the first of ours first.

    told:  is called with a line for each model.
    now:   is called with a line for what is being measured.
    """
    for shape in shapes:
        found = _of_shape(shape, [peer for peer in peers if peer.shape == shape], device, effort or Effort(), now)
        for row in found:
            told(f"{row.name}: " + (f"{1e3 * row.step.median:.3g} ms a step" if row.step else row.note))
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        yield from found


def peers_table(
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    effort: Effort | None = None,
    peers: Sequence[Peer] = PEERS,
    command: str | None = None,
    told: Told = str,
    now: Told = str,
) -> tuple[BenchTable, list[Row]]:
    """The table, and what it is made of. An interruption ends the measuring: the table then holds what was done by then."""
    before, rows = Conditions.now(device), list[Row]()
    with measuring(device) as stop:
        for row in measure_peers(shapes, device, effort=effort, peers=peers, told=told, now=now):
            rows.append(row)
    source = source_of(device, command, before)
    source |= {row.library: row.version for row in rows if row.library != "selfnorm"}
    ours: dict[tuple[int, ...], Timing] = {}
    for row in rows:
        if row.library == "selfnorm" and row.step:
            ours.setdefault(row.shape, row.step)
    table = BenchTable(
        title=f"A training step beside other libraries', on {machine_of(device)}",
        notes=[
            Note(
                f"Forward, backward and Adam at batch {BATCH}, in milliseconds: medians over "
                f"{blocks_of(row.step for row in rows)} after a warm-up, with the 10 % and 90 % quantiles of the "
                "blocks; models for one shape took turns."
            ),
            Note(
                "Ours is the whole step with a batch made of bytes"
                + (", in CUDA graphs as in training" if device.type == "cuda" else "")
                + "; the others' is −log_prob of a batch that lies ready, backward and fused Adam, eager. Models of one shape "
                "are what each library has for it, not the same function."
            ),
            Note("This / ours: against the self-normalizing model of that shape.", ("this / ours",)),
        ],
        columns=COLUMNS,
        rows=[_cells(row, ours.get(row.shape)) for row in rows],
        source=source,
        details=[_details(row) for row in rows],
        failures=[f"{row.name}: {row.note}" for row in rows if row.failed],
        stopped=stop.after(len({row.shape for row in rows}), len(shapes), "shapes"),
    )
    return table, rows


def _of_shape(shape: tuple[int, ...], peers: Sequence[Peer], device: torch.device, effort: Effort, now: Told) -> list[Row]:
    rows: list[Row] = []
    steps: dict[str, TrainingStep] = {}
    works: dict[str, Work] = {}
    for model in OURS[shape]:
        row = Row("selfnorm", model.name, shape, selfnorm.__version__)
        rows.append(row)
        now(f"{row.name}: building it")
        _attempt(row, partial(_build_ours, row, model, device, steps, works))
    for peer in peers:
        row = Row(peer.library, peer.model, shape, installed(peer.library))
        rows.append(row)
        now(f"{row.name}: building it")
        _attempt(row, partial(_build_peer, row, peer, device, works))
    now(f"steps of {', '.join(works)}" + (" in turn" if len(works) > 1 else ""))
    for name, timing in measure(works, device, effort).items():
        row = next(row for row in rows if row.name == name)
        if isinstance(timing, Failure):
            row.note, row.failed = timing.reason, True
        elif name in steps and steps[name].failed():
            row.note, row.failed = FAILED_STEP, True
        else:
            row.step = timing
    return rows


def _build_ours(row: Row, model: Model, device: torch.device, steps: dict[str, TrainingStep], works: dict[str, Work]) -> None:
    step = training_step(model, device)
    row.parameters = _parameters(step.loss)
    steps[row.name], works[row.name] = step, step.work


def _build_peer(row: Row, peer: Peer, device: torch.device, works: dict[str, Work]) -> None:
    try:
        flow, loss = peer.make()
    except ImportError as error:
        missing = (getattr(error, "name", None) or "").split(".")[0] == peer.library
        row.note = MISSING if missing else f"cannot be imported: {reason_for(error)}"
        return
    flow.to(device, torch.float32)
    optimizer = torch.optim.Adam(flow.parameters(), lr=RATE, fused=True)
    x = torch.randn(BATCH, *peer.shape, device=device, dtype=torch.float32)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(x).backward()
        optimizer.step()

    run()  # now, so that what fails at once fails by itself; it also initialises what looks at a first batch
    row.parameters = _parameters(flow)
    works[row.name] = Work(run)


def _attempt(row: Row, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        row.note, row.failed = reason_for(error), True


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _cells(row: Row, ours: Timing | None) -> list[Cell]:
    ratio = row.step.median / ours.median if row.step and ours else None
    example = "×".join(map(str, row.shape if math.prod(row.shape) != row.shape[0] else row.shape[:1]))
    return [row.model, row.library, example, row.parameters, *milli(row.step), significant(ratio), row.note or None]


def _details(row: Row) -> dict[str, Any]:
    return {
        "library": row.library,
        "version": row.version,
        "model": row.model,
        "shape": list(row.shape),
        "parameters": row.parameters,
        **in_full("step", row.step),
        "note": row.note,
    }

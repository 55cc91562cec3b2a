"""Times the flows of zuko, nflows and normflows, if installed, next to ours: same shapes, same run.

Nothing else needs these libraries. Their models are built as in their documentation, with default sizes if our library has no
counterpart, and trained as their users do: eagerly, with −log_prob, a backward pass and fused Adam.
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
from selfnorm.bench.timing import Effort, Failure, Timing, Work, measure, reason_for
from selfnorm.bench.training import FAILED_STEP, TrainingStep, training_step
from selfnorm.bench.workloads import MODELS, Model
from selfnorm.report.provenance import machine_of

PeerLoss = Callable[[Tensor], Tensor]  # batch to scalar
PEER_BATCH = 100
PEER_LEARNING_RATE = 1e-5
MISSING = "not installed"
PEER_COLUMNS = ("model", "library", "example", "parameters", "ms a step", "10 %", "90 %", "this / ours", "note")


@dataclass(frozen=True)
class Peer:
    """A model of another library.

    make:  returns the model, on the CPU and in the default precision, and its loss.
    """

    library: str
    model: str
    shape: tuple[int, ...]
    make: Callable[[], tuple[nn.Module, PeerLoss]]


@dataclass
class PeerRow:
    """The measurements of one model, ours or of another library."""

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


def zuko_flow(kind: str, features: int) -> tuple[nn.Module, PeerLoss]:
    """Returns zuko's MAF or NICE with default sizes."""
    flow: nn.Module = getattr(import_module("zuko.flows"), kind)(features)
    return flow, lambda x: -flow().log_prob(x).mean()


def nflows_lu(features: int) -> tuple[nn.Module, PeerLoss]:
    """Returns two LU-factored linear layers with a leaky ReLU between them: the counterpart of our fully connected flow."""
    transforms = import_module("nflows.transforms")

    class Leaky(transforms.LeakyReLU):  # type: ignore[name-defined, misc]
        """The leaky ReLU of nflows, fixed: its log-determinant is always on the CPU."""

        def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            log_det = (inputs < 0).to(inputs) * math.log(self.negative_slope)
            return nn.functional.leaky_relu(inputs, self.negative_slope), log_det.sum(1)

    return _nflows(
        transforms.CompositeTransform([transforms.LULinear(features), Leaky(0.3), transforms.LULinear(features)]), features
    )


def nflows_coupling(features: int, layers: int = 4, hidden: int = 512) -> tuple[nn.Module, PeerLoss]:
    """Returns affine couplings with residual networks that transform alternate halves."""
    transforms, nets = import_module("nflows.transforms"), import_module("nflows.nn.nets")

    def network(inputs: int, outputs: int) -> nn.Module:
        made: nn.Module = nets.ResidualNet(inputs, outputs, hidden_features=hidden)
        return made

    masks = [(torch.arange(features) + layer) % 2 for layer in range(layers)]
    couplings = [transforms.AffineCouplingTransform(mask, network) for mask in masks]
    return _nflows(transforms.CompositeTransform(couplings), features)


def _nflows(transform: nn.Module, features: int) -> tuple[nn.Module, PeerLoss]:
    flows, distributions = import_module("nflows.flows"), import_module("nflows.distributions")
    flow: Any = flows.Flow(transform, distributions.StandardNormal([features]))
    return flow, lambda x: -flow.log_prob(x).mean()


def normflows_glow(shape: tuple[int, int, int], blocks: int, steps: int, hidden: int = 512) -> tuple[nn.Module, PeerLoss]:
    """Returns Glow as in the example of normflows, without classes."""
    nf = import_module("normflows")
    channels, height, width = shape
    bases, flows, merges = [], [], []
    for block in range(blocks):
        depth = blocks - block  # the number of squeezes before this block's latent
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
    """Returns the version of a library, or None if it is not installed."""
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
    on_result: LineCallback = str,
    on_status: LineCallback = str,
) -> Iterator[PeerRow]:
    """Yields the time of a training step of each model for examples of these shapes; models of one shape take turns.

    on_result:  called with one line for each measured model.
    on_status:  called with one line about what is being measured.
    """
    for shape in shapes:
        found = _measure_shape(shape, [peer for peer in peers if peer.shape == shape], device, effort or Effort(), on_status)
        for row in found:
            on_result(f"{row.name}: " + (f"{1e3 * row.step.median:.3g} ms per step" if row.step else row.note))
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
    on_result: LineCallback = str,
    on_status: LineCallback = str,
) -> tuple[BenchTable, list[PeerRow]]:
    """Returns the table and its measurements. Ctrl-C stops the measuring; the table then holds what was finished."""
    before, rows = Conditions.now(device), list[PeerRow]()
    with measuring(device) as stop:
        for row in measure_peers(shapes, device, effort=effort, peers=peers, on_result=on_result, on_status=on_status):
            rows.append(row)
    source = source_of(device, command, before)
    source |= {row.library: row.version for row in rows if row.library != "selfnorm"}
    ours: dict[tuple[int, ...], Timing] = {}
    for row in rows:
        if row.library == "selfnorm" and row.step:
            ours.setdefault(row.shape, row.step)
    table = BenchTable(
        title=f"A training step compared with other libraries, on {machine_of(device)}",
        notes=[
            Note(
                f"Forward, backward and Adam at batch {PEER_BATCH}, in milliseconds: medians over "
                f"{blocks_of(row.step for row in rows)} after a warm-up, with the 10 % and 90 % quantiles of the "
                "blocks; models for one shape took turns."
            ),
            Note(
                "Ours is the whole step, including a batch made from bytes"
                + (", in CUDA graphs as in training" if device.type == "cuda" else "")
                + "; theirs is −log_prob of a ready batch, backward and fused Adam, eager. Models for one shape are what each "
                "library offers for it, not the same function."
            ),
            Note("This / ours: time relative to our self-normalizing model for that shape.", ("this / ours",)),
        ],
        columns=PEER_COLUMNS,
        rows=[_peer_cells(row, ours.get(row.shape)) for row in rows],
        source=source,
        details=[_peer_details(row) for row in rows],
        failures=[f"{row.name}: {row.note}" for row in rows if row.failed],
        stopped=stop.after(len({row.shape for row in rows}), len(shapes), "shapes"),
    )
    return table, rows


def _measure_shape(
    shape: tuple[int, ...], peers: Sequence[Peer], device: torch.device, effort: Effort, on_status: LineCallback
) -> list[PeerRow]:
    rows: list[PeerRow] = []
    steps: dict[str, TrainingStep] = {}
    works: dict[str, Work] = {}
    for model in OURS[shape]:
        row = PeerRow("selfnorm", model.name, shape, selfnorm.__version__)
        rows.append(row)
        on_status(f"{row.name}: building it")
        _build_or_note(row, partial(_build_ours, row, model, device, steps, works))
    for peer in peers:
        row = PeerRow(peer.library, peer.model, shape, installed(peer.library))
        rows.append(row)
        on_status(f"{row.name}: building it")
        _build_or_note(row, partial(_build_peer, row, peer, device, works))
    on_status(f"steps of {', '.join(works)}" + (" in turn" if len(works) > 1 else ""))
    for name, timing in measure(works, device, effort).items():
        row = next(row for row in rows if row.name == name)
        if isinstance(timing, Failure):
            row.note, row.failed = timing.reason, True
        elif name in steps and steps[name].failed():
            row.note, row.failed = FAILED_STEP, True
        else:
            row.step = timing
    return rows


def _build_ours(row: PeerRow, model: Model, device: torch.device, steps: dict[str, TrainingStep], works: dict[str, Work]) -> None:
    step = training_step(model, device)
    row.parameters = _parameter_count(step.loss)
    steps[row.name], works[row.name] = step, step.work


def _build_peer(row: PeerRow, peer: Peer, device: torch.device, works: dict[str, Work]) -> None:
    try:
        flow, loss = peer.make()
    except ImportError as error:
        missing = (getattr(error, "name", None) or "").split(".")[0] == peer.library
        row.note = MISSING if missing else f"cannot be imported: {reason_for(error)}"
        return
    flow.to(device, torch.float32)
    optimizer = torch.optim.Adam(flow.parameters(), lr=PEER_LEARNING_RATE, fused=True)
    x = torch.randn(PEER_BATCH, *peer.shape, device=device, dtype=torch.float32)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(x).backward()
        optimizer.step()

    run()  # so that an immediate failure affects only this model; it also initialises layers from a first batch
    row.parameters = _parameter_count(flow)
    works[row.name] = Work(run)


def _build_or_note(row: PeerRow, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        row.note, row.failed = reason_for(error), True


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _peer_cells(row: PeerRow, ours: Timing | None) -> list[Cell]:
    ratio = row.step.median / ours.median if row.step and ours else None
    example = "×".join(map(str, row.shape if math.prod(row.shape) != row.shape[0] else row.shape[:1]))
    return [row.model, row.library, example, row.parameters, *milliseconds(row.step), significant(ratio), row.note or None]


def _peer_details(row: PeerRow) -> dict[str, Any]:
    return {
        "library": row.library,
        "version": row.version,
        "model": row.model,
        "shape": list(row.shape),
        "parameters": row.parameters,
        **timing_details("step", row.step),
        "note": row.note,
    }

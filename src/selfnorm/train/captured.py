"""`CapturedStep`: training steps as CUDA graphs, since launching the kernels of a small step takes longer than running them.

One graph makes the batches of a whole block of steps: it gathers, augments and dequantises them, and sends them through the
leading layers that have no parameters. Another graph holds several training steps: loss, backward pass, clipping, Adam, trackers,
multipliers. Learning rates, λ, counters and flags are tensors on the device. The host sets the rates and launches the next
replay. It also sets the seeds, so that a step has the same noise as the eager step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from selfnorm.bijection import Chain, InverseTracker
from selfnorm.data.batches import TrainingBatches, seed_of
from selfnorm.kernels.dispatch import usable
from selfnorm.objective import Loss, Metrics
from selfnorm.runtime.collector import collected_gradients
from selfnorm.runtime.device import synchronize
from selfnorm.runtime.graphs import capturing
from selfnorm.runtime.streams import Branches, branching
from selfnorm.train.adam import GuardedAdam, metrics_unless_frozen
from selfnorm.train.step import no_mark

# Steps that run uncaptured first: they compile kernels, and libraries allocate what cannot be allocated during a capture.
WARM_UP_STEPS = 3
# Modules times steps in one graph. A graph of a few thousand kernels is quick to make; more steps would gain nothing.
MAX_MODULES_PER_GRAPH = 2000


def can_be_captured(loss: Loss, batches: TrainingBatches) -> bool:
    """Returns whether the steps can run as graphs: on a GPU and in float32."""
    single = all(parameter.dtype == torch.float32 for parameter in loss.parameters())
    return batches.examples.device.type == "cuda" and single


class CapturedStep:
    """A `Step` that takes several steps per call and, once captured, never waits for the device. On a CPU it runs uncaptured, for
    tests."""

    def __init__(self, loss: Loss, optimizer: torch.optim.Adam, batches: TrainingBatches, clip: float | None) -> None:
        self.loss, self.optimizer, self.batches = loss, optimizer, batches
        device = batches.examples.device
        self.preprocessing, self._rest = loss.flow.split_preprocessing()
        # Large parameters first: torch's kernels for many tensors take some 36 of them per launch and 65,536 numbers per
        # processor, so small tensors between large ones would leave most of the card idle.
        trained = (parameter for parameter in loss.parameters() if parameter.requires_grad)
        self._adam = GuardedAdam(optimizer, sorted(trained, key=Tensor.numel, reverse=True), clip)
        self.failed, self.lost = self._adam.flags.failed, self._adam.flags.lost
        self._trackers = list(loss.flow.inverse_trackers().values())
        self._limits = self.failed.new_tensor([tracker.largest_residual for tracker in self._trackers])
        self._residuals = _shared_residuals(self._trackers, self._limits)
        # Where R is not read before the next update, its tracker may run during the next forward and backward pass.
        late = all(tracker.reads_inverse_late for tracker in self._trackers)
        self._tracks_late = clip is None and usable(self.failed) and late
        self._graph_steps = _steps_per_graph(batches.block, sum(1 for _ in loss.modules()))
        self._taken = 0
        self.mark: Callable[..., None] = no_mark
        self._graphs = _Graphs(device)
        self._branches, self._tracker_branches = (Branches(device) for _ in range(2))
        self._block = _BatchBlock(batches, self.preprocessing, self._graphs)
        # Graphs read and write the same memory at each replay.
        zeros = self.failed.new_zeros
        self._one = zeros(()) + 1
        self._x = torch.zeros_like(self._block.x[: self._graph_steps * batches.batch_size])
        self._rates = zeros(self._graph_steps)
        self._generators = [torch.Generator(device) for _ in range(self._graph_steps)] if loss.draws else []
        self._history = zeros(self._graph_steps, 2 + len(loss.flow.reconstruction_names))  # loss, surrogate, errors of each step
        self.losses = zeros(0)

    def steps_per_call(self, index: int) -> int:
        left = min(self.batches.steps_per_epoch, (index // self.batches.block + 1) * self.batches.block) - index
        return self._graph_steps if self._taken >= WARM_UP_STEPS and left >= self._graph_steps else 1

    def __call__(self, epoch: int, index: int, *rates: float) -> Metrics:
        size, n = self.batches.batch_size, len(rates)
        number, within = divmod(index, self.batches.block)
        warm = self._taken >= WARM_UP_STEPS
        if self._block.holds != (epoch, number):
            self._block.make(epoch, number, warm=warm)
        self._x[: n * size].copy_(self._block.x[within * size : (within + n) * size])
        self._rates[:n].copy_(_pinned(torch.tensor(rates), self._rates.device), non_blocking=True)
        for step, generator in enumerate(self._generators[:n], index):
            generator.manual_seed(seed_of(self.batches.seed, "probes", epoch, step))
        self._graphs.run(f"{n} steps", lambda: self._take(n), self._generators[:n], warm=warm)
        self._taken += n
        preprocessing_nll = self._block.nll[within : within + n]
        self.losses = self._history[:n, 0] + preprocessing_nll
        return Metrics(self._history[:n, 1] + preprocessing_nll, self._history[:n, 2:].clone())

    def unfreeze(self) -> None:
        self._adam.unfreeze()

    def seconds_for_batch(self, rounds: int = 5) -> float:
        """Returns one step's share of the time to make a block of batches: the median of a few."""
        times = []
        for epoch in range(rounds):
            synchronize(self._rates.device)
            began = time.perf_counter()
            self._block.make(epoch, 0, warm=self._taken >= WARM_UP_STEPS)
            synchronize(self._rates.device)
            times.append(time.perf_counter() - began)
        return statistics.median(times) / min(self.batches.block, self.batches.steps_per_epoch)

    def _take(self, n: int) -> None:
        for step, x in enumerate(self._x.split(self.batches.batch_size)[:n]):
            self._take_one(step, x, self._generators[step] if self._generators else None)
        self._branches.join()
        self._wait_for_trackers()
        self._adam.begin(advance=False)

    def _take_one(self, step: int, x: Tensor, generator: torch.Generator | None) -> None:
        branches = self._branches if self._graphs.capturing else None
        self.mark("the rest of the loss")
        # Clipping needs whole gradients.
        with collected_gradients() if self._adam.clip is None else nullcontext() as collector:
            with branching(branches):
                value, metrics = self.loss.without_preprocessing(self._rest, x, generator=generator)
            self.mark("the rest of the loss", backward=True)
            value.backward(self._one)
        self.mark("norm of the gradient")
        factored = collector.take(wait=self._wait_for_trackers) if collector else []
        loss = value.detach()
        unchecked = self._adam.check(loss)
        self.mark("Adam")
        self._wait_for_trackers()  # from here on, R and the residuals may be read
        self._adam.begin(unchecked)
        self._adam.update(self._rates[step], factored, branches)
        self.mark("trackers, multipliers")
        self._after_step(metrics, generator)
        figures = (loss.view(1), metrics.surrogate.view(1), metrics.reconstruction)
        with branching(branches, joined=False) as context, context.on_side_stream(*figures):
            torch.cat(figures, out=self._history[step])  # for the host to read
        self.mark("end")

    def _after_step(self, metrics: Metrics, generator: torch.Generator | None) -> None:
        """Updates multipliers and trackers, each tracker on a separate branch."""
        metrics = metrics_unless_frozen(self.loss, metrics, self._adam.flags.frozen)
        with branching(self._tracker_branches if self._graphs.capturing else None, joined=False):
            self.loss.after_step(metrics, generator=generator)
        if not self._tracks_late:
            self._wait_for_trackers()

    def _wait_for_trackers(self) -> None:
        """Joins the trackers of the previous step, and raises `lost` if one of them could not keep up."""
        if self._trackers:
            self._tracker_branches.join()
            self._adam.raise_lost(self._residuals, self._limits)


class _BatchBlock:
    """A block of batches, made by one graph and already preprocessed.

    x:      the preprocessed examples, one batch after another.
    nll:    for each batch, what the preprocessing adds to its mean negative log-likelihood.
    holds:  epoch and number of the block in memory; None before the first.
    """

    def __init__(self, batches: TrainingBatches, preprocessing: Chain, graphs: _Graphs) -> None:
        self._batches, self._preprocessing, self._graphs = batches, preprocessing, graphs
        examples, rows = batches.examples, batches.block * batches.batch_size
        device = examples.device
        self._resident = examples.stored.device.type == device.type
        self._index = torch.zeros(rows, dtype=torch.int64, device=device)
        self._stored = torch.zeros(0 if self._resident else rows, *examples.shape, dtype=examples.stored.dtype, device=device)
        self._noise = torch.Generator(device)
        with torch.no_grad():
            example = preprocessing.surrogate(torch.zeros(1, *examples.shape, dtype=torch.float32, device=device)).z
        self.x = example.new_zeros(rows, *example.shape[1:])
        self.nll = example.new_zeros(batches.block)
        self.holds: tuple[int, int] | None = None

    def make(self, epoch: int, number: int, *, warm: bool) -> None:
        """Makes a block; warm: whether the graph may be captured."""
        index = self._batches.index(epoch, number)
        rows = len(index)
        if self._resident:
            self._index[:rows].copy_(index)
        else:
            self._stored[:rows].copy_(self._batches.examples.gather(index))
        self._noise.manual_seed(self._batches.seed_of_block(epoch, number))
        self._graphs.run(f"{rows} examples", lambda: self._prepare(rows), [self._noise], warm=warm)
        self.holds = (epoch, number)

    @torch.no_grad()
    def _prepare(self, rows: int) -> None:
        stored = self._batches.examples.stored[self._index[:rows]] if self._resident else self._stored[:rows]
        x, log_det, _ = self._preprocessing.surrogate(self._batches.prepare(stored, self._noise))
        self.x[:rows].copy_(x)
        steps = rows // self._batches.batch_size
        self.nll[:steps].copy_(-log_det.view(steps, -1).mean(1))


def _shared_residuals(trackers: Sequence[InverseTracker], like: Tensor) -> Tensor:
    """Returns one tensor that holds the residuals of all trackers, to be checked at once."""
    residuals = torch.zeros_like(like)
    for tracker, entry in zip(trackers, residuals, strict=True):
        tracker.write_residual_to(entry)
    return residuals


def _steps_per_graph(block: int, modules: int) -> int:
    """Returns the most steps that divide a block and make a graph of moderate size."""
    return max(n for n in range(1, block + 1) if block % n == 0 and (n == 1 or n * modules <= MAX_MODULES_PER_GRAPH))


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory() if device.type == "cuda" else x


class _Graphs:
    """Device work by name: captured as a graph once it is warm, then replayed. On a CPU it simply runs."""

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.capturing = False
        # They run one after another, so they can share their memory.
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    def run(self, name: str, work: Callable[[], None], generators: Sequence[torch.Generator], *, warm: bool) -> None:
        """Runs the work. warm: whether work of this kind has run before, so that it can be captured."""
        if not (self._captures and warm):
            work()
            return
        if name not in self._graphs:
            self._graphs[name] = self._capture(work, generators)
        self._graphs[name].replay()

    def _capture(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        self.capturing = True
        try:
            with capturing(graph, pool=self._pool):
                work()
        except RuntimeError as error:
            cause = str(error.__context__ or error).splitlines()[0]  # the first error; ending the capture raises a second one
            raise RuntimeError(
                f"expected a training step that can be captured as a CUDA graph, got one in which the host waits or that still "
                f"refers to an earlier backward pass ({cause}); --set graphs=false trains without graphs"
            ) from error
        finally:
            self.capturing = False
        return graph

"""Steps as CUDA graphs: a small step takes the host far longer to ask for, kernel by kernel, than the device to do.

The batches of a whole block of steps are made at once by one graph: gathered, augmented, dequantised, and sent through the layers
in front that have nothing to train. Another graph holds several training steps: loss, backward, clipping, Adam, trackers,
multipliers. Learning rates, λ, counters and flags are tensors on the device, so that the host only sets them and asks for the
next replay. It sets seeds in the same way, which gives a step the noise that the eager step would have.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from selfnorm.data.batches import TrainingBatches, seed_of
from selfnorm.kernels.dense.factored import factored_gradients
from selfnorm.kernels.dispatch import usable
from selfnorm.layers.tracked import TrackedConv2d, TrackedLinear
from selfnorm.objective import Fixed, Loss, Metrics
from selfnorm.runtime.device import synchronize
from selfnorm.runtime.graphs import capturing
from selfnorm.runtime.streams import Branches, beside, branching
from selfnorm.train.step import BETAS, EPS, adam_state, adam_tensors, unmarked

# The first steps run as they are: they compile kernels and make libraries allocate what cannot be allocated in a capture.
WARM_UP = 3
# Modules times steps in one graph. A graph of a few thousand kernels is quick to make; with more steps it would gain nothing.
GRAPH_MODULES = 2000


def can_be_captured(loss: Loss, batches: TrainingBatches) -> bool:
    """Whether the steps can run as graphs: on a GPU, in float32, and with nothing in them that the host has to decide."""
    single = all(parameter.dtype == torch.float32 for parameter in loss.parameters())
    return batches.examples.device.type == "cuda" and single and loss.polish is None and not loss.debias


class CapturedStep:
    """A `Step` that takes several steps a call and never reads the device. On a CPU the same without graphs, for tests."""

    def __init__(self, loss: Loss, optimizer: torch.optim.Adam, batches: TrainingBatches, clip: float | None) -> None:
        self.loss, self.optimizer, self.batches, self.clip = loss, optimizer, batches, clip
        self.front, self._flow = loss.flow.in_two()
        # Large ones first: torch's kernels for many tensors take some 36 of them a launch and 65,536 numbers a processor, so that
        # small tensors among the large ones would leave most of the card idle.
        trained = (parameter for parameter in loss.parameters() if parameter.requires_grad)
        self._parameters = sorted(trained, key=Tensor.numel, reverse=True)
        self._tracked = [module for module in loss.modules() if isinstance(module, TrackedLinear | TrackedConv2d)]
        self._several = _steps_per_graph(batches.block, sum(1 for _ in loss.modules()))
        self._taken = 0
        self.mark: Callable[..., None] = unmarked
        self._graphs = _Graphs(batches.examples.device)
        self._branches, self._trackers = (Branches(batches.examples.device) for _ in range(2))
        zeros = self._parameters[0].detach().new_zeros
        self.failed, self.lost, self._late_failure, self._frozen = (zeros(()) for _ in range(4))
        self._step = shared_step(optimizer, self._parameters)
        self._one = zeros(()) + 1
        self._limits = self.failed.new_tensor([layer.largest_residual for layer in self._tracked])
        self._residuals = _side_by_side(self._tracked, self._limits)
        # Where R is not read before the next update, its tracker may take as long as the next forward and backward pass.
        self._late = clip is None and usable(self.failed) and all(isinstance(layer, TrackedLinear) for layer in self._tracked)
        # What the graphs read and write lies in the same memory at each replay. First, a block of batches:
        device, rows = batches.examples.device, batches.block * batches.batch_size
        self._resident = batches.examples.stored.device.type == device.type
        self._index = torch.zeros(rows, dtype=torch.int64, device=device)
        self._stored = torch.zeros(0 if self._resident else rows, *batches.examples.shape, dtype=batches.examples.stored.dtype)
        self._stored = self._stored.to(device)
        self._noise = torch.Generator(device)
        with torch.no_grad():
            example = self.front.surrogate(zeros(1, *batches.examples.shape)).z
        self._behind_front = zeros(rows, *example.shape[1:])
        self._front_nll = zeros(batches.block)
        self._block: tuple[int, int] | None = None  # which one it is
        # Then, some steps of it:
        self._x = torch.zeros_like(self._behind_front[: self._several * batches.batch_size])
        self._rates = zeros(self._several)
        self._generators = [torch.Generator(device) for _ in range(self._several)] if loss.draws else []
        self._history = zeros(self._several, 2 + len(loss.flow.reconstruction_names))  # loss, surrogate, errors of each step
        self.losses = zeros(0)

    def reach(self, index: int) -> int:
        left = min(self.batches.steps_per_epoch, (index // self.batches.block + 1) * self.batches.block) - index
        return self._several if self._taken >= WARM_UP and left >= self._several else 1

    def __call__(self, epoch: int, index: int, *rates: float) -> Metrics:
        size, n = self.batches.batch_size, len(rates)
        number, within = divmod(index, self.batches.block)
        if self._block != (epoch, number):
            self._make_block(epoch, number)
        self._x[: n * size].copy_(self._behind_front[within * size : (within + n) * size])
        self._rates[:n].copy_(_pinned(torch.tensor(rates), self._rates.device), non_blocking=True)
        for step, generator in enumerate(self._generators[:n], index):
            generator.manual_seed(seed_of(self.batches.seed, "probes", epoch, step))
        self._graphs.run(f"{n} steps", lambda: self._take(n), self._generators[:n], warm=self._taken >= WARM_UP)
        self._taken += n
        front_nll = self._front_nll[within : within + n]
        self.losses = self._history[:n, 0] + front_nll
        return Metrics(self._history[:n, 1] + front_nll, self._history[:n, 2:].clone())

    def go_on(self) -> None:
        self.lost.zero_()
        self.failed.zero_()  # in a step that changed nothing: if it was no accident, it will come again

    def seconds_for_batch(self, rounds: int = 5) -> float:
        """What one step's share of making a block takes: the median of a few."""
        times = []
        for number in range(rounds):
            synchronize(self._index.device)
            began = time.perf_counter()
            self._make_block(number, 0)
            synchronize(self._index.device)
            times.append(time.perf_counter() - began)
        return statistics.median(times) / min(self.batches.block, self.batches.steps_per_epoch)

    def _make_block(self, epoch: int, number: int) -> None:
        index = self.batches.index(epoch, number)
        rows = len(index)
        if self._resident:
            self._index[:rows].copy_(index)
        else:
            self._stored[:rows].copy_(self.batches.examples.gather(index))
        self._noise.manual_seed(self.batches.seed_of_block(epoch, number))
        self._graphs.run(f"{rows} examples", lambda: self._prepare(rows), [self._noise], warm=self._taken >= WARM_UP)
        self._block = (epoch, number)

    @torch.no_grad()
    def _prepare(self, rows: int) -> None:
        stored = self.batches.examples.stored[self._index[:rows]] if self._resident else self._stored[:rows]
        x, log_det, _ = self.front.surrogate(self.batches.prepare(stored, self._noise))
        self._behind_front[:rows].copy_(x)
        steps = rows // self.batches.batch_size
        self._front_nll[:steps].copy_(-log_det.view(steps, -1).mean(1))

    def _take(self, n: int) -> None:
        for step, x in enumerate(self._x.split(self.batches.batch_size)[:n]):
            self._take_one(step, x, self._generators[step] if self._generators else None)
        self._branches.join()
        self._wait_for_trackers()
        self._begin_update(advance=False)

    def _take_one(self, step: int, x: Tensor, generator: torch.Generator | None) -> None:
        self.mark("the rest of the loss")
        with factored_gradients() if self.clip is None else nullcontext() as collected:  # to clip gradients one must have them
            with branching(self._branches if self._graphs.capturing else None):
                value, metrics = self.loss.of(self._flow, x, generator=generator)
            self.mark("the rest of the loss", backward=True)
            value.backward(self._one)
        self.mark("norm of the gradient")
        factored = collected.take(wait=self._wait_for_trackers) if collected else []
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        at_once = self.clip is None and self._can_look_at_once(gradients)
        if not at_once:
            self._look(value.detach(), gradients)
        self.mark("Adam")
        self._wait_for_trackers()  # from here on somebody may read what they write
        self._begin_update(loss=value.detach() if at_once else None, gradients=gradients if at_once else [])
        with branching(self._branches if self._graphs.capturing else None):
            for record in factored:
                with beside():
                    record.apply_adam(self._state, self._rates[step], self._frozen, self._late_failure, BETAS, EPS)
            self._adam(self._rates[step])
        self.optimizer.zero_grad(set_to_none=True)
        self.mark("trackers, multipliers")
        taken = metrics
        if type(self.loss.penalty) is not Fixed:  # multipliers stay where they are if an error is not a number
            taken = metrics._replace(reconstruction=torch.where(self._frozen > 0, torch.nan, metrics.reconstruction))
        with branching(self._trackers if self._graphs.capturing else None, joined=False):  # each beside the others
            self.loss.after_step(taken, generator=generator)
        if not self._late:
            self._wait_for_trackers()
        told = (value.detach().view(1), metrics.surrogate.view(1), metrics.reconstruction)
        with branching(self._branches if self._graphs.capturing else None, joined=False), beside(*told):  # for the host to read
            torch.cat(told, out=self._history[step])
        self.mark("end")

    def _look(self, value: Tensor, gradients: list[Tensor]) -> None:
        """Raise `failed` if the loss or a gradient is not finite; clip the gradients."""
        # Norms, since a gradient whose square overflows is none that Adam could use.
        checked = [torch.stack(torch._foreach_norm(gradients))] if gradients else []
        if self.clip is not None:
            checked = [torch.linalg.vector_norm(checked[0])]
            nn.utils.clip_grads_with_norm_(self._parameters, self.clip, checked[0])
        # What gradient scaling uses: one kernel looks at all of it (and multiplies by 1), and raises the flag.
        torch._amp_foreach_non_finite_check_and_unscale_([*checked, value], self.failed, self._one)

    def _can_look_at_once(self, gradients: list[Tensor]) -> bool:
        """Whether `_begin_update` can do what `_look` does, at no launch of its own."""
        if not usable(self.failed, *gradients):
            return False
        from selfnorm.kernels.dense.guard import few_and_small

        return few_and_small(gradients)

    def _wait_for_trackers(self) -> None:
        """Join those of the step before, and see whether all of them have kept up."""
        if not self._tracked:
            return
        self._trackers.join()
        if usable(self.lost):
            from selfnorm.kernels.dense.guard import note_lost

            note_lost(self.lost, self._residuals, self._limits)
        else:
            self.lost.copy_(torch.maximum(self.lost, 1 - (self._residuals < self._limits).all().to(self.lost)))

    def _begin_update(self, *, advance: bool = True, loss: Tensor | None = None, gradients: Sequence[Tensor] = ()) -> None:
        """Set `frozen` and the number of the update that follows; what went wrong in the one before is first seen here.

        loss, gradients:  if nobody has looked at them.
        """
        if usable(self.failed):
            from selfnorm.kernels.dense.guard import begin_update

            flags = (self.failed, self._late_failure, self.lost, self._frozen, self._step)
            begin_update(*flags, advance=advance, loss=loss, gradients=gradients)
        else:
            self._step.sub_(self._late_failure * (1 - self.failed))
            self.failed.copy_(torch.maximum(self.failed, self._late_failure))
            self._late_failure.zero_()
            self._frozen.copy_(torch.maximum(self.failed, self.lost))
            if advance:
                self._step.add_(1 - self._frozen)

    def _adam(self, rate: Tensor) -> None:
        """What the optimiser's own step would do for all parameters that have a gradient, less the counting."""
        updated = [(parameter, parameter.grad, *self._state(parameter)) for parameter in self._parameters]
        updated = [each for each in updated if each[1] is not None]
        if not updated:
            return
        parameters, gradients, averages, squares, steps = zip(*updated, strict=True)
        torch._fused_adam_(
            parameters,
            gradients,
            averages,
            squares,
            [],
            steps,
            lr=rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=0.0,
            eps=EPS,
            amsgrad=False,
            maximize=False,
            found_inf=self._frozen,
        )

    def _state(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor, Tensor]:
        return adam_tensors(self.optimizer, parameter)


def shared_step(optimizer: torch.optim.Adam, parameters: Sequence[Tensor]) -> Tensor:
    """Adam's count of steps, made one tensor for all parameters, which all take every step."""
    states = [adam_state(optimizer, parameter) for parameter in parameters]
    shared = torch.stack([state["step"] for state in states]).amax()
    for state in states:
        state["step"] = shared
    return shared


def _side_by_side(tracked: Sequence[TrackedLinear | TrackedConv2d], like: Tensor) -> Tensor:
    """The layers' residuals, made entries of one tensor, so that one look sees them all."""
    residuals = torch.zeros_like(like)
    for layer, entry in zip(tracked, residuals, strict=True):
        layer.residual = entry
    return residuals


def _steps_per_graph(block: int, modules: int) -> int:
    """As many as divide a block and make a graph of a moderate size."""
    return max(n for n in range(1, block + 1) if block % n == 0 and (n == 1 or n * modules <= GRAPH_MODULES))


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory() if device.type == "cuda" else x


class _Graphs:
    """Pieces of device work by name: the first time as they are, from then on as graphs. On a CPU always as they are."""

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.capturing = False
        # One after another they can share the memory in which they work.
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    def run(self, name: str, work: Callable[[], None], generators: Sequence[torch.Generator], *, warm: bool) -> None:
        """warm: whether work of this kind was done before, so that it can be captured."""
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
            cause = str(error.__context__ or error).splitlines()[0]  # what came first; the end of the capture only complains
            raise RuntimeError(
                f"expected a training step that can be captured as a CUDA graph, got one in which the host waits or something "
                f"holds on to an earlier backward pass ({cause}); --set graphs=false trains without graphs"
            ) from error
        finally:
            self.capturing = False
        return graph

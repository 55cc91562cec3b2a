"""Where a training step's time goes: by layer, forward and backward, and by what else a step does.

Marks divide a step into pieces: each says what begins there. Between layers they stand in the autograd graph, so that they are
passed on the way back, too. On a GPU a mark is an event inside of the captured graph, read after replays; on a CPU a look at the
clock.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfnorm.bijection import Bijection, Chain
from selfnorm.flow import Flow
from selfnorm.layers.image import Split
from selfnorm.train.captured import WARM_UP, CapturedStep
from selfnorm.train.step import EagerStep

ROUNDS = 20


class Piece(NamedTuple):
    """A part of a step: a layer by its place and kind, or something else a step does, which has no backward."""

    place: str
    kind: str
    forward: float  # seconds
    backward: float


class Marks:
    """Points in time, in the order in which they are passed, each with what begins there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.labels: list[tuple[str, str, bool]] = []
        self._times: list[Any] = []

    def __call__(self, place: str, kind: str = "", backward: bool = False) -> None:
        self.labels.append((place, kind, backward))
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
            event.record()
            self._times.append(event)
        else:
            self._times.append(time.perf_counter())

    def forget(self) -> None:
        self.labels, self._times = [], []

    def seconds(self) -> list[float]:
        """From each mark to the next."""
        pairs = zip(self._times, self._times[1:], strict=False)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


class _Mark(torch.autograd.Function):
    """The identity, which marks when it is passed: one label on the way there and another on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[], None], back: Callable[[], None]) -> Tensor:
        ctx.back = back
        there()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.back()
        return grad, None, None


@contextmanager
def marked(flow: Flow, marks: Marks, *, without: Bijection) -> Iterator[None]:
    """Every layer of the flow between two marks, but for those that another bijection holds, too."""
    layers = {
        name: layer
        for name, layer in flow.bijection.named_modules()
        if isinstance(layer, Bijection)
        and not _is_container(layer)
        and not any(part is layer for part in without.modules())
        and not _is_part(layer, flow)
    }
    for name, layer in layers.items():
        layer.surrogate = _between_marks(layer, name, marks)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.surrogate


def _is_container(layer: Bijection) -> bool:
    return type(layer) is Chain or isinstance(layer, Split)


def _is_part(layer: Bijection, flow: Flow) -> bool:
    """Whether the layer belongs to another one that is no mere container."""
    others = (other for other in flow.bijection.modules() if isinstance(other, Bijection) and other is not layer)
    return any(any(part is layer for part in other.modules()) for other in others if not _is_container(other))


def _between_marks(layer: Bijection, name: str, marks: Marks) -> Callable[..., Any]:
    original, kind = layer.surrogate, type(layer).__name__

    def surrogate(x: Tensor, *, context: Tensor | None = None) -> Any:
        x = _Mark.apply(x, lambda: marks(name, kind), lambda: marks("the rest of the loss", backward=True))
        found = original(x, context=context)
        z = _Mark.apply(found.z, lambda: marks("the rest of the loss"), lambda: marks(name, kind, backward=True))
        return found._replace(z=z)

    return surrogate


def profile(step: EagerStep | CapturedStep, *, rounds: int = ROUNDS) -> list[Piece]:
    """The pieces of a training step, medians over rounds, in the order in which they begin.

    Takes steps, with a learning rate of 0. Use a step that nobody trains with: moments, trackers and multipliers move.
    """
    marks = Marks(step.batches.examples.device)
    times: list[list[float]] = []
    captured = isinstance(step, CapturedStep) and step.batches.examples.device.type == "cuda"
    step.mark = marks
    with marked(step.loss.flow, marks, without=step.front):
        for number in range(WARM_UP + 1 + rounds):
            # What is captured in a graph passes its marks again at each replay, without a word to us.
            if number <= WARM_UP or not captured:
                marks.forget()
            step(0, number % step.batches.steps_per_epoch, 0.0)
            if number > WARM_UP:
                times.append(marks.seconds())
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (place, kind, backward), values in zip(marks.labels[:-1], zip(*times, strict=True), strict=True):
        totals[place, kind][backward] += statistics.median(values)
    made = [Piece("the batch", "", step.seconds_for_batch(), 0.0)] if isinstance(step, CapturedStep) else []
    return [*made, *(Piece(place, kind, *seconds) for (place, kind), seconds in totals.items())]

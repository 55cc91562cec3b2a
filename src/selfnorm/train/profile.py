"""`profile`: where a training step's time goes, by layer, forward and backward, and by the other parts of a step.

Marks divide a step into pieces; each names the piece that begins there. Around layers they are nodes of the autograd graph, so
that the backward pass reaches them, too. On a GPU a mark is an event inside the captured graph, read after replays; on a CPU it
reads the clock.
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

from selfnorm.bijection import Bijection, Chain, Surrogate
from selfnorm.flow import Flow
from selfnorm.layers.image import Split
from selfnorm.runtime.context import step_context
from selfnorm.train.captured import WARM_UP_STEPS, CapturedStep
from selfnorm.train.step import EagerStep

ROUNDS = 20


class Piece(NamedTuple):
    """A part of a step: a layer, by its place and kind, or something else, which has no backward pass."""

    place: str
    kind: str
    forward: float  # seconds
    backward: float


class Marks:
    """Points in time, in the order in which they are passed, each with the piece that begins there."""

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
        """Returns the seconds from each mark to the next."""
        pairs = zip(self._times, self._times[1:], strict=False)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


class _Mark(torch.autograd.Function):
    """The identity, with a mark in the forward pass and another one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark_forward: Callable[[], None], mark_backward: Callable[[], None]) -> Tensor:
        ctx.mark_backward = mark_backward
        mark_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.mark_backward()
        return grad, None, None


@contextmanager
def marked(flow: Flow, marks: Marks, *, without: Bijection) -> Iterator[None]:
    """Context manager that puts every layer of the flow between two marks, except the layers in `without`."""
    names = {
        id(layer): name
        for name, layer in flow.bijection.named_modules()
        if isinstance(layer, Bijection)
        and not _is_container(layer)
        and not any(part is layer for part in without.modules())
        and not _is_part(layer, flow)
    }

    def between_marks(layer: Bijection, x: Tensor, context: Tensor | None) -> Surrogate:
        if id(layer) not in names:
            return layer.surrogate(x, context=context)
        name, kind = names[id(layer)], type(layer).__name__
        x = _Mark.apply(x, lambda: marks(name, kind), lambda: marks("the rest of the loss", backward=True))
        found = layer.surrogate(x, context=context)
        z = _Mark.apply(found.z, lambda: marks("the rest of the loss"), lambda: marks(name, kind, backward=True))
        return found._replace(z=z)

    with step_context(observer=between_marks):
        yield


def _is_container(layer: Bijection) -> bool:
    return type(layer) is Chain or isinstance(layer, Split)


def _is_part(layer: Bijection, flow: Flow) -> bool:
    """Returns whether the layer belongs to another layer that is not just a container."""
    others = (other for other in flow.bijection.modules() if isinstance(other, Bijection) and other is not layer)
    return any(any(part is layer for part in other.modules()) for other in others if not _is_container(other))


def profile(step: EagerStep | CapturedStep, *, rounds: int = ROUNDS) -> list[Piece]:
    """Returns the pieces of a training step, medians over rounds, in the order in which they begin.

    It takes steps with a learning rate of 0. Use a copy of the step that trains: moments, trackers and multipliers move.
    """
    marks = Marks(step.batches.examples.device)
    times: list[list[float]] = []
    captured = isinstance(step, CapturedStep) and step.batches.examples.device.type == "cuda"
    step.mark = marks
    with marked(step.loss.flow, marks, without=step.preprocessing):
        for number in range(WARM_UP_STEPS + 1 + rounds):
            # A replayed graph passes its marks again without calling them.
            if number <= WARM_UP_STEPS or not captured:
                marks.forget()
            step(0, number % step.batches.steps_per_epoch, 0.0)
            if number > WARM_UP_STEPS:
                times.append(marks.seconds())
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (place, kind, backward), values in zip(marks.labels[:-1], zip(*times, strict=True), strict=True):
        totals[place, kind][backward] += statistics.median(values)
    made = [Piece("the batch", "", step.seconds_for_batch(), 0.0)] if isinstance(step, CapturedStep) else []
    return [*made, *(Piece(place, kind, *seconds) for (place, kind), seconds in totals.items())]

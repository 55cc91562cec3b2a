"""`StepContext`: settings and resources that a training step shares with its layers.

A layer's `surrogate(x)` takes only data. Settings and resources that all layers of a step share are in one object, which is
current while the step runs:

    with step_context(branches=Branches(device), collector=GradientCollector()) as step:
        value, metrics = loss(x)
        step.join()
        value.backward()

    current_step().on_side_stream(x)            # inside a layer

Without a surrounding step the defaults hold: everything runs on the current stream, and gradients go to `.grad`. Each thread
has its own context, since layers run on the thread that calls them; backward passes, which run on autograd's threads, read only
`precision` and `kernel_devices`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

if TYPE_CHECKING:
    from selfnorm.runtime.collector import GradientCollector
    from selfnorm.runtime.rounding import Rounding
    from selfnorm.runtime.streams import Branches

Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class StepContext:
    """Settings and resources shared by the layers of a step.

    branches:        streams for work that nothing waits for yet; None keeps everything on the current stream.
    collector:       where fused layers leave their weight gradients as factors; None makes them ordinary gradients.
    precision:       of products, as set by `runtime.precision.precision`; None leaves torch's own settings.
    inverse_likelihood:  whether learned inverses take half of the likelihood's gradient, as in the paper; None means that a layer
                     keeps the value that it last got from a loss.
    observer:        called in place of each layer's `surrogate`, with the layer and its arguments; used for profiling.
    kernel_devices:  the device types on which Triton kernels replace plain PyTorch.
    trusts_plans:    whether `auto_inverse` follows the layers' last plans without a check that they are still right, for which
                     it would have to wait for the device; used to capture samples.
    rounding:        where layers note what makes rounding errors grow, during an exact evaluation; None means nowhere.
    """

    branches: Branches | None = None
    collector: GradientCollector | None = None
    precision: Precision | None = None
    inverse_likelihood: bool | None = None
    observer: Callable[..., Any] | None = None
    kernel_devices: tuple[str, ...] = ("cuda",)
    trusts_plans: bool = False
    rounding: Rounding | None = None

    def on_side_stream(self, *reads: Tensor, recorded: bool = False) -> AbstractContextManager[Any]:
        """Context manager that runs its block on a side stream, if the step has any. Call `join` before you use the results.

        reads:     tensors that the block reads; they are kept alive until `join`.
        recorded:  whether autograd records what the block does.
        """
        return nullcontext() if self.branches is None else self.branches.on_side_stream(reads, recorded)

    def join(self) -> None:
        """Makes the current stream wait for all work on side streams."""
        if self.branches is not None:
            self.branches.join()

    def collector_for(self, *weights: Tensor) -> GradientCollector | None:
        """Returns the collector for a layer's gradients for these weights; None if the layer returns them to autograd."""
        trained = all(isinstance(weight, nn.Parameter) and weight.requires_grad for weight in weights)
        return self.collector if trained else None

    def surrogate_of(self, layer: Any, x: Tensor, context: Tensor | None) -> Any:
        """Returns `layer.surrogate(x, context=context)`, through the observer if there is one."""
        if self.observer is None:
            return layer.surrogate(x, context=context)
        return self.observer(layer, x, context)


# Layers run on the thread that calls them, so each thread has its own context. Precision and kernel devices also hold for the
# process: backward passes read them on autograd's threads. Blocks of several threads may end in any order.
_process = StepContext()
_thread = threading.local()
_PROCESS_FIELDS = {"precision", "kernel_devices"}
_lock = threading.Lock()
_entered: list[dict[str, Any]] = []


def current_step() -> StepContext:
    """Returns the step that is running on this thread, or the defaults outside of one."""
    return getattr(_thread, "context", None) or _process


@contextmanager
def step_context(**changes: Any) -> Iterator[StepContext]:
    """Context manager in whose block the current step has these fields changed."""
    outside = getattr(_thread, "context", None)
    _thread.context = replace(current_step(), **changes)
    shared = {name: value for name, value in changes.items() if name in _PROCESS_FIELDS}
    try:
        with _in_process(shared) if shared else nullcontext():
            yield _thread.context
    finally:
        _thread.context = outside


@contextmanager
def _in_process(fields: dict[str, Any]) -> Iterator[None]:
    with _lock:
        _entered.append(fields)
        _combine()
    try:
        yield
    finally:
        with _lock:
            _entered[:] = [other for other in _entered if other is not fields]
            _combine()


def _combine() -> None:
    """Sets the context of the process to what the blocks ask for that have not ended; of several, the last one entered."""
    global _process
    _process = StepContext(**{name: value for fields in _entered for name, value in fields.items()})

"""Draws samples by replaying one captured CUDA graph: for few samples, launching each kernel takes longer than running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex, get_args

import torch
from torch import Tensor

from selfnorm.bijection import InversePlan, PlannedInverse
from selfnorm.flow import Flow, Inverse
from selfnorm.runtime.checks import whole_number
from selfnorm.runtime.context import step_context
from selfnorm.runtime.graphs import capturing, error_on_sync, restoring_generator
from selfnorm.runtime.modules import all_modules
from selfnorm.runtime.precision import convolutions_in_tf32, networks_in_bf16, products_in_tf32

GRAPH_DEVICE_TYPE = "cuda"


class Sampler:
    """Draws the n samples that `flow.sample(n, inverse, generator)` would draw; on a GPU faster from the third call on.

    On a GPU, the inverses "auto" and "learned" run as a CUDA graph: the first call runs normally, the second captures the graph,
    later ones replay it. The graph reads the weights from their memory, so it sees updates by training or `load_state_dict`. With
    "auto" it has a fixed number of steps for each layer. It compares the weights with those for which the steps were chosen. If
    they differ, the call runs normally and chooses again, and the graph is captured again if the numbers have changed.

    The graph is also captured again when weights move in memory, change dtype or layout, or when the precision of products
    changes. Calls run without a graph on other devices, and where an inverse waits for the device: the exact and refined ones,
    layers with only an exact one, and "auto" if it uses the exact inverse of a layer.

    The graph keeps the shapes of its capture, such as the size of the images that the flow saw last. A sampler is not
    thread-safe.

    >>> from selfnorm import SelfNormLinear, StandardNormal
    >>> sampler = Sampler(Flow(SelfNormLinear(2), StandardNormal(2)))
    >>> sampler().shape
    torch.Size([1, 2])
    """

    def __init__(
        self, flow: Flow, n: SupportsIndex = 1, inverse: Inverse = "auto", generator: torch.Generator | None = None
    ) -> None:
        if inverse not in get_args(Inverse):
            raise ValueError(f"Sampler: expected inverse to be one of {', '.join(get_args(Inverse))}, got {inverse!r}")
        if not isinstance(flow, Flow):
            raise ValueError(f"Sampler: expected a Flow, got {type(flow).__name__}")
        if not isinstance(generator, torch.Generator | None):
            raise ValueError(f"Sampler: expected generator to be a torch.Generator or None, got {type(generator).__name__}")
        self.flow, self.n, self.inverse, self.generator = flow, whole_number("Sampler", "n", n), inverse, generator
        self._conditions: tuple[Any, ...] | None = None  # of the last call; what follows belongs to calls under them
        self._calls = 0
        self._layers: list[PlannedInverse] = []
        self._weights: list[Tensor] = []  # W and R of the layers
        self._versions: list[int] | None = None  # of the weights at the last call
        self._tried: _FixedSteps | None = None  # the steps for which a capture was last attempted
        self._graph: _CapturedInverse | None = None

    def __repr__(self) -> str:
        return f"Sampler({type(self.flow).__name__}, n={self.n}, inverse={self.inverse!r}, captured={self.captured})"

    @property
    def captured(self) -> bool:
        """Whether the last call left a captured graph."""
        return self._graph is not None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Returns n new samples, (n, *shape)."""
        z = self.flow.base.sample(self.n, generator=self.generator)
        if self.n and self.inverse in ("auto", "learned") and z.device.type == GRAPH_DEVICE_TYPE:
            self._prepare(z)
        if self._graph is not None:
            x = self._graph.run(z)
            if x is not None:
                return x
        # Chooses the steps of "auto" again, and raises the error for samples that are not finite.
        return self.flow.decode(z, self.inverse)

    def _prepare(self, z: Tensor) -> None:
        """Brings the graph up to date for inputs like z.

        Drops it if the conditions have changed. From the second call on, captures it, and again whenever the fixed steps change;
        "learned" has none, so it is captured once.
        """
        conditions = _capture_conditions(self.flow, z)
        if conditions != self._conditions:
            self._conditions, self._calls, self._tried, self._graph = conditions, 0, None, None
            self._layers = list(self.flow.planned_inverses().values())
            weights = [value for layer in self._layers for value in (layer.weight, layer.weight_inv)]
            self._weights = [
                value for value in weights if not value.is_inference()
            ]  # tensors made in inference mode have no version
        self._calls += 1
        if self.inverse == "learned":
            versions = [value._version for value in self._weights]
            if self._calls > 1 and versions != self._versions:  # the first call runs normally, and checks them itself
                self.flow.check_learned_inverses()
            self._versions = versions
        steps = _fixed_steps(self._layers) if self.inverse == "auto" else ()
        if steps != self._tried and self._calls > 1:  # the first call compiled kernels and let libraries allocate
            self._tried = steps
            waits = any(plan.steps is None for plan, _ in steps)
            self._graph = None if waits else _capture_inverse(self._auto if self.inverse == "auto" else self._learned, z)

    def _learned(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x by the learned inverse, and whether it is finite."""
        x = self.flow.bijection.approx_inverse(z)
        return x, torch.isfinite(x).all()

    def _auto(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x by the last plans, and whether it is finite and the plans are still right."""
        with step_context(trusts_plans=True):
            x = self.flow.bijection.auto_inverse(z)
        holds = [layer.plan_holds() for layer in self._layers if layer.last_plan is not None]
        return x, torch.stack([torch.isfinite(x).all(), *holds]).all()


_FixedSteps = tuple[tuple[InversePlan, tuple[int, ...]], ...]


def _fixed_steps(layers: list[PlannedInverse]) -> _FixedSteps:
    """Returns what a graph of `auto_inverse` has fixed: the plan of each layer, and where the copies of its weights lie."""
    plans = [(layer.last_plan, tuple(copy.data_ptr() for copy in layer.planned_weights())) for layer in layers]
    # The measured error changes with the weights, and does not matter here.
    return tuple((plan._replace(error=0.0), copies) for plan, copies in plans if plan is not None)


class _CapturedInverse(NamedTuple):
    """A graph that maps z to x, its input and output memory, and whether x may be used."""

    graph: torch.cuda.CUDAGraph
    z: Tensor
    x: Tensor
    valid: Tensor

    def run(self, z: Tensor) -> Tensor | None:
        self.z.copy_(z)
        self.graph.replay()
        x = self.x.clone()  # because the next replay overwrites it
        return x if self.valid else None


@torch.inference_mode(False)
@torch.no_grad()
def _capture_inverse(function: Callable[[Tensor], tuple[Tensor, Tensor]], z: Tensor) -> _CapturedInverse | None:
    """Returns the function from z to x and whether x may be used, captured for tensors like z.

    None if it waits for the device, which cannot be captured.
    """
    static, graph, stream = torch.empty_like(z).copy_(z), torch.cuda.CUDAGraph(), torch.cuda.Stream(z.device)
    with torch.cuda.device(z.device):
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream), error_on_sync():  # checked first, since a failed capture has side effects
                function(static)
            with restoring_generator(z.device), capturing(graph, stream=stream):
                x, valid = function(static)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return None
    return _CapturedInverse(graph, static, x, valid)


def _capture_conditions(flow: Flow, z: Tensor) -> tuple[Any, ...]:
    """Returns everything that a captured graph relies on: the memory and layout of tensors, and the precision of products."""
    held = [values for module in all_modules(flow) for values in (module._parameters, module._buffers)]
    tensors = [value for values in held for value in values.values() if value is not None]
    layout = [(value.data_ptr(), value.dtype, value.shape, value.stride()) for value in tensors]
    rounding = products_in_tf32(), convolutions_in_tf32(), networks_in_bf16()
    autocast = torch.is_autocast_enabled(z.device.type), torch.get_autocast_dtype(z.device.type)
    return z.device, z.dtype, z.shape, layout, rounding, autocast

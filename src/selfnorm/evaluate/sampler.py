"""Samples again and again, as a CUDA graph: one at a time, what the host asks for kernel by kernel takes longer than the work."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple, SupportsIndex, get_args

import torch
from torch import Tensor, nn

from selfnorm.flow import Flow, Inverse
from selfnorm.runtime.graphs import capturing, generator_kept, waiting_is_an_error
from selfnorm.runtime.precision import convolutions_in_tf32, networks_in_bf16, products_in_tf32

GRAPHS = "cuda"  # the kind of device that has them


class Sampler:
    """Draws n samples a call, those that `flow.sample(n, inverse, generator)` would draw; on a GPU faster from the third call on.

    There the learned inverse runs as a CUDA graph: the first call is plain, the second captures, and the rest replay. The graph
    reads the weights where they lie, so that training or `load_state_dict` between calls is seen. When they lie elsewhere, have
    another dtype or layout, or products are to be rounded otherwise, it is captured anew. On other devices, and where an inverse
    waits for the device (the exact and the refined one, and the exact ones of layers that have no other), every call is plain.

    What a flow knows of shapes, such as the size of the images that it saw last, is that of the capture. Not for several threads
    at once.

    >>> from selfnorm import SelfNormLinear, StandardNormal
    >>> sampler = Sampler(Flow(SelfNormLinear(2), StandardNormal(2)))
    >>> sampler().shape
    torch.Size([1, 2])
    """

    def __init__(
        self, flow: Flow, n: SupportsIndex = 1, inverse: Inverse = "learned", generator: torch.Generator | None = None
    ) -> None:
        if inverse not in get_args(Inverse):
            raise ValueError(f"Sampler: expected inverse to be one of {', '.join(get_args(Inverse))}, got {inverse!r}")
        if not isinstance(flow, Flow):
            raise ValueError(f"Sampler: expected a Flow, got {type(flow).__name__}")
        if not isinstance(generator, torch.Generator | None):
            raise ValueError(f"Sampler: expected generator to be a torch.Generator or None, got {type(generator).__name__}")
        self.flow, self.n, self.inverse, self.generator = flow, _number(n), inverse, generator
        self._state: tuple[Any, ...] | None = None  # of the last call
        self._calls = 0  # at this state
        self._graph: _Graph | None = None

    def __repr__(self) -> str:
        return f"Sampler({type(self.flow).__name__}, n={self.n}, inverse={self.inverse!r}, captured={self.captured})"

    @property
    def captured(self) -> bool:
        """Whether there is a graph, for the weights as the last call found them."""
        return self._graph is not None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """n fresh samples, (n, *shape)."""
        z: Tensor = self.flow.base.sample(self.n, generator=self.generator)  # type: ignore[operator]
        if self.n and self.inverse == "learned" and z.device.type == GRAPHS:
            self._prepare(z)
        if self._graph is not None:
            x = self._graph.run(z)
            if x is not None:
                return x
        return self.flow.decode(z, self.inverse)  # which also says what is wrong with a sample that is not finite

    def _prepare(self, z: Tensor) -> None:
        state = _state_of(self.flow, z)
        if state != self._state:
            self._state, self._calls, self._graph = state, 0, None
        self._calls += 1
        if self._calls == 2:  # the first compiled kernels and made libraries allocate
            self._graph = _captured(self.flow.bijection.approx_inverse, z)


class _Graph(NamedTuple):
    """A captured map, the memory it reads and writes, and whether all that it wrote is finite."""

    graph: torch.cuda.CUDAGraph
    z: Tensor
    x: Tensor
    finite: Tensor

    def run(self, z: Tensor) -> Tensor | None:
        self.z.copy_(z)
        self.graph.replay()
        x = self.x.clone()  # the next replay writes there again
        return x if self.finite else None


@torch.inference_mode(False)
@torch.no_grad()
def _captured(function: Callable[[Tensor], Tensor], z: Tensor) -> _Graph | None:
    """The function of tensors like z as a graph; None for one that waits for the device, which no graph can hold."""
    static, graph, stream = torch.empty_like(z).copy_(z), torch.cuda.CUDAGraph(), torch.cuda.Stream(z.device)
    with torch.cuda.device(z.device):
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream), waiting_is_an_error():  # seen beforehand, since a capture that fails leaves traces
                function(static)
            with generator_kept(z.device), capturing(graph, stream=stream):
                x = function(static)
                finite = torch.isfinite(x).all()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return None
    return _Graph(graph, static, x, finite)


def _state_of(flow: Flow, z: Tensor) -> tuple[Any, ...]:
    """All that a graph takes for granted: where tensors lie and how, and how products are rounded."""
    modules: list[nn.Module] = [flow]
    tensors: list[Tensor] = []
    while modules:  # as `flow.modules()`, at a fraction of its time
        module = modules.pop()
        tensors += (value for held in (module._parameters, module._buffers) for value in held.values() if value is not None)
        modules += (child for child in module._modules.values() if child is not None)
    lie = [(value.data_ptr(), value.dtype, value.shape, value.stride()) for value in tensors]
    rounding = products_in_tf32(), convolutions_in_tf32(), networks_in_bf16()
    autocast = torch.is_autocast_enabled(z.device.type), torch.get_autocast_dtype(z.device.type)
    return z.device, z.dtype, z.shape, lie, rounding, autocast


def _number(n: SupportsIndex) -> int:
    """Of samples, of whatever integer type; none is a number, too."""
    try:
        number = -1 if isinstance(n, bool) else index(n)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"Sampler: expected n to be a whole number of at least 0, got {n!r}")
    return number

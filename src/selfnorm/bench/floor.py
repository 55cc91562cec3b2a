"""Computes the floor of a training step: a lower bound on its time, from its operations and the bytes that it moves.

    floor = max(operations / measured product rate, bytes / measured copy rate)

operations:  of all matrix products and convolutions of one step, forward and backward, as torch counts them in plain PyTorch,
             and of factorisations and solves by the usual formulas: 2/3·m³ for an LU, 2m²k for a solve with k columns.
bytes:       7 passes over each parameter (itself and Adam's two moments read and written, its gradient once), 2 over each
             tracked inverse, and 2 over what the step keeps for its backward pass (written, read).

Both rates are measured at the start of a run: a large product, in the precision that products have in training (bfloat16 only for
flows whose coupling networks run in it), and a large copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm.bench.timing import Effort, Failure, Work, measure
from selfnorm.bijection import Bijection
from selfnorm.kernels.dispatch import used_on

ADAM_PASSES = 7  # over each parameter, in a training step with Adam


@dataclass(frozen=True)
class Ceilings:
    """The highest rates of the machine: operations per second in a product, and bytes per second, read and written, in a copy.

    in_bf16:  whether the product is of bfloat16 numbers instead of float32.
    """

    product: float
    copy: float
    in_bf16: bool = False

    def __str__(self) -> str:
        kind = " of bfloat16 numbers" if self.in_bf16 else ""
        return f"a product{kind} at {_scaled(self.product)}FLOP/s, a copy at {_scaled(self.copy)}B/s"


@dataclass(frozen=True)
class Counts:
    """The counts for one step: operations, bytes moved, and bytes kept for the backward pass."""

    operations: float
    moved: float
    activations: float

    def floor(self, ceilings: Ceilings) -> float:
        """Returns the floor in seconds."""
        return max(self.operations / ceilings.product, self.moved / ceilings.copy)


def measure_ceilings(device: torch.device, seconds: float = 1.0, in_bf16: bool = False) -> Ceilings:
    """Measures both rates with a product of large square matrices and a copy larger than any cache, from the fastest blocks."""
    gpu = device.type != "cpu"
    side, values = (8192, 2**28) if gpu else (1536, 2**25)
    if device.type == "cuda":
        values = min(values, torch.cuda.mem_get_info(device)[0] // 32)
    factors = torch.bfloat16 if in_bf16 else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=factors) for _ in range(2))
    out, source = torch.empty_like(a), torch.zeros(values, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    works = {"product": Work(lambda: torch.mm(a, b, out=out)), "copy": Work(lambda: target.copy_(source))}
    found = {}
    for name, timing in measure(works, device, Effort(seconds=seconds / 2, warm_up=seconds / 4)).items():
        if isinstance(timing, Failure):
            raise RuntimeError(f"bench: expected to measure a {name} for the floor, got {timing.reason}; is the device busy?")
        found[name] = timing.low  # the highest rate is that of the fastest blocks
    return Ceilings(2 * side**3 / found["product"], 2 * source.nbytes / found["copy"], in_bf16)


def count_step(step: Callable[[], object], module: nn.Module) -> Counts:
    """Returns the counts of an eager step of a module. Takes two steps, one in plain PyTorch, whose products torch can count."""
    from torch.utils.flop_counter import FlopCounterMode

    with used_on(), FlopCounterMode(display=False, custom_mapping=_linear_algebra()) as counter:
        step()
    activations = saved_bytes(step, module)
    trackers = [layer.inverse_tracker for layer in module.modules() if isinstance(layer, Bijection)]
    inverses = sum(tracker.weight_inv.nbytes for tracker in trackers if tracker is not None)
    moved = ADAM_PASSES * parameter_bytes(module) + 2 * inverses + 2 * activations
    return Counts(float(counter.get_total_flops()), float(moved), float(activations))


def parameter_bytes(module: nn.Module) -> int:
    """Returns the bytes of all trainable parameters."""
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)


def saved_bytes(step: Callable[[], object], module: nn.Module) -> int:
    """Returns the bytes that a step saves for its backward pass, without parameters and buffers; shared storage counts once."""
    own = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (where := _storage(tensor)) not in own:
            seen[where] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # returning the tensor itself would create a cycle if a function saves its own output

    # Saved tensors live until the backward pass, so different ones have different addresses.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    module.zero_grad(set_to_none=True)  # a graph captured next must not add to the gradients of this step
    return sum(seen.values())


def bare_step(dimensions: int, layers: int, batch: int, device: torch.device) -> Callable[[], None]:
    """Returns a function that does the minimum of a self-normalizing fully connected step: 6 products per layer, and Adam."""
    W, R = ([torch.randn(dimensions, dimensions, device=device, dtype=torch.float32) for _ in range(layers)] for _ in range(2))
    x = torch.randn(batch, dimensions, device=device, dtype=torch.float32)
    parameters = [nn.Parameter(tensor / math.sqrt(dimensions)) for tensor in (*W, *R)]
    weights = [parameter.detach() for parameter in parameters]
    gradients = [torch.zeros_like(weight) for weight in weights]
    optimizer = torch.optim.Adam(parameters, lr=1e-5, fused=True, capturable=device.type == "cuda")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

    def run() -> None:
        for layer in range(layers):
            weight, inverse = weights[layer], weights[layers + layer]
            z = x @ weight.mT
            e = z @ inverse.mT
            u = e @ inverse
            _ = x @ weight
            torch.mm(u.mT, x, out=gradients[layer])
            torch.mm(e.mT, z, out=gradients[layers + layer])
        optimizer.step()

    return run


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _linear_algebra() -> dict[Any, Any]:
    """Returns operation counts for factorisations, solves and in-place products, none of which torch's counter knows."""
    aten = torch.ops.aten

    def lu(shape: Iterable[int], *rest: Any, **options: Any) -> float:
        *batch, rows, _ = shape
        return math.prod(batch) * 2 * rows**3 / 3

    def inverse(shape: Iterable[int], *rest: Any, **options: Any) -> float:
        return 3 * lu(shape)

    def solve(shape: Iterable[int], right: Iterable[int], *rest: Any, **options: Any) -> float:
        return lu(shape) + substitute(shape, right)

    def substitute(shape: Iterable[int], right: Iterable[int], *rest: Any, **options: Any) -> float:
        *batch, rows, _ = shape
        return math.prod(batch) * 2 * rows**2 * list(right)[-1]

    def lu_solve(lu_: Iterable[int], pivots: Any, right: Iterable[int], *rest: Any, **options: Any) -> float:
        return substitute(lu_, right)

    def add_product(shape: Any, left: Iterable[int], right: Iterable[int], *rest: Any, **options: Any) -> float:
        return 2 * math.prod(left) * list(right)[-1]

    def triangular(shape: Iterable[int], right: Iterable[int], *rest: Any, **options: Any) -> float:
        return substitute(shape, right) / 2

    return {
        aten.addmm_: add_product,
        aten.baddbmm_: add_product,
        aten._linalg_slogdet: lu,
        aten.linalg_lu_factor_ex: lu,
        aten.linalg_inv_ex: inverse,
        aten._linalg_solve_ex: solve,
        aten.linalg_lu_solve: lu_solve,
        aten.linalg_solve_triangular: triangular,
    }


def _scaled(value: float) -> str:
    for power, prefix in ((12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}"
    return f"{value:.3g} "

"""Whether a fused kernel can take over from plain PyTorch. Importing this does not import Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from selfnorm.runtime.precision import products_in_tf32

_devices: tuple[str, ...] = ("cuda",)  # where kernels are used


@contextmanager
def used_on(*devices: str) -> Iterator[None]:
    """Kernels on these kinds of devices alone. On none, all is plain PyTorch, which the kernels are compared with.

    On the CPU they run if Triton was imported with TRITON_INTERPRET=1 set: step by step, in Python, for tests.
    """
    global _devices
    before, _devices = _devices, devices
    try:
        yield
    finally:
        _devices = before


def usable(*tensors: Tensor | None) -> bool:
    """Whether kernels can work on these tensors: float32 on the current CUDA device, and nobody traces or transforms the call."""
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    return (
        device.type in _devices
        and (device.type != "cuda" or device.index == torch.cuda.current_device())  # where Triton launches
        and all(
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.device == device
            and tensor.dtype == torch.float32
            and tensor.numel() > 0
            for tensor in given
        )
        and not _watched()
        and triton_is_there()
    )


def _watched() -> bool:
    """Whether somebody wants to know what is done, and not only its outcome."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


@cache
def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def allows_tf32() -> bool:
    """Whether float32 products may be rounded to TF32: torch's own switch says so, where there are units for it."""
    return products_in_tf32() and torch.cuda.is_available()


def input_precision() -> str:
    """What a kernel's products take of their factors, in Triton's words."""
    return "tf32" if allows_tf32() else "ieee"

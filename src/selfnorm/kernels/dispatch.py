"""`usable`: whether Triton kernels can replace plain PyTorch for a call. Importing this module does not import Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from selfnorm.runtime.autograd import is_transformed
from selfnorm.runtime.context import current_step, step_context
from selfnorm.runtime.precision import products_in_tf32


@contextmanager
def used_on(*devices: str) -> Iterator[None]:
    """Context manager that lets kernels run on these device types only. With none, everything is plain PyTorch, for comparison.

    On the CPU, kernels run if Triton was imported with TRITON_INTERPRET=1 set: step by step, in Python, for tests.
    """
    with step_context(kernel_devices=devices):
        yield


def usable(*tensors: Tensor | None) -> bool:
    """Returns whether kernels can work on these tensors: float32 on the current CUDA device.

    In a call that torch traces or transforms they cannot.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    return (
        device.type in current_step().kernel_devices
        and (device.type != "cuda" or device.index == torch.cuda.current_device())  # where Triton launches
        and all(
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.device == device
            and tensor.dtype == torch.float32
            and tensor.numel() > 0
            for tensor in given
        )
        and not _is_traced()
        and has_triton()
    )


def _is_traced() -> bool:
    """Returns whether torch records or transforms the operations of this call, which a kernel would hide from it."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or is_transformed()
    )


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def allows_tf32() -> bool:
    """Returns whether float32 products may be rounded to TF32: torch's switch allows it, and there is a GPU to do it."""
    return products_in_tf32() and torch.cuda.is_available()


def input_precision() -> str:
    """Returns the rounding of factors in the products of kernels, by Triton's name."""
    return "tf32" if allows_tf32() else "ieee"

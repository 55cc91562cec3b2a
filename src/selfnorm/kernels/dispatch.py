"""Whether a fused kernel can take over from plain PyTorch. Importing this does not import Triton."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_enabled = True


@contextmanager
def plain() -> Iterator[None]:
    """No kernels inside: everything in plain PyTorch, as on a CPU. What the kernels are compared with."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def usable(*tensors: Tensor | None) -> bool:
    """Whether kernels can work on these tensors: float32 on one CUDA device, and nobody traces or transforms the call.

    With TRITON_INTERPRET=1, which makes Triton run kernels step by step in Python, tensors on the CPU will do.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    return (
        _enabled
        and (device.type == "cuda" or (device.type == "cpu" and interpreted()))
        and all(tensor.device == device and tensor.dtype == torch.float32 and tensor.numel() > 0 for tensor in given)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and triton_is_there()
    )


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def allows_tf32() -> bool:
    """Whether float32 products may be rounded to TF32: torch's own switch says so."""
    return torch.backends.cuda.matmul.allow_tf32

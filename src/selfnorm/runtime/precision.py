"""The precision of matrix products: full float32, TF32, or bfloat16 in coupling networks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, get_args

import torch
from torch import Tensor

from selfnorm.runtime.context import Precision, current_step, step_context

__all__ = [
    "PRECISIONS",
    "Precision",
    "convolutions_in_tf32",
    "full_float32",
    "networks_in_bf16",
    "precision",
    "products_in_tf32",
    "summed_in_float32",
]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@contextmanager
def precision(value: Precision) -> Iterator[None]:
    """Context manager that sets the precision of products, and restores the previous one afterwards.

    float32:  full precision everywhere.
    tf32:     on CUDA, inputs of float32 products are rounded to TF32 (10 bits of mantissa) and summed in float32; no effect on
              the CPU.
    bf16:     like tf32; in addition coupling networks keep activations in bfloat16 (7 bits) and multiply in it, summing in
              float32, on every device. Parameters, scales, shifts and log-determinants stay float32.

    Layers read the setting when they are called, and again in the backward pass: keep both within the block. A captured graph
    keeps the setting it was captured with. Torch's switches belong to the process: within the block it holds for all threads.

    >>> with precision("bf16"):
    ...     networks_in_bf16()
    True
    """
    if value not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {value!r}")
    with step_context(precision=value), _rounding.to_tf32(value != "float32"):
        yield


def networks_in_bf16() -> bool:
    """Returns whether coupling networks work in bfloat16."""
    return current_step().precision == "bf16"


def products_in_tf32() -> bool:
    """Returns whether float32 matrix products may be rounded to TF32 on CUDA; torch's default is no."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def convolutions_in_tf32() -> bool:
    """Returns whether float32 convolutions may be rounded to TF32 on CUDA; torch's default is yes."""
    return bool(_of_convolutions().fp32_precision == "tf32")


class _Rounding:
    """Torch's switches, which belong to the process, between the first block that asks for something and the end of the last.

    Among blocks that overlap, full float32 comes first, and otherwise the one that was entered last. Torch has an old and a new
    setting. Writing the old one also sets the new one; after the new one is written, torch refuses to read the old one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[tuple[bool]] = []
        self._full = 0
        self._now: bool | None = None
        self._before = ("none", "none")

    @contextmanager
    def to_tf32(self, wanted: bool) -> Iterator[None]:
        """Context manager that allows or forbids TF32 for products and convolutions."""
        entry = (wanted,)
        with self._lock:
            self._wanted.append(entry)
            self._switch()
        try:
            yield
        finally:
            with self._lock:
                self._wanted.remove(entry)  # equal ones want the same
                self._switch()

    def __enter__(self) -> None:
        with self._lock:
            self._full += 1
            self._switch()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._full -= 1
            self._switch()

    def _switch(self) -> None:
        wanted = False if self._full else self._wanted[-1][0] if self._wanted else None
        if wanted == self._now:
            return
        matmul, cudnn, conv = torch.backends.cuda.matmul, torch.backends.cudnn, _of_convolutions()
        if self._now is None:
            self._before = matmul.fp32_precision, conv.fp32_precision
        if wanted is None:
            matmul.allow_tf32, cudnn.allow_tf32 = (value == "tf32" for value in self._before)
            matmul.fp32_precision, conv.fp32_precision = self._before
        else:
            matmul.allow_tf32 = cudnn.allow_tf32 = wanted
        self._now = wanted


_rounding = _Rounding()


def full_float32() -> AbstractContextManager[None]:
    """Context manager that turns off rounding of products: for small differences of large numbers, such as I − RW."""
    return _rounding


def _of_convolutions() -> Any:
    return torch.backends.cudnn.conv  # type: ignore[attr-defined]


def summed_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of two bfloat16 matrices in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()

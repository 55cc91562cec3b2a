"""In which precision products are taken: full float32, TF32, or the coupling networks in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor

from selfnorm.runtime.step import Precision, current_step, step_context

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
    """Take products in this precision within the block; what was set before comes back after it.

    float32:  full precision everywhere.
    tf32:     on CUDA, float32 products are rounded to TF32 (10 bits of mantissa) and summed in float32; on the CPU as float32.
    bf16:     as tf32, and the coupling networks hold their activations in bfloat16 (7 bits) and take its products, summed in
              float32, on every device. Parameters stay float32, and so do scales, shifts and log-determinants.

    It is read when a layer is called, and by the backward pass when that runs: keep both within the block. A captured graph
    stays as it was captured.

    >>> with precision("bf16"):
    ...     networks_in_bf16()
    True
    """
    if value not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {value!r}")
    with step_context(precision=value), _rounding(value != "float32"):
        yield


def networks_in_bf16() -> bool:
    """Whether coupling networks are to work in bfloat16."""
    return current_step().precision == "bf16"


def products_in_tf32() -> bool:
    """Whether matrix products of float32 numbers may be rounded to TF32 on CUDA. Not so unless somebody asks torch for it."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def convolutions_in_tf32() -> bool:
    """The same of convolutions, for which torch does so unless somebody asks it not to."""
    return bool(_of_convolutions().fp32_precision == "tf32")


@contextmanager
def full_float32() -> Iterator[None]:
    """No rounding of products in here, whatever the precision: for small differences of large numbers, such as I − RW."""
    with _rounding(False):
        yield


@contextmanager
def _rounding(to_tf32: bool) -> Iterator[None]:
    """Round products and convolutions in this block, or do not. Torch has two ways to say so, an old one, which sets the new one
    too, and a new one, after which it refuses to read the old."""
    matmul, cudnn, conv = torch.backends.cuda.matmul, torch.backends.cudnn, _of_convolutions()
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.allow_tf32 = cudnn.allow_tf32 = to_tf32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = (value == "tf32" for value in before)
        matmul.fp32_precision, conv.fp32_precision = before


def _of_convolutions() -> Any:
    return torch.backends.cudnn.conv  # type: ignore[attr-defined]


def summed_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices of bfloat16 numbers, in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()

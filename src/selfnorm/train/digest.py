"""Digests, by which a checkpoint shows that it holds what was written."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, uint8

LARGE = 1 << 20  # bytes of a tensor for which another thread pays


def digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """Returns the SHA-256, in hex, of the facts and of the name, dtype, shape and CRC-32 of each tensor.

    It finds every single flipped bit, tensors that were exchanged or renamed, and misses other damage to a tensor with a
    probability of 2⁻³². It guards against accidents, not against forgery: the CRC-32 takes less than half as long as a SHA-256
    of the data would. Tensors: contiguous, on the CPU; threads share the large ones.
    """
    large = [value for value in tensors.values() if value.nbytes >= LARGE]
    if len(large) > 1:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:  # zlib lets other threads run meanwhile
            sums = dict(zip(map(id, large), threads.map(_crc32, large), strict=True))
    else:
        sums = {}
    described = [
        (name, str(value.dtype), list(value.shape), sums[id(value)] if id(value) in sums else _crc32(value))
        for name, value in sorted(tensors.items())
    ]
    return hashlib.sha256(json.dumps([facts, described]).encode()).hexdigest()


def digest_of_scores(scores: NDArray[np.float64]) -> str:
    """Returns the CRC-32 of an array of numbers, in hex."""
    return f"{zlib.crc32(np.ascontiguousarray(scores).data):08x}"


def _crc32(value: Tensor) -> int:
    return zlib.crc32(value.detach().reshape(-1).view(uint8).numpy().data)

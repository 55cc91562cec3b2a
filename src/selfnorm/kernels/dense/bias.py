"""The gradient of a dense layer's bias, as the sum of what arrives and as the relative gradient.

    bias_weights   u_n = z_n·b + 1                                         one launch, reads z
    bias_gradient  Σ_n g_z[n, :]·u_n + Σ g_log_det · b, or Σ_n g_z[n, :]   one launch, reads g_z

z, g_z (N, D), b (D,), g_log_det, u (N,); float32. u depends on the forward pass only, so it can be computed in parallel. A
program sums whole rows or columns: no result depends on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS_PER_PROGRAM = 32  # 128 bytes of each row


def bias_weights(z: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns u_n = z_n·b + 1 (N,), written to `out` if it is given."""
    examples, features = z.shape
    u = z.new_empty(examples) if out is None else out
    block = min(triton.next_power_of_2(features), 1024)
    _bias_weights_kernel[(examples,)](
        z.contiguous(),
        b.contiguous(),
        u,
        features,
        BLOCK=block,
        STEPS=triton.cdiv(features, block),
        num_warps=max(1, block // 256),
    )
    return u


def bias_gradient(grad_z: Tensor, u: Tensor | None = None, b: Tensor | None = None, grad_log_det: Tensor | None = None) -> Tensor:
    """Returns Σ_n grad_z[n, :]·u_n + Σ grad_log_det · b (D,); Σ_n grad_z[n, :] if only grad_z is given."""
    examples, features = grad_z.shape
    grad_b = grad_z.new_empty(features)
    rows = min(triton.next_power_of_2(examples), 128)
    others = (None if other is None else other.contiguous() for other in (u, b, grad_log_det))
    _bias_gradient_kernel[(triton.cdiv(features, COLUMNS_PER_PROGRAM),)](
        grad_z.contiguous(), *others, grad_b, examples, features, ROWS=rows, COLUMNS=COLUMNS_PER_PROGRAM, num_warps=4
    )
    return grad_b


@triton.jit
def _bias_weights_kernel(z, b, u, features, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """An example for each program."""
    row = z + tl.program_id(0).to(tl.int64) * features
    products = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)
        inside = at < features
        products += tl.load(row + at, mask=inside, other=0.0) * tl.load(b + at, mask=inside, other=0.0)
    tl.store(u + tl.program_id(0), tl.sum(products, axis=0) + 1)


@triton.jit
def _bias_gradient_kernel(grad_z, u, b, grad_log_det, grad_b, examples, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns for each program."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < features
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    scale = tl.zeros((ROWS,), tl.float32)
    for start in range(0, examples, ROWS):
        row = start + tl.arange(0, ROWS)
        places = row[:, None].to(tl.int64) * features + column[None, :]
        arriving = tl.load(grad_z + places, mask=(row < examples)[:, None] & inside[None, :], other=0.0)
        if u is not None:
            arriving *= tl.load(u + row, mask=row < examples, other=0.0)[:, None]
        if grad_log_det is not None:
            scale += tl.load(grad_log_det + row, mask=row < examples, other=0.0)
        total += arriving
    result = tl.sum(total, axis=0)
    if b is not None:
        result += tl.sum(scale, axis=0) * tl.load(b + column, mask=inside, other=0.0)
    tl.store(grad_b + column, result, mask=inside)

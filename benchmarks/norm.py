"""Checks whether training keeps ‖T(k)‖ ≤ 0.9, with power iteration and with the bound that `ExpConv2d` uses.

    python benchmarks/norm.py [--json results/norm-cpu.json]

Adam at 1e-3 fits exp(T(k)) to a target that it cannot reach, which drives the kernel against the limit. After every tenth of 150
steps the true norm is computed from the singular values of T(k). About 2 minutes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from record import Cell, parser, record
from selfnorm.layers.exponential import MAX_NORM, TRAINING_TERMS, norm_bound
from selfnorm.linalg.convmatrix import Geometry, conv_matrix, convolve, flip
from selfnorm.report.provenance import provenance

SHAPES = ((4, 14), (8, 10), (16, 7))  # channels, side
ITERATIONS = (1, 4, 16)  # after each step
STEPS, CHECK_EVERY = 150, 10
DEFAULT_GEOMETRY = Geometry()


def worst(channels: int, side: int, iterations: int | None) -> float:
    """Returns the largest true norm over 0.9, with this many power iterations per step, or with the bound if None."""
    torch.manual_seed(0)
    weight = (0.01 * torch.randn(channels, channels, 3, 3)).requires_grad_()
    u = torch.randn(1, channels, side, side)
    x, target = torch.randn(50, channels, side, side), 3 * torch.randn(50, channels, side, side)
    optimizer = torch.optim.Adam([weight], lr=1e-3)

    def kernel() -> Tensor:
        sigma = (
            norm_bound(weight, (side, side)) if iterations is None else convolve(u / u.norm(), weight, DEFAULT_GEOMETRY).norm()
        )
        return weight * (MAX_NORM / sigma.clamp_min(MAX_NORM))

    largest = 0.0
    for step in range(1, STEPS + 1):
        k, term, total = kernel(), x, x
        for i in range(1, TRAINING_TERMS + 1):
            term = convolve(term, k / i, DEFAULT_GEOMETRY)
            total = total + term
        optimizer.zero_grad()
        (total - target).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(iterations or 0):
                u = convolve(convolve(u / u.norm(), weight, DEFAULT_GEOMETRY), flip(weight), DEFAULT_GEOMETRY)
            if step % CHECK_EVERY == 0:
                matrix = conv_matrix(kernel(), (side, side), DEFAULT_GEOMETRY)[0]
                largest = max(largest, float(torch.linalg.matrix_norm(matrix, 2)) / MAX_NORM)
    return largest


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows: list[list[Cell]] = [
        [f"{channels}×{side}×{side}", *(round(worst(channels, side, iterations), 3) for iterations in (*ITERATIONS, None))]
        for channels, side in SHAPES
    ]
    record(
        options.json,
        title="Holding the convolution exponential's norm",
        about=(
            f"The largest true ‖T(k)‖ over its limit {MAX_NORM} in {STEPS} steps of Adam at 1e-3 that drive the kernel "
            "against it. The target is at most 1."
        ),
        columns=["images", *(f"power iteration, {number} a step" for number in ITERATIONS), "the bound"],
        rows=rows,
        provenance=provenance(command="python benchmarks/norm.py"),
    )


if __name__ == "__main__":
    main()

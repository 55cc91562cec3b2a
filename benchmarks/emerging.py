"""Times the inverse of an autoregressive convolution against pixel-by-pixel substitution and other ways to solve for it.

    python benchmarks/emerging.py [--device cpu] [--repeats 9] [--threads 1] [--json results/emerging-cpu.json]

For one 3×3 `AutoregressiveConv2d`, T(w)x = z is solved for x in float64:

raster order:  one pixel after another, for all examples at once: the baseline for "inverse".
dense:         T(w) as a matrix, triangular in the order of pixels, then channels; one triangular solve.
fronts, rows:  the two algorithms of the library.
inverse:       the layer's own method, which chooses between the two, from float32 to float32, with the log-determinant.

Candidates take turns within each round. A figure is the median over rounds, the gain the median of the ratios per round. Runs on
one thread by default, since each piece of work is small, and other load on the machine disturbs two threads far more. Exits with
1 if the gain at 28×28 is below 5. About two minutes.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from record import Cell, at_least, command, parser, record, run
from selfnorm.cli.options import resolve_device
from selfnorm.layers.emerging import AutoregressiveConv2d, Mask, solve_by_fronts, solve_by_rows
from selfnorm.linalg.convmatrix import Geometry, conv_matrix
from selfnorm.report.provenance import provenance
from selfnorm.runtime.device import synchronize
from selfnorm.runtime.threads import cpu_threads

SHAPES = [(1, 28, 28), (4, 14, 14), (16, 7, 7), (12, 16, 16), (3, 32, 32)]
BATCHES = (1, 100)
TARGET = 5.0
CANDIDATES = ("raster order", "dense", "fronts", "rows", "inverse")


def solve_by_pixels(z: Tensor, w: Tensor) -> Tensor:
    """Solves T(w)x = z by substitution, one pixel after another, with as little work per pixel as possible."""
    n, channels, height, width = z.shape
    kh, kw = w.shape[2], w.shape[3]
    centre = w[:, :, kh // 2, kw // 2]
    pull = torch.linalg.solve_triangular(centre, w.flatten(1), upper=True).mT.contiguous()
    alone = torch.linalg.solve_triangular(centre, z.permute(1, 2, 3, 0).reshape(channels, -1), upper=True)
    alone = alone.reshape(channels, height, width, n).permute(1, 2, 3, 0).contiguous()
    # Pixels that are not solved yet are 0, so the centre contributes nothing to the product.
    x = z.new_zeros(n, channels, height + kh - 1, width + kw - 1)
    for i, j in itertools.product(reversed(range(height)), reversed(range(width))):
        x[:, :, i + kh // 2, j + kw // 2] = alone[i, j] - x[:, :, i : i + kh, j : j + kw].reshape(n, -1) @ pull
    return x[:, :, kh // 2 : kh // 2 + height, kw // 2 : kw // 2 + width]


def solve_densely(z: Tensor, w: Tensor) -> Tensor:
    n, channels, height, width = z.shape
    pixels, features = height * width, channels * height * width
    matrix = conv_matrix(w, (height, width), Geometry()).reshape(channels, pixels, channels, pixels)
    matrix = matrix.permute(1, 0, 3, 2).reshape(features, features)
    x = torch.linalg.solve_triangular(matrix, z.permute(2, 3, 1, 0).reshape(features, n), upper=True)
    return x.reshape(height, width, channels, n).permute(3, 2, 0, 1)


@torch.no_grad()
def compare(shape: tuple[int, int, int], batch: int, mask: Mask, repeats: int, device: torch.device) -> list[Cell]:
    layer = AutoregressiveConv2d(shape[0], 3, bias=False, mask=mask).to(device).eval()
    w = torch.where(layer.tap_mask, layer.weight, 0.0).double()
    x = torch.randn(batch, *shape, dtype=torch.float64, device=device)
    z = F.conv2d(x, w, padding=1)
    candidates: dict[str, Callable[[], Tensor]] = {
        "raster order": lambda: solve_by_pixels(z, w),
        "dense": lambda: solve_densely(z, w),
        "fronts": lambda: solve_by_fronts(z, w, mask),
        "rows": lambda: solve_by_rows(z, w),
        "inverse": lambda: layer.inverse(z.float())[0],
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(repeats + 1):
        for name, solve in candidates.items():
            synchronize(device)
            start = time.perf_counter()
            found = solve()
            synchronize(device)
            if round_:
                times[name].append(1e3 * (time.perf_counter() - start))
            else:  # the first round warms up and checks the result
                torch.testing.assert_close(found.double(), x, rtol=1e-4, atol=1e-4)
    gains = [slow / fast for slow, fast in zip(times["raster order"], times["inverse"], strict=True)]
    medians = [round(statistics.median(times[name]), 3) for name in CANDIDATES]
    return ["×".join(map(str, shape)), mask, batch, *medians, round(statistics.median(gains), 1), round(min(gains), 1)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--repeats", type=at_least(1), default=9)
    options.add_argument("--threads", type=at_least(1), default=1)
    chosen = options.parse_args()
    device = resolve_device(chosen.device)
    torch.manual_seed(0)
    masks: tuple[Mask, ...] = ("quadrant", "raster")
    with cpu_threads(chosen.threads):
        rows = [
            compare(shape, batch, mask, chosen.repeats, device)
            for shape, mask, batch in itertools.product(SHAPES, masks, BATCHES)
        ]
        source = provenance(device, command())
    record(
        chosen.json,
        title=f"The inverse of a 3×3 autoregressive convolution, on {source['machine']}",
        about=(
            "Milliseconds to solve T(w)x = z in float64: pixel by pixel in raster order, with T(w) as a dense triangular "
            "matrix, by fronts of independent pixels, and by rows; then of the whole `AutoregressiveConv2d.inverse`, which "
            "uses rows or fronts. Medians over rounds; the gain is raster order over inverse, the lowest is that of the worst "
            f"round. The target at 28×28 is at least {TARGET:g}."
        ),
        columns=["shape", "mask", "batch", *(f"{name} ms" for name in CANDIDATES), "gain", "lowest"],
        rows=rows,
        provenance=source,
    )
    least = min(float(row[-2] or 0) for row in rows if row[0] == "1×28×28")
    if least < TARGET:
        sys.exit(f"emerging: expected a gain of at least {TARGET:g} at 28×28, got {least}")


if __name__ == "__main__":
    run(main)

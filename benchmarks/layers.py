"""Times a self-normalizing layer against its exact twin, and building T(w). Run `make bench`, or with options:

    python benchmarks/layers.py [--device cuda] [--repeats 9] [--json results/layers-cpu.json]

One "step" is `surrogate` and its backward pass at batch 100, without an optimiser. Candidates take turns within each round, so
that a slow phase of the machine affects all of them. A figure is the median over rounds, a ratio the median of the ratios per
round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from record import Cell, at_least, command, parser, record, run
from selfnorm import Bijection, ExactConv2d, ExactLinear, SelfNormConv2d, SelfNormLinear
from selfnorm.cli.options import resolve_device
from selfnorm.linalg.convmatrix import Geometry, conv_matrix
from selfnorm.report.provenance import provenance
from selfnorm.runtime.device import synchronize

BATCH = 100
# The three stages of the paper's 9-layer flow on MNIST, each of 784 dimensions.
CONV_STAGES = [(1, 28, 28), (4, 14, 14), (16, 7, 7)]


def time_rounds(candidates: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Returns the milliseconds of each candidate in each round, after two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(repeats + 2):
        for name, candidate in candidates.items():
            synchronize(device)
            start = time.perf_counter()
            candidate()
            synchronize(device)
            if round_ >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def step(layer: Bijection, x: torch.Tensor) -> Callable[[], None]:
    """Returns a function that runs the training objective forward and backward, with a gradient for x as inside a flow."""
    x = x.requires_grad_()

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        z, log_det, reconstruction = layer.surrogate(x)
        (0.5 * z.square().sum() - log_det.sum() + reconstruction.sum()).backward()

    return run


def six_products(x: torch.Tensor, features: int) -> Callable[[], None]:
    """Returns a function that runs only the matrix products that the self-normalizing step needs."""
    W, R, g = torch.randn(features, features).to(x), torch.randn(features, features).to(x), torch.randn_like(x)
    x = x.detach()

    def run() -> None:
        z = x @ W.T
        e = z @ R.T
        u = e @ R
        _ = g @ W, u.T @ x, e.T @ z

    return run


def compare(name: str, candidates: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, Cell]:
    times = time_rounds(candidates, repeats, device)
    row: dict[str, Cell] = {"name": name}
    row |= {f"{key} ms": round(statistics.median(values), 3) for key, values in times.items()}
    if {"selfnorm", "exact"} <= times.keys():
        ratios = [e / s for e, s in zip(times["exact"], times["selfnorm"], strict=True)]
        row |= {"exact / selfnorm": round(statistics.median(ratios), 2), "lowest": round(min(ratios), 2)}
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--repeats", type=at_least(1), default=9)
    chosen = options.parse_args()
    device = resolve_device(chosen.device)
    torch.manual_seed(0)

    rows = []
    candidates: dict[str, Callable[[], object]]
    for features in (784, 3072):
        x = torch.randn(BATCH, features, device=device)
        candidates = {
            "selfnorm": step(SelfNormLinear(features).to(device), x.clone()),
            "exact": step(ExactLinear(features).to(device), x.clone()),
            "six products": six_products(x, features),
        }
        rows.append(compare(f"linear, D = {features}", candidates, chosen.repeats, device))
    for shape in CONV_STAGES:
        x = torch.randn(BATCH, *shape, device=device)
        weight = torch.randn(shape[0], shape[0], 3, 3, device=device)
        candidates = {
            "selfnorm": step(SelfNormConv2d(shape[0], 3).to(device), x.clone()),
            "exact": step(ExactConv2d(shape[0], 3).to(device), x.clone()),
            "T(w)": partial(conv_matrix, weight, shape[1:], Geometry()),
        }
        rows.append(compare(f"3×3 convolution, {'×'.join(map(str, shape))}", candidates, chosen.repeats, device))

    source = provenance(device, command())
    times = dict.fromkeys(key for row in rows for key in row if key.endswith(" ms"))
    columns = ["name", *times, "exact / selfnorm", "lowest"]
    record(
        chosen.json,
        title=f"One layer's training step, on {source['machine']}",
        about=(
            f"`surrogate` and its backward pass at batch {BATCH}, in milliseconds: medians over rounds, and the lowest ratio of "
            "any round. Six products are the matrix products that a self-normalizing linear layer needs; T(w) is the time to "
            "build that matrix."
        ),
        columns=columns,
        rows=[[row.get(column) for column in columns] for row in rows],
        provenance=source,
    )


if __name__ == "__main__":
    run(main)

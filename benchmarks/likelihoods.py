"""Measures how exact `Flow.log_prob` is in float32 with ill-conditioned weights, and what finding that out costs.

    python benchmarks/likelihoods.py [--device cpu] [--repeats 15] [--threads 1] [--json results/likelihoods-cpu.json]

Accuracy: one `SelfNormLinear` with a random weight of a given condition number, at 200 draws from N(0, I) and 200 of the flow's
own density, against the same weights and data in float64.

Cost: flows for MNIST at batch 100, in eval mode, with linear layers of a given condition number. "float32" is the bare
evaluation, bijection and base, which looks at nothing; "log_prob" the same by the flow's method, once it knows these weights;
"new weights" and "float32, new weights" are the first call after a change, which factorises. Candidates take turns within each
round. A figure is the median over rounds. Runs on one thread by default. Exits with 1 if an error is above 1e-3 nats a dimension
up to a condition number of 1e8. About a minute.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from record import Cell, at_least, command, parser, record, run
from selfnorm import Flow, SelfNormConv2d, SelfNormLinear
from selfnorm.cli.options import resolve_device
from selfnorm.models import conv_flow, fc_flow, glow
from selfnorm.report.provenance import provenance
from selfnorm.runtime.device import synchronize
from selfnorm.runtime.threads import cpu_threads

PROMISED, LARGEST = 1e-3, 1e8  # nats a dimension, up to this condition number
ROWS, BATCH = 200, 100
FLOWS: dict[str, Callable[[], Flow]] = {
    "fully connected": lambda: fc_flow((1, 28, 28), levels=256),
    "convolutional": lambda: conv_flow((1, 28, 28), levels=256),
    "Glow, 2 levels of 4 steps, 64 hidden": lambda: glow((1, 28, 28), steps_per_block=4, hidden=64, levels=256),
}


def conditioned(rows: int, condition: float) -> Tensor:
    """Returns a random matrix whose singular values lie evenly in logarithm between √condition and its inverse."""
    left, right = (torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))[0] for _ in range(2))
    return (left * torch.logspace(0.5, -0.5, rows, base=condition, dtype=torch.float64)) @ right


def bare(flow: Flow, x: Tensor) -> Tensor:
    """Returns log p(x) in x's dtype throughout."""
    z, log_det = flow.bijection(x)
    return flow.base.log_prob(z) + log_det


@torch.no_grad()
def errors(rows: int, condition: float, device: torch.device) -> list[Cell]:
    """Returns a row with the largest errors, in nats a dimension, apart from rounding the result."""
    layer = SelfNormLinear(rows)
    layer.weight.copy_(conditioned(rows, condition))
    flow, exact = Flow(layer).eval(), Flow(copy.deepcopy(layer).double()).eval()
    x = torch.cat([torch.randn(ROWS, rows), exact.decode(torch.randn(ROWS, rows, dtype=torch.float64), "exact").float()])
    flow, exact, x = flow.to(device), exact.to(device), x.to(device)
    expected = exact.log_prob(x.double())
    rounding = expected.abs() * torch.finfo(torch.float32).eps / 2
    found = [
        float((((method(x).double() - expected).abs() - rounding).clamp_min(0) / rows).max())
        for method in (lambda x: bare(flow, x), flow.log_prob)
    ]
    return [f"one layer of {rows}", condition, *(float(f"{each:.2g}") for each in found), *[None] * 4]


@torch.no_grad()
def costs(name: str, condition: float, repeats: int, device: torch.device) -> list[Cell]:
    """Returns a row with the times of a batch, in milliseconds."""
    flow = FLOWS[name]().to(device).eval()
    x = 256 * torch.rand(BATCH, 1, 28, 28, device=device)
    layers = [layer for layer in flow.bijection.modules() if isinstance(layer, SelfNormLinear | SelfNormConv2d)]
    flow.initialize(x)
    for layer in layers:
        stretch(layer, condition)
    changed = layers[0].weight

    def after_a_change(evaluate: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            changed.mul_(1.0 + 1e-6)
            return evaluate(x)

        return call

    candidates: dict[str, Callable[[], Tensor]] = {
        "float32": lambda: bare(flow, x),
        "log_prob": lambda: flow.log_prob(x),
        "float32, new weights": after_a_change(lambda x: bare(flow, x)),
        "new weights": after_a_change(flow.log_prob),
    }
    times: dict[str, list[float]] = {each: [] for each in candidates}
    for round_ in range(repeats + 1):
        for each, call in candidates.items():
            bare(flow, x) if each == "float32" else flow.log_prob(x)  # what the last change left to do
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if round_:
                times[each].append(1e3 * (time.perf_counter() - start))
    return [name, condition, None, None, *(round(statistics.median(each), 3) for each in times.values())]


def stretch(layer: SelfNormLinear | SelfNormConv2d, condition: float) -> None:
    """Gives a layer a weight of about this condition number; a convolution by its centre, of which the image has a multiple."""
    weight = layer.weight
    rows = weight.shape[0]
    if rows == 1:
        return
    matrix = conditioned(rows, condition).to(weight)
    if weight.dim() == 2:
        weight.copy_(matrix)
    else:
        weight.zero_()[:, :, weight.shape[2] // 2, weight.shape[3] // 2] = matrix


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--repeats", type=at_least(1), default=15)
    options.add_argument("--threads", type=at_least(1), default=1)
    chosen = options.parse_args()
    device = resolve_device(chosen.device)
    torch.manual_seed(0)
    with cpu_threads(chosen.threads), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        accuracy = [errors(rows, 10.0**power, device) for rows in (4, 64) for power in (2, 3, 4, 5, 6, 7, 8, 10)]
        times = [costs(name, condition, chosen.repeats, device) for name in FLOWS for condition in (1.0, 3.0, 1e4)]
        source = provenance(device, command())
    record(
        chosen.json,
        title=f"Exact likelihoods of ill-conditioned flows, on {source['machine']}",
        about=(
            "Above: the largest error of log p(x) in float32, in nats a dimension, of a layer whose weight has this condition "
            "number, against float64 at the same weights and data, apart from rounding the result. Below: milliseconds for a "
            "batch of 100 with linear layers of this condition number (convolutions of one channel keep theirs), by a bare "
            "evaluation in float32 and by `Flow.log_prob`, and by both right after a change of the weights. Medians over rounds."
        ),
        columns=[
            "flow",
            "condition",
            "error in float32",
            "error of log_prob",
            "float32 ms",
            "log_prob ms",
            "float32, new weights ms",
            "new weights ms",
        ],
        rows=[*accuracy, *times],
        provenance=source,
    )
    worst = max(float(row[3] or 0) for row in accuracy if float(row[1] or 0) <= LARGEST)
    if worst > PROMISED:
        sys.exit(f"likelihoods: expected errors of at most {PROMISED:g} nats a dimension, got {worst:g}")


if __name__ == "__main__":
    run(main)

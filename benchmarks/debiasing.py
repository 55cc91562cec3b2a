"""Measures cost and variance of the debiased log-determinant gradient, against the bias that it removes.

    python benchmarks/debiasing.py [--json results/debiasing-cpu.json]

R is the best inverse of its size plus noise, scaled to a given ρ(I − RW). The variance is the trace of the covariance over the
squared norm of the exact gradient. It averages over 512 probes, but weights the numbers of terms by their probabilities: few
draws would contain the long sums, which dominate once ρ² is near q. Takes less than a minute.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from record import Cell, parser, record
from selfnorm import SelfNormConv2d, SelfNormLinear
from selfnorm.report.provenance import provenance

RADII = (0.1, 0.3, 0.6)
KEEPS = (0.25, 0.5, 0.75)
PROBES = 512
Layer = SelfNormLinear | SelfNormConv2d


def matrices(layer: Layer, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns W and R, dense and differentiable."""
    basis = torch.eye(math.prod(shape)).reshape(-1, *shape)
    return layer.apply_weight(basis).flatten(1).T, layer.apply_inverse(basis).flatten(1).T


@torch.no_grad()
def radius_of(layer: Layer, shape: tuple[int, ...]) -> float:
    W, R = matrices(layer, shape)
    return float(torch.linalg.eigvals(torch.eye(len(W)) - R @ W).abs().max())


@torch.no_grad()
def disturb(layer: Layer, shape: tuple[int, ...], radius: float) -> None:
    """Moves R away from the best inverse, in a random direction, until ρ(I − RW) equals the radius."""
    layer.load_state_dict({"weight": layer.weight.clone()})  # loading a state without R sets the best R of its size
    best, direction = layer.weight_inv.clone(), torch.randn_like(layer.weight_inv)
    step = 0.01
    for _ in range(8):  # ρ is nearly proportional to the step
        layer.weight_inv.copy_(best + step * direction)
        step *= radius / radius_of(layer, shape)


def gradients(layer: Layer, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns the gradients of log|det W|: the one by Rᵀ, and the exact one."""
    W, R = matrices(layer, shape)
    (learned,) = torch.autograd.grad((W * R.detach().T).sum(), layer.weight, retain_graph=True)
    (exact,) = torch.autograd.grad(torch.linalg.slogdet(W).logabsdet, layer.weight)
    return learned, exact


def second_moment(layer: Layer, probes: Tensor, keep: float) -> float:
    """Returns the mean of ‖gradient‖² of the tail with one probe: as `neumann_tail` with each probe alone, for all N at once."""
    power = layer.apply_inverse(probes).detach()
    weighted = torch.zeros_like(power)
    total, n, share = 0.0, 1, math.inf
    while share > 1e-4 * total:
        power = (power - layer.apply_inverse(layer.apply_weight(power))).detach()
        weighted = weighted + power / keep**n
        share = (1 - keep) * keep**n * mean_square(layer, probes, weighted)
        total, n = total + share, n + 1
    return total


def mean_square(layer: Layer, v: Tensor, u: Tensor) -> float:
    """Returns the mean over examples of ‖∂⟨v, Wu⟩/∂W‖²."""
    total = 0.0
    for some_v, some_u in zip(
        v.split(16), u.split(16), strict=True
    ):  # torch runs the backward pass once per example of the batch
        products = (some_v * layer.apply_weight(some_u)).flatten(1).sum(1)
        (each,) = torch.autograd.grad(products, layer.weight, torch.eye(len(products)), is_grads_batched=True)
        total += float(each.square().sum())
    return total / len(v)


def main() -> None:
    chosen = parser(__doc__).parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # the products are small
    torch.manual_seed(0)
    layers: list[tuple[str, Layer, tuple[int, ...]]] = [
        ("linear, D = 64", SelfNormLinear(64, bias=False), (64,)),
        ("3×3 convolution, 4×8×8", SelfNormConv2d(4, 3, bias=False), (4, 8, 8)),
    ]
    rows: list[list[Cell]] = []
    for name, layer, shape in layers:
        with torch.no_grad():
            layer.weight.add_(0.03 * torch.randn_like(layer.weight))
        for radius in RADII:
            disturb(layer, shape, radius)
            learned, exact = gradients(layer, shape)
            scale, bias = float(exact.norm()), float((exact - learned).norm())
            probes = torch.randn(PROBES, *shape)
            for keep in KEEPS:
                products = 3 + 2 * keep / (1 - keep)
                row: list[Cell] = [name, round(radius_of(layer, shape), 3), keep, round(bias / scale, 4), round(products, 2)]
                if radius**2 >= keep:
                    rows.append([*row, "infinite", None, None])
                    continue
                variance = (second_moment(layer, probes, keep) - bias**2) / scale**2
                even = math.ceil(variance * scale**2 / bias**2)
                rows.append([*row, float(f"{variance:.2g}"), float(f"{variance * products:.2g}"), even])
    record(
        chosen.json,
        title="Debiasing the log-determinant's gradient",
        about=(
            "Rᵀ alone has a bias and no variance; with the tail of the Neumann series it has a variance and no bias. Both are "
            "relative to the norm of the exact gradient, squared for the variance, which is accurate to about 5 %. q is the "
            f"probability of one more term. A product is one with W or R: {64**2:,} multiply–adds for the linear layer, at "
            f"most {9 * 4**2 * 8**2:,} for the convolution. "
            "Variance × products compares values of q at equal work. The last column is the least number of probes for which a "
            "single debiased gradient has a mean squared error no larger than Rᵀ alone; averaged over the steps of an optimiser, "
            "fewer per step are enough."
        ),
        columns=[
            "layer",
            "ρ(I − RW)",
            "q",
            "bias of Rᵀ alone",
            "products a probe",
            "variance with one probe",
            "variance × products",
            "probes to match Rᵀ alone",
        ],
        rows=rows,
        provenance=provenance(command="python benchmarks/debiasing.py"),
    )


if __name__ == "__main__":
    main()

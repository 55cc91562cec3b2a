"""Counts how often the stability bounds of docs/stability.md are wrong, over random layers at an optimum with R = W⁻¹.

    python benchmarks/stability.py [--cases 2000] [--json results/stability-cpu.json]

Each case has a random second moment S of the input, a random W of 1 to 4 dimensions and a random λ. The Jacobian of the expected
gradient field is taken by complex steps, which are exact to rounding, and its eigenvalues are compared with what the bound says.
Neutral directions, along which the likelihood is constant, are projected out. About 2 minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from record import Cell, at_least, parser, record
from selfnorm.report.provenance import provenance

STEP = 1e-30
OBJECTIVES = {
    "the paper's": "8λ·λ_min(S) > 1",
    "one-sided": "always stable",
    "the paper's, white-noise probes": "8λ·(λ_min(S) + 1) > 1",
    "the paper's, symmetric": "4λ(I + WᵀW)⊗S ≻ T",
}
BEHIND = ("N(0, I)", "any Gaussian", "other curvature")


@dataclass
class Layers:
    """Linear layers W, first to last, on inputs with second moment S, before a loss ½zᵀCz + tilt that makes them optimal."""

    S: Tensor
    W: list[Tensor]
    C: Tensor
    tilt: Tensor  # constant part of E[δ hᵀ] of the last layer

    def field(self, weights: Tensor, inverses: Tensor, objective: str, weight: float) -> Tensor:
        """Returns the expected gradient, (batch, parameters), for W and R (batch, layers, D, D)."""
        of_w, of_r = (1.0, 0.0) if objective == "one-sided" else (0.5, 0.5)
        eye = torch.eye(len(self.S), dtype=weights.dtype)
        moments = [self.S.to(weights.dtype).expand_as(weights[:, 0])]
        for k in range(weights.shape[1]):
            moments.append(weights[:, k] @ moments[-1] @ weights[:, k].mT)
        for_w: list[Tensor] = []
        for_r: list[Tensor] = []
        behind = self.C.to(weights.dtype)
        for k in reversed(range(weights.shape[1])):
            W, R, S = weights[:, k], inverses[:, k], moments[k]
            data = behind @ W @ S + self.tilt  # E[δ hᵀ]
            error = R @ W - eye
            seen = S + eye if "probes" in objective else S
            share = 0.5 if "symmetric" in objective else 1.0
            grad_w = of_w * (data - R.mT) + 2 * share * weight * R.mT @ error @ seen
            grad_r = -of_r * (W.mT @ data @ W.mT - W.mT) + 2 * share * weight * error @ seen @ W.mT
            if "symmetric" in objective:
                backwards = (W @ R - eye) @ moments[k + 1]
                grad_w = grad_w + weight * backwards @ R.mT
                grad_r = grad_r + weight * W.mT @ backwards
            for_w.insert(0, grad_w)
            for_r.insert(0, grad_r)
            behind = W.mT @ behind @ W
        return torch.stack([*for_w, *for_r], 1).flatten(1)

    def growth(self, objective: str, weight: float) -> float:
        """Returns the largest real part of the eigenvalues of gradient descent, relative to the largest modulus."""
        point = torch.stack([*self.W, *map(torch.linalg.inv, self.W)])
        steps = torch.eye(point.numel()).view(-1, *point.shape)
        moved = torch.complex(point.expand_as(steps), STEP * steps)
        count = len(self.W)
        matrix = -self.field(moved[:, :count], moved[:, count:], objective, weight).imag.mT / STEP
        neutral = self.neutral()
        if neutral.shape[1]:
            rest = torch.linalg.qr(neutral, mode="complete").Q[:, neutral.shape[1] :]
            matrix = rest.mT @ matrix @ rest
        values = torch.linalg.eigvals(matrix)
        return float(values.real.max() / values.abs().max())

    def neutral(self) -> Tensor:
        """Returns the directions along which the likelihood is constant: rotations of z, and A between two layers."""
        found = []
        for basis in torch.eye(len(self.S) ** 2).view(-1, *self.S.shape):
            for k in range(len(self.W) - 1):
                found.append(self._move({k: basis @ self.W[k], k + 1: -self.W[k + 1] @ basis}))
            if not self.tilt.any():
                root = _power(self.C, 0.5)
                turn = torch.linalg.solve(root, (basis - basis.mT) @ root)
                found.append(self._move({len(self.W) - 1: turn @ self.W[-1]}))
        if not found:
            return torch.zeros(2 * len(self.W) * self.S.numel(), 0)
        U, singular, _ = torch.linalg.svd(torch.stack(found, 1), full_matrices=False)
        return U[:, singular > 1e-9 * singular[0]]

    def _move(self, changes: dict[int, Tensor]) -> Tensor:
        zero = torch.zeros_like(self.S)
        of_w = [changes.get(k, zero) for k in range(len(self.W))]
        of_r = [-torch.linalg.solve(W, dW) @ torch.linalg.inv(W) for W, dW in zip(self.W, of_w, strict=True)]
        return torch.stack([*of_w, *of_r]).flatten()


def _power(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values**power @ vectors.mT


def _rotation(dimensions: int) -> Tensor:
    return torch.linalg.qr(torch.randn(dimensions, dimensions)).Q


def _positive(dimensions: int) -> Tensor:
    """Returns a random symmetric matrix with a condition number of up to 10, 100 or 10,000."""
    spread = (10.0, 1e2, 1e4)[int(torch.randint(3, ()))]
    rotation = _rotation(dimensions)
    return rotation * spread ** (torch.rand(dimensions) - 0.5) @ rotation.mT


def one_layer(behind: str) -> Layers:
    """Returns a random layer at its optimum."""
    D = int(torch.randint(1, 5, ()))
    S, C = _positive(D), torch.eye(D) if behind == "N(0, I)" else _positive(D)
    W = _power(C, -0.5) @ _rotation(D) @ _power(S, -0.5)
    if behind != "other curvature":
        return Layers(S, [W], C, torch.zeros(D, D))
    transposition = torch.eye(D * D).view(D, D, D, D).transpose(0, 1).reshape(D * D, D * D)
    while True:  # until W is a strict minimum of the NLL
        C = math.exp(float(torch.rand(())) * 6 - 1) * _positive(D)
        hessian = torch.kron(W.mT @ C @ W, S) + transposition
        if torch.linalg.eigvalsh(hessian)[0] > 1e-3:
            return Layers(S, [W], C, torch.linalg.inv(W).mT - C @ W @ S)


def two_layers() -> Layers:
    """Returns two random linear layers in a row that whiten their input together."""
    D = int(torch.randint(1, 4, ()))
    S = _positive(D)
    first = _rotation(D) @ _power(_positive(D), 0.5)
    second = _rotation(D) @ _power(first @ S @ first.mT, -0.5)
    return Layers(S, [first, second], torch.eye(D), torch.zeros(D, D))


def smallest_moment(layers: Layers) -> float:
    """Returns the smallest eigenvalue of E[hhᵀ] over the layers."""
    found, S = [], layers.S
    for W in layers.W:
        found.append(float(torch.linalg.eigvalsh(S)[0]))
        S = W @ S @ W.mT
    return min(found)


def says_stable(objective: str, layers: Layers, weight: float) -> bool:
    """Returns what the bound says."""
    smallest = smallest_moment(layers)
    if objective == "one-sided":
        return True
    if "probes" in objective:
        return 8 * weight * (smallest + 1) > 1
    if "symmetric" in objective:
        D, W = len(layers.S), layers.W[0]
        transposition = torch.eye(D * D).view(D, D, D, D).transpose(0, 1).reshape(D * D, D * D)
        form = 2 * weight * torch.kron(torch.eye(D) + W.mT @ W, layers.S) - transposition / 2
        return float(torch.linalg.eigvalsh(form)[0]) > 0
    return 8 * weight * smallest > 1


def count(objective: str, draw: Callable[[], Layers], cases: int) -> list[Cell]:
    """Returns the number of cases, of unstable ones, of those on each side that the bound gets wrong, and the largest λ·λ_min."""
    torch.manual_seed(0)
    unstable = missed = feared = 0
    largest = 0.0
    for _ in range(cases):
        layers = draw()
        smallest = smallest_moment(layers)
        scaled = 10 ** float(torch.rand(()) * 4 - 2)  # 8λ·λ_min(S)
        weight = scaled / 8 / (smallest + 1 if "probes" in objective else smallest)
        grows = layers.growth(objective, weight) > 1e-10
        stable = says_stable(objective, layers, weight)
        unstable += grows
        missed += grows and stable
        feared += not grows and not stable
        largest = max(largest, weight * smallest) if grows else largest
    return [cases, unstable, missed, feared, float(f"{largest:.3g}") if largest else None]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", type=at_least(1), default=2000, help="per row")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rows: list[list[Cell]] = [
        [objective, behind, bound, *count(objective, partial(one_layer, behind), chosen.cases)]
        for objective, bound in OBJECTIVES.items()
        for behind in BEHIND
    ]
    for objective in ("the paper's", "one-sided"):
        rows.append([objective, "two linear layers", OBJECTIVES[objective], *count(objective, two_layers, chosen.cases)])
    record(
        chosen.json,
        title="Stability of the optimum: bounds against eigenvalues",
        about=(
            "Random layers of 1 to 4 dimensions at an optimum with R = W⁻¹, with random S = E[hhᵀ], W and λ. Unstable: an "
            "eigenvalue of the Jacobian of the gradient field has a positive real part. The next two columns count cases the "
            "bound gets wrong: unstable although it says stable, and the reverse. The last column is the largest λ·λ_min(S) "
            "of an unstable case. What is behind the layer is fixed, except in the last two rows, where two linear layers train."
        ),
        columns=[
            "objective",
            "behind the layer",
            "bound",
            "cases",
            "unstable",
            "wrongly stable",
            "wrongly unstable",
            "largest unstable λ·λ_min(S)",
        ],
        rows=rows,
        provenance=provenance(command=f"python benchmarks/stability.py --cases {chosen.cases}"),
    )


if __name__ == "__main__":
    main()

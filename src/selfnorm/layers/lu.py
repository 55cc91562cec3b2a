"""A linear map by its factors, W = PLU, as most flow libraries offer it: determinant and inverse without a factorisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfnorm.bijection import Bijection
from selfnorm.layers.linear import drop_stored_inverse
from selfnorm.linalg.blocks import Dense
from selfnorm.linalg.condition import KnownCondition, estimate_norm, norm_probes
from selfnorm.linalg.factors import lu_factors, to_float64
from selfnorm.runtime.autograd import in_full_precision
from selfnorm.runtime.checks import describe, expect_like, expect_shape, positive_int
from selfnorm.runtime.context import current_step
from selfnorm.runtime.rounding import note_bias, note_condition


class LULinear(Bijection):
    """z = PLUx + b with P a fixed permutation, L unit lower and U upper triangular: exact likelihood, O(D²) per example.

    Parameters: factors (D, D), L below the diagonal, log|uᵢᵢ| on it, U above it; bias (D,). Buffers: permutation (D,), row i of
    PLU being row permutation[i] of LU, and signs (D,) of U's diagonal, both fixed: they come from factorising the initial weight,
    I + Xavier-normal noise of gain 0.01. A state with a `weight` in place of the factors, such as an `ExactLinear`'s, is
    factorised as it is loaded.
    Kingma & Dhariwal (2018), section 3.2.

    >>> layer = LULinear(3)
    >>> x = torch.randn(5, 3)
    >>> z, log_det = layer(x)
    >>> bool(torch.allclose(layer.inverse(z)[0], x, atol=1e-5))
    True
    """

    takes_context = False
    notes_rounding = True
    permutation: Tensor
    signs: Tensor
    bias: Tensor | None

    def __init__(self, features: int, bias: bool = True) -> None:
        super().__init__()
        self.features = features = positive_int(type(self).__name__, "features", features)
        start = torch.eye(features) + nn.init.xavier_normal_(torch.empty(features, features), gain=0.01)
        factors, permutation, signs = _factorise(f"LULinear({features})", start)
        self.factors = nn.Parameter(factors)
        self.bias = nn.Parameter(torch.zeros(features)) if bias else None
        self.register_buffer("permutation", permutation)
        self.register_buffer("signs", signs)
        self._condition = KnownCondition()

    def extra_repr(self) -> str:
        return f"{self.features}, bias={self.bias is not None}"

    @property
    def weight(self) -> Tensor:
        """W = PLU (D, D)."""
        upper = self.factors.triu(1).diagonal_scatter(self._diagonal(self.factors))
        return (upper + self.factors.tril(-1) @ upper)[self.permutation]

    @in_full_precision
    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_input(x)
        self._note_condition(x)
        half = torch.addmm(x * self._diagonal(self.factors), x, self.factors.triu(1).mT)  # Ux
        z = torch.addmm(half, half, self.factors.tril(-1).mT)[:, self.permutation]
        z = z if self.bias is None else z + self.bias
        note_bias(self.bias, z)
        return z, self._log_det(x)

    @in_full_precision
    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Solves two triangular systems in float64."""
        self._check_input(z)
        self._note_condition(z)
        packed = to_float64(self.factors)
        shifted = to_float64(z if self.bias is None else z - self.bias)
        back = shifted[:, self.permutation.argsort().to(shifted.device)].mT
        # A triangular solve reads only its own triangle.
        half = torch.linalg.solve_triangular(packed, back, upper=False, unitriangular=True)
        upper = packed.diagonal_scatter(self._diagonal(packed))
        return torch.linalg.solve_triangular(upper, half, upper=True).mT.to(z), -self._log_det(z)

    def _note_condition(self, x: Tensor) -> None:
        if current_step().rounding is not None:  # training must not wait for the device
            note_condition(self, self._condition.of(self.factors, (), self._estimate_condition), x)

    def _estimate_condition(self, factors: Tensor) -> Tensor:
        """Returns an estimate of the condition number of LU, which is W's: P is a permutation."""
        packed = to_float64(factors)
        upper = packed.triu(1).diagonal_scatter(self._diagonal(packed))
        lower = packed.tril(-1).diagonal_scatter(torch.ones_like(packed.diagonal()))
        solve = torch.linalg.solve_triangular
        probes = norm_probes(self.features, packed)
        largest = estimate_norm(lambda v: lower @ (upper @ v), lambda v: upper.mT @ (lower.mT @ v), probes)
        smallest = estimate_norm(
            lambda v: solve(upper, solve(lower, v, upper=False), upper=True),
            lambda v: solve(lower.mT, solve(upper.mT, v, upper=False), upper=True),
            probes,
        )
        return largest * smallest

    def _log_det(self, x: Tensor) -> Tensor:
        return to_float64(self.factors.diagonal()).sum().to(x).repeat(x.shape[0])

    def _diagonal(self, factors: Tensor) -> Tensor:
        """Returns the diagonal of U (D,), in the precision of the factors."""
        return self.signs.to(factors) * factors.diagonal().exp()

    def _check_input(self, x: Tensor) -> None:
        expect_shape(self, x, self.features)
        expect_like(self, x, self.factors)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.shape == self.factors.shape and prefix + "factors" not in state_dict:
            parts = zip(("factors", "permutation", "signs"), _factorise(describe(self), weight), strict=True)
            del state_dict[prefix + "weight"]
            state_dict.update({prefix + name: part for name, part in parts})
            drop_stored_inverse(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@torch.no_grad()
def _factorise(who: str, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the factors, permutation and signs of a weight; raises `SingularWeightError` if it has none."""
    packed, pivots = lu_factors(who, weight, Dense())
    diagonal = packed.diagonal()
    permutation = torch.lu_unpack(packed, pivots, unpack_data=False)[0].argmax(1)
    factors = packed - diagonal.diag() + diagonal.abs().log().diag()
    return factors.to(weight), permutation.to(weight.device), diagonal.sign().to(weight)

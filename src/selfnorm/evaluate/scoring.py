"""Scores rows of any size, also where float32 or even float64 overflows."""

from __future__ import annotations

import torch
from torch import Tensor

from selfnorm.data.batches import Examples
from selfnorm.evaluate.likelihood import mean_log_likelihoods
from selfnorm.flow import Flow
from selfnorm.linalg.wide import in_float64

FARTHEST = 1e140  # the square of anything farther leaves float64, and a few layers must not


def scores_of(
    flow: Flow, x: Tensor, levels: int | None, device: torch.device, *, batch_size: int = 500, samples: int = 1, seed: int = 0
) -> Tensor:
    """Returns the exact log-likelihood of each row, (N,), averaged over `samples` draws of noise.

    x:  grey levels, or real numbers in float64. They are scored in the flow's own type, and in float64 where that overflows; a
        row beyond ±1e140 has the log-likelihood −∞.
    """

    def scored(flow: Flow, rows: Tensor) -> Tensor:
        return mean_log_likelihoods(flow, Examples.exact(rows, levels, device), batch_size=batch_size, samples=samples, seed=seed)

    if levels is not None:
        return scored(flow, x)
    found = torch.full((len(x),), -torch.inf, dtype=torch.float64)
    if next(flow.parameters()).dtype != torch.float64:
        rows = x.float()
        held = torch.isfinite(rows).flatten(1).all(1)
        try:
            found[held] = scored(flow, rows[held])
        except ValueError:  # a latent overflows
            found.fill_(-torch.inf)
    again = torch.isinf(found) & (x.abs() <= FARTHEST).flatten(1).all(1)
    if again.any():
        found[again] = scored(in_float64(flow), x[again])
    return found

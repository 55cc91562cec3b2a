"""Exact likelihoods of data sets, in nats and bits per dimension, with standard errors."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from selfnorm.data.batches import Examples
from selfnorm.data.prepare import FEW_EXAMPLES
from selfnorm.flow import Flow
from selfnorm.runtime.precision import Precision
from selfnorm.runtime.precision import precision as using_precision

MAX_REFERENCE_EXAMPLES = 10_000


@dataclass(frozen=True)
class Likelihood:
    """Exact negative log-likelihood of a set of examples.

    nll:             mean over examples and dequantisation samples, in nats.
    standard_error:  of that mean over examples, each example's samples averaged first.
    """

    nll: float
    standard_error: float
    bits_per_dim: float
    examples: int
    samples: int

    def __str__(self) -> str:
        how = f"{self.examples} example{'s' * (self.examples > 1)}"
        how += f" × {self.samples} dequantisation samples" if self.samples > 1 else ""
        how += ", too few to rely on" if self.examples < FEW_EXAMPLES else ""
        error = f" ± {self.standard_error:.2f}" if math.isfinite(self.standard_error) else ""
        return f"{self.nll:.2f}{error} nats ({self.bits_per_dim:.3f} bits/dim; exact, {how})"


def bits_per_dim(nats: float, dimensions: int) -> float:
    """Converts nats per example to bits per dimension: nats / (D·log 2)."""
    return nats / (dimensions * math.log(2))


class _Evaluated(NamedTuple):
    """A module in eval mode for the sake of `users` blocks, and the mode of each of its parts before the first of them."""

    users: int
    training: list[tuple[nn.Module, bool]]


_evaluated: weakref.WeakKeyDictionary[nn.Module, _Evaluated] = weakref.WeakKeyDictionary()
_evaluated_lock = threading.Lock()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context manager that switches to eval mode without gradients, and restores the previous modes afterwards.

    Several threads may use it on the same module: the last one that leaves restores them.
    """
    with _evaluated_lock:
        known = _evaluated.get(module)
        _evaluated[module] = _Evaluated(1, _modes(module)) if known is None else known._replace(users=known.users + 1)
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        with _evaluated_lock:
            users, training = _evaluated.pop(module)
            if users > 1:
                _evaluated[module] = _Evaluated(users - 1, training)
            else:
                for part, mode in training:
                    part.training = mode


def _modes(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(part, part.training) for part in module.modules()]


def log_likelihoods(flow: Flow, batches: Iterable[Tensor]) -> Tensor:
    """Returns the exact log p(x) of every example, (N,) in float64 on the CPU."""
    with evaluating(flow):
        return torch.cat([flow.log_prob(x).double().cpu() for x in batches])


def mean_log_likelihoods(
    flow: Flow,
    examples: Examples,
    *,
    batch_size: int = 500,
    samples: int = 1,
    seed: int = 0,
    watch: Callable[[], None] = lambda: None,
    precision: Precision = "float32",
) -> Tensor:
    """Returns the exact log-likelihood of each example, (N,), averaged over `samples` draws of dequantisation noise.

    samples:    ignored for real-valued data, which needs no noise.
    watch:      called before each batch; it may raise to interrupt a long evaluation.
    precision:  of the products, independent of training. Anything but float32 changes likelihoods by rounding errors.
    """
    draws = 1 if examples.levels is None else samples

    def watched(draw: int) -> Iterator[Tensor]:
        for x in examples.in_order(batch_size, seed, draw):
            watch()
            yield x

    with using_precision(precision):
        return torch.stack([log_likelihoods(flow, watched(draw)) for draw in range(draws)]).mean(0)


def likelihood(
    flow: Flow,
    examples: Examples,
    *,
    batch_size: int = 500,
    samples: int = 1,
    seed: int = 0,
    watch: Callable[[], None] = lambda: None,
    precision: Precision = "float32",
) -> Likelihood:
    """Returns the exact NLL of a set of examples; for the arguments see `mean_log_likelihoods`."""
    scores = mean_log_likelihoods(
        flow, examples, batch_size=batch_size, samples=samples, seed=seed, watch=watch, precision=precision
    )
    nll = -scores.mean().item()
    error = scores.std().item() / math.sqrt(len(scores)) if len(scores) > 1 else math.inf
    draws = 1 if examples.levels is None else samples
    return Likelihood(nll, error, bits_per_dim(nll, math.prod(examples.shape)), len(scores), draws)


def reference_scores(flow: Flow, train: Examples, batch_size: int, seed: int, watch: Callable[[], None] = lambda: None) -> Tensor:
    """Returns the sorted log-likelihoods of up to 10,000 training examples, to compare the scores of new examples with."""
    some = train.subset(MAX_REFERENCE_EXAMPLES, seed, "reference")
    return mean_log_likelihoods(flow, some, batch_size=batch_size, seed=seed, watch=watch).sort().values

"""`SelfNormDensity`: a self-normalizing flow as a scikit-learn density estimator and outlier detector."""

from __future__ import annotations

import warnings
from dataclasses import replace
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, DensityMixin, OutlierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from selfnorm.bijection import Chain, located
from selfnorm.data.dataset import Dataset
from selfnorm.evaluate.likelihood import evaluating
from selfnorm.flow import Flow, Inverse
from selfnorm.layers.affine import Standardize
from selfnorm.runtime.checks import count
from selfnorm.train.loop import Trainer, threads
from selfnorm.train.recipes import recipe_for
from selfnorm.train.stopping import DivergedError

Floats = NDArray[np.float64]


class SelfNormDensity(OutlierMixin, DensityMixin, BaseEstimator):  # type: ignore[misc]
    """The density of a table, learned by a flow of linear layers and splines; exact log-likelihoods, samples and outliers.

    layers:               linear layers, with learned splines between them; by default by the number of columns.
    learning_rate:        of Adam; likewise.
    kind:                 "selfnorm" for layers that learn their inverse, "exact" for exact gradients.
    reconstruction_weight: λ, how much the learned inverses matter beside the likelihood.
    max_steps:            optimiser steps of batch_size rows at most, though at least one epoch; training stops before that if
                          validation_fraction of the rows stops improving.
    patience:             how many validations without a new best it waits for, a validation every 2 % of max_steps.
    contamination:        the part of the training rows that `predict` calls outliers.
    random_state:         seeds everything: split, weights, order.
    device:               where to train; the fitted flow scores on the CPU, in float64.

    Fitted: flow_, a `Flow`; offset_, the log-likelihood below which a row is an outlier; validation_nll_; n_steps_.

    >>> rows = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = SelfNormDensity(max_steps=100, random_state=0).fit(rows)
    >>> model.score_samples(rows[:3]).shape, model.sample(5).shape
    ((3,), (5, 2))
    """

    def __init__(
        self,
        *,
        layers: int | None = None,
        kind: str = "selfnorm",
        reconstruction_weight: float = 10.0,
        max_steps: int = 5000,
        batch_size: int = 100,
        learning_rate: float | None = None,
        validation_fraction: float = 0.1,
        patience: int = 10,
        contamination: float = 0.1,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.layers = layers
        self.kind = kind
        self.reconstruction_weight = reconstruction_weight
        self.max_steps = max_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.contamination = contamination
        self.random_state = random_state
        self.device = device

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Learn the density of the rows of X."""
        table = validate_data(self, X, dtype=np.float64, ensure_min_samples=3)
        for name, value in (("contamination", self.contamination), ("validation_fraction", self.validation_fraction)):
            if not isinstance(value, Real) or not 0 < value <= 0.5:
                raise ValueError(f"SelfNormDensity: expected {name} in (0, 0.5], got {value!r}")
        count("SelfNormDensity", "max_steps", self.max_steps)
        random = check_random_state(self.random_state)
        order = random.permutation(len(table))
        held_out = max(1, round(self.validation_fraction * len(table)))
        rows = torch.from_numpy(table[order])
        # Here rather than by the recipe: in float32 a column such as 1e8 ± 1 would have lost its digits already.
        standardize = Standardize(rows.shape[1]).double()
        with located("SelfNormDensity"):
            standardize.initialize(rows[held_out:])
        rows = standardize(rows)[0].float()
        dataset = Dataset("table", rows[held_out:], rows[:held_out], rows[:held_out])
        recipe = replace(
            recipe_for("table", dataset.shape, len(dataset.train), self.max_steps, self.batch_size),
            name="SelfNormDensity",
            kind=self.kind,
            standardize=False,
            weight=self.reconstruction_weight,
            patience=self.patience,
            seed=int(random.randint(2**31)),
        )
        given: dict[str, Any] = {"layers": self.layers, "learning_rate": self.learning_rate}
        recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
        trainer = Trainer(recipe, dataset, device=self.device)
        trainer.start()
        try:
            best = trainer.run()
        except DivergedError:
            best = trainer.best()
            if best.progress["best_nll"] is None:  # not even one validation
                raise
            warnings.warn(
                f"SelfNormDensity: diverged after {best.progress['step']} steps, whose weights are kept; try a "
                "larger reconstruction_weight or a smaller learning_rate",
                ConvergenceWarning,
                stacklevel=2,
            )
        learned = best.flow().double()
        self.flow_ = Flow(Chain(standardize, learned.bijection), learned.base).eval()
        self.validation_nll_ = best.progress["best_nll"] - standardize.scale.log().sum().item()  # in X's units
        self.n_steps_ = trainer.progress.step
        self.offset_ = float(np.quantile(self._log_prob(table), self.contamination))
        return self

    def score_samples(self, X: ArrayLike) -> Floats:
        """The exact log-likelihood of each row, in nats."""
        check_is_fitted(self)
        return self._log_prob(validate_data(self, X, dtype=np.float64, reset=False))

    def score(self, X: ArrayLike, y: object = None) -> float:
        """The mean log-likelihood of the rows; higher is better, so that cross-validation can choose by it."""
        return float(self.score_samples(X).mean())

    def decision_function(self, X: ArrayLike) -> Floats:
        """score_samples − offset_: negative for outliers."""
        scores: Floats = self.score_samples(X) - self.offset_
        return scores

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:
        """−1 for outliers, 1 for the others."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def sample(self, n_samples: int = 1, random_state: Any = None, inverse: Inverse = "exact") -> Floats:
        """Rows drawn from the learned density."""
        check_is_fitted(self)
        generator = torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31)))
        with evaluating(self.flow_), threads(1):
            rows: Floats = self.flow_.sample(n_samples, inverse, generator).numpy()
        return rows

    def _log_prob(self, table: Floats) -> Floats:
        with evaluating(self.flow_), threads(1):
            # A copy: the rows may be a read-only memory map, which torch does not take.
            batches = [self.flow_.log_prob(torch.tensor(table[i : i + 10_000])) for i in range(0, len(table), 10_000)]
        scores: Floats = torch.cat(batches).numpy()
        return scores

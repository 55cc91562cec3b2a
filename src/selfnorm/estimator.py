"""`SelfNormDensity`, a self-normalizing flow as a scikit-learn density estimator and outlier detector."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, DensityMixin, OutlierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from selfnorm.bijection import Chain, located
from selfnorm.data.dataset import Dataset
from selfnorm.data.dependence import expect_independent
from selfnorm.data.labels import listed
from selfnorm.data.outliers import describe_crowd, describe_outliers
from selfnorm.data.prepare import note_on_constants, note_on_size, prepare
from selfnorm.data.resolution import WIDE_SPREADS, expect_distinguishable, expect_spread
from selfnorm.evaluate.likelihood import evaluating
from selfnorm.evaluate.scoring import scores_of
from selfnorm.flow import Flow, Inverse
from selfnorm.layers.affine import Standardize
from selfnorm.runtime.checks import positive_int
from selfnorm.runtime.device import available_device
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.experiments import recipe_for
from selfnorm.train.loop import Trainer
from selfnorm.train.stopping import DivergedError, StoppedError

Floats = NDArray[np.float64]
FLOATS = (np.float64, np.float32)  # anything else becomes the first


class SelfNormDensity(OutlierMixin, DensityMixin, BaseEstimator):  # type: ignore[misc]
    """Learns the density of a table with a flow of linear layers and splines; gives exact log-likelihoods, samples and outliers.

    layers:                 the number of linear layers, with learned splines between them; by default chosen by the number of
                            columns.
    learning_rate:          of Adam; by default chosen by the number of columns.
    kind:                   of the linear layers: "selfnorm" learns its inverse, "exact" has exact gradients; the others are
                            "tracked", "sketch", "relative" and "lu", which docs/choosing.md compares.
    reconstruction_weight:  λ, the weight of the reconstruction error relative to the likelihood.
    max_steps:              the largest number of optimiser steps, each on batch_size rows, but at least one epoch. Training
                            stops earlier if the likelihood of the held-out rows, validation_fraction of all, stops improving.
    patience:               the number of validations without a new best before training stops; there is one validation
                            every 2 % of max_steps.
    contamination:          the fraction of the training rows that `predict` labels as outliers.
    set_outliers_aside:     whether rows that lie far from all others are left out of training and validation: at most one in a
                            hundred, or in a small table one in 20, up to three. They are scored like any others.
    random_state:           the seed for everything: split, weights, order.
    device:                 where to train, as "cuda", or "auto" for an accelerator if there is one; the fitted flow scores on
                            the CPU, in float64.
    on_interrupt:           what Ctrl-C does during training: "raise" a KeyboardInterrupt, or "keep" the best flow so far, with a
                            ConvergenceWarning. Before the first step there is none to keep, so both raise.

    Attributes after fit: flow_, a `Flow` of the columns that vary; offset_, the log-likelihood below which a row is an outlier;
    validation_nll_, the best validation NLL in nats, which says little if fewer than 30 rows were held out; n_steps_, the number
    of steps taken; set_aside_, the rows that were neither trained nor validated on because they lie far from all others;
    constant_columns_ and constant_values_, the columns that are constant in the training rows, and their values.

    Constant columns contribute nothing to a likelihood; a row that differs there has the log-likelihood −∞, and samples have the
    constants. Columns that are linear functions of others raise ValueError.

    >>> rows = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = SelfNormDensity(max_steps=100, random_state=0).fit(rows)
    >>> model.score_samples(rows[:3]).shape, model.sample(5).shape
    ((3,), (5, 2))
    """

    flow_: Flow

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
        set_outliers_aside: bool = True,
        random_state: Any = None,
        device: str = "cpu",
        on_interrupt: str = "raise",
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
        self.set_outliers_aside = set_outliers_aside
        self.random_state = random_state
        self.device = device
        self.on_interrupt = on_interrupt

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Learns the density of the rows of X, and returns the estimator."""
        if hasattr(self, "flow_"):
            del self.flow_  # if this fit ends early, its columns must not be paired with the flow of an earlier one
        table = self._validated(X, ensure_min_samples=3)
        for name, value in (("contamination", self.contamination), ("validation_fraction", self.validation_fraction)):
            if not isinstance(value, Real) or not 0 < value <= 0.5:
                raise ValueError(f"SelfNormDensity: expected {name} in (0, 0.5], got {value!r}")
        if self.on_interrupt not in ("raise", "keep"):
            raise ValueError(f"SelfNormDensity: expected on_interrupt to be raise or keep, got {self.on_interrupt!r}")
        positive_int("SelfNormDensity", "max_steps", self.max_steps)
        random = check_random_state(self.random_state)
        train, held_out = self._prepared(table, random)
        # Here, in float64, and not by the recipe: float32 would already have lost the digits of a column such as 1e8 ± 1.
        standardize = Standardize(train.shape[1]).double()
        with located("SelfNormDensity"):
            standardize.initialize(train)
        train, held_out = (standardize(rows)[0].float() for rows in (train, held_out))
        dataset = Dataset("table", train, held_out, held_out)
        learned = self._trained(dataset, int(random.randint(2**31)))
        if told := note_on_size(dataset, tests=False):
            warnings.warn(f"SelfNormDensity: {told}", stacklevel=2)
        flow = Flow(Chain(standardize, learned.bijection), learned.base).eval()
        self.validation_nll_ -= standardize.scale.log().sum().item()  # in X's units
        scores = self._log_prob(flow, table)
        lowest = scores[np.isfinite(scores)].min()
        self.offset_ = float(np.quantile(scores.clip(lowest), self.contamination))
        self.flow_ = flow  # last: only now is the estimator fitted
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "flow_")

    def score_samples(self, X: ArrayLike) -> Floats:
        """Returns the exact log-likelihood of each row, in nats."""
        check_is_fitted(self)
        return self._log_prob(self.flow_, self._validated(X, reset=False))

    def score(self, X: ArrayLike, y: object = None) -> float:
        """Returns the mean log-likelihood of the rows; higher is better, as cross-validation expects."""
        return float(self.score_samples(X).mean())

    def decision_function(self, X: ArrayLike) -> Floats:
        """Returns score_samples − offset_, which is negative for outliers."""
        scores: Floats = self.score_samples(X) - self.offset_
        return scores

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:
        """Returns −1 for outliers, 1 for other rows."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def sample(self, n_samples: int = 1, random_state: Any = None, inverse: Inverse = "auto") -> Floats:
        """Returns rows drawn from the learned density; `Flow.decode` explains the choices of `inverse`."""
        check_is_fitted(self)
        generator = torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31)))
        with evaluating(self.flow_), cpu_threads(1):
            drawn: Floats = self.flow_.sample(n_samples, inverse, generator).numpy()
        rows = np.empty((len(drawn), self.n_features_in_))
        rows[:, self.constant_columns_] = self.constant_values_
        rows[:, self._varying()] = drawn
        return rows

    def _validated(self, X: ArrayLike, **options: Any) -> NDArray[np.floating]:
        """Returns X as an array of finite numbers; an error names the columns of a data frame that are none."""
        try:
            if _holds_times(X):
                raise ValueError("SelfNormDensity: expected numbers, got times; subtract a time, and divide by a unit of time")
            table: NDArray[np.floating] = validate_data(self, X, dtype=FLOATS, **options)
            return table
        except (ValueError, TypeError) as error:
            if not (wrong := _columns_without_numbers(X)):
                raise
            raise ValueError(f"{error}\nSelfNormDensity: expected finite numbers, got others in {listed(wrong)}") from None

    def _log_prob(self, flow: Flow, table: NDArray[np.floating]) -> Floats:
        # torch.tensor copies: the rows may be a read-only memory map, which torch does not accept.
        rows = torch.tensor(table[:, self._varying()], dtype=torch.float64)
        with cpu_threads(1):
            scores: Floats = scores_of(flow, rows, None, torch.device("cpu"), batch_size=10_000).numpy()
        coarse = min(table.dtype, self.constant_values_.dtype, key=lambda dtype: dtype.itemsize)  # in which 0.1 is 0.1
        differs = (table[:, self.constant_columns_].astype(coarse) != self.constant_values_.astype(coarse)).any(1)
        return np.where(differs, -np.inf, scores)

    def _varying(self) -> NDArray[np.bool_]:
        """Returns which columns the flow models."""
        varying = np.ones(self.n_features_in_, bool)
        varying[self.constant_columns_] = False
        return varying

    def _prepared(self, given: NDArray[np.floating], random: np.random.RandomState) -> tuple[Tensor, Tensor]:
        """Returns the training and the held-out rows without outliers and constant columns, and warns of them."""

        def split(total: int) -> list[NDArray[np.int64]]:
            held_out = max(1, round(self.validation_fraction * total))
            return np.split(random.permutation(total), [held_out])[::-1]

        table = given.astype(np.float64, copy=False)
        names = getattr(self, "feature_names_in_", [f"x{index}" for index in range(table.shape[1])])
        labels = [repr(str(name)) for name in names]
        expect_distinguishable("SelfNormDensity", given, labels)
        prepared = prepare(table, split, set_outliers_aside=self.set_outliers_aside, kept=())
        self.set_aside_ = np.array([each.row for each in prepared.outliers], np.int64)
        self.constant_columns_ = np.array(list(prepared.constant), np.int64)
        self.constant_values_ = np.array(list(prepared.constant.values()), given.dtype)
        constant, total = listed([labels[index] for index in prepared.constant]), len(prepared.parts[0])
        if not prepared.rows.shape[1]:
            raise ValueError(
                f"SelfNormDensity: expected columns that vary, got the same value in all {total} training rows of every "
                f"column ({constant}); constants have no density"
            )
        for told in (
            describe_outliers(prepared.outliers, len(table), labels, "set_outliers_aside=False"),
            describe_crowd(prepared.crowd, len(table), labels, "set_outliers_aside=False"),
        ):
            if told:
                warnings.warn(f"SelfNormDensity: {told}", stacklevel=3)
        if constant:
            told = note_on_constants(prepared, constant)
            warnings.warn(
                f"SelfNormDensity: the same value in all {total} training rows of {constant}: left out, so that they contribute "
                f"nothing to the likelihood; a row that differs there has the log-likelihood −∞{'; ' if told else ''}{told}",
                stacklevel=3,
            )
        train, held_out = prepared.split(prepared.rows)
        varying = [label for label, varies in zip(labels, self._varying(), strict=True) if varies]
        expect_spread("SelfNormDensity", torch.from_numpy(train), varying, WIDE_SPREADS)
        expect_independent("SelfNormDensity", train, varying, "remove {} from X")
        return torch.from_numpy(train), torch.from_numpy(held_out)

    def _trained(self, dataset: Dataset, seed: int) -> Flow:
        """Returns the best flow of standardised data, in float64; keeps its validation NLL and the number of steps."""
        recipe = recipe_for("table", dataset.shape, len(dataset.train), self.max_steps, self.batch_size).changed(
            name="SelfNormDensity",
            kind=self.kind,
            standardize=False,
            reconstruction_weight=self.reconstruction_weight,
            patience=self.patience,
            seed=seed,
        )
        given: dict[str, Any] = {"layers": self.layers, "learning_rate": self.learning_rate}
        recipe = recipe.changed(**{name: value for name, value in given.items() if value is not None})
        trainer = Trainer(recipe, dataset, device=available_device("SelfNormDensity", str(self.device)))
        trainer.start()
        try:
            best = trainer.run()
        except StoppedError as stopped:
            if self.on_interrupt != "keep" or not isinstance(stopped, KeyboardInterrupt):
                raise
            if trainer.best().progress["best_nll"] is None:  # there was no validation yet
                with suppress(DivergedError):
                    trainer.judge()
            best = trainer.best()
            if best.progress["best_nll"] is None:
                raise
            warnings.warn(
                f"SelfNormDensity: {stopped} after {trainer.progress.step} of {trainer.total} steps, so the best weights so far, "
                f"those after {best.progress['step']} steps, are kept",
                ConvergenceWarning,
                stacklevel=3,
            )
        except DivergedError:
            best = trainer.best()
            if best.progress["best_nll"] is None:  # there was no validation
                raise
            warnings.warn(
                f"SelfNormDensity: training diverged, so the weights after {best.progress['step']} steps are kept; try a "
                "larger reconstruction_weight or a smaller learning_rate",
                ConvergenceWarning,
                stacklevel=3,
            )
        self.validation_nll_, self.n_steps_ = best.progress["best_nll"], trainer.progress.step
        return best.flow().double()


def _holds_times(X: Any) -> bool:
    """Returns whether an array, a column of a data frame or the first row of a list holds times, which NumPy makes numbers of."""
    if isinstance(X, list | tuple):
        return any(np.asarray(each).dtype.kind in "mM" for each in X[:1])
    types = getattr(X, "dtypes", ())
    types = (getattr(X, "dtype", None), *(types if isinstance(types, Iterable) else ()))
    return any(getattr(each, "kind", None) in ("m", "M") for each in types)


def _columns_without_numbers(X: Any) -> list[str]:
    """Returns the names of a data frame's columns that hold anything but finite numbers; empty for other data."""
    columns, wrong = getattr(X, "columns", ()), []
    for name in columns if isinstance(columns, Iterable) else ():
        if not isinstance(name, str | int):  # of a library whose columns are no names
            return []
        try:
            column = np.asarray(X[name])
            is_finite = column.dtype.kind not in "mM" and bool(np.isfinite(column.astype(np.float64)).all())
        except (ValueError, TypeError):
            is_finite = False
        if not is_finite:
            wrong.append(repr(str(name)))
    return wrong

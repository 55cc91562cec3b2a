"""Watches the learned inverses of a run: measures them at each validation, and says in one line if one of them is being lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from selfnorm.data.batches import Examples
from selfnorm.evaluate.causes import cause_of_error
from selfnorm.evaluate.stability import stability_ratios
from selfnorm.flow import LARGEST_ERROR
from selfnorm.objective import Loss

MAX_EXAMPLES = 20_000  # of the training data, for second moments; each validation reads them, if the objective has a bound


@dataclass(frozen=True)
class InverseState:
    """Figures of the self-normalizing layers, by name; None where one could not be measured.

    errors:  ‖RW − I‖_F/√D; in more than 256 dimensions an estimate.
    ratios:  `stability_ratios`; empty unless the paper's objective trains them.
    """

    errors: dict[str, float | None]
    ratios: dict[str, float | None]

    def record(self) -> dict[str, list[float | None]]:
        """Returns what the log of a run keeps, in the order of the layers; nothing if there is nothing to log."""
        found = {"inverse_error": list(self.errors.values()), "stability_ratio": list(self.ratios.values())}
        return {key: values for key, values in found.items() if values}

    def causes(self) -> dict[str, str]:
        """Returns the lines to warn with, by the kind of their cause: of each kind that of the worst layer."""
        of_paper = bool(self.ratios)
        found = {name: cause_of_error(name, error, self.ratios.get(name), of_paper) for name, error in self.errors.items()}
        lines: dict[str, str] = {}
        for kind, figures in {"stability": self.ratios, "error": self.errors}.items():
            of_kind = {name: cause.line for name, cause in found.items() if cause and cause.kind == kind}
            if of_kind:
                _, worst = max((_size(figures[name]), name) for name in of_kind)
                lines[kind] = of_kind[worst]
        return lines

    def recovered(self) -> set[str]:
        """Returns the kinds of causes from which all layers are far enough that the next crossing is worth a new warning."""
        figures = {"stability": (self.ratios, 1.0), "error": (self.errors, LARGEST_ERROR)}
        return {kind for kind, (values, bound) in figures.items() if all(_size(value) < bound / 2 for value in values.values())}


class InverseWatch:
    """Measures the learned inverses of a loss's flow.

    train:  the training data, of which it keeps a part if the objective has a bound.
    """

    def __init__(self, loss: Loss, train: Examples, batch_size: int, seed: int) -> None:
        self._loss, self._batch_size, self._seed = loss, batch_size, seed
        self._examples = (
            train.subset(MAX_EXAMPLES, seed, "watch") if loss.inverse_likelihood and loss.flow.reconstruction_names else None
        )

    def measure(self, check: Callable[[], None] = lambda: None) -> InverseState:
        """Returns the present figures. `check` is called before each batch, and may raise to interrupt."""
        flow = self._loss.flow
        layers = flow.planned_inverses()
        errors = {name: layers[name].inverse_error() if name in layers else None for name in flow.reconstruction_names}
        return InverseState(errors, {} if self._examples is None else stability_ratios(self._loss, self._batches(check)))

    def _batches(self, check: Callable[[], None]) -> Iterator[Tensor]:
        assert self._examples is not None
        for x in self._examples.in_order(self._batch_size, self._seed):
            check()
            yield x


def _size(figure: float | None) -> float:
    """Returns a figure to sort by: 0 where there is none, infinity for NaN."""
    return 0.0 if figure is None else math.inf if math.isnan(figure) else figure

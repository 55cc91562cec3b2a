"""The counters that the training loop keeps between steps, and how it judges a validation."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from selfnorm.train.records import is_sound

LASTING = 3  # validations in a row, after which an error counts as lasting


@dataclass
class RunProgress:
    """The progress of a run; stored in its checkpoints."""

    step: int = 0  # steps taken
    validated: int = 0  # step of the last validation
    best_nll: float | None = None  # exact, on the validation set
    best_step: int = 0
    stale: int = 0  # validations since the best one
    worse: int = 0  # consecutive validations far above the best
    rollbacks: int = 0
    far_off: int = 0  # consecutive validations with a learned inverse that is far off
    warned: list[str] = field(default_factory=list)  # kinds of causes for which a warning stands
    log_length: int = 0  # bytes of metrics.jsonl
    seconds: float = 0.0  # training time so far

    def judge(self, nll: float) -> None:
        """Updates the counters with the NLL of a validation at the current step."""
        self.validated = self.step
        if self.best_nll is None or nll < self.best_nll:
            self.best_nll, self.best_step = nll, self.step
            self.stale = self.worse = 0
        else:
            self.stale += 1
            self.worse = self.worse + 1 if far_above(nll, self.best_nll) else 0

    def warn(self, causes: Set[str], recovered: Set[str]) -> list[str]:
        """Updates the warnings that stand with the causes that a validation found, and returns those to tell now.

        An error is told if it lasts: early in training R may lag behind W for a while.
        """
        self.far_off = self.far_off + 1 if "error" in causes else 0
        standing = set(self.warned) - recovered
        new = {cause for cause in causes - standing if cause != "error" or self.far_off >= LASTING}
        self.warned = sorted(standing | new)
        return sorted(new)

    @property
    def diverged(self) -> bool:
        """Whether two validations in a row were far above the best."""
        return self.worse >= 2


def unsound_counters(stored: Mapping[str, Any]) -> list[str]:
    """Returns the names of stored counters that have another type than in `RunProgress`, are not finite, or negative."""
    kinds = {name: kind for name, kind in get_type_hints(RunProgress).items() if name in stored}  # earlier versions had fewer
    negative = {name for name in kinds if kinds[name] in (int, float) and is_sound(stored[name], float) and stored[name] < 0}
    return [name for name, kind in kinds.items() if name in negative or not is_sound(stored[name], kind)]


def far_above(nll: float, best: float) -> bool:
    """Returns whether nll exceeds the best by more than 5 % and by more than 5 nats."""
    return nll > best + max(0.05 * abs(best), 5.0)

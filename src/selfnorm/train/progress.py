"""What the loop remembers from one step to the next, beside tensors, and how it judges a validation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunProgress:
    """Where a run stands."""

    step: int = 0  # steps taken
    validated: int = 0  # the step of the last validation
    best_nll: float | None = None  # exact, on the validation part
    best_step: int = 0
    stale: int = 0  # validations since the best
    worse: int = 0  # validations in a row that were far above the best
    rollbacks: int = 0
    log_length: int = 0
    seconds: float = 0.0

    def judge(self, nll: float) -> None:
        """Take in a validation at the present step."""
        self.validated = self.step
        if self.best_nll is None or nll < self.best_nll:
            self.best_nll, self.best_step = nll, self.step
            self.stale = self.worse = 0
        else:
            self.stale += 1
            self.worse = self.worse + 1 if far_above(nll, self.best_nll) else 0

    @property
    def diverged(self) -> bool:
        """Far above the best twice running."""
        return self.worse >= 2


def far_above(nll: float, best: float) -> bool:
    """More than 5 % above the best, and more than 5 nats."""
    return nll > best + max(0.05 * abs(best), 5.0)

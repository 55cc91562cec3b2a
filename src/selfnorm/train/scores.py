"""The result of scoring a file: the log-likelihood of each row, its rank in the file, and its percentile in the training data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfnorm.runtime.checks import one_line, shortened
from selfnorm.train.digest import digest_of_scores


@dataclass(frozen=True)
class Scores:
    """The rows of a file, compared by their exact log-likelihoods.

    rank:        1 for the least likely row.
    percentile:  percentage of the training examples (at most 10,000 of them) that are less likely than the row; near 0 for an
                 outlier.
    carried:     columns of the file that identify its rows, to be copied to the output, by name.
    differs:     for each row, the names of the columns that were constant in the training data and have another value here,
                 separated by commas; None if the run, or the file, has no such columns.
    understood:  a note on how the file was read, such as a guess about its header; empty if there is nothing to say.
    """

    log_likelihood: NDArray[np.float64]
    rank: NDArray[np.int64]
    percentile: NDArray[np.float64]
    carried: Mapping[str, Sequence[str]] = field(default_factory=dict)
    differs: Sequence[str] | None = None
    understood: str = ""

    @classmethod
    def of(cls, log_likelihood: NDArray[np.float64], training: NDArray[np.float64]) -> Scores:
        """Returns the scores of rows; `training` has the log-likelihoods of training examples in ascending order."""
        rank = np.empty(len(log_likelihood), np.int64)
        rank[np.argsort(log_likelihood, kind="stable")] = np.arange(1, len(log_likelihood) + 1)
        percentile = 100 * np.searchsorted(training, log_likelihood) / len(training)
        return cls(log_likelihood, rank, percentile)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one dict for each row, in the order of the file. It begins with the columns that identify the row."""
        own: dict[str, Sequence[Any]] = {
            "row": range(len(self.rank)),
            "log_likelihood": self.log_likelihood.tolist(),
            "rank": self.rank.tolist(),
            "percentile": self.percentile.tolist(),
        }
        if self.differs is not None:
            own["differs"] = self.differs
        carried: dict[str, Sequence[Any]] = {}
        for name, texts in self.carried.items():
            if name in own:
                name = f"input_{name}"
                while name in own or name in self.carried:
                    name = f"input_{name}"
            carried[name] = texts
        columns = carried | own
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class UnverifiedScoresWarning(UserWarning):
    """The scores of the training data, which give the percentiles, cannot be compared with those that the run wrote."""


def read_scores(path: Path, expected_digest: str | None) -> NDArray[np.float64]:
    """Returns the log-likelihoods of training examples that a run stored, sorted; raises ValueError if they cannot be used.

    expected_digest:  from the run's result; None, if there is none, skips the comparison, with `UnverifiedScoresWarning`.
    """
    got = ""
    try:
        stored = np.lib.format.open_memmap(path, mode="r")  # which checks the file's size before it allocates anything
    except Exception as error:  # numpy parses the header as Python, and lets errors of that parser through
        got = f"a damaged file ({shortened(one_line(error))})"
    else:
        if stored.ndim != 1 or stored.dtype not in (np.float32, np.float64):
            got = f"an array of shape {stored.shape} and dtype {shortened(str(stored.dtype))}"
        elif not (len(stored) and np.isfinite(stored).all()):
            got = "non-finite ones" if len(stored) else "none"
        elif (np.diff(stored) < 0).any():
            got = "unsorted ones"
        elif expected_digest and digest_of_scores(np.array(stored, np.float64)) != expected_digest:
            got = "others than the run wrote"
    if got:
        raise ValueError(
            f"{path}: expected the training data's scores, got {got}; `selfnorm train --resume {path.parent}` writes them again"
        )
    if expected_digest is None:
        warnings.warn(
            f"{path}: the run's result holds no digest of this file, so a change of it cannot be detected; "
            f"`selfnorm train --resume {path.parent}` writes both again",
            UnverifiedScoresWarning,
            stacklevel=2,
        )
    return np.array(stored, np.float64)

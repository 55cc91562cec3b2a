"""`Result`, what a run has found when it is finished."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

from selfnorm.evaluate.likelihood import Likelihood
from selfnorm.runtime.files import json_text, write_text
from selfnorm.train.records import is_sound


@dataclass(frozen=True)
class Result:
    """The result of a finished run: exact likelihoods of its best weights, costs and provenance."""

    recipe: str
    test: Likelihood
    validation_nll: float
    best_epoch: int
    epochs: int  # actually run
    seconds: float
    step_seconds: float | None  # of one training step, median over epochs; None without a log
    # MiB, see `PeakMemory`: from building the trainer to the end of training, of a resumed run since it was resumed. None if it
    # could not be measured.
    peak_memory: float | None
    parameters: int  # number of trainable values in the flow
    rollbacks: int
    provenance: dict[str, str | None]
    scores_digest: str | None = None  # of training_scores.npy; None from earlier versions

    def write(self, path: Path) -> None:
        """Stores the result in result.json, with a digest."""
        stored = json.loads(json_text(asdict(self)))
        write_text(path, json_text({**stored, "digest": _digest(stored)}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        """Returns the result that a run stored in result.json; those of earlier versions have no digest to verify them with."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(stored, dict):
                raise ValueError("no fields")
            if "digest" in stored and stored.pop("digest") != _digest(stored):
                raise ValueError("its digest differs")
            test = stored["test"]
            infinite = {"standard_error": math.inf} if test["standard_error"] is None else {}  # stored as null
            result = cls(**{**stored, "test": Likelihood(**{**test, **infinite})})
            _expect_types(result)
            _expect_types(result.test)
            return result
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: expected a run's result, got a missing, damaged or older file ({error})") from None

    @classmethod
    def stored(cls, path: Path) -> Result | None:
        """Returns the result in result.json, or None if there is none that can be read."""
        try:
            return cls.read(path)
        except ValueError:
            return None


def _digest(stored: dict[str, Any]) -> str:
    """Returns the SHA-256, in hex, of what is stored beside it."""
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def _expect_types(found: Result | Likelihood) -> None:
    """Raises ValueError unless each field has its type, and numbers are finite but for an unknown standard error."""
    for name, kind in get_type_hints(type(found)).items():
        value = getattr(found, name)
        if name == "provenance":
            sound = isinstance(value, dict) and all(isinstance(each, str | NoneType) for each in value.values())
        else:
            sound = is_sound(value, kind) or (name == "standard_error" and value == math.inf)
        if not sound:
            raise ValueError(f"unusable {name}: {str(value)[:40]}")

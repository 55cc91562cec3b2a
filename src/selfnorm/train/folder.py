"""A run's folder: where each of its files is, and the log of its metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from selfnorm.runtime.files import json_text, partial, write_text
from selfnorm.train.recipe import Recipe
from selfnorm.train.settings import from_toml, to_toml

try:
    import fcntl
except ImportError:  # not on Windows, where runs are then not locked
    fcntl = None  # type: ignore[assignment]


class RunFolder:
    """The files of one run, by name.

    recipe.toml, metrics.jsonl, best.safetensors, last.safetensors, training_scores.npy, samples.png, curves.png, result.json
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.toml"
        self.metrics = path / "metrics.jsonl"
        self.best = path / "best.safetensors"
        self.last = path / "last.safetensors"
        self.scores = path / "training_scores.npy"
        self.samples = path / "samples.png"
        self.curves = path / "curves.png"
        self.result = path / "result.json"
        self._log: TextIO | None = None  # kept open: for a small model, opening it anew is a good part of an epoch

    def create(self, recipe: Recipe) -> None:
        """Make the folder for a new run; one that holds anything already is left alone."""
        self.expect_free()
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.recipe, to_toml(recipe))

    def expect_free(self) -> None:
        """Refuse a folder that holds anything."""
        if self.recipe.exists():
            raise ValueError(
                f"{self.path}: expected a folder without a run, got one that has one; go on with it by "
                f"`selfnorm train --resume {self.path}`, or name another folder"
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(f"{self.path}: expected a new or empty folder for the run, got one in use; name another")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to this run meanwhile; a process that is killed lets go of it."""
        with (self.path / ".lock").open("a") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(f"{self.path}: expected a run that nobody is at, got one that is being trained") from None
            yield

    def sweep(self) -> None:
        """Remove what a killed process left half-written of the run's own files."""
        for whole in (self.best, self.last, self.scores, self.samples, self.curves, self.result):
            for path in self.path.glob(partial(whole)):
                path.unlink(missing_ok=True)

    def read_recipe(self) -> Recipe:
        """The recipe of the run in this folder."""
        if not self.recipe.is_file():
            raise ValueError(
                f"{self.path}: expected a run folder with recipe.toml, got {'none' if self.path.is_dir() else 'no folder'}"
            )
        try:
            text = self.recipe.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{self.recipe}: expected text, got something else") from None
        return from_toml(text, str(self.recipe))

    def log(self, record: dict[str, Any]) -> int:
        """Append a line to the metrics; the file's length after it."""
        if self._log is None:
            self._log = self.metrics.open("a", encoding="utf-8")
        self._log.write(json_text(record) + "\n")
        self._log.flush()
        return self._log.tell()

    def close_log(self) -> None:
        """Close the metrics file; the next `log` opens it again."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def rewind_log(self, length: int) -> None:
        """Forget the metrics written after a checkpoint that said the file was so long then."""
        self.close_log()
        if self.metrics.exists() and self.metrics.stat().st_size > length:
            with self.metrics.open("rb+") as file:
                file.truncate(length)

    def read_log(self) -> list[dict[str, Any]]:
        """All records so far. They are for pictures: a line that was cut off or damaged costs a point there, no more."""
        if not self.metrics.exists():
            return []
        records = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict)]

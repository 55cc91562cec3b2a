"""The folder of a run: the paths of its files, its lock, and the log of its metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from selfnorm.data.safe_files import expect_regular
from selfnorm.runtime.files import json_text, naming_full_disk, temporary_pattern, write_text
from selfnorm.train.recipe import Recipe
from selfnorm.train.settings import from_toml, to_toml

try:
    import fcntl
except ImportError:  # Windows has no such module; runs are not locked there
    fcntl = None  # type: ignore[assignment]


class RunFolder:
    """The paths of one run's files, as attributes.

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
        self._log: TextIO | None = None  # kept open: reopening it would take a large part of a small model's epoch

    def create(self, recipe: Recipe) -> None:
        """Creates the folder of a new run and writes its recipe; raises ValueError if the folder is in use."""
        self.expect_unused()
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.recipe, to_toml(recipe))

    def expect_unused(self) -> None:
        """Raises ValueError unless the folder is missing or empty."""
        if self.recipe.exists():
            raise ValueError(
                f"{self.path}: expected a folder without a run, got one that holds a run; continue it with "
                f"`selfnorm train --resume {self.path}`, or choose another folder"
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(f"{self.path}: expected a new or empty folder for the run, got one in use; choose another")

    def own_files(self) -> list[Path]:
        """Returns the paths of all files of the run, whether they exist or not."""
        return [path for path in vars(self).values() if isinstance(path, Path) and path != self.path] + [self.path / ".lock"]

    def expect_regular_files(self) -> None:
        """Raises ValueError if a file of the run is something else, such as a named pipe, for which a reader would wait."""
        for path in self.own_files():
            if path.exists():
                expect_regular(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager that locks the run against other processes. The lock is released even if the process is killed."""
        self.expect_regular_files()
        with (self.path / ".lock").open("a") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(f"{self.path}: expected an idle run, got one that is being trained") from None
            yield

    def remove_partial_files(self) -> None:
        """Removes the temporary files that a killed process left while writing files of this run."""
        for whole in (self.best, self.last, self.scores, self.samples, self.curves, self.result):
            for path in self.path.glob(temporary_pattern(whole)):
                path.unlink(missing_ok=True)

    def read_recipe(self) -> Recipe:
        """Returns the recipe of the run."""
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
        """Appends a record to the metrics and returns the length of the file afterwards."""
        if self._log is None:
            self._log = self.metrics.open("a", encoding="utf-8")
        with naming_full_disk(self.metrics):
            self._log.write(json_text(record) + "\n")
            self._log.flush()
        return self._log.tell()

    def close_log(self) -> None:
        """Closes the metrics file; the next `log` opens it again."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def rewind_log(self, length: int) -> None:
        """Removes the metrics written after a checkpoint, given the length of the file at that time."""
        self.close_log()
        if self.metrics.exists() and self.metrics.stat().st_size > length:
            with self.metrics.open("rb+") as file:
                file.truncate(length)

    def read_log(self) -> list[dict[str, Any]]:
        """Returns all records so far, skipping damaged lines: they serve figures, where one missing point does not matter."""
        if not self.metrics.exists():
            return []
        records = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict)]

"""The folder of a run: the paths of its files, its lock, and the log of its metrics."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from selfnorm.data.safe_files import expect_regular
from selfnorm.runtime.files import json_text, naming_full_disk, temporary_name, write_text
from selfnorm.runtime.locks import LOCK_NAME, locking
from selfnorm.train.recipe import Recipe
from selfnorm.train.records import parse_records
from selfnorm.train.settings import checked_toml, from_toml

# What safetensors itself writes to, beside the temporary file that it is asked to write.
SAFETENSORS_TEMPORARY = re.compile(r"\.tmp[0-9A-Za-z]{6}")


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
        self.lock = path / LOCK_NAME
        self._had_recipe = False
        self._log: TextIO | None = None  # kept open: reopening it would take a large part of a small model's epoch

    def write_recipe(self, recipe: Recipe) -> None:
        """Writes the recipe of the run; raises ValueError for one that could not be read."""
        write_text(self.recipe, checked_toml(recipe, str(self.recipe)))

    def locked(self) -> AbstractContextManager[None]:
        """Returns a context manager that locks the run against other processes, see `locking`."""
        self.expect_regular_files()
        return locking(self.path, f"{self.path}: expected an idle run, got one that is being trained")

    def expect_in_place(self) -> None:
        """Raises ValueError if the recipe is gone that was there before: someone moves or deletes the run while it is trained.

        Deleting a folder fails if a file is written at that moment; without this check, a run would go on in what is left.
        """
        is_there = self.recipe.exists()
        if self._had_recipe and not is_there:
            got = "no folder any more; if it was moved, resume it there"
            if self.path.exists():
                got = f"a folder without {self.recipe.name}; remove what is left of it, and start the run again"
            raise ValueError(f"{self.path}: expected the files of the run to stay while it is trained, got {got}")
        self._had_recipe = is_there

    def own_files(self) -> list[Path]:
        """Returns the paths of all files of the run, whether they exist or not."""
        return [path for path in vars(self).values() if isinstance(path, Path) and path != self.path]

    def expect_regular_files(self) -> None:
        """Raises ValueError if a file of the run is something else, such as a named pipe, for which a reader would wait."""
        for path in self.own_files():
            if path.exists():
                expect_regular(path, "remove it, or copy the run again")

    def partial_files(self) -> set[Path]:
        """Returns the temporary files that a killed process left while writing files of this run."""
        wholes = (self.recipe, self.best, self.last, self.scores, self.samples, self.curves, self.result)
        found = {path for whole in wholes for path in self.path.glob(temporary_name(whole, "*"))}
        found |= {path for path in self.path.glob(".tmp*") if SAFETENSORS_TEMPORARY.fullmatch(path.name)}
        return {path for path in found if path.is_file()}

    def remove_partial_files(self) -> None:
        """Removes the partial files; call it only while the run is locked."""
        for path in self.partial_files():
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

    def has_trained(self) -> bool:
        """Returns whether the folder holds what a run only has after its first checkpoint."""
        return self.result.exists() or self.scores.exists() or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def stored_recipe(self) -> Recipe | None:
        """Returns the recipe of the run; None if there is none that can be read."""
        try:
            return self.read_recipe()
        except ValueError:
            return None

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
            log, self._log = self._log, None
            with naming_full_disk(self.metrics):  # closing writes again what a full disk did not take
                log.close()

    def rewind_log(self, length: int) -> None:
        """Removes the metrics written after a checkpoint, given the length of the file at that time."""
        self.close_log()
        if self.metrics.exists() and self.metrics.stat().st_size > length:
            with self.metrics.open("rb+") as file:
                file.truncate(length)

    def read_log(self) -> list[dict[str, Any]]:
        """Returns all records so far, without damaged ones; see `parse_records`."""
        return parse_records(self.metrics.read_text(encoding="utf-8", errors="replace")) if self.metrics.is_file() else []

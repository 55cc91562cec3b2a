"""Starts runs: makes sure that a new run has a folder to itself, and finds the checkpoint that a resumed run continues from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selfnorm.train.checkpoint import Checkpoint, read_checkpoint
from selfnorm.train.folder import RunFolder
from selfnorm.train.recipe import Recipe


class DamagedCheckpointWarning(UserWarning):
    """A run continues from its best checkpoint, because the last one is damaged."""


@contextmanager
def new_run(folder: RunFolder, recipe: Recipe) -> Iterator[None]:
    """Context manager that creates the folder of a new run, locks it within the block, and writes its recipe.

    Raises ValueError if the folder is in use, see `is_unused`. Of several processes at once, one starts and the others change
    nothing.
    """
    expect_unused(folder, recipe)  # here, too, so that nothing is put into a foreign folder
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.locked():
        expect_unused(folder, recipe)
        folder.remove_partial_files()
        folder.write_recipe(recipe)
        yield


def expect_unused(folder: RunFolder, recipe: Recipe) -> None:
    """Raises ValueError unless a run of the recipe can start in the folder, see `is_unused`."""
    if is_unused(folder, recipe):
        return
    if folder.recipe.exists():
        raise ValueError(
            f"{folder.path}: expected a folder without a run, got one that holds a run; continue it with "
            f"`selfnorm train --resume {folder.path}`, or choose another folder"
        )
    raise ValueError(f"{folder.path}: expected a new or empty folder for the run, got one in use; choose another")


def is_unused(folder: RunFolder, recipe: Recipe) -> bool:
    """Returns whether the folder is missing, or holds nothing but what a start of the same recipe leaves if it is killed.

    Those are the lock, half-written files, the recipe, and the checkpoint of step 0; no training is lost with them. The recipe
    must be the same: another one may have been put there by hand.
    """
    if not folder.path.exists():
        return True
    if not folder.path.is_dir():
        return False
    found = set(folder.path.iterdir()) - {folder.lock} - folder.partial_files()
    if not found:
        return True
    if folder.recipe not in found or found - {folder.recipe, folder.best}:
        return False
    return folder.read_recipe() == recipe and (folder.best not in found or is_start(folder.best))


def is_start(path: Path) -> bool:
    """Returns whether a checkpoint is from before the first step."""
    return read_checkpoint(path).progress.get("step") == 0


def checkpoint_to_resume(folder: RunFolder) -> tuple[Path, Checkpoint]:
    """Returns the last checkpoint of a run and its path; with a warning the best one, if the last one is damaged."""
    try:
        path, checkpoint = folder.last, read_checkpoint(folder.last)
    except ValueError as error:
        try:
            path, checkpoint = folder.best, read_checkpoint(folder.best)
        except ValueError as other:
            raise ValueError(f"{error}; nor can the run go on from its best checkpoint: {other}") from None
        warnings.warn(
            f"{error}; the run continues from {path.name}, step {checkpoint.progress.get('step')}",
            DamagedCheckpointWarning,
            stacklevel=2,
        )
    if not checkpoint.is_resumable():
        raise ValueError(f"{path}: expected a checkpoint to resume from, got weights without the optimiser's moments")
    return path, checkpoint

"""Finds data files, and explains which are missing and where to get them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from selfnorm.data.safe_files import kind_of

OnProgress = Callable[[str, int, int | None], None]  # of what is being done, how much is done, and the total, if known


def cache_folder() -> Path:
    """Returns the user's cache folder for this library; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "selfnorm"


def data_folder(who: str, data_dir: str | Path | None) -> tuple[Path, bool]:
    """Returns the folder to look in, and whether it is the cache: downloads go only there, never into a folder that you name."""
    named, given = "data_dir", data_dir
    if given is None:
        named, given = "$SELFNORM_DATA", os.environ.get("SELFNORM_DATA") or None
    if given is None:
        return cache_folder(), True
    folder = Path(given).expanduser()
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise ValueError(f"{who}: expected {named} to be the folder that holds the data, got {got}: {folder}")
    return folder, False


def locate(folder: Path, places: Sequence[str], names: Sequence[str], endings: Sequence[str] = ("",)) -> list[Path]:
    """Returns the named files from the first of the places below `folder` that has them all, or an empty list."""
    for place in places:
        variants = [paths_in(folder, (place,), (name,), endings) for name in names]
        found = [next((file for file in files if file.is_file()), None) for files in variants]
        whole = [file for file in found if file is not None]
        if len(whole) == len(names):
            return whole
    return []


def paths_in(folder: Path, places: Sequence[str], names: Sequence[str], endings: Sequence[str] = ("",)) -> list[Path]:
    """Returns the paths of the names, with each of the endings, in each of the places below `folder`."""
    return [folder / place / (name + ending) for place in places for name in names for ending in endings]


def missing_files_error(
    who: str, folder: Path, places: Sequence[str], names: Sequence[str], source: str, endings: Sequence[str] = ("",)
) -> ValueError:
    """Returns the error if `locate` finds nothing: which files are missing, where they belong, and where to get them."""
    for path in paths_in(folder, places, names, endings):
        if kind := kind_of(path):
            return ValueError(f"{who}: expected a regular file at {path}, got {kind}; replace it with the file from {source}")
    place = folder / places[0]
    absent = [name for name in names if not any(path.exists() for path in paths_in(place, ("",), (name,), endings))]
    got = f"all but {', '.join(absent)}" if len(absent) < len(names) else "none of them"
    return ValueError(f"{who}: expected {', '.join(names)} in {place}, got {got}; get them from {source}")


def require_module(module: str, who: str, package: str) -> Any:
    """Imports a module that only some data need; raises ValueError with the command to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{who}: expected {module.split('.')[0]} to be installed ({error}); run pip install '{package}'"
        ) from error

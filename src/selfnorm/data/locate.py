"""Finds data files, and explains which are missing and where to get them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

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
        found = [
            next((file for ending in endings if (file := folder / place / (name + ending)).is_file()), None) for name in names
        ]
        whole = [file for file in found if file is not None]
        if len(whole) == len(names):
            return whole
    return []


def missing_files_error(who: str, folder: Path, names: Sequence[str], source: str) -> ValueError:
    """Returns the error for missing files: which ones, where they belong, and where to get them."""
    absent = [name for name in names if not (folder / name).exists()]
    got = f"all but {', '.join(absent)}" if len(absent) < len(names) else "none of them"
    return ValueError(f"{who}: expected {', '.join(names)} in {folder}, got {got}; get them from {source}")


def require_module(module: str, who: str, package: str) -> Any:
    """Imports a module that only some data need; raises ValueError with the command to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{who}: expected {module.split('.')[0]} to be installed ({error}); run pip install '{package}'"
        ) from error

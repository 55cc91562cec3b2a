"""The data that a recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from selfnorm.data import NAMES, load_dataset
from selfnorm.data.dataset import Dataset
from selfnorm.data.locate import OnProgress
from selfnorm.data.prepare import expect_float32_spread
from selfnorm.data.tables import TEXT_SUFFIXES
from selfnorm.runtime.escapes import in_utf8
from selfnorm.train.recipe import Recipe


def dataset_of(
    recipe: Recipe, on_progress: OnProgress | None = None, *, is_new: bool = False, columns: Sequence[str] | None = None
) -> Dataset:
    """Returns the data set that a recipe names.

    is_new:   whether a new run is to be trained on it; then data without a density that a flow can learn raise ValueError.
    columns:  the names of the columns that the run was trained on, which tell whether its table has a header; None if it is new.
    """
    data = recipe.data
    header = data.header
    if header is None and columns is not None and data.source.lower().endswith(TEXT_SUFFIXES):
        header = bool(columns)
    dataset = load_dataset(
        data.source,
        data.folder,
        levels=data.levels,
        header=header,
        drop=data.drop,
        keep=data.keep,
        set_outliers_aside=data.set_outliers_aside,
        check_columns=is_new,
        on_progress=on_progress,
    )
    if is_new:
        expect_float32_spread(dataset)
    return dataset


def with_absolute_data_path(recipe: Recipe) -> Recipe:
    """Returns the recipe with the path of the user's own data made absolute, so that it is found from any folder.

    Raises ValueError for a path that cannot be stored.
    """
    own = Path(recipe.data.source).expanduser()
    if recipe.data.source not in NAMES and own.exists():
        recipe = recipe.changed(source=str(own.resolve()))
    for path in (recipe.data.source, recipe.data.folder or ""):
        expect_storable(path)
    return recipe


def expect_storable(path: str) -> None:
    """Raises ValueError for a path that is not in UTF-8, the encoding of recipe.toml."""
    if (shown := in_utf8(path)) != path:
        raise ValueError(
            f"{shown}: expected a path in UTF-8, which the run can store, got other bytes; rename the file or folder"
        )

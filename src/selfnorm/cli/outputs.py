"""Which files a verb may write: never its input or a run's own files, and an existing file only with `--force`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from selfnorm.data import paths_read, reads_folder
from selfnorm.data.images import belongs_to_images
from selfnorm.runtime.files import is_stream
from selfnorm.train.folder import RunFolder
from selfnorm.train.trained import Trained


def check_output(output: Path, endings: Sequence[str], force: bool, inputs: Iterable[Path] = ()) -> None:
    """Raises ValueError, before any work is done, unless `output` may be written.

    endings:  of the formats that the verb can write; a stream may have none.
    force:    whether an existing file may be replaced. The inputs and the files of a run are never replaced.
    """
    if output.is_dir():
        raise ValueError(f"{output}: expected a file to write, got a folder")
    expect_not_input(output, inputs)
    expect_ending(output, endings)
    if is_stream(output):
        return
    if not output.parent.is_dir():
        raise ValueError(f"{output}: expected a folder to write it to, got none at {output.parent}")
    for path in (output.absolute(), output.resolve()):
        if _belongs_to_run(path):
            raise ValueError(
                f"{output}: expected another name, got that of a file of the run {path.parent}, which stays as it is"
            )
    if output.exists() and not force:
        raise ValueError(f"{output}: expected a new file, got one that exists; choose another name, or replace it with --force")


def expect_ending(output: Path, endings: Sequence[str]) -> None:
    """Raises ValueError unless `output` has one of the endings, which choose the format; a stream may have none."""
    suffix = output.suffix.lower()
    if suffix not in endings and (suffix or not is_stream(output)):
        raise ValueError(f"{output}: expected a name that ends in {', '.join(endings)}, got {suffix or 'no ending'}")


def expect_not_input(output: Path, inputs: Iterable[Path]) -> None:
    """Raises ValueError if `output` is one of the inputs, by whatever name, or would be one of the images in an input folder."""
    for path in inputs:
        if _same(output, path) or (path.is_dir() and belongs_to_images(output, path)):
            raise _is_read(output, path)


def expect_not_data(output: Path, trained: Trained, data_dir: str | None = None) -> None:
    """Raises ValueError if `output` belongs to the run's data, by whatever name.

    data_dir:  where a built-in set's files are, if not where the recipe says.
    """
    data = trained.checkpoint.recipe.data
    paths = paths_read(data.source, data_dir or data.folder)
    expect_not_input(output, paths)
    if reads_folder(data.source):  # its folders hold nothing but data
        for path in paths:
            if path.is_dir() and output.resolve().is_relative_to(path.resolve()):
                raise _is_read(output, path)


def files_of(run: Path) -> list[Path]:
    """Returns what must stay as it is when a verb uses a run: its files, or the checkpoint that was named."""
    return [*RunFolder(run).own_files(), *([] if run.is_dir() else [run])]


def _belongs_to_run(path: Path) -> bool:
    """Returns whether a path has the name of one of the files of a run, in a folder that holds one."""
    folder = RunFolder(path.parent)
    holds_run = any(file.exists() for file in (folder.recipe, folder.best, folder.last))
    # Some file systems do not tell upper from lower case.
    return holds_run and path.name.casefold() in {file.name.casefold() for file in folder.own_files()}


def _is_read(output: Path, path: Path) -> ValueError:
    return ValueError(
        f"{output}: expected another file than those that are read, got {path}, which stays as it is; choose another with -o"
    )


def _same(one: Path, other: Path) -> bool:
    if "\0" in f"{one}{other}":  # no file has such a name, and looking for one raises ValueError
        return False
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return one.resolve() == other.resolve()

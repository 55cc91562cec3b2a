"""Whole runs: start or resume one, and leave its exact test likelihood, scores and pictures in its folder."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from selfnorm.bijection import located
from selfnorm.data import NAMES, load_dataset
from selfnorm.data.batches import Examples, generator_for
from selfnorm.data.dataset import Dataset, fingerprint, is_image
from selfnorm.data.locate import OnProgress
from selfnorm.evaluate.likelihood import Likelihood, evaluating, likelihood, reference_scores
from selfnorm.flow import Flow
from selfnorm.report import figures
from selfnorm.report.provenance import provenance
from selfnorm.runtime.files import json_text, replacing, write_text
from selfnorm.runtime.memory import PeakMemory
from selfnorm.train.checkpoint import Checkpoint, read
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Report, Trainer, threads
from selfnorm.train.profile import Piece
from selfnorm.train.recipe import Recipe
from selfnorm.train.stopping import DivergedError, StopRequests
from selfnorm.train.together import run_together


@dataclass(frozen=True)
class Result:
    """What a finished run came to: exact likelihoods of its best weights, and where they come from."""

    recipe: str
    test: Likelihood
    validation_nll: float
    best_epoch: int
    epochs: int  # actually run
    seconds: float
    step_seconds: float | None  # of one training step: the median over epochs; None without a log
    # MiB; see `PeakMemory`. From the building of the trainer to the end of training, of a resumed run that of its last part. None
    # where it cannot be known.
    peak_memory: float | None
    parameters: int  # trainable numbers in the flow
    rollbacks: int
    provenance: dict[str, str | None]

    @classmethod
    def read(cls, path: Path) -> Result:
        """As a run left it in its folder."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            test = stored["test"]
            infinite = {"standard_error": math.inf} if test["standard_error"] is None else {}  # for which JSON has no word
            return cls(**{**stored, "test": Likelihood(**{**test, **infinite})})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: expected a run's result, got a missing, damaged or older file ({error})") from None


def start_run(
    recipe: Recipe,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    report: Report | None = None,
    on_progress: OnProgress | None = None,
    on_profile: Callable[[list[Piece]], None] | None = None,
    save_every: float = 30.0,
) -> Result:
    """Train a recipe into a new folder. `save_every`: seconds between checkpoints; `on_profile` is told first where a step's time
    goes."""
    recipe = settled(recipe)
    dataset = dataset_of(recipe, on_progress)
    memory = PeakMemory(device)
    trainer = Trainer(recipe, dataset, device=device, folder=RunFolder(path), report=report, save_every=save_every)
    with _new(trainer):
        if on_profile:
            on_profile(trainer.profile())
        trainer.run()
        return _finish(trainer, memory)


def start_runs(
    recipes: Sequence[Recipe],
    paths: Sequence[Path],
    *,
    device: torch.device | str = "cpu",
    reports: Sequence[Report],
    on_progress: OnProgress | None = None,
    save_every: float = 30.0,
) -> list[Result | DivergedError]:
    """Train recipes for the same data at once, in one process, each into a new folder. What they share cannot tell each one's
    memory, so that is not known."""
    recipes = [settled(recipe) for recipe in recipes]
    dataset = dataset_of(recipes[0], on_progress)
    trainers = [
        Trainer(recipe, dataset, device=device, folder=RunFolder(path), report=report, save_every=save_every)
        for recipe, path, report in zip(recipes, paths, reports, strict=True)
    ]
    for path in paths:
        RunFolder(path).expect_free()  # all of them, before anything is made
    with ExitStack() as locks:
        for trainer in trainers:
            locks.enter_context(_new(trainer))
        diverged = run_together(trainers)
        return [error or _finish(trainer, None) for trainer, error in zip(trainers, diverged, strict=True)]


@contextmanager
def _new(trainer: Trainer) -> Iterator[None]:
    """A trainer that has not begun, in its folder, which is made and locked."""
    assert trainer.folder is not None
    trainer.start()
    trainer.folder.create(trainer.recipe)
    with trainer.folder.locked():
        yield


def resume_run(
    path: Path,
    *,
    data_dir: str | None = None,
    on_divergence: Literal["stop", "rollback"] | None = None,
    device: torch.device | str = "cpu",
    report: Report | None = None,
    on_progress: OnProgress | None = None,
    save_every: float = 30.0,
) -> Result:
    """Go on with the run of a folder where its last checkpoint left it; only what is given here may differ from its recipe."""
    memory = PeakMemory(device)
    with _resumed(path, data_dir, on_divergence, device, report, on_progress, save_every) as trainer:
        trainer.run()
        return _finish(trainer, memory)


def resume_runs(
    paths: Sequence[Path],
    *,
    data_dir: str | None = None,
    on_divergence: Literal["stop", "rollback"] | None = None,
    device: torch.device | str = "cpu",
    reports: Sequence[Report],
    on_progress: OnProgress | None = None,
    save_every: float = 30.0,
) -> list[Result | DivergedError]:
    """Go on with several runs at once, in one process."""
    places = [path.resolve() for path in paths]
    if twice := next((path for path, place in zip(paths, places, strict=True) if places.count(place) > 1), None):
        raise ValueError(f"{twice}: expected each run once, got it twice")
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(_resumed(path, data_dir, on_divergence, device, report, on_progress, save_every))
            for path, report in zip(paths, reports, strict=True)
        ]
        diverged = run_together(trainers)
        return [error or _finish(trainer, None) for trainer, error in zip(trainers, diverged, strict=True)]


@contextmanager
def _resumed(
    path: Path,
    data_dir: str | None,
    on_divergence: Literal["stop", "rollback"] | None,
    device: torch.device | str,
    report: Report | None,
    on_progress: OnProgress | None,
    save_every: float,
) -> Iterator[Trainer]:
    """The trainer of a folder, where its last checkpoint left it, the folder locked."""
    folder = RunFolder(path)
    stored = folder.read_recipe()
    # At the start, best is written a moment before last: a kill in between leaves nothing that a new start would not make again.
    if folder.best.exists() and not folder.last.exists() and read(folder.best).progress["step"] > 0:
        raise ValueError(
            f"{folder.last}: expected the checkpoint to go on from, got none; {folder.best.name} alone can be used, not resumed"
        )
    recipe = replace(stored, data_dir=data_dir or stored.data_dir, on_divergence=on_divergence or stored.on_divergence)
    dataset = dataset_of(recipe, on_progress)
    trainer = Trainer(recipe, dataset, device=device, folder=folder, report=report, save_every=save_every)
    with folder.locked():
        folder.sweep()
        if folder.last.exists():
            checkpoint = read(folder.last)
            with located(str(folder.last)):
                _expect_same(checkpoint, recipe, dataset)
                trainer.resume(checkpoint)
        else:  # stopped before its first checkpoint
            trainer.start()
            folder.rewind_log(0)
        yield trainer


def _expect_same(checkpoint: Checkpoint, recipe: Recipe, dataset: Dataset) -> None:
    """Refuse to go on with another recipe or other data than a run began with."""
    before = replace(checkpoint.recipe, data_dir=recipe.data_dir, on_divergence=recipe.on_divergence)
    changed = [field.name for field in fields(Recipe) if getattr(before, field.name) != getattr(recipe, field.name)]
    if changed:
        raise ValueError(f"expected the recipe that the run began with, got another {', '.join(changed)} in recipe.toml")
    if checkpoint.data != fingerprint(dataset):
        raise ValueError(f"expected the data that the run began with, got other data from {recipe.data}")


def free_path(path: Path) -> Path:
    """The path, or the first with -2, -3, … behind its name that does not exist yet."""
    names = (path.with_stem(path.stem if number == 1 else f"{path.stem}-{number}") for number in range(1, 10**6))
    return next(name for name in names if not name.exists())


def settled(recipe: Recipe) -> Recipe:
    """The recipe as its folder has it: the user's own data by an absolute path, to be found again from elsewhere."""
    own = Path(recipe.data).expanduser()
    return replace(recipe, data=str(own.resolve())) if recipe.data not in NAMES and own.exists() else recipe


def dataset_of(recipe: Recipe, on_progress: OnProgress | None = None) -> Dataset:
    """The data that a recipe names."""
    return load_dataset(recipe.data, recipe.data_dir, levels=recipe.levels, on_progress=on_progress)


def _finish(trainer: Trainer, memory: PeakMemory | None) -> Result:
    best, folder = trainer.best(), trainer.folder
    assert folder is not None
    peak = memory.mebibytes() if memory else None
    recipe, dataset, device = trainer.recipe, trainer.dataset, trainer.device
    flow = best.flow().to(device)
    size, seed = recipe.eval_batch_size, recipe.seed
    progress = trainer.progress
    assert progress.best_nll is not None
    with threads(recipe.threads), StopRequests() as stop:
        examples = Examples(dataset.test, dataset.levels, device)
        test = likelihood(flow, examples, batch_size=size, samples=recipe.test_samples, seed=seed, watch=stop.check)
        scores = reference_scores(flow, trainer.train, size, seed, watch=stop.check)
        with replacing(folder.scores) as temporary:
            np.save(temporary, scores.numpy())
        records = folder.read_log()
        result = Result(
            recipe=recipe.name,
            test=test,
            validation_nll=progress.best_nll,
            best_epoch=progress.best_step // trainer.batches.steps_per_epoch,
            epochs=trainer.epoch,
            seconds=progress.seconds,
            step_seconds=_step_seconds(records),
            peak_memory=peak,
            parameters=sum(parameter.numel() for parameter in trainer.flow.parameters() if parameter.requires_grad),
            rollbacks=progress.rollbacks,
            provenance=provenance(device),
        )
        if (earlier := _earlier(folder)) and earlier.seconds == result.seconds:  # it had ended, and was not trained again
            result = replace(result, peak_memory=earlier.peak_memory, provenance=earlier.provenance)
        write_text(folder.result, json_text(asdict(result), indent=2) + "\n")
        # Last, since what can go wrong with a picture must not cost the figures.
        if records:
            figures.curves(folder.curves, records, flow.reconstruction_names, exact=flow.surrogate_is_exact)
        draw_samples(folder.samples, flow, trainer.train, dataset.columns)
    trainer.report({"kind": "result", "folder": str(folder.path), **asdict(result)})
    return result


def _step_seconds(records: list[dict[str, Any]]) -> float | None:
    times = [record["step_seconds"] for record in records if isinstance(record.get("step_seconds"), float)]
    return statistics.median(times) if times else None


def _earlier(folder: RunFolder) -> Result | None:
    """What a run had come to before it was resumed, if it had ended by then."""
    try:
        return Result.read(folder.result)
    except ValueError:
        return None


def draw_samples(path: Path, flow: Flow, train: Examples, columns: tuple[str, ...]) -> None:
    """The sheet of a run: data, samples by the learned inverse, and samples by the exact one from the same z."""
    image = is_image(train.shape, train.levels)
    data = train.spread(64 if image else 1000, seed=0)
    with evaluating(flow):
        learned, exact = (
            flow.sample(len(data), inverse, generator_for(train.device, 0, "sheet")).cpu() for inverse in ("learned", "exact")
        )
    if image:
        assert train.levels is not None
        figures.sample_sheet(path, learned, exact, data.cpu(), train.levels)
    else:
        figures.sample_scatter(path, learned.flatten(1), exact.flatten(1), data.cpu().flatten(1), columns or None)

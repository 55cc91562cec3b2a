"""Complete runs: start or resume them, and write exact test likelihoods, scores and figures into their folders."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from selfnorm.bijection import located
from selfnorm.data import reads_folder
from selfnorm.data.batches import Examples, generator_for
from selfnorm.data.dataset import Dataset, fingerprint, is_image
from selfnorm.data.locate import OnProgress
from selfnorm.evaluate.likelihood import evaluating, likelihood, reference_scores
from selfnorm.flow import Flow, InaccurateInverseWarning, Inverse
from selfnorm.report import figures
from selfnorm.report.provenance import provenance
from selfnorm.runtime.files import replacing
from selfnorm.runtime.memory import PeakMemory
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.checkpoint import Checkpoint
from selfnorm.train.digest import digest_of_scores
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Report, Trainer
from selfnorm.train.profile import Piece
from selfnorm.train.recipe import Recipe
from selfnorm.train.result import Result
from selfnorm.train.source import dataset_of, expect_storable, with_absolute_data_path
from selfnorm.train.starts import checkpoint_to_resume, expect_unused, is_start, new_run
from selfnorm.train.stopping import DivergedError, StopRequests
from selfnorm.train.together import run_together


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
    """Trains a recipe in a new folder and returns its result.

    save_every:  seconds between checkpoints.
    on_profile:  called before training with the time that each part of a step takes.
    """
    recipe = with_absolute_data_path(recipe)
    dataset = dataset_of(recipe, on_progress, is_new=True)
    memory = PeakMemory(device)
    trainer = Trainer(recipe, dataset, device=device, folder=RunFolder(path), report=report, save_every=save_every)
    with _started(trainer):
        if on_profile:
            on_profile(trainer.profile())
        _train_alone(trainer)
        return _finish_run(trainer, memory)


def start_runs(
    recipes: Sequence[Recipe],
    paths: Sequence[Path],
    *,
    device: torch.device | str = "cpu",
    reports: Sequence[Report],
    on_progress: OnProgress | None = None,
    save_every: float = 30.0,
) -> list[Result | DivergedError]:
    """Trains recipes for the same data together in one process, each in a new folder; see `run_together`.

    Returns a result, or the error of a diverged run, for each recipe. Peak memory is unknown, because the runs share it.
    """
    recipes = [with_absolute_data_path(recipe) for recipe in recipes]
    dataset = dataset_of(recipes[0], on_progress, is_new=True)
    trainers = [
        Trainer(recipe, dataset, device=device, folder=RunFolder(path), report=report, save_every=save_every)
        for recipe, path, report in zip(recipes, paths, reports, strict=True)
    ]
    for recipe, path in zip(recipes, paths, strict=True):
        expect_unused(RunFolder(path), recipe)  # check all of them before creating any
    with ExitStack() as locks:
        for trainer in trainers:
            locks.enter_context(_started(trainer))
        return _train_together(trainers)


@contextmanager
def _started(trainer: Trainer) -> Iterator[None]:
    """Initialises a new trainer, and holds the lock of its new folder within the block."""
    assert trainer.folder is not None
    trainer.start()
    with new_run(trainer.folder, trainer.recipe):
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
    """Resumes the run in a folder from its last checkpoint. Only the settings given here may differ from its recipe."""
    memory = PeakMemory(device)
    with _resumed_run(path, data_dir, on_divergence, device, report, on_progress, save_every) as trainer:
        _train_alone(trainer)
        return _finish_run(trainer, memory)


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
    """Resumes several runs together in one process; see `start_runs` and `resume_run`."""
    places = [path.resolve() for path in paths]
    if twice := next((path for path, place in zip(paths, places, strict=True) if places.count(place) > 1), None):
        raise ValueError(f"{twice}: expected each run once, got it twice")
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(_resumed_run(path, data_dir, on_divergence, device, report, on_progress, save_every))
            for path, report in zip(paths, reports, strict=True)
        ]
        return _train_together(trainers)


def _train_alone(trainer: Trainer) -> None:
    """Trains a run to the end."""
    try:
        trainer.run()
    except DivergedError:
        _draw_diverged(trainer)
        raise


def _train_together(trainers: Sequence[Trainer]) -> list[Result | DivergedError]:
    """Trains runs together, and returns the result, or the error of a diverged one, of each."""
    diverged = run_together(trainers)
    found = [error or _finish_run(trainer, None) for trainer, error in zip(trainers, diverged, strict=True)]
    for trainer, error in zip(trainers, diverged, strict=True):
        if error:
            _draw_diverged(trainer)
    return found


@contextmanager
def _resumed_run(
    path: Path,
    data_dir: str | None,
    on_divergence: Literal["stop", "rollback"] | None,
    device: torch.device | str,
    report: Report | None,
    on_progress: OnProgress | None,
    save_every: float,
) -> Iterator[Trainer]:
    """Yields the trainer of a run, restored by `checkpoint_to_resume`, and holds the lock of its folder within the block."""
    folder = RunFolder(path)
    stored = folder.read_recipe()
    # At step 0, best is written just before last. If the run was killed in between, it can simply start again.
    if not folder.last.exists() and (folder.has_trained() or (folder.best.exists() and not is_start(folder.best))):
        then = f"; {folder.best.name} can be evaluated and sampled from, but not resumed" if folder.best.exists() else ""
        raise ValueError(f"{folder.last}: expected the checkpoint to resume from, got none{then}")
    kept = stored.data.folder if reads_folder(stored.data.source) else None  # older runs stored it for any data
    recipe = stored.changed(folder=data_dir or kept, on_divergence=on_divergence or stored.optimiser.on_divergence)
    expect_storable(recipe.data.folder or "")
    with folder.locked():
        folder.remove_partial_files()
        found = checkpoint_to_resume(folder) if folder.last.exists() else None
        if found:
            with located(str(found[0])):
                found[1].expect_recipe(recipe)  # before anything is built by it
        dataset = dataset_of(recipe, on_progress, columns=found[1].columns if found else None)
        if found and "data.origin" not in found[1].tensors:
            dataset = dataset.narrowed()
        trainer = Trainer(recipe, dataset, device=device, folder=folder, report=report, save_every=save_every)
        if found:
            source, checkpoint = found
            with located(str(source)):
                _expect_same_recipe_and_data(checkpoint, recipe, dataset)
            best = trainer.best()  # raises if it is damaged: now, not after the training
            with located(str(folder.best)):
                _expect_same_recipe_and_data(best, recipe, dataset)
            with located(str(source)):
                trainer.resume(checkpoint)
        else:  # it was stopped before its first checkpoint
            trainer.start()
            folder.rewind_log(0)
        yield trainer


def _expect_same_recipe_and_data(checkpoint: Checkpoint, recipe: Recipe, dataset: Dataset) -> None:
    """Raises ValueError if the recipe or the data differ from those that the run started with."""
    checkpoint.expect_recipe(recipe)
    if checkpoint.data != fingerprint(dataset):
        raise ValueError(f"expected the data that the run started with, got other data from {recipe.data.source}")


def free_path(path: Path) -> Path:
    """Returns the path if it does not exist yet, else the first free one with -2, -3, … appended to its name."""
    names = (path.with_stem(path.stem if number == 1 else f"{path.stem}-{number}") for number in range(1, 10**6))
    return next(name for name in names if not name.exists())


def _finish_run(trainer: Trainer, memory: PeakMemory | None) -> Result:
    """Evaluates the best weights of a trained run, and writes training scores, result.json and figures into its folder."""
    best, folder = trainer.best(), trainer.folder
    assert folder is not None
    peak = memory.mebibytes() if memory else None
    recipe, dataset, device = trainer.recipe, trainer.dataset, trainer.device
    flow = best.flow().to(device)
    size, seed = recipe.evaluation.batch_size, recipe.optimiser.seed
    progress = trainer.progress
    assert progress.best_nll is not None
    with cpu_threads(recipe.optimiser.threads), StopRequests() as stop:
        # Not those of the trainer, which may be distances from an origin.
        train, held_out = (Examples.exact(part, dataset.levels, device) for part in (dataset.train, dataset.test))
        test = likelihood(flow, held_out, batch_size=size, samples=recipe.evaluation.test_samples, seed=seed, watch=stop.check)
        scores = reference_scores(flow, train, size, seed, watch=stop.check)
        with replacing(folder.scores) as temporary:
            np.save(temporary, scores.numpy())
        records = folder.read_log()
        result = Result(
            recipe=recipe.name,
            test=test,
            validation_nll=best.progress["best_nll"],  # of the weights that are evaluated here
            best_epoch=best.progress["best_step"] // trainer.batches.steps_per_epoch,
            epochs=trainer.epoch,
            seconds=progress.seconds,
            step_seconds=_step_seconds(records),
            peak_memory=peak,
            parameters=sum(parameter.numel() for parameter in trainer.flow.parameters() if parameter.requires_grad),
            rollbacks=progress.rollbacks,
            provenance=provenance(device),
            scores_digest=digest_of_scores(scores.numpy()),
        )
        if (earlier := Result.stored(folder.result)) and earlier.seconds == result.seconds:  # had already ended
            result = replace(result, peak_memory=earlier.peak_memory, provenance=earlier.provenance)
        folder.expect_in_place()
        result.write(folder.result)
        # Last, so that an error in a figure cannot cost the result.
        _draw_curves(trainer, flow)
        draw_samples(folder.samples, flow, train, dataset.columns)
    trainer.report({"kind": "result", "folder": str(folder.path), **asdict(result)})
    return result


def _draw_diverged(trainer: Trainer) -> None:
    """Writes the training curves of a run that diverged, which show how it came to that."""
    with suppress(OSError):  # a full disk must not hide the divergence
        _draw_curves(trainer, trainer.flow)


def _draw_curves(trainer: Trainer, flow: Flow) -> None:
    """Writes the training curves of a run, if it has an epoch or a validation to show."""
    assert trainer.folder is not None
    records = trainer.folder.read_log()
    if any(record["kind"] in ("epoch", "validation") for record in records):
        figures.run_curves(trainer.folder.curves, records, flow.reconstruction_names, exact=flow.surrogate_is_exact)


def _step_seconds(records: list[dict[str, Any]]) -> float | None:
    """Returns the median over epochs of the time of one step; None if no record has it."""
    times = [seconds for record in records if (seconds := record.get("step_seconds")) is not None]
    return statistics.median(times) if times else None


def draw_samples(path: Path, flow: Flow, train: Examples, columns: tuple[str, ...]) -> None:
    """Writes a figure of the data, of samples, and if there is a learned inverse of samples by it alone, from the same z."""
    image = is_image(train.shape, train.levels)
    data = train.random_examples(64 if image else 1000, seed=0)
    kinds: dict[str, Inverse] = {"samples": "auto"}
    if flow.planned_inverses():
        kinds[f"{'learned' if flow.reconstruction_names else 'tracked'} inverse"] = "learned"
    # The figure shows what the warning would say.
    with evaluating(flow), warnings.catch_warnings(action="ignore", category=InaccurateInverseWarning):
        samples = {
            title: flow.sample(len(data), inverse, generator_for(train.device, 0, "sheet")).cpu()
            for title, inverse in kinds.items()
        }
    if image:
        assert train.levels is not None
        figures.sample_sheet(path, data.cpu(), samples, train.levels)
    else:
        tables = {title: drawn.flatten(1) for title, drawn in samples.items()}
        figures.sample_scatter(path, data.cpu().flatten(1), tables, columns or None)

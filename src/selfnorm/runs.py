"""Whole runs: start or resume one, and leave its exact test likelihood, scores and pictures in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from selfnorm.data import load_dataset
from selfnorm.data.batches import Examples, generator_for
from selfnorm.data.dataset import Dataset
from selfnorm.data.files import Progress as OnProgress
from selfnorm.evaluate import Likelihood, evaluating, likelihood, log_likelihoods
from selfnorm.files import replacing, write_text
from selfnorm.flow import Flow
from selfnorm.recipe import Recipe
from selfnorm.report import figures
from selfnorm.report.provenance import provenance
from selfnorm.train.checkpoint import read
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import OnDivergence, Report, Trainer, threads
from selfnorm.train.stopping import StopRequests

MOST_SCORES = 10_000  # training examples to compare new ones with


@dataclass(frozen=True)
class Result:
    """What a finished run came to: exact likelihoods of its best weights, and where they come from."""

    recipe: str
    test: Likelihood
    validation_nll: float
    best_epoch: int
    epochs: int  # actually run
    seconds: float
    rollbacks: int
    provenance: dict[str, str | None]


def start_run(
    recipe: Recipe,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    report: Report | None = None,
    on_divergence: OnDivergence = "stop",
    on_progress: OnProgress | None = None,
    save_every: float = 30.0,
) -> Result:
    """Train a recipe into a new folder. `save_every`: seconds between checkpoints."""
    folder = RunFolder(path)
    trainer = Trainer(
        recipe,
        _dataset(recipe, on_progress),
        device=device,
        folder=folder,
        report=report,
        on_divergence=on_divergence,
        save_every=save_every,
    )
    trainer.start()
    folder.create(recipe)
    return _finish(trainer, folder, report)


def resume_run(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    report: Report | None = None,
    on_divergence: OnDivergence = "stop",
    on_progress: OnProgress | None = None,
    save_every: float = 30.0,
) -> Result:
    """Go on with the run of a folder where its last checkpoint left it."""
    folder = RunFolder(path)
    recipe = folder.read_recipe()
    folder.sweep()
    trainer = Trainer(
        recipe,
        _dataset(recipe, on_progress),
        device=device,
        folder=folder,
        report=report,
        on_divergence=on_divergence,
        save_every=save_every,
    )
    if folder.last.exists():
        trainer.resume(read(folder.last))
    else:  # stopped before its first checkpoint
        trainer.start()
        folder.rewind_log(0)
    return _finish(trainer, folder, report)


def free_folder(parent: Path, name: str) -> Path:
    """parent/name, or with -2, -3, … behind it the first that holds no run."""
    candidates = (parent / (name if number == 1 else f"{name}-{number}") for number in range(1, 10**6))
    return next(path for path in candidates if not path.exists())


def _dataset(recipe: Recipe, on_progress: OnProgress | None = None) -> Dataset:
    return load_dataset(recipe.data, recipe.data_dir, levels=recipe.levels, on_progress=on_progress)


def _finish(trainer: Trainer, folder: RunFolder, report: Report | None) -> Result:
    best = trainer.run()
    recipe, dataset = trainer.recipe, trainer.dataset
    flow = best.flow().to(trainer.device)
    with threads(recipe.threads), StopRequests() as stop:
        test = likelihood(
            flow,
            Examples(dataset.test, dataset.levels, trainer.device),
            batch_size=recipe.eval_batch_size,
            samples=recipe.test_samples,
            seed=recipe.seed,
            watch=stop.check,
        )
        scores = _training_scores(recipe, flow, trainer.train)
        with replacing(folder.scores) as temporary:
            np.save(temporary, scores)
        draw_samples(folder.samples, flow, trainer.train, dataset.columns)
    figures.curves(folder.curves, folder.read_log(), flow.reconstruction_names)
    progress = trainer.progress
    assert progress.best_nll is not None
    result = Result(
        recipe.name,
        test,
        progress.best_nll,
        progress.best_step // trainer.batches.steps_per_epoch,
        trainer.epoch,
        progress.seconds,
        progress.rollbacks,
        provenance(trainer.device),
    )
    write_text(folder.result, json.dumps(asdict(result), indent=2) + "\n")
    if report:
        report({"kind": "result", "folder": str(folder.path), **asdict(result)})
    return result


def _training_scores(recipe: Recipe, flow: Flow, train: Examples) -> NDArray[np.float64]:
    order = torch.randperm(len(train), generator=generator_for(torch.device("cpu"), recipe.seed, "scores"))[:MOST_SCORES]
    some = Examples(train.stored[order.to(train.stored.device)], train.levels, train.device)
    return np.sort(log_likelihoods(flow, some.in_order(recipe.eval_batch_size, recipe.seed)).numpy())


def draw_samples(path: Path, flow: Flow, train: Examples, columns: tuple[str, ...]) -> None:
    """The sheet of a run: data, samples by the learned inverse, and samples by the exact one from the same z."""
    image = train.levels is not None and len(train.shape) == 3
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

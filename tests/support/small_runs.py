"""Short runs on the digits, and comparisons of two runs."""

import json

import torch

from selfnorm.compare.worker import Outcome
from selfnorm.data import load_dataset
from selfnorm.data.batches import Examples, TrainingBatches
from selfnorm.train.adam import make_adam
from selfnorm.train.build import build_flow, build_loss
from selfnorm.train.checkpoint import read_checkpoint
from selfnorm.train.experiments import find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Trainer
from selfnorm.train.settings import override

SMALL = ("layers=2", "epochs=6", "validate_every=2", "test_samples=1")


def digits(*settings):
    """Returns the recipe digits-fc-snf, with settings such as "epochs=6"."""
    return override(find_recipe("digits-fc-snf"), settings)


def trained(recipe, **options):
    """Trains a recipe; returns the trainer and its best checkpoint."""
    trainer = Trainer(recipe, load_dataset(recipe.data.source), **options)
    trainer.start()
    return trainer, trainer.run()


def same(one, other):
    """Returns whether the tensors of two checkpoints are identical."""
    return one.tensors.keys() == other.tensors.keys() and all(torch.equal(one.tensors[k], other.tensors[k]) for k in one.tensors)


def assert_same_runs(one, other):
    """Asserts that two run folders agree in everything except times."""
    for name in ("best.safetensors", "last.safetensors"):
        assert same(read_checkpoint(one / name), read_checkpoint(other / name)), name
    logs = [RunFolder(path).read_log() for path in (one, other)]
    for record in logs[0] + logs[1]:
        for time in ("seconds", "step_seconds"):
            record.pop(time, None)
    assert logs[0] == logs[1]
    results = [json.loads((path / "result.json").read_text()) for path in (one, other)]
    assert results[0]["test"] == results[1]["test"]


def without_worker(work, report, stop):
    """Does what `run_in_worker` does, but in this process: a new one takes seconds to import everything."""
    work(report)
    return Outcome("finished")


def folder_with(recipe, path):
    """Returns the folder of a run that has written nothing but its recipe."""
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    folder.write_recipe(recipe)
    return folder


def started(*settings, **options):
    """Returns the trainer of a small recipe, initialised but not yet trained."""
    trainer = Trainer(digits(*SMALL, *settings), load_dataset("digits"), **options)
    trainer.start()
    return trainer


def made(kind, device, *settings, recipe="digits-fc-snf", block=5):
    """Returns a training step of a kind on the digits, as the trainer builds it, but with blocks of a few steps even on a CPU."""
    recipe = override(find_recipe(recipe), ["standardize=false", *settings])
    data = load_dataset("digits")
    loss = build_loss(recipe, build_flow(recipe, data.shape, data.levels)).to(device)
    batches = TrainingBatches(
        Examples(data.train, data.levels, device), recipe.optimiser.batch_size, recipe.optimiser.seed, jitter=recipe.data.jitter
    )
    batches.block = block
    loss.flow.initialize(batches.batch(0, 0))
    return kind(loss, make_adam(loss), batches, recipe.optimiser.clip)

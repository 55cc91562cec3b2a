"""The loop: schedule, exact repeatability through stops and kills, early stopping."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from selfnorm.data import load_dataset
from selfnorm.data.batches import Examples
from selfnorm.evaluate.likelihood import likelihood
from selfnorm.train.checkpoint import read_checkpoint, save_checkpoint
from selfnorm.train.experiments import find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Trainer
from selfnorm.train.run import resume_run, start_run
from selfnorm.train.settings import override
from selfnorm.train.step import learning_rate_at
from selfnorm.train.stopping import StoppedError
from support.small_runs import SMALL, assert_same_runs, digits, folder_with, same, started, trained

CPU = torch.device("cpu")


def test_self_normalizing_digits_reach_their_exact_twin():
    """60 epochs, three seeds: within 3 nats of each other on average, in exact test NLL. `benchmarks/` has the full budget."""
    dataset = load_dataset("digits")
    test = Examples(dataset.test, dataset.levels, CPU)
    means = []
    for kind in ("selfnorm", "exact"):
        found = []
        for seed in range(3):
            _, best = trained(digits("epochs=60", f"kind={kind}", f"seed={seed}"))
            found.append(likelihood(best.flow(), test, samples=5).nll)
        means.append(sum(found) / 3)
    assert abs(means[0] - means[1]) < 3, means
    assert max(means) < 104, "and both have learned: an untrained flow has some 130"


def test_the_learning_rate_rises_batch_by_batch_stays_and_falls():
    rates = [learning_rate_at(step, 10, 20, peak=2.0, warmup_epochs=1.5, decay=0.25) for step in range(200)]
    assert rates[:15] == pytest.approx([2 * (step + 1) / 15 for step in range(15)])
    assert set(rates[15:150]) == {2.0}
    assert rates[150:] == pytest.approx([2 * (200 - step) / 50 for step in range(150, 200)])
    assert {learning_rate_at(step, 10, 20, 2.0, 0.0, 0.0) for step in range(200)} == {2.0}


def test_clipping_bounds_the_gradient():
    recipe = digits(*SMALL, "clip=0.5")
    trainer = Trainer(recipe, load_dataset("digits"))
    trainer.start()
    trainer._step(0, 0, 1e-3)
    norm = torch.cat([p.grad.flatten() for p in trainer.loss.parameters()]).norm()
    assert norm.item() == pytest.approx(0.5, rel=1e-4)


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    recipe = digits(*SMALL)
    (_, first), (_, again), (_, other) = (trained(recipe.changed(seed=seed)) for seed in (0, 0, 1))
    assert same(first, again)
    assert not same(first, other)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("penalty=geco", "weight=100"),
        ("penalty=mdmm", "weight=100", "probes=3"),
        ("probes=2", "inverse_likelihood=true"),
        ("kind=tracked",),
        ("kind=sketch", "learning_rate=1e-4"),
        ("kind=lu",),  # its factors are column-major
    ],
    ids=["fixed", "geco", "mdmm with probes", "held", "tracked", "sketch", "lu"],
)
@pytest.mark.parametrize("stop_at", [1, 12, 31], ids=["first step", "end of an epoch", "mid-epoch"])
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path, monkeypatch, settings, stop_at):
    recipe = digits(*SMALL, *settings)
    start_run(recipe, tmp_path / "whole")

    calls = []
    original = Trainer._loop

    def loop(self, stop):
        check = stop.check

        def stopping():
            calls.append(1)
            if len(calls) == stop_at:
                stop._note(signal.SIGTERM, None)
            check()

        stop.check = stopping
        return original(self, stop)

    monkeypatch.setattr(Trainer, "_loop", loop)
    with pytest.raises(StoppedError):
        start_run(recipe, tmp_path / "stopped")
    monkeypatch.setattr(Trainer, "_loop", original)
    assert read_checkpoint(tmp_path / "stopped" / "last.safetensors").progress["step"] < 72
    resume_run(tmp_path / "stopped")
    assert_same_runs(tmp_path / "whole", tmp_path / "stopped")


DRIVER = """
import sys, torch
from pathlib import Path
from selfnorm.train.settings import override
from selfnorm.train.experiments import find_recipe
from selfnorm.train.run import resume_run, start_run
folder = Path(sys.argv[1])
print("ready", flush=True)
if folder.exists():
    resume_run(folder, save_every=0.05)
else:
    start_run(override(find_recipe("digits-fc-snf"), sys.argv[2:]), folder, save_every=0.05)
"""


def test_a_run_killed_three_times_ends_with_the_same_bits(tmp_path):
    settings = ["epochs=150", "validate_every=10", "test_samples=1"]
    start_run(digits(*settings), tmp_path / "whole")
    killed, kills, delays = tmp_path / "killed", 0, [0.3, 0.7, 0.45]
    while True:
        with subprocess.Popen([sys.executable, "-c", DRIVER, str(killed), *settings], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            if kills < 3:
                while process.poll() is None and not (killed / "last.safetensors").exists():
                    time.sleep(0.01)
                time.sleep(delays[kills])
                process.kill()
            code = process.wait()
        if kills == 3:
            break
        assert code == -signal.SIGKILL, "it must die in mid-run for this to test anything"
        kills += 1
    assert code == 0
    assert_same_runs(tmp_path / "whole", killed)
    assert not list(killed.glob(".*part*")), "what a kill left half-written is swept up"


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    recipe = digits(*SMALL)
    start_run(recipe, tmp_path / "whole")
    folder_with(recipe, tmp_path / "young")
    resume_run(tmp_path / "young")
    assert_same_runs(tmp_path / "whole", tmp_path / "young")


def test_a_run_killed_between_its_first_two_checkpoints_starts_again(tmp_path):
    recipe = digits(*SMALL)
    start_run(recipe, tmp_path / "whole")
    trainer = Trainer(recipe, load_dataset("digits"), folder=folder_with(recipe, tmp_path / "young"))
    trainer.start()
    save_checkpoint(trainer.folder.best, trainer.best())
    resume_run(tmp_path / "young")
    assert_same_runs(tmp_path / "whole", tmp_path / "young")


def test_a_finished_run_can_be_resumed_and_says_the_same(tmp_path):
    first = start_run(digits(*SMALL), tmp_path / "run")
    assert resume_run(tmp_path / "run").test == first.test


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    start_run(digits(*SMALL), tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match="--resume"):
        start_run(digits(*SMALL, "seed=1"), tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_training_on_does_not_change_the_best_checkpoint():
    trainer = started("on_divergence=rollback")
    for index in range(3):
        trainer._step(0, index, 1e-3)
    trainer._kept.best = trainer._make_checkpoint()
    before = {name: value.clone() for name, value in trainer._kept.best.tensors.items()}
    trainer._restore(trainer._kept.best)
    for index in range(3):
        trainer._step(0, index, 1e-3)
    assert all(torch.equal(value, before[name]) for name, value in trainer._kept.best.tensors.items())


def test_the_epochs_record_is_the_mean_of_its_own_steps():
    records = []
    trainer = started("learning_rate=1e-30", report=records.append)
    trainer.run()
    surrogates = [record["surrogate"] for record in records if record["kind"] == "epoch"]
    assert len(surrogates) == 6
    assert max(surrogates) - min(surrogates) < 2, "weights do not move, so epochs differ by their noise alone"
    steps = [trainer._step(5, index, 0.0).surrogate.item() for index in range(12)]
    assert surrogates[5] == pytest.approx(sum(steps) / 12, rel=1e-5)


def test_best_is_on_disk_before_a_last_that_knows_of_it(tmp_path, monkeypatch):
    trainer = Trainer(digits(*SMALL), load_dataset("digits"), folder=RunFolder(tmp_path))
    trainer.start()
    written = []
    monkeypatch.setattr("selfnorm.train.checkpoint.save_checkpoint", lambda path, checkpoint: written.append(path.name))
    trainer.save()
    trainer.save()
    assert written == ["best.safetensors", "last.safetensors", "last.safetensors"], "and the best only when it is a new one"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("recipe.toml", ("seed = 0", "seed = 1"), "a different optimiser.seed"),
        ("recipe.toml", ("epochs = 6", "epochs = 7"), "a different optimiser.epochs"),
    ],
)
def test_a_run_goes_on_only_as_it_began(tmp_path, file, change, words):
    start_run(digits(*SMALL), tmp_path / "run")
    path = tmp_path / "run" / file
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ValueError, match=rf"last.safetensors.*{words}"):
        resume_run(tmp_path / "run")


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    rows = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float32).numpy()
    np.save(tmp_path / "x.npy", rows)
    recipe = override(find_recipe("moons-fc-snf"), [f"data={tmp_path / 'x.npy'}", "epochs=2", "layers=2", "init_examples=40"])
    start_run(recipe, tmp_path / "run")
    resume_run(tmp_path / "run")
    np.save(tmp_path / "x.npy", rows + 1)
    with pytest.raises(ValueError, match=r"last.safetensors.*other data from .*x.npy"):
        resume_run(tmp_path / "run")


def test_patience_ends_training_early(tmp_path):
    recipe = digits("epochs=60", "validate_every=1", "patience=3", "learning_rate=1e-30", "warmup_epochs=0")
    trainer, best = trained(recipe)
    assert trainer.epoch < 60
    assert trainer.progress.stale == 3
    assert best.progress["best_step"] == trainer.progress.best_step


@pytest.mark.filterwarnings("ignore::selfnorm.objective.UnstableObjectiveWarning")
def test_the_best_weights_are_those_of_the_best_validation(tmp_path):
    recipe = digits("epochs=30", "validate_every=5", "weight=0.02", "learning_rate=0.001", "decay=0", "inverse_likelihood=true")
    trainer, best = trained(recipe)
    validation = Examples(trainer.dataset.validation, 17, CPU)
    assert likelihood(best.flow(), validation, seed=recipe.optimiser.seed).nll == trainer.progress.best_nll
    assert likelihood(trainer.flow, validation, seed=recipe.optimiser.seed).nll > trainer.progress.best_nll


@pytest.mark.gpu
def test_a_run_on_the_device_resumes_to_the_same_bits(tmp_path, monkeypatch):
    device = torch.accelerator.current_accelerator()
    recipe = digits(*SMALL, "precision=float32")
    start_run(recipe, tmp_path / "whole", device=device)
    trainer = Trainer(recipe, load_dataset("digits"), device=device, folder=folder_with(recipe, tmp_path / "stopped"))
    trainer.start()
    for index in range(5):
        metrics = trainer._step(0, index, trainer._learning_rate(index))
        trainer._metrics[index] = torch.cat([metrics.surrogate, metrics.reconstruction[0]])
        trainer.progress.step += 1
    trainer.save()
    resume_run(tmp_path / "stopped", device=device)
    assert_same_runs(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.data
def test_real_mnist_trains(tmp_path):
    """A few steps of the paper's FC flow on the digits themselves bring the exact validation NLL down."""
    if not os.environ.get("SELFNORM_DATA"):
        pytest.skip("needs MNIST under $SELFNORM_DATA")
    recipe = override(find_recipe("mnist-fc-snf"), ["warmup_epochs=0", "learning_rate=1e-3"])
    dataset = load_dataset("mnist")
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [50_000, 10_000, 10_000]
    trainer = Trainer(recipe, dataset)
    trainer.start()
    some = Examples(dataset.validation[:500], 256, CPU)
    before = likelihood(trainer.flow, some).nll
    for index in range(20):
        trainer._step(0, index, 1e-3)
    assert not trainer._step.failed
    after = likelihood(trainer.flow, some).nll
    assert 1100 < after < before - 100

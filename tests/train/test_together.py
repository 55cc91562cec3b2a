"""Several runs in one process: each gives the result that it would give alone, even if others fail."""

import json
import os
import signal

import pytest
import torch

from selfnorm.data import load_dataset
from selfnorm.train.checkpoint import read_checkpoint
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Trainer
from selfnorm.train.run import Result, start_run, start_runs
from selfnorm.train.stopping import DivergedError, StoppedError
from selfnorm.train.together import run_together
from support.commandline import SHORT, fails, ok
from support.small_runs import SMALL, assert_same_runs, digits, folder_with, same, started


def silent(record):
    pass


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the sketch tracker loses its inverse once
@pytest.mark.parametrize("kind", ["selfnorm", "sketch"])
def test_each_run_is_the_same_as_alone(tmp_path, device, kind):
    recipes = [digits(*SMALL, f"kind={kind}", f"seed={seed}", "precision=float32") for seed in (0, 5)]
    paths = [tmp_path / str(recipe.optimiser.seed) for recipe in recipes]
    results = start_runs(recipes, paths, device=device, reports=[silent] * 2)
    assert all(isinstance(result, Result) and result.peak_memory is None for result in results)
    for recipe, path in zip(recipes, paths, strict=True):
        start_run(recipe, tmp_path / f"alone-{recipe.optimiser.seed}", device=device)
        assert_same_runs(path, tmp_path / f"alone-{recipe.optimiser.seed}")


def test_a_diverging_run_does_not_affect_the_others(tmp_path):
    bad, good = digits(*SMALL, "learning_rate=1e30", "warmup_epochs=0"), digits(*SMALL, "seed=1")
    found = start_runs([bad, good], [tmp_path / "bad", tmp_path / "good"], reports=[silent] * 2)
    assert isinstance(found[0], DivergedError)
    assert found[1].epochs == 6
    assert (tmp_path / "bad" / "best.safetensors").exists()
    assert (tmp_path / "bad" / "curves.png").exists() == bool(RunFolder(tmp_path / "bad").read_log())


def test_curves_that_cannot_be_written_cost_no_result(tmp_path, monkeypatch):
    def draw(trainer, flow):
        if trainer.recipe.optimiser.learning_rate == 1e30:
            raise OSError("disk full")

    bad, good = digits(*SMALL, "learning_rate=1e30", "warmup_epochs=0"), digits(*SMALL, "seed=1")
    monkeypatch.setattr("selfnorm.train.run._draw_curves", draw)
    found = start_runs([bad, good], [tmp_path / "bad", tmp_path / "good"], reports=[silent] * 2)
    assert isinstance(found[0], DivergedError) and isinstance(found[1], Result)
    assert (tmp_path / "good" / "result.json").exists()


def test_a_stop_saves_all_runs(tmp_path):
    def stopping(record):
        if record["kind"] == "epoch" and record["epoch"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    recipes = [digits(*SMALL, f"seed={seed}") for seed in range(3)]
    paths = [tmp_path / str(seed) for seed in range(3)]
    with pytest.raises(StoppedError):
        start_runs(recipes, paths, reports=[silent, stopping, silent])
    steps = [read_checkpoint(path / "last.safetensors").progress["step"] for path in paths]
    assert max(steps) - min(steps) <= 1
    assert 24 <= min(steps) <= 25


def test_threads_and_precision_must_be_the_same():
    with pytest.raises(ValueError, match="threads and precision, got 1 and tf32 in digits-fc-snf, 2 and tf32 in digits-fc-snf"):
        run_together([started("threads=1"), started("threads=2")])


def test_the_command_trains_seeds_together_and_prints_their_mean(tmp_path):
    short = ["--set", "epochs=2", "--set", "warmup_epochs=1"]
    said = ok("train", "digits-fc-snf", *short, "--seeds", "2", "--seed", "7", "--run", tmp_path / "run", "-q")
    assert "over 2 of 2 seeds" in said
    seeds = [
        read_checkpoint(path / "last.safetensors").recipe.optimiser.seed for path in (tmp_path / "run", tmp_path / "run-seed8")
    ]
    assert seeds == [7, 8]
    lines = ok("train", "digits-fc-snf", *short, "--seeds", "2", "--run", tmp_path / "other", "--json").splitlines()
    records = [json.loads(line) for line in lines]
    summary = records.pop()
    assert summary["kind"] == "seeds" and summary["nll"].keys() == {"0", "1"} and summary["diverged"] == []
    assert {record["run"] for record in records} == {str(tmp_path / "other"), str(tmp_path / "other-seed1")}
    assert sum(record["kind"] == "result" for record in records) == 2
    assert "no --twin" in fails("train", "digits-fc-snf", "--seeds", "2", "--twin")
    assert "--seeds" in fails("train", "--resume", tmp_path / "run", "--seeds", "2")
    run = tmp_path / "run"
    assert f"{run}: expected each run once" in fails("train", "--resume", run, "--resume", run / ".." / "run").replace("\n", "")


@pytest.mark.gpu
def test_runs_on_their_own_streams_are_the_same_as_alone():
    recipes = [digits(*SMALL, f"seed={seed}", "precision=float32") for seed in range(3)]
    data = load_dataset("digits")
    together = [Trainer(recipe, data, device="cuda") for recipe in recipes]
    for trainer in together:
        trainer.start()
    assert run_together(together) == [None] * 3
    for recipe, trainer in zip(recipes, together, strict=True):
        alone = Trainer(recipe, data, device="cuda")
        alone.start()
        assert same(alone.run(), trainer.best())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_stopped_seeds_resume_together(tmp_path):
    whole = [tmp_path / "a", tmp_path / "a-seed1"]
    ok("train", "digits-fc-snf", *SHORT, "--seeds", "2", "--run", whole[0], "-q")

    def stopping(record):
        if record["kind"] == "epoch" and record["epoch"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    recipes = [read_checkpoint(path / "last.safetensors").recipe for path in whole]
    stopped = [tmp_path / "b", tmp_path / "b-seed1"]
    with pytest.raises(StoppedError):
        start_runs(recipes, stopped, reports=[stopping, silent])
    said = ok("train", "--resume", stopped[0], "--resume", stopped[1], "-q")
    assert "over 2 of 2 seeds" in said
    for one, other in zip(whole, stopped, strict=True):
        assert_same_runs(one, other)


def test_only_seeds_of_one_recipe_have_a_mean(tmp_path):
    """Neither two runs of the same seed nor runs of two recipes are averaged."""
    one, again, other, twin = (tmp_path / name for name in ("one", "again", "other", "twin"))
    ok("train", "digits-fc-snf", *SHORT, "--run", one, "-q")
    ok("train", "digits-fc-snf", *SHORT, "--run", again, "-q")
    ok("train", "digits-fc-tracked", *SHORT, "--run", other, "-q")
    ok("train", "digits-fc-tracked", *SHORT, "--seed", "1", "--run", twin, "-q")
    for first, second in ((one, again), (one, other), (one, twin)):
        said = ok("train", "--resume", first, "--resume", second, "-q")
        assert said.count(": test NLL") == 2 and "mean" not in said
        records = [json.loads(line) for line in ok("train", "--resume", first, "--resume", second, "--json").splitlines()]
        assert {record["run"] for record in records if record["kind"] == "result"} == {str(first), str(second)}
        assert not any(record["kind"] == "seeds" for record in records)
    assert "over 2 of 2 seeds" in ok("train", "--resume", other, "--resume", twin, "-q")


def test_resuming_a_finished_run_keeps_its_result(tmp_path, monkeypatch):
    paths = [tmp_path / "a", tmp_path / "a-seed1"]
    ok("train", "digits-fc-snf", *SHORT, "--seeds", "2", "--run", paths[0], "-q")
    ok("train", "digits-fc-snf", *SHORT, "--run", tmp_path / "alone", "-q")
    monkeypatch.setattr("selfnorm.train.run.provenance", lambda device: {"command": "another"})
    for runs in (paths[:1], paths, [tmp_path / "alone"], [tmp_path / "alone", paths[1]]):
        before = [Result.read(RunFolder(path).result) for path in runs]
        ok("train", *(word for path in runs for word in ("--resume", path)), "-q")
        assert [Result.read(RunFolder(path).result) for path in runs] == before
    forgotten = RunFolder(paths[0]).result
    forgotten.unlink()
    ok("train", "--resume", paths[0], "-q")
    assert Result.read(forgotten).provenance == {"command": "another"}


def test_all_folders_must_be_unused_before_any_is_created(tmp_path):
    (tmp_path / "run-seed1").mkdir()
    (tmp_path / "run-seed1" / "file").touch()
    assert "run-seed1: expected a new or empty folder" in fails(
        "train", "digits-fc-snf", *SHORT, "--seeds", "2", "--run", tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()


def test_an_error_in_one_run_saves_the_others(tmp_path):
    trainers = []
    for seed in range(2):
        recipe = digits(*SMALL, f"seed={seed}")
        trainers.append(Trainer(recipe, load_dataset("digits"), folder=folder_with(recipe, tmp_path / str(seed))))
        trainers[-1].start()

    def breaking(record):
        if record["kind"] == "epoch" and record["epoch"] == 2:
            raise OSError("no space left")

    trainers[0].report = breaking
    with pytest.raises(OSError, match="no space"):
        run_together(trainers)
    assert read_checkpoint(tmp_path / "1" / "last.safetensors").progress["step"] >= 23

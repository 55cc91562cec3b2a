"""Starting: of several processes on one new folder one trains, and after a kill the same command starts again."""

import multiprocessing
import os
import signal
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from selfnorm.train.checkpoint import read_checkpoint, save_checkpoint
from selfnorm.train.experiments import recipe_for
from selfnorm.train.folder import RunFolder
from selfnorm.train.run import resume_run, start_run
from selfnorm.train.settings import to_toml
from support.commandline import digest, fails, invoke, numbers, ok, write_csv
from support.small_runs import SMALL, assert_same_runs, digits, without_worker

fcntl = pytest.importorskip("fcntl")  # where there is none, folders are not locked
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
RECIPE = digits(*SMALL, "layers=1", "epochs=1", "validate_every=1", "threads=1")


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """Imports here what a run imports when it begins, so that no fork has to."""
    start_run(RECIPE, tmp_path_factory.mktemp("first") / "run")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Leaves out the figures at the end of a run, which take most of the time of a small one, and new processes for workers."""
    for name in ("run_curves", "sample_scatter", "sample_sheet", "comparison_curves"):
        monkeypatch.setattr(f"selfnorm.report.figures.{name}", lambda *args, **options: None)
    monkeypatch.setattr("selfnorm.compare.execute.run_in_worker", without_worker)


@contextmanager
def held(folder):
    """Holds the lock of a folder, as another process would."""
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def in_two_processes(work):
    """Calls work(0) and work(1) at the same moment, each in its own process, and returns what they return."""
    barrier, results = FORK.Barrier(2), FORK.Queue()

    def child(index):
        barrier.wait()
        results.put((index, work(index)))

    children = [FORK.Process(target=child, args=(index,)) for index in range(2)]
    for process in children:
        process.start()
    found = dict(results.get(timeout=120) for _ in children)
    for process in children:
        process.join()
    return [found[index] for index in range(2)]


@pytest.mark.parametrize("attempt", range(6))
def test_of_two_starts_at_once_one_trains_its_own_recipe(tmp_path, attempt):
    recipes = [RECIPE.changed(epochs=1, seed=seed) for seed in (10, 20)]

    def start(index):
        try:
            start_run(recipes[index], tmp_path / "run")
        except ValueError as error:
            return str(error)
        return "trained"

    said = in_two_processes(start)
    assert sorted(each == "trained" for each in said) == [False, True], said
    winner = said.index("trained")
    assert said[1 - winner].startswith(f"{tmp_path / 'run'}: expected ")
    folder = RunFolder(tmp_path / "run")
    assert folder.read_recipe() == recipes[winner]
    ok("train", "--resume", folder.path, "-q")  # which compares the recipe with that of the checkpoint


def test_a_start_changes_nothing_while_another_holds_the_folder(tmp_path):
    with held(tmp_path / "run"):
        assert "expected an idle run, got one that is being trained" in fails("train", "--run", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


# Kills


@pytest.fixture(params=["noted", pytest.param("digits", marks=pytest.mark.slow)])
def recipe(request, tmp_path):
    """A recipe for a table of 40 rows, about which the log has notes, and for the digits, about which it has none."""
    if request.param == "digits":
        return RECIPE
    path = str(write_csv(tmp_path / "few.csv", numbers(40, 3)))
    return recipe_for(path, (3,), 32).changed(source=path, layers=1, epochs=1, validate_every=1, threads=1)


def killed_at(event, path, recipe):
    """Starts a run in another process, which is killed just before it touches the folder for the event-th time."""

    def count(name, args):
        nonlocal event
        if name in ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove") and any(
            str(arg).startswith(str(path)) for arg in args
        ):
            event -= 1
            if event < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def child():
        sys.addaudithook(count)
        start_run(recipe, path)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


def test_after_a_kill_at_any_instant_before_the_first_steps_the_same_start_works(tmp_path, recipe):
    start_run(recipe, tmp_path / "whole")
    notes = [record for record in RunFolder(tmp_path / "whole").read_log() if record["kind"] == "note"]
    assert bool(notes) is (recipe is not RECIPE)
    started, resumed = 0, 0
    while resumed < 3:
        path = tmp_path / f"killed-{started + resumed}"
        assert killed_at(started + resumed, path, recipe)
        if (path / "last.safetensors").exists():  # from here on it is resumed
            resumed += 1
            resume_run(path)
        else:
            started += 1
            start_run(recipe, path)
        assert_same_runs(tmp_path / "whole", path)
        assert not list(path.glob(".*part*"))
    assert started > 8, "the folder, the lock, the recipe and two checkpoints: each is at least one event"


@pytest.mark.parametrize("leftovers", [[".lock"], [".recipe.0123.part.toml"], [".best.0123.part.safetensors", "recipe.toml"]])
def test_what_a_kill_leaves_is_taken_over(tmp_path, leftovers):
    run = tmp_path / "run"
    run.mkdir()
    for name in leftovers:
        (run / name).write_text(to_toml(RECIPE) if name == "recipe.toml" else "half a fi")
    start_run(RECIPE, run)
    assert not list(run.glob(".*part*"))


@pytest.mark.parametrize("name", [".lock", ".recipe.0123.part.toml", "recipe.toml"])
def test_what_others_left_is_not(tmp_path, name):
    """Neither next to a foreign file nor under another recipe, which may have been written by hand."""
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text(to_toml(RECIPE.changed(seed=5)))
    if name != "recipe.toml":
        (run / "notes.txt").write_text("mine")
    before = digest(run)
    with pytest.raises(ValueError, match=r"run: expected a"):
        start_run(RECIPE, run)
    assert digest(run) == before


def test_weights_that_were_trained_are_not_taken_for_leftovers(digits_run, tmp_path):
    """A run that someone shared as its recipe and its best checkpoint."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("recipe.toml", "best.safetensors"):
        (run / name).write_bytes((digits_run[0] / name).read_bytes())
    before = digest(run)
    with pytest.raises(ValueError, match="got one that holds a run"):
        start_run(RunFolder(run).read_recipe(), run)
    assert digest(run) == before


# Comparisons

SHORT = ("--set", "epochs=1", "--set", "validate_every=1", "--set", "layers=1")


def test_a_comparison_changes_nothing_while_another_holds_its_folder(tmp_path):
    with held(tmp_path / "both"):
        said = fails("compare", "digits-fc-snf", *SHORT, "--run", tmp_path / "both")
    assert f"{tmp_path / 'both'}: expected an idle comparison, got one under way" in said
    assert [path.name for path in (tmp_path / "both").iterdir()] == [".lock"]


def test_of_two_comparisons_at_once_one_trains(tmp_path):
    names = ("digits-fc-snf", "digits-fc-exact")

    def compare(index):
        result = invoke("compare", names[index], *SHORT, "--run", tmp_path / "both", "--device", "cpu", "-q")
        return result.exit_code, result.stderr

    codes, said = zip(*in_two_processes(compare), strict=True)
    assert sorted(codes) == [0, 1], said
    winner = codes.index(0)
    assert "got one under way" in said[1 - winner] and said[winner] == ""
    assert not (tmp_path / "both" / names[1 - winner]).exists()


def test_a_comparison_takes_over_what_a_kill_left(tmp_path):
    run = tmp_path / "both" / "digits-fc-snf"
    run.mkdir(parents=True)
    (run / ".recipe.0123.part.toml").write_text("half a fi")
    ok("compare", "digits-fc-snf", *SHORT, "--run", tmp_path / "both", "-q")
    assert not list(run.glob(".*part*"))


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_run_whose_files_are_deleted_meanwhile_stops(tmp_path, epoch):
    """Deleting a folder fails, and leaves what is written at that moment, if a run goes on in it."""
    folder = RunFolder(tmp_path / "run")

    def report(event):
        if event["kind"] == "epoch" and event["epoch"] == epoch:
            for path in (*folder.own_files(), folder.path / ".lock"):
                path.unlink(missing_ok=True)

    recipe = RECIPE.changed(epochs=3, layers=1)
    with pytest.raises(
        ValueError, match=r"run: expected the files of the run to stay while it is trained, got .* without recipe"
    ):
        start_run(recipe, folder.path, report=report, save_every=0.0)
    assert not folder.recipe.exists() and not folder.result.exists()


def test_a_kill_while_a_checkpoint_is_written_leaves_nothing(tmp_path):
    """Of safetensors neither, which writes to a temporary file of its own."""
    start_run(RECIPE, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    checkpoint = read_checkpoint(folder.last)
    checkpoint.tensors["loss.large"] = torch.zeros(1 << 24)

    def save_for_ever():
        while True:
            save_checkpoint(folder.last, checkpoint)

    left = []
    for _ in range(20):
        child = FORK.Process(target=save_for_ever, daemon=True)
        child.start()
        until = time.monotonic() + 5
        while time.monotonic() < until and not list(folder.path.glob(".tmp*")):
            pass
        child.kill()
        child.join()
        if left := list(folder.path.glob(".tmp*")):
            break
    with folder.locked():
        folder.remove_partial_files()
    assert {path.name for path in folder.path.iterdir()} <= {path.name for path in folder.own_files()}, left
    if not left:
        pytest.skip("this version of safetensors leaves nothing of its own")


def test_only_what_safetensors_may_have_left_is_removed(tmp_path):
    folder = RunFolder(tmp_path)
    for name in (".tmpAbC123", ".tmp-notes", ".tmpnote", ".tmpAbC1234", ".tmpAbC12"):
        (tmp_path / name).touch()
    (tmp_path / ".tmpfolder").mkdir()
    folder.remove_partial_files()
    assert {path.name for path in tmp_path.iterdir()} == {".tmp-notes", ".tmpnote", ".tmpAbC1234", ".tmpAbC12", ".tmpfolder"}

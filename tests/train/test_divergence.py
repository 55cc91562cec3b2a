"""Divergence: what counts as one, what is kept, where it is traced to, and rollbacks."""

import pytest
import torch

from selfnorm.data import load_dataset
from selfnorm.data.dataset import Dataset
from selfnorm.train.adam import steps_taken
from selfnorm.train.checkpoint import read_checkpoint
from selfnorm.train.counters import RunProgress
from selfnorm.train.divergence import diagnosis
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Trainer
from selfnorm.train.run import resume_run, start_run
from selfnorm.train.stopping import DivergedError
from support.small_runs import SMALL, digits, folder_with, started

pytestmark = pytest.mark.filterwarnings("ignore::selfnorm.objective.UnstableObjectiveWarning")
PAPER = "inverse_likelihood=true"  # unlike the one-sided objective, it diverges on digits if λ is small


def begun(trainer):
    trainer.start()
    return trainer


def test_too_small_a_lambda_is_called_divergence(tmp_path):
    """λ = 0.01 never turns non-finite; its exact validation likelihood gets worse and worse."""
    with pytest.raises(DivergedError, match=r"exact validation NLL.*larger reconstruction_weight \(λ is 0.01\).*clip"):
        start_run(digits(PAPER, "weight=0.01", "epochs=300", "learning_rate=0.001"), tmp_path / "run")
    log = RunFolder(tmp_path / "run").read_log()
    course = [record["nll"] for record in log if record["kind"] == "validation"]
    limit = min(course) + max(5, 0.05 * min(course))
    assert course[-1] > limit
    assert course[-2] > limit
    best, last = (read_checkpoint(tmp_path / "run" / f"{name}.safetensors") for name in ("best", "last"))
    assert best.progress["best_nll"] == min(course)
    assert last.progress["worse"] == 0, "the last good one, not the one that diverged"
    assert RunFolder(tmp_path / "run").curves.exists()


def test_rollback_raises_lambda_tenfold_and_trains_on(tmp_path):
    result = start_run(
        digits(PAPER, "weight=0.01", "epochs=100", "learning_rate=0.001", "on_divergence=rollback"), tmp_path / "run"
    )
    rollbacks = [record for record in RunFolder(tmp_path / "run").read_log() if record["kind"] == "rollback"]
    assert 1 <= len(rollbacks) == result.rollbacks <= 3
    raised = [[pytest.approx(0.01 * 10 ** (number + 1))] * 2 for number in range(len(rollbacks))]
    assert [record["reconstruction_weight"] for record in rollbacks] == raised
    assert result.test.nll < 110


@pytest.mark.filterwarnings("ignore:Flow.log_prob")  # of weights that are nearly singular by then
def test_a_run_that_diverges_before_anything_can_be_drawn_says_so(tmp_path):
    with pytest.raises(DivergedError):
        start_run(digits(*SMALL, "learning_rate=1e8", "warmup_epochs=0", "on_divergence=rollback"), tmp_path / "run")


def test_rollbacks_end_after_three(tmp_path):
    with pytest.raises(DivergedError, match="3 rollbacks did not help"):
        start_run(digits(PAPER, "weight=1e-9", "epochs=400", "learning_rate=0.02", "on_divergence=rollback"), tmp_path / "run")
    assert sum(record["kind"] == "rollback" for record in RunFolder(tmp_path / "run").read_log()) == 3
    with pytest.raises(DivergedError, match="3 rollbacks did not help"):
        resume_run(tmp_path / "run")  # it still counts them
    assert read_checkpoint(tmp_path / "run" / "last.safetensors").progress["rollbacks"] == 3


def test_a_non_finite_loss_names_the_layer_and_keeps_the_last_good_checkpoint(tmp_path):
    recipe = digits("epochs=50", "learning_rate=1e30", "warmup_epochs=0", "validate_every=1", "decay=0")
    with pytest.raises(DivergedError, match=r"non-finite.*layer|no exact likelihood.*layer"):
        start_run(recipe, tmp_path / "run")
    for name in ("best", "last"):
        tensors = read_checkpoint(tmp_path / "run" / f"{name}.safetensors").tensors
        assert all(torch.isfinite(value).all() for value in tensors.values() if value.is_floating_point())


def test_no_weight_changes_after_a_step_that_failed():
    recipe = digits(*SMALL)
    trainer = Trainer(recipe, load_dataset("digits"))
    trainer.start()
    trainer._step(0, 0, 1e-3)
    with torch.no_grad():
        trainer.flow.bijection[6].bias[3] = torch.nan
    frozen = {name: value.clone() for name, value in trainer.loss.named_parameters()}
    moments = [value.clone() for state in trainer.optimizer.state.values() for value in state.values()]
    trainer._step(0, 1, 1e-3)
    assert trainer._step.failed
    with torch.no_grad():  # even without its cause, the flag stays raised
        trainer.flow.bijection[6].bias[3] = frozen["flow.bijection.6.bias"][3] = 0.0
    for index in (2, 3):
        trainer._step(0, index, 1e-3)
    assert trainer._step.failed
    assert steps_taken(trainer.optimizer) == 1
    assert all(torch.equal(value, frozen[name]) for name, value in trainer.loss.named_parameters())
    after = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    with torch.no_grad():
        trainer.flow.bijection[6].bias[3] = torch.nan
    with pytest.raises(DivergedError, match=r"epoch 1, step 2: layer 6.*SelfNormLinear"):
        trainer._step_failed()


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_loss_or_a_gradient_alone_that_is_not_finite_is_a_failure(broken):
    trainer = started()
    original = trainer.loss.forward

    def forward(x, **options):
        value, metrics = original(x, **options)
        return (value + torch.inf if broken == "loss" else value), metrics

    trainer.loss.forward = forward
    if broken == "gradient":
        trainer.flow.bijection[4].weight.register_hook(lambda gradient: gradient * torch.nan)
    trainer._step(0, 0, 1e-3)
    assert trainer._step.failed


def test_a_non_finite_gradient_is_traced_to_where_it_began():
    trainer = started()
    for name in ("bijection.4.weight", "bijection.6.weight"):
        trainer.flow.get_parameter(name).register_hook(lambda gradient: gradient * torch.nan)
    assert "bijection.6.weight is the first" in diagnosis(trainer.loss, trainer.batches, 0, 0)


def test_a_gradient_whose_square_overflows_is_named():
    trainer = started()
    trainer.flow.bijection[4].weight.register_hook(lambda gradient: gradient * 1e30)
    assert "bijection.4.weight" in diagnosis(trainer.loss, trainer.batches, 0, 0)


@pytest.mark.parametrize("penalty", ["geco", "mdmm"])
def test_a_rollback_after_a_non_finite_step_has_a_finite_lambda(penalty, tmp_path):
    recipe = digits(*SMALL, f"penalty={penalty}", "weight=100", "on_divergence=rollback")
    trainer = Trainer(recipe, load_dataset("digits"), folder=RunFolder(tmp_path))
    trainer.start()
    trainer._step(0, 0, 1e-3)
    with torch.no_grad():
        trainer.flow.bijection[4].weight[0, 0] = torch.nan
    trainer._step(0, 1, 1e-3)
    assert trainer._step.failed
    trainer._step_failed()
    assert trainer.progress.rollbacks == 1
    assert (trainer.loss.penalty.weight > 500).all()
    assert not trainer._step.failed
    assert read_checkpoint(tmp_path / "last.safetensors").progress["rollbacks"] == 1, "and it is on disk at once"
    trainer.folder.close_log()


def test_without_a_lambda_to_raise_divergence_ends_the_run(tmp_path):
    trainer = started("kind=exact", "on_divergence=rollback")
    with pytest.raises(DivergedError, match="no layer learns its inverse"):
        trainer._diverge("for a reason")


def test_a_stop_after_a_failed_step_does_not_save_it(tmp_path):
    """As on an accelerator, where the flag is read only now and then."""
    recipe = digits(*SMALL)
    trainer = Trainer(recipe, load_dataset("digits"), folder=RunFolder(tmp_path))
    trainer.start()
    trainer.save()
    with torch.no_grad():
        trainer.flow.bijection[4].weight[0, 0] = torch.nan
    trainer._step(0, 0, 1e-3)
    with pytest.raises(DivergedError):
        trainer.save()
    assert all(torch.isfinite(v).all() for v in read_checkpoint(tmp_path / "last.safetensors").tensors.values())


@pytest.mark.parametrize(
    ("course", "stale", "worse"),
    [
        ([100.0], 0, 0),
        ([100.0, 99.0], 0, 0),
        ([100.0, 105.1], 1, 1),
        ([100.0, 104.9], 1, 0),
        ([200.0, 209.0, 211.0], 2, 1),  # 5 % of 200 are more than 5 nats
        ([100.0, 106.0, 107.0], 2, 2),
        ([100.0, 106.0, 101.0, 107.0], 3, 1),  # not consecutive
        ([100.0, 106.0, 99.0], 0, 0),
        ([-1000.0, -951.0], 1, 0),  # a negative NLL has its 5 % above it, too
        ([-1000.0, -949.0, -949.0], 2, 2),
    ],
)
def test_judging_validations(course, stale, worse):
    progress = RunProgress()
    for step, nll in enumerate(course, 1):
        progress.step = step
        progress.judge(nll)
    assert (progress.stale, progress.worse, progress.diverged) == (stale, worse, worse >= 2)
    assert progress.best_nll == min(course)
    assert progress.best_step == 1 + course.index(min(course))
    assert progress.validated == len(course)


def test_overfitting_is_no_divergence_where_there_is_patience(tmp_path):
    table = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    dataset = Dataset("table", table[:20], table[20:30], table[30:])
    settings = ["activation=spline", "layers=5", "epochs=600", "validate_every=20", "learning_rate=1e-2", "init_examples=20"]
    with pytest.raises(DivergedError):
        begun(Trainer(digits(*settings), dataset)).run()
    patient = begun(Trainer(digits(*settings, "patience=1000"), dataset))
    best = patient.run()
    assert patient.epoch < 600
    assert best.progress["best_nll"] == patient.progress.best_nll


def test_after_a_resume_the_last_good_checkpoint_is_one_that_was_validated(tmp_path):
    recipe = digits(PAPER, "weight=0.01", "epochs=200", "learning_rate=0.003", "validate_every=10")
    trainer = Trainer(recipe, load_dataset("digits"), folder=folder_with(recipe, tmp_path))
    trainer.start()
    trainer.total = 19 * 12  # as if it had been stopped there, in the middle of an interval
    trainer.run()
    with pytest.raises(DivergedError):
        resume_run(tmp_path)
    last = read_checkpoint(tmp_path / "last.safetensors").progress
    assert last["step"] == last["validated"] == last["best_step"]


def test_a_weight_that_turns_singular_under_its_tracker_ends_the_run_by_name(tmp_path):
    recipe = digits(*SMALL, "kind=tracked")
    trainer = Trainer(recipe, load_dataset("digits"), folder=folder_with(recipe, tmp_path / "run"))
    trainer.start()
    follow, calls = trainer.loss.after_step, []

    def after_step(metrics, *, generator):
        calls.append(1)
        if len(calls) == 6:
            trainer.flow.bijection[6].weight.data.fill_(1.0)
        follow(metrics, generator=generator)

    trainer.loss.after_step = after_step
    with pytest.raises(DivergedError, match=r"epoch 1, step 6: layer 6: TrackedLinear\(64.*expected an invertible weight"):
        trainer.run()
    assert len(read_checkpoint(tmp_path / "run" / "last.safetensors").tensors["loss.flow.bijection.6.weight"].unique()) > 1


def test_fallbacks_are_logged(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"factorised again.*\.fallbacks"):
        start_run(digits(*SMALL, "kind=tracked", "learning_rate=0.3", "warmup_epochs=0"), tmp_path / "run")
    counts = [record["fallbacks"] for record in RunFolder(tmp_path / "run").read_log() if record["kind"] == "epoch"]
    assert len(counts) == 6 and 0 < counts[0] <= counts[-1]

"""The watch over learned inverses: what a run logs, and when it warns."""

import math
import re

import pytest
import torch

from selfnorm.data import load_dataset
from selfnorm.evaluate.health import examine
from selfnorm.train.folder import RunFolder
from selfnorm.train.loop import Trainer
from selfnorm.train.run import resume_run, start_run
from selfnorm.train.stopping import StoppedError
from selfnorm.train.watch import InverseState
from support.small_runs import SMALL, digits, folder_with, started, trained

PAPER = "inverse_likelihood=true"


def of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def records_of(*settings):
    records = []
    trained(digits(*SMALL, *settings), report=records.append)
    return records


def test_a_validation_logs_the_error_of_each_learned_inverse():
    records = []
    trainer, _ = trained(digits(*SMALL), report=records.append)
    validations = of_kind(records, "validation")
    assert [len(record["inverse_error"]) for record in validations] == [2, 2, 2]
    assert all("stability_ratio" not in record for record in validations)
    exact = [layer.distance for layer in examine(trainer.flow, trainer.train.random_examples(50, seed=0)).layers]
    assert validations[-1]["inverse_error"] == pytest.approx(exact, rel=1e-3)


def test_with_the_objective_of_the_paper_it_logs_the_stability_ratio():
    records = []
    trainer, _ = trained(digits(*SMALL, PAPER, "weight=10"), report=records.append)
    last = of_kind(records, "validation")[-1]
    # The first learned layer, number 4, sees preprocessed data, the same at every validation.
    seed = trainer.recipe.optimiser.seed
    x = torch.cat([*trainer.train.subset(len(trainer.train), seed, "watch").in_order(500, seed)])
    h = trainer.flow.split_preprocessing()[0](x)[0].double()
    smallest = torch.linalg.eigvalsh(h.mT @ h / len(h))[0].item()
    assert last["stability_ratio"][0] == pytest.approx(1 / (8 * 10 * smallest), rel=1e-4)
    assert last["stability_ratio"][0] == of_kind(records, "validation")[0]["stability_ratio"][0]
    assert not of_kind(records, "warning")


def test_without_learned_inverses_there_is_nothing_to_log():
    (record, *_) = of_kind(records_of("kind=exact"), "validation")
    assert "inverse_error" not in record and "stability_ratio" not in record


def test_a_run_warns_once_also_after_it_was_resumed(tmp_path, monkeypatch):
    recipe = digits(*SMALL, PAPER, "weight=0.5")
    start_run(recipe, tmp_path / "whole")
    (warning,) = of_kind(RunFolder(tmp_path / "whole").read_log(), "warning")
    assert warning["epoch"] == 2
    assert "is predicted to lose its learned inverse" in warning["message"] and "inverse_likelihood=false" in warning["message"]

    trainer = Trainer(recipe, load_dataset("digits"), folder=folder_with(recipe, tmp_path / "stopped"))
    trainer.start()
    end_epoch = trainer._end_epoch

    def end_epoch_and_stop(epoch, rate):
        end_epoch(epoch, rate)
        if epoch == 3:
            raise StoppedError(2)

    monkeypatch.setattr(trainer, "_end_epoch", end_epoch_and_stop)
    with pytest.raises(StoppedError):
        trainer.run()
    resume_run(tmp_path / "stopped")
    assert len(of_kind(RunFolder(tmp_path / "stopped").read_log(), "warning")) == 1


def test_a_second_crossing_after_a_recovery_is_told_again(monkeypatch):
    ratios = iter([0.9, 1.1, 1.2, 0.9, 1.3, 0.4, 0.9, 1.5])
    records = []
    trainer = Trainer(digits(*SMALL, "epochs=16"), load_dataset("digits"), report=records.append)
    monkeypatch.setattr(trainer._watch, "measure", lambda check: InverseState({"4": 0.01}, {"4": next(ratios)}))
    trainer.start()
    trainer.run()
    assert [record["epoch"] for record in of_kind(records, "warning")] == [4, 16]


def test_an_error_is_told_only_if_it_lasts(monkeypatch):
    errors = iter([0.2, 0.2, 0.05, 0.2, 0.2, 0.2, 0.2, 0.04])
    records = []
    trainer = Trainer(digits(*SMALL, "epochs=16"), load_dataset("digits"), report=records.append)
    monkeypatch.setattr(trainer._watch, "measure", lambda check: InverseState({"4": next(errors)}, {}))
    trainer.start()
    trainer.run()
    assert [record["epoch"] for record in of_kind(records, "warning")] == [12]


def test_a_rollback_does_not_repeat_the_warning():
    trainer = started(PAPER, "weight=0.5", "on_divergence=rollback")
    trainer.progress.warned = ["stability"]
    trainer._diverge("for a reason")
    assert trainer.progress.rollbacks == 1 and trainer.progress.warned == ["stability"]


@pytest.mark.parametrize(
    ("errors", "ratios", "said"),
    [
        ({"0": 0.02, "2": 0.09}, {}, {}),
        ({}, {}, {}),
        ({"0": None}, {"0": None}, {}),
        (
            {"0": 0.02, "2": 0.2},
            {},
            {"error": r"layer 2 has a learned inverse that is off by .* = 0.2, above 0.1\. .*larger recon"},
        ),
        ({"0": math.nan, "2": 0.2}, {}, {"error": r"layer 0 .* = nan"}),
        ({"0": 0.02, "2": 0.2}, {"0": 0.3, "2": 0.99}, {"error": r"layer 2 has a"}),
        (
            {"0": 0.02, "2": 0.2},
            {"0": 1.01, "2": 0.99},
            {"stability": r"layer 0 is predicted to lose.* is 1.01.*inverse_likelihood=false", "error": "layer 2"},
        ),
        ({"0": 0.02, "2": 0.3}, {"0": 1.5, "2": 3}, {"stability": r"layer 2 has lost.* is 3"}),
        ({"0": 0.5, "2": 0.9}, {"0": 0.2, "2": 0.1}, {"error": r"layer 2 .* = 0.9"}),
        ({"0": 0.02, "2": 0.2}, {"0": 0.5, "2": None}, {"error": r"layer 2 .*Train with inverse_likelihood=false"}),
        ({"0": 0.02}, {"0": math.inf}, {"stability": r"layer 0 is predicted to lose.* is inf"}),
    ],
)
def test_a_warning_names_the_layer_the_cause_and_a_remedy(errors, ratios, said):
    lines = InverseState(errors, ratios).causes()
    assert lines.keys() == said.keys()
    assert all(re.search(said[kind], line) and "\n" not in line for kind, line in lines.items())

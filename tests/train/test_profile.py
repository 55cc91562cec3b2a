"""Where a step's time goes: every layer is there, forward and backward, and measuring leaves no trace."""

import json

import pytest
import torch

from selfnorm.train.captured import CapturedStep
from selfnorm.train.profile import Marks, profile
from selfnorm.train.step import EagerStep
from support.commandline import SHORT, fails, ok
from support.small_runs import made, same, started

GLOW = ("model=glow", "blocks=2", "steps=1", "hidden=8", "kernel_size=1")
REST = ["the rest of the loss", "norm of the gradient", "Adam", "trackers, multipliers"]


@pytest.mark.parametrize("kind", [EagerStep, CapturedStep])
def test_every_layer_is_there_with_both_ways(device, kind):
    pieces = profile(made(kind, device, *GLOW, recipe="digits-conv-snf"), rounds=3)
    layers = [(piece.place, piece.kind) for piece in pieces if piece.kind]
    front = [] if kind is CapturedStep else [("0", "Affine"), ("1", "Logit"), ("2", "Squeeze")]
    assert layers[: len(front)] == front
    assert layers[len(front) :] == [
        ("3", "ActNorm"),
        ("4", "SelfNormConv2d"),
        ("5", "AffineCoupling"),
        ("6.rest.0", "Squeeze"),
        ("6.rest.1", "ActNorm"),
        ("6.rest.2", "SelfNormConv2d"),
        ("6.rest.3", "AffineCoupling"),
        ("6.rest.4", "Flatten"),
        ("6.prior", "ConditionalAffine"),
    ]
    assert sorted(piece.place for piece in pieces if not piece.kind) == sorted([*REST, "the batch"])
    assert all(piece.forward > 0 for piece in pieces)
    # The first layer with a parameter needs no gradient for its input, so its backward piece ends with the backward pass.
    assert all((piece.backward > 0) == (piece.place not in ("0", "1", "2")) for piece in pieces if piece.kind)


def test_parts_of_a_layer_are_not_told_apart_from_it(device):
    pieces = profile(made(EagerStep, device, recipe="digits-conv-emerging"), rounds=1)
    assert {piece.kind for piece in pieces if piece.kind} == {"Affine", "Logit", "EmergingConv2d", "SplineActivation", "Squeeze"}


def test_times_are_those_between_marks(monkeypatch):
    clock = iter([1.0, 3.0, 3.5, 7.5])
    monkeypatch.setattr("selfnorm.train.profile.time.perf_counter", lambda: next(clock))
    marks = Marks(torch.device("cpu"))
    for label in ("a", "b", "a", "end"):
        marks(label)
    assert marks.seconds() == [2.0, 0.5, 4.0]


def test_measuring_leaves_no_trace():
    one, other = started(), started()
    assert one.profile()
    assert same(one.run(), other.run())
    assert "surrogate" not in vars(one.flow.bijection[4])


def test_the_command_shows_one_table(tmp_path):
    said = ok("train", "digits-conv-snf", *SHORT, "--profile", "--run", tmp_path / "run", "-q")
    table = said.split("digits-conv-snf: test NLL")[0]
    assert "all SplineActivation" in table and "× 3" in table and "layer 4" in table
    assert table.strip().splitlines()[-1].split()[-2:] == ["100.0", "%"]
    line = ok("train", "digits-fc-snf", *SHORT, "--profile", "--run", tmp_path / "other", "--json").splitlines()[0]
    assert json.loads(line)["kind"] == "profile"
    assert "--profile" in fails("train", "digits-fc-snf", "--profile", "--seeds", "2")

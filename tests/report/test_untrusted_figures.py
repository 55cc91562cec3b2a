"""Figures of strangers' data, in strangers' folders: nothing in them chooses a program, or how a name is read."""

import os

import matplotlib
import pytest
import torch

from selfnorm.report.figures import comparison_curves, run_curves, sample_scatter, sample_sheet
from selfnorm.report.timings import Bar, bars, growth

DRAWN = {
    "sheet": lambda path: sample_sheet(path, torch.zeros(4, 1, 3, 3), {"samples": torch.zeros(4, 1, 3, 3)}, 2),
    "scatter": lambda path: sample_scatter(path, torch.randn(9, 3), {"samples": torch.randn(9, 3)}, ["a", "b", "c"]),
    "curves": lambda path: run_curves(path, [{"kind": "validation", "epoch": 1, "nll": 2.0}]),
    "comparison": lambda path: comparison_curves(path, "title", {"a": [[(1.0, 2.0), (2.0, 1.0)]]}),
    "bars": lambda path: bars(path, "title", [Bar("a", 1.0, 0.9, 1.1)]),
    "growth": lambda path: growth(path, "title", {"a": {"b": {32: 1.0, 64: 2.0}}}, {"a": {"b": 1.0}}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_folder_cannot_make_matplotlib_start_latex(tmp_path, monkeypatch, name):
    """matplotlib reads a matplotlibrc from the working folder."""
    marker = tmp_path / "called"
    for program in ("latex", "dvipng", "kpsewhich"):
        (tmp_path / program).write_text(f"#!/bin/sh\necho {program} >> {marker}\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with matplotlib.rc_context({"text.usetex": True}):
        DRAWN[name](tmp_path / "x.png")
        assert matplotlib.rcParams["text.usetex"]  # a program's own setting stays
    assert not marker.exists() and (tmp_path / "x.png").exists()


@pytest.mark.parametrize("name", ["$\\bad{$", "$x$", "price ($)", "$$"])
def test_names_are_no_formulas(tmp_path, name):
    sample_scatter(tmp_path / "x.png", torch.randn(9, 3), {"samples": torch.randn(9, 3)}, [name, "b", "c"])
    comparison_curves(tmp_path / "y.png", name, {name: [[(1.0, 2.0), (2.0, 1.0)]]})

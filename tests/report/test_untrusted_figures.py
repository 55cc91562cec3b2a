"""Figures of strangers' data, in strangers' folders: nothing in them chooses a program, or how a name is read."""

import os

import matplotlib
import pytest
import torch
from matplotlib.cbook import is_math_text
from matplotlib.text import Text

from selfnorm.report import figures
from selfnorm.report.canvas import new_figure
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
def test_names_are_no_formulas(tmp_path, monkeypatch, name):
    drawn = []
    monkeypatch.setattr(figures, "new_figure", lambda *size: drawn.append(new_figure(*size)) or drawn[-1])
    sample_scatter(tmp_path / "x.png", torch.randn(9, 3), {"samples": torch.randn(9, 3)}, [name, "b", "c"])
    sample_scatter(tmp_path / "y.png", torch.randn(9, 2), {"samples": torch.randn(9, 2)}, [name, name])
    comparison_curves(tmp_path / "z.png", name, {name: [[(1.0, 2.0), (2.0, 1.0)]]})
    escaped = name.replace("$", r"\$")
    shown = [[text.get_text() for text in figure.findobj(Text) if "$" in text.get_text()] for figure in drawn]
    assert [set(texts) for texts in shown] == [{escaped}] * 3 and [len(texts) for texts in shown] == [1, 3, 2]
    assert not any(is_math_text(text) for texts in shown for text in texts)

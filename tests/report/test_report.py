"""Figures show the given data, checked pixel by pixel where possible; RESULTS.md holds all measurements."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from selfnorm.report import canvas, figures
from selfnorm.report.figures import image_grid, run_curves, sample_scatter, sample_sheet
from selfnorm.report.results import build, write_results

ROOT = Path(__file__).parents[2]


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def test_image_grid_is_pixel_exact(tmp_path):
    levels = torch.randint(0, 256, (7, 3, 5, 4))
    image_grid(tmp_path / "deep" / "grid.png", levels + torch.rand(levels.shape), 256)
    picture = pixels(tmp_path / "deep" / "grid.png")
    assert picture.shape == (3 * 7 - 2, 3 * 6 - 2, 3)
    for index, image in enumerate(levels):
        top, left = index // 3 * 7, index % 3 * 6
        assert np.array_equal(picture[top : top + 5, left : left + 4], image.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9, 10])
def test_image_grid_takes_any_number(tmp_path, n):
    image_grid(tmp_path / "grid.png", torch.full((n, 1, 2, 2), 16.9), 17)  # the highest level is white
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.mode == "L" and np.asarray(picture).min() == 255


def test_levels_span_black_to_white_and_outside_is_clamped(tmp_path):
    image_grid(tmp_path / "grid.png", torch.tensor([-3.0, 0.9, 8.0, 16.5, 40.0, 1.0]).reshape(1, 1, 2, 3), 17)
    assert pixels(tmp_path / "grid.png")[:, :, 0].flatten().tolist() == [0, 0, 128, 255, 255, 16]


@pytest.mark.parametrize("channels", [1, 3])
def test_sample_sheet_shows_each_kind_enlarged_and_in_order(tmp_path, channels):
    data, some, others = (torch.randint(0, 256, (count, channels, 3, 3)) for count in (4, 2, 1))
    sample_sheet(tmp_path / "sheet.png", data, {"some": some, "others": others}, 256)
    picture = pixels(tmp_path / "sheet.png")
    factor = 280 // 6
    corners = []
    for image in [*data, *some, *others]:
        tile = image.permute(1, 2, 0).expand(-1, -1, 3).repeat_interleave(factor, 0).repeat_interleave(factor, 1).numpy()
        corners.append(corner_of(tile, picture))
    (a, b, c, d), (e, f), (g,) = corners[:4], corners[4:6], corners[6:]
    assert a[0] == b[0] == e[0] == f[0] == g[0] and a[1] < b[1] < e[1] < f[1] < g[1]  # one row, from left to right
    assert (c[1], d[1]) == (a[1], b[1]) and c[0] == d[0] == a[0] + 3 * factor + 2


def corner_of(tile, picture):
    """Returns the only (row, column) at which a picture contains a tile exactly."""
    height, width = tile.shape[:2]
    starts = np.argwhere((picture[: -height + 1, : -width + 1] == tile[0, 0]).all(-1))
    (corner,) = [(y, x) for y, x in starts if np.array_equal(picture[y : y + height, x : x + width], tile)]
    return corner


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32)])
def test_sample_sheet_is_small_even_of_noise(tmp_path, channels, side):
    noise = torch.rand(100, channels, side, side) * 256
    sample_sheet(tmp_path / "sheet.png", noise, {"samples": noise, "learned inverse": noise}, 256)
    assert (tmp_path / "sheet.png").stat().st_size < canvas.MAX_SHEET_BYTES


def test_scatter_of_two_columns_keeps_to_the_datas_axes(monkeypatch, tmp_path):
    drawn = capture(monkeypatch)
    data = torch.randn(500, 2) * torch.tensor([1.0, 10.0])
    far = torch.cat([data, torch.full((1, 2), 1e6)])
    sample_scatter(tmp_path / "s.png", data, {"samples": data, "learned inverse": far}, ["u", "v"])
    axes = drawn[0].axes
    assert [ax.get_title() for ax in axes] == ["data", "samples", "learned inverse"]
    assert [len(ax.collections[0].get_offsets()) for ax in axes] == [500, 500, 501]
    for ax in axes:
        assert ax.get_xlim() == axes[0].get_xlim() and ax.get_ylim() == axes[0].get_ylim()
        assert 2 < ax.get_xlim()[1] < 5 and 20 < ax.get_ylim()[1] < 50 and ax.get_xlabel() == "u"


@pytest.mark.parametrize(("width", "panels"), [(1, 1), (3, 3), (4, 4), (9, 6)])
def test_histograms_of_other_tables(monkeypatch, tmp_path, width, panels):
    drawn = capture(monkeypatch)
    data = torch.randn(300, width)
    sample_scatter(tmp_path / "h.png", data, {"samples": data, "learned inverse": data + 1000})
    axes = drawn[0].axes
    assert [ax.get_title() for ax in axes] == [f"column {index}" for index in range(panels)]
    for ax in axes:
        step = {patch.get_label(): patch.get_data() for patch in ax.patches}
        mass = {label: (data.values * np.diff(data.edges)).sum() for label, data in step.items()}
        assert mass["data"] > 0.98 and mass["samples"] > 0.98 and mass["learned inverse"] == 0
    assert (drawn[0].legends[0].get_title().get_text() == "the first 6 of 9 columns") == (width == 9)


def test_a_constant_column_has_an_axis_too(tmp_path):
    sample_scatter(tmp_path / "h.png", torch.ones(5, 1), {"samples": torch.ones(5, 1)}, ["one"])
    assert pixels(tmp_path / "h.png").min() < 100


def capture(monkeypatch):
    """Returns a list that collects the figures drawn from now on."""
    drawn = []
    monkeypatch.setattr(figures, "rendered", lambda figure: drawn.append(figure) or canvas.rendered(figure))
    return drawn


def run_records(epochs, layers, weight, key="reconstruction_weight"):
    for epoch in range(1, epochs + 1):
        rows = [10.0 * (layer + 1) / epoch for layer in range(layers)]
        yield {
            "kind": "epoch",
            "epoch": epoch,
            "surrogate": 90 + 1e6 / epoch**8,
            "reconstruction": rows,
            key: [weight(epoch)] * layers,
        }
        yield {"kind": "validation", "epoch": epoch, "nll": 100 + abs(epoch - 15) + 1e6 * (epoch == 1)}
    yield {"kind": "note", "text": "not drawn"}


@pytest.mark.parametrize("key", ["reconstruction_weight", "weight"])  # the latter in logs of earlier versions
def test_curves_mark_the_best_and_survive_a_wild_start(monkeypatch, tmp_path, key):
    drawn = capture(monkeypatch)
    run_curves(tmp_path / "c.png", list(run_records(20, 2, lambda epoch: float(epoch), key)), ["3", "5"])
    nll, loss, reconstruction, weight = drawn[0].axes
    assert nll.lines[1].get_xydata().tolist() == [[15, 100]]
    assert nll.get_legend().get_texts()[0].get_text() == "best: 100.00 at epoch 15"
    assert 110 < nll.get_ylim()[1] < 200 and 90 < loss.get_ylim()[1] < 5000
    assert reconstruction.get_yscale() == "log" and len(reconstruction.lines) == 2
    assert [text.get_text() for text in reconstruction.get_legend().get_texts()] == ["layer 3", "layer 5"]
    assert len(weight.lines) == 1 and weight.lines[0].get_ydata().tolist() == list(range(1, 21))


@pytest.mark.parametrize(("layers", "panels"), [(0, 2), (1, 3), (9, 3)])
def test_curves_have_the_panels_there_is_something_for(monkeypatch, tmp_path, layers, panels):
    drawn = capture(monkeypatch)
    run_curves(tmp_path / "c.png", list(run_records(5, layers, lambda epoch: 1.0)))
    assert len(drawn[0].axes) == panels
    assert layers == 0 or len(drawn[0].axes[2].lines) == layers


def test_curves_show_the_inverses_and_the_bound_of_the_paper(monkeypatch, tmp_path):
    drawn = capture(monkeypatch)
    records = list(run_records(5, 2, lambda epoch: 1.0))
    for record in records:
        if record["kind"] == "validation":
            record |= {"inverse_error": [0.01, 0.02], "stability_ratio": [0.5, None]}
    run_curves(tmp_path / "c.png", records, ["3", "5"])
    *_, error, ratio = drawn[0].axes
    assert len(drawn[0].axes) == 5 and error.get_title() == "error of the learned inverse"
    assert [set(line.get_ydata()) for line in error.lines] == [{0.01}, {0.02}]
    assert [*ratio.lines[2].get_ydata()] == [1, 1] and set(ratio.lines[0].get_ydata()) == {0.5}


def test_a_training_loss_is_called_a_likelihood_only_if_it_is_one(monkeypatch, tmp_path):
    drawn = capture(monkeypatch)
    for exact in (False, True):
        run_curves(tmp_path / "c.png", list(run_records(5, 0, lambda epoch: 1.0)), exact=exact)
    titles = [figure.axes[1].get_title() for figure in drawn]
    assert titles == ["surrogate training loss (not a likelihood)", "exact training NLL"]


def test_curves_of_a_run_that_stands_still_after_a_wild_start(monkeypatch, tmp_path):
    drawn = capture(monkeypatch)
    run_curves(tmp_path / "c.png", [{"kind": "validation", "epoch": e, "nll": 100.0 if e else 1e6} for e in range(9)])
    assert 100 < drawn[0].axes[0].get_ylim()[1] < 110


def test_curves_draw_a_run_that_went_wrong(monkeypatch, tmp_path):
    drawn = capture(monkeypatch)
    records = [
        {"kind": "validation", "epoch": e, "nll": nll} for e, nll in enumerate([5.0, float("nan"), 4.0, None, float("inf")])
    ]
    run_curves(tmp_path / "c.png", records)
    assert drawn[0].axes[0].lines[1].get_xydata().tolist() == [[2, 4]]


def test_a_failed_write_leaves_the_old_picture(monkeypatch, tmp_path):
    path = tmp_path / "grid.png"
    image_grid(path, torch.zeros(1, 1, 2, 2), 2)
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        image_grid(path, torch.ones(1, 1, 2, 2), 2)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["grid.png"]


def test_figures_leave_pyplot_and_the_import_alone():
    code = (
        "import sys, tempfile, torch; import selfnorm.report.figures as f; assert not {'matplotlib', 'PIL'} & set(sys.modules);"
        "x = torch.zeros(3, 1, 2, 2); f.sample_sheet(tempfile.mkdtemp() + '/a.png', x, {'samples': x}, 2);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: image_grid(path, torch.zeros(2, 3, 3), 256), r"image_grid: expected images .* got \(2, 3, 3\)"),
        (lambda path: image_grid(path, torch.zeros(0, 1, 3, 3), 256), r"image_grid: expected images .* got \(0, 1, 3, 3\)"),
        (lambda path: image_grid(path, torch.full((1, 1, 3, 3), torch.nan), 256), "expected a finite image, got 9 non-finite"),
        (lambda path: image_grid(path, torch.zeros(1, 1, 3, 3), 0), "expected levels"),
        (lambda path: sample_scatter(path, torch.zeros(2, 3), {"samples": torch.zeros(2, 2)}), "with the same D"),
        (
            lambda path: sample_scatter(path, torch.zeros(2, 3), {"s": torch.zeros(2, 3)}, ["a"]),
            "a name for each of the 3 columns, got 1",
        ),
        (lambda path: run_curves(path, [{"kind": "note"}]), "got none among 1"),
    ],
)
def test_figures_refuse(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


RESULT = {
    "title": "A title",
    "about": "What it is.",
    "columns": ["method", "nats", "time|s"],
    "rows": [["exact", 95.3, None], ["selfnorm", 95.6, 12]],
    "provenance": {"command": "do it", "commit": None, "machine": "a box", "date": "2026-01-02", "torch": "2.13", "epochs": 60},
}


def test_results_say_all_that_was_measured_and_where(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps(RESULT))
    (tmp_path / "a.json").write_text(json.dumps(RESULT | {"title": "Before it"}))
    text = build(tmp_path)
    assert text.index("## Before it") < text.index("## A title")
    for line in [
        r"| method | nats | time\|s |",
        "| --- | ---: | ---: |",
        "| exact | 95.3 | – |",
        "| selfnorm | 95.6 | 12 |",
        "`do it` · commit – · a box · 2026-01-02 · torch 2.13 · epochs 60 · `results/b.json`",
    ]:
        assert f"\n{line}\n" in text
    write_results(tmp_path, tmp_path / "R.md")
    assert (tmp_path / "R.md").read_text(encoding="utf-8") == text == build(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [["exact", 1]]}, r"bad.json: expected 3 cells in row 0"),
        ({"about": None}, "bad.json: expected 'about' to be a str, got None"),
        ({"provenance": {"command": "x"}}, "got none for commit, machine, date, torch"),
    ],
)
def test_results_refuse_a_broken_file(tmp_path, change, message):
    (tmp_path / "bad.json").write_text(json.dumps(RESULT | change))
    with pytest.raises(ValueError, match=message):
        build(tmp_path)


def test_results_refuse_what_is_no_json_or_no_folder(tmp_path):
    with pytest.raises(ValueError, match="expected a folder"):
        build(tmp_path / "none")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json: expected JSON"):
        build(tmp_path)
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match=r"bad\.json: expected an object"):
        build(tmp_path)


def test_results_md_is_current():
    """If it fails, run python -m selfnorm.report.results."""
    assert (ROOT / "RESULTS.md").read_text(encoding="utf-8") == build(ROOT / "results")


def test_results_run_as_a_command(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text(json.dumps(RESULT))
    subprocess.run([sys.executable, "-m", "selfnorm.report.results"], cwd=tmp_path, check=True)
    assert (tmp_path / "RESULTS.md").read_text(encoding="utf-8") == build(tmp_path / "results")


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "L"), (3, "RGB"), (4, "RGB")])
def test_images_of_any_number_of_channels_are_shown(tmp_path, channels, mode):
    image_grid(tmp_path / "grid.png", torch.zeros(2, channels, 3, 3), 256)
    with Image.open(tmp_path / "grid.png") as image:
        assert image.mode == mode

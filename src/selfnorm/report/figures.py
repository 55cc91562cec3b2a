"""Pictures of a run: samples next to data, training curves, grids of images. All are written atomically, as PNG.

matplotlib is used without pyplot, so no global state is changed and no display is needed. matplotlib and pillow are imported
where they are used, since the rest of the library does not need them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from selfnorm.report.canvas import literal, new_figure, png_bytes, rendered, sheet_bytes, without_latex, write_png
from selfnorm.runtime.checks import expect_finite, positive_int
from selfnorm.runtime.escapes import escaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = np.ndarray[Any, np.dtype[Any]]

IMAGE_GAP = 2  # pixels between images
COLOURS = ("0.45", "tab:blue", "tab:orange", "tab:green")  # of the data, and of each kind of samples


@without_latex
def sample_sheet(path: str | Path, data: Tensor, samples: Mapping[str, Tensor], levels: int) -> None:
    """Draws data and samples side by side, each kind of samples under its title: up to 64 of (n, C, H, W) each.

    Values are in [0, levels), dequantised or not; values outside are clamped. Pixels are enlarged by an integer factor, so they
    stay square and sharp.
    """
    images = {"data": data, **samples}
    batches = [_displayed_pixels("sample_sheet", batch[:64], levels) for batch in images.values()]
    factor = max(1, 280 // max(_grid_columns(len(batch)) * max(batch.shape[1:3]) for batch in batches))
    grids = [_tiled(batch.repeat(factor, 1).repeat(factor, 2)) for batch in batches]
    margin, heading = 12, 28
    columns = [max(grid.shape[1], 110) for grid in grids]  # at least as wide as the heading
    height = heading + max(grid.shape[0] for grid in grids) + margin
    width = sum(columns) + margin * (len(grids) + 1)
    canvas = np.full((height, width, 3), 255, np.uint8)
    figure = new_figure(width / 100, height / 100)
    left = margin
    for title, grid, column in zip(images, grids, columns, strict=True):
        at = left + (column - grid.shape[1]) // 2
        canvas[heading : heading + grid.shape[0], at : at + grid.shape[1]] = grid  # a grey grid is broadcast to RGB
        figure.text((left + column / 2) / width, 1 - heading / 2 / height, title, ha="center", va="center", fontsize=9)
        left += column + margin
    figure.figimage(canvas, zorder=-1)
    write_png(path, sheet_bytes(rendered(figure)))


def image_grid(path: str | Path, images: Tensor, levels: int) -> None:
    """Draws images (n, C, H, W) with values in [0, levels) in a near-square grid, not enlarged, with white lines between them."""
    write_png(path, image_grid_bytes(images, levels))


def image_grid_bytes(images: Tensor, levels: int) -> bytes:
    """Returns the file that `image_grid` writes."""
    from PIL import Image

    grid = _tiled(_displayed_pixels("image_grid", images, levels))
    return png_bytes(Image.fromarray(grid[:, :, 0] if grid.shape[2] == 1 else grid))


def grid_pixels(n: int, height: int, width: int) -> int:
    """Returns the number of pixels of the picture that `image_grid` draws of n images."""
    columns = _grid_columns(n)
    rows = -(-n // columns)  # without a float, which would round large numbers
    return (rows * (height + IMAGE_GAP) - IMAGE_GAP) * (columns * (width + IMAGE_GAP) - IMAGE_GAP)


@without_latex
def sample_scatter(path: str | Path, data: Tensor, samples: Mapping[str, Tensor], columns: Sequence[str] | None = None) -> None:
    """Draws a table (n, D) and kinds of samples under their titles: scatter plots if D = 2, else histograms of 6 columns at most.

    The axes span the data without its outermost half per cent. Samples outside are not drawn, but they are counted in the
    normalisation of the histograms.
    """
    tables = {"data": data, **samples}
    values = {title: _table(title, table, data) for title, table in tables.items()}
    width = data.shape[1]
    names = [f"column {index}" for index in range(width)] if columns is None else [literal(escaped(name)) for name in columns]
    if len(names) != width:
        raise ValueError(f"sample_scatter: expected a name for each of the {width} columns, got {len(names)}: {names}")
    limits = [_limits(values["data"][:, index]) for index in range(min(width, 6))]
    if width == 2:
        figure = new_figure(3 * len(values), 3.3)
        axes = figure.subplots(1, len(values), sharex=True, sharey=True)
        for ax, (title, points), colour in zip(axes, values.items(), COLOURS, strict=False):
            size = min(6.0, 300 / math.sqrt(len(points) + 1))
            ax.scatter(*points.T, s=size, color=colour, alpha=0.6, linewidths=0, rasterized=True)
            ax.set(title=title, xlabel=names[0], xlim=limits[0], ylim=limits[1])
        figure.axes[0].set_ylabel(names[1])
    else:
        across = 2 if len(limits) == 4 else min(3, len(limits))
        down = math.ceil(len(limits) / across)
        figure = new_figure(max(4.5, 3.2 * across), 2.4 * down + 0.5)
        for index, limit in enumerate(limits):
            ax = figure.add_subplot(down, across, index + 1)
            _histograms(ax, {title: points[:, index] for title, points in values.items()}, limit)
            ax.set(title=names[index], xlim=limit, yticks=[])
            if index % across == 0:
                ax.set_ylabel("density")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        left_out = f"the first {len(limits)} of {width} columns" if width > len(limits) else None
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, title=left_out)
    write_png(path, png_bytes(rendered(figure)))


@without_latex
def run_curves(path: str | Path, records: Sequence[Mapping[str, Any]], names: Sequence[str] = (), *, exact: bool = False) -> None:
    """Draws the metrics of a run: validation NLL, training loss, the errors of each layer's inverse, and λ if it varies.

    records:  of kind "validation" (epoch, nll; error of the inverse and stability ratio by layer) and "epoch" (epoch, surrogate;
              reconstruction and λ by layer).
    names:    of the layers, for the legend; with more than 6 layers a colour scale from first to last replaces them.
    exact:    whether the training loss is a likelihood; otherwise only its gradient is meaningful.
    """
    from matplotlib.ticker import MaxNLocator

    epochs = [record for record in records if record.get("kind") == "epoch"]
    validations = [record for record in records if record.get("kind") == "validation"]
    at, when = _series(epochs, "epoch"), _series(validations, "epoch")
    loss, nll = _series(epochs, "surrogate"), _series(validations, "nll")
    by_layer = {
        ("reconstruction error on data", "‖RWh − h‖²/D"): (at, _by_layer(epochs, "reconstruction")),
        ("error of the learned inverse", "‖RW − I‖/√D"): (when, _by_layer(validations, "inverse_error")),
        ("stability ratio, unstable above 1", "1/(8λ·λ_min(E[hhᵀ]))"): (when, _by_layer(validations, "stability_ratio")),
    }
    limits = {"stability ratio, unstable above 1": 1}
    by_layer = {title: (x, y) for title, (x, y) in by_layer.items() if y.size}
    weight = _by_layer(epochs, "reconstruction_weight", "weight")
    varies = weight.size > 0 and not np.all(weight == weight.flat[0])

    count = (len(nll) > 0) + (len(loss) > 0) + len(by_layer) + varies
    if not count:
        raise ValueError(f"curves: expected records of kind 'epoch' or 'validation', got none among {len(records)}")
    across = min(count, 2 if count == 4 else 3)
    down = math.ceil(count / across)
    figure = new_figure(4.6 * across, 3.2 * down)
    axes = iter([figure.add_subplot(down, across, index + 1) for index in range(count)])
    if len(nll):
        ax = next(axes)
        _robust_line(ax, when, nll)
        ax.set(title="exact validation NLL", ylabel="nats")
        if np.isfinite(nll).any():
            best = int(np.nanargmin(nll))
            label = f"best: {nll[best]:.2f} at epoch {when[best]:g}"
            ax.plot(when[best], nll[best], "o", color="tab:red", label=label, clip_on=False, zorder=3)
            ax.legend(frameon=False, loc="upper right")
    if len(loss):
        ax = next(axes)
        _robust_line(ax, at, loss)
        ax.set(title="exact training NLL" if exact else "surrogate training loss (not a likelihood)", ylabel="nats")
    for (title, label), (x, y) in by_layer.items():
        ax = next(axes)
        _layer_lines(ax, x, y, names)
        if (y > 0).any():
            ax.set_yscale("log", nonpositive="mask")
        if title in limits:
            ax.axhline(limits[title], color="tab:red", linewidth=0.8, linestyle="--")
        ax.set(title=title, ylabel=label)
    if varies:
        ax = next(axes)
        alike = (weight == weight[:, :1]).all()
        _layer_lines(ax, at, weight[:, :1] if alike else weight, () if alike else names)
        positive = weight[weight > 0]
        if positive.size and positive.max() > 100 * positive.min():
            ax.set_yscale("log", nonpositive="mask")
        ax.set(title="weight of the reconstruction penalty", ylabel="λ")
    for ax in figure.axes:
        ax.set_xlabel("epoch")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        ax.grid(color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    write_png(path, png_bytes(rendered(figure)))


@without_latex
def comparison_curves(path: str | Path, title: str, lines: Mapping[str, Sequence[Sequence[tuple[float, float | None]]]]) -> None:
    """Draws exact validation NLL against seconds of training. Each label has one or several runs, each a list of (seconds, NLL).

    For several runs the mean is drawn, up to the end of the shortest, with each run faintly behind it. The vertical axis leaves
    out the large values at the start of each run, and the time axis is logarithmic if the runs took very different times.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = new_figure(8.2, 4.2)
    ax = figure.add_subplot()
    drawn = []
    for index, (label, runs) in enumerate(lines.items()):
        color, linestyle = f"C{index % 10}", ("-", "--", ":")[index // 10 % 3]
        arrays = [np.array([(at, math.nan if value is None else value) for at, value in run], dtype=float).T for run in runs]
        drawn += [(seconds, nll) for seconds, nll in arrays]
        shared = min(array.shape[1] for array in arrays)
        mean = np.mean([array[:, :shared] for array in arrays], axis=0)
        ax.plot(
            *mean,
            label=literal(label),
            color=color,
            linestyle=linestyle,
            linewidth=1.4,
            marker="." if shared <= 60 else None,
            markersize=4,
        )
        if len(arrays) > 1:
            for array in arrays:
                ax.plot(*array, color=color, linestyle=linestyle, linewidth=0.6, alpha=0.3)
    ends, top = [seconds[-1] for seconds, _ in drawn], _common_axis(ax, [nll for _, nll in drawn])
    if min(ends) > 0 and max(ends) > 5 * min(ends):
        seen = [seconds[(nll <= top) & (seconds > 0)] for seconds, nll in drawn]
        ax.set(xscale="log", xlim=(0.7 * min((times[0] for times in seen if len(times)), default=min(ends)), 1.3 * max(ends)))
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_xlim(left=0)
    for line in ax.get_lines():
        values = np.asarray(line.get_ydata(), dtype=float)
        if not str(line.get_label()).startswith("_") and not (values <= top).any():
            line.set_label(f"{line.get_label()}, above the plot")
    ax.set(title=literal(title), xlabel="seconds of training", ylabel="exact validation NLL, nats")
    ax.grid(color="0.9")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    write_png(path, png_bytes(rendered(figure)))


def _common_axis(ax: Axes, curves: Sequence[Array]) -> float:
    """Sets the vertical limits from the values after the first fifth of each curve, and returns the upper one. One bad curve
    does not flatten the others."""
    finite = [values for curve in curves if len(values := curve[np.isfinite(curve)])]
    if not finite:
        return math.inf
    low = min(float(values.min()) for values in finite)
    highs = sorted(float(values[len(values) // 5 :].max()) for values in finite)
    high = min(highs[-1], low + 2 * (highs[(len(highs) - 1) // 2] - low))
    span = high - low or 0.01 * abs(low) or 1.0
    ax.set_ylim(low - 0.06 * span, high + 0.1 * span)
    return high + 0.1 * span


def _series(records: Sequence[Mapping[str, Any]], key: str) -> Array:
    """Returns one number per record; NaN, which is not drawn, for a record without it."""
    return np.array([math.nan if record.get(key) is None else record[key] for record in records], dtype=float)


def _by_layer(records: Sequence[Mapping[str, Any]], key: str, old_key: str = "") -> Array:
    """Returns an array (records, layers), filled up with NaN. Logs of earlier versions have old_key instead of key."""
    rows = [list(record.get(key) or record.get(old_key) or []) for record in records]
    layers = max((len(row) for row in rows), default=0)
    return np.array([row + [math.nan] * (layers - len(row)) for row in rows], dtype=float).reshape(len(rows), layers)


def _robust_line(ax: Axes, x: Array, y: Array) -> None:
    """Draws a line and limits the axis so that large values at the start, or spikes, run off the plot without flattening it."""
    ax.plot(x, y, color="tab:blue", linewidth=1.2, marker="." if len(y) <= 60 else None)
    finite = y[np.isfinite(y)]
    settled = finite[max(1, len(finite) // 8) :]
    if len(settled) < 3:
        return
    low, middle, high = finite.min(), np.median(settled), settled.max()
    high = min(high, low + 10 * (middle - low)) if middle > low else high
    span = high - low or 0.01 * abs(low) or 1.0
    ax.set_ylim(low - 0.06 * span, high + 0.15 * span)


def _layer_lines(ax: Axes, x: Array, y: Array, names: Sequence[str]) -> None:
    from matplotlib import colormaps

    layers, marker = y.shape[1], "." if len(y) == 1 else None  # a line needs two points
    if layers <= 6:
        for index in range(layers):
            label = f"layer {names[index]}".strip() if len(names) == layers else None
            ax.plot(x, y[:, index], label=label, color=f"C{index}", linewidth=1.2, marker=marker)
        if len(names) == layers:
            ax.legend(frameon=False, fontsize=8, loc="best", ncols=1 + (layers > 3))
        return
    for index in range(layers):
        ends = {0: "first layer", layers - 1: f"last of {layers}"}
        colour = colormaps["viridis"](0.9 * index / (layers - 1))
        ax.plot(x, y[:, index], label=ends.get(index), color=colour, linewidth=0.8, marker=marker)
    ax.legend(frameon=False, fontsize=8, loc="best")


def _histograms(ax: Axes, series: Mapping[str, Array], limits: tuple[float, float]) -> None:
    edges = np.linspace(*limits, 41)
    for (title, values), colour in zip(series.items(), COLOURS, strict=False):
        heights = np.histogram(values, edges)[0] / (max(1, len(values)) * (edges[1] - edges[0]))
        ax.stairs(heights, edges, label=title, color=colour, fill=title == "data", alpha=0.35 if title == "data" else 1)
    ax.set_ylim(bottom=0)


def _table(title: str, table: Tensor, data: Tensor) -> Array:
    if table.dim() != 2 or table.shape[1] != data.shape[-1] or table.shape[1] == 0:
        raise ValueError(f"sample_scatter: expected tables (n, D) with the same D, got {tuple(table.shape)} for {title}")
    expect_finite("sample_scatter", title, table)
    values: Array = table.detach().double().cpu().numpy()
    return values


def _limits(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [0.005, 0.995]) if len(values) else (0.0, 0.0)
    margin = 0.1 * (high - low) or 0.5  # a constant column still needs an axis
    return float(low - margin), float(high + margin)


def _displayed_pixels(who: str, images: Tensor, levels: int) -> Array:
    """Returns images (n, C, H, W) with values in [0, levels) as bytes (n, H, W, C): the first 3 channels if C ≥ 3, else 1."""
    if images.dim() != 4 or 0 in images.shape:
        raise ValueError(f"{who}: expected images (n, C, H, W), got {tuple(images.shape)}")
    images = images[:, : 3 if images.shape[1] >= 3 else 1]
    expect_finite(who, "image", images)
    highest = positive_int(who, "levels", levels) - 1
    whole = images.detach().double().cpu().floor().clamp(0, highest)
    grey = (whole * (255 / max(1, highest))).round().to(torch.uint8)
    values: Array = grey.permute(0, 2, 3, 1).numpy()
    return values


def _grid_columns(n: int) -> int:
    return math.isqrt(n - 1) + 1  # ⌈√n⌉


def _tiled(images: Array) -> Array:
    """Returns images (n, H, W, C) as one image with ⌈√n⌉ columns, filled row by row."""
    n, height, width, channels = images.shape
    columns = _grid_columns(n)
    rows = math.ceil(n / columns)
    grid = np.full((rows * (height + IMAGE_GAP) - IMAGE_GAP, columns * (width + IMAGE_GAP) - IMAGE_GAP, channels), 255, np.uint8)
    for index, image in enumerate(images):
        top, left = index // columns * (height + IMAGE_GAP), index % columns * (width + IMAGE_GAP)
        grid[top : top + height, left : left + width] = image
    return grid

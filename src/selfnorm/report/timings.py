"""Plots of timings: bars or dots comparing models, and lines of time against dimension."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from selfnorm.report.canvas import new_figure, png_bytes, rendered, without_latex, write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BAR_RATIO = 10  # largest time over smallest: bars below this, dots from there on


@dataclass(frozen=True)
class Bar:
    """The time of a model in milliseconds: median, 10 % and 90 % quantiles, and a lower bound (floor), if known.

    group:  bars of the same group share a colour.
    """

    label: str
    median: float
    low: float
    high: float
    floor: float | None = None
    group: str = ""


@without_latex
def bars(path: str | Path, title: str, shown: Sequence[Bar], xlabel: str = "ms per training step") -> None:
    """Draws one row for each time, in the order given, with its spread, its floor, and its median as text.

    Draws bars from 0 if the largest time is less than `MAX_BAR_RATIO` times the smallest. Otherwise draws dots on a
    logarithmic axis, where the length of a bar would be meaningless.
    """
    if not shown:
        raise ValueError("bars: expected at least one time to draw, got none")
    floors = [bar.floor for bar in shown if bar.floor]
    highest, lowest = max(bar.high for bar in shown), min(bar.low for bar in shown)
    linear = highest < MAX_BAR_RATIO * lowest
    figure = new_figure(8.2, 1.3 + 0.27 * len(shown))
    ax = figure.add_subplot()
    groups = list(dict.fromkeys(bar.group for bar in shown))
    for place, bar in enumerate(shown):
        colour = f"C{groups.index(bar.group) % 10}"
        if linear:
            ax.barh(place, bar.median, height=0.66, color=colour, alpha=0.75)
        else:
            ax.plot(bar.median, place, "o", color=colour, markersize=6)
        ax.plot([bar.low, bar.high], [place, place], color="0.2", linewidth=1.2, solid_capstyle="butt")
        ax.annotate(three_digits(bar.median), (bar.high, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
        if bar.floor:
            ax.plot(bar.floor, place, "|", color="black", markersize=11, markeredgewidth=1.6)
    figure.suptitle(textwrap.fill(title, 90), fontsize=11)
    ax.set(xlabel=xlabel, ylim=(len(shown) - 0.4, -0.6))
    ax.set_yticks(range(len(shown)), [bar.label for bar in shown], fontsize=8)
    if linear:
        ax.set_xlim(0, 1.12 * highest)
    else:
        ax.set(xscale="log", xlim=(min([lowest, *floors]) / 1.6, highest * 2.2))
        _plain_logarithms(ax, "x")
    ax.grid(axis="x" if linear else "both", color="0.9")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    notes = f"{'bar' if linear else 'dot'}: median; thin line: 10 % to 90 % of the blocks" + (
        "; black mark: the floor" if floors else ""
    )
    figure.supxlabel(notes, fontsize=8, color="0.35")
    write_png(path, png_bytes(rendered(figure)))


@without_latex
def growth(
    path: str | Path,
    title: str,
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    slopes: Mapping[str, Mapping[str, float | None]],
) -> None:
    """Draws milliseconds against dimension on logarithmic axes, by panel and kind of layer, with the slopes in the legend."""
    panels = {name: kinds for name, kinds in panels.items() if any(kinds.values())}
    if not panels:
        raise ValueError("growth: expected at least one time to draw, got none")
    figure = new_figure(4.7 * len(panels) + 0.4, 4.4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    order = list(dict.fromkeys(kind for kinds in panels.values() for kind in kinds))
    sizes: list[int] = []
    for ax, (name, kinds) in zip(axes, panels.items(), strict=True):
        for kind, times in kinds.items():
            slope = slopes.get(name, {}).get(kind)
            label = kind if slope is None else f"{kind}, $D^{{{slope:.2f}}}$"
            at = sorted(times)
            index = order.index(kind)
            ax.plot(
                at,
                [times[size] for size in at],
                label=label,
                color=f"C{index}",
                marker=("o", "s", "^", "v", "D", "x")[index % 6],
                markersize=4,
                linewidth=1.3,
            )
            sizes += at
        ax.set(title=name, xlabel="dimensions D", xscale="log", yscale="log")
        ax.legend(frameon=False, fontsize=8, loc="best")
        ax.grid(color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("ms per step")
    for ax in axes:
        _powers_of_two(ax, sorted(set(sizes)))
        _plain_logarithms(ax, "y")
    if any(slope is not None for kinds in slopes.values() for slope in kinds.values()):
        note = "$D^s$: s is the slope of log time against log D, over the upper half of the dimensions"
        figure.supxlabel(note, fontsize=8, color="0.35")
    figure.suptitle(textwrap.fill(title, 50 * len(panels)), fontsize=11)
    write_png(path, png_bytes(rendered(figure)))


def three_digits(value: float) -> str:
    """Returns the number with three significant digits, or as an integer from 100 on."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _powers_of_two(ax: Axes, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ax.xaxis.set_major_locator(FixedLocator([float(size) for size in sizes]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="x", labelsize=8)


def _plain_logarithms(ax: Axes, which: str) -> None:
    """Labels a logarithmic axis with 0.1, 1, 10 instead of powers, and with 2 and 5 in between if it spans few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = ax.xaxis if which == "x" else ax.yaxis
    low, high = ax.get_xlim() if which == "x" else ax.get_ylim()
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())

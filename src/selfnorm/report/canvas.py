"""Renders matplotlib figures without pyplot or a display, and writes them as PNG files, atomically."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import numpy as np

from selfnorm.runtime.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

MAX_SHEET_BYTES = 200_000
Arguments = ParamSpec("Arguments")


def without_latex(draw: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorator that keeps matplotlib from starting LaTeX, even if a matplotlibrc in the working folder asks for it."""

    @wraps(draw)
    def drawn(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        from matplotlib import rc_context

        with rc_context({"text.usetex": False}):
            draw(*args, **options)

    return drawn


def literal(text: str) -> str:
    """Returns text that matplotlib shows as it is; between dollar signs it would expect a formula, and refuse an invalid one."""
    return text.replace("$", r"\$")


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty white figure; width and height in inches, at 100 pixels per inch."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(w_pad=0.08, h_pad=0.08)  # inches
    return figure


def rendered(figure: Figure) -> Image:
    """Returns the figure as an RGB image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[:, :, :3].copy())


def png_bytes(image: Image) -> bytes:
    """Returns the image as an optimised PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def sheet_bytes(image: Image) -> bytes:
    """Returns the image as PNG, with fewer colours if it would otherwise exceed `MAX_SHEET_BYTES`.

    Colours are not dithered: that would blur enlarged pixels, and compress worse.
    """
    from PIL import Image

    channels = np.asarray(image)
    if (channels == channels[:, :, :1]).all():
        image = image.convert("L")
    content = png_bytes(image)
    for colours in (128, 64, 32, 16):
        if len(content) < MAX_SHEET_BYTES:
            break
        content = png_bytes(image.quantize(colours, dither=Image.Dither.NONE))
    return content


def write_png(path: str | Path, content: bytes) -> None:
    """Writes the file atomically, creating its folder if necessary."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)

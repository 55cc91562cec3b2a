"""From a matplotlib figure to a file: rendered without pyplot or a display, as PNG, written atomically."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from selfnorm.runtime.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

SMALL = 200_000  # bytes that a sample sheet may take


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(w_pad=0.08, h_pad=0.08)  # inches
    return figure


def rendered(figure: Figure) -> Image:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[:, :, :3].copy())


def png(image: Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def smaller(image: Image) -> bytes:
    """As PNG, with as many colours as fit into SMALL bytes. Not dithered: that would blur enlarged pixels, and compress worse."""
    from PIL import Image

    channels = np.asarray(image)
    if (channels == channels[:, :, :1]).all():
        image = image.convert("L")
    content = png(image)
    for colours in (128, 64, 32, 16):
        if len(content) < SMALL:
            break
        content = png(image.quantize(colours, dither=Image.Dither.NONE))
    return content


def write(path: str | Path, content: bytes) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)

"""Folders of images: formats, modes and sizes, wrong contents under a suffix, nested and hidden files."""

import io
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from fuzz.cases import Case, Outcome
from fuzz.scores import scored_rows
from fuzz.strategies_tables import damaged

FORMATS = {
    ".png": "PNG",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".gif": "GIF",
}
MODES = {
    "PNG": ["L", "1", "LA", "RGB", "RGBA", "P", "I;16"],
    "BMP": ["L", "1", "RGB", "P"],
    "TIFF": ["L", "1", "RGB", "CMYK", "F", "I;16"],
    "JPEG": ["L", "RGB", "CMYK"],
    "WEBP": ["RGB", "RGBA"],
    "GIF": ["L", "P"],
}
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"
FOREIGN = [
    POSTSCRIPT,
    b"",
    b"text",
    b"\x00" * 64,
    b"%PDF-1.4\n",
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"\x89PNG\r\n\x1a\n",
    b"P5 4 4 255\n" + b"x" * 16,
]
NAMES = st.sampled_from(["a", "b", "c", "deep/er/d", ".hidden", ".git/e", "ä", "x y", "\x1b[2Jf", "UPPER", "line\nbreak"])


@st.composite
def image(draw: Any, suffix: str, grey: bool) -> bytes:
    """The bytes of an image of 4 × 4 pixels, sometimes of another size or mode."""
    kind = FORMATS[suffix]
    modes = MODES[kind]
    mode = "L" if grey and "L" in modes and draw(st.integers(0, 9)) else draw(st.sampled_from(modes))
    size = draw(st.sampled_from([(4, 4)] * 12 + [(4, 5), (1, 1), (400, 1)]))
    pixels = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (*size, 3), np.uint8)
    picture = Image.fromarray(pixels[..., 0] if mode in ("L", "1", "LA", "F") else pixels)
    picture = Image.fromarray(pixels[..., 0].astype(np.uint16)) if mode == "I;16" else picture.convert(mode)
    stream = io.BytesIO()
    picture.save(stream, kind)
    return stream.getvalue()


@st.composite
def folders(draw: Any) -> tuple[dict[str, bytes], int]:
    """Files in a folder, and how many of them must be read as images; −1 if that may be any number, or an error."""
    files: dict[str, bytes] = {}
    expected = 0
    suffixes = draw(st.sampled_from([[".png"], [".png", ".bmp", ".tif"], list(FORMATS)]))
    for _ in range(draw(st.integers(0, 6))):
        name, suffix = draw(NAMES), draw(st.sampled_from(suffixes))
        shown = draw(st.sampled_from([suffix, suffix, suffix, suffix.upper(), ".png", ".txt", ""]))
        content = draw(image(suffix, True))
        how = draw(st.integers(0, 14))
        if how == 0:
            content = draw(st.sampled_from(FOREIGN))
        elif how == 1:
            content = draw(damaged(content))
        certain = how > 1 and shown.lower() == suffix != ".gif"
        if f"images/{name}{shown}" in files:
            continue
        files[f"images/{name}{shown}"] = content
        if name.startswith(".") or shown in (".txt", ""):
            continue
        expected = expected + 1 if certain and expected >= 0 else -1
    return files, expected


@st.composite
def plain_folders(draw: Any) -> tuple[dict[str, bytes], int]:
    """Grey images of one size in formats without loss, and their number."""
    names = draw(st.lists(st.sampled_from(["a", "b", "deep/er/d", "ä", "x y", "UPPER"]), min_size=1, unique=True))
    files: dict[str, bytes] = {}
    for name in names:
        suffix = draw(st.sampled_from([".png", ".bmp", ".tif"]))
        stream = io.BytesIO()
        pixels = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (4, 4), np.uint8)
        Image.fromarray(pixels).save(stream, FORMATS[suffix])
        files[f"images/{name}{draw(st.sampled_from([suffix, suffix.upper()]))}"] = stream.getvalue()
    return files, len(files)


@st.composite
def images(draw: Any) -> Case:
    """A call of `score`, seldom of `fit`, on a folder of images or on one image."""
    fit = draw(st.integers(0, 9)) == 0
    plain = not fit and draw(st.integers(0, 4)) == 0
    files, expected = draw(plain_folders() if plain else folders())
    if fit and draw(st.booleans()):  # as many as it takes
        files |= {f"images/{index}.png": draw(image(".png", True)) for index in range(8)}
    # A folder without any file could not be made of files.
    files["images/readme.txt"] = b"text"
    if fit:
        few = ("--set", "epochs=1", "--set", "layers=1", "--set", "model=fc", "--run", "new", "-q")
        return Case("images", ("fit", "images", *few), files=files)
    what, count = "images", expected
    if not plain and draw(st.integers(0, 4)) == 0:
        what, count = draw(st.sampled_from(sorted(files))), -1
    output = draw(st.sampled_from([None, "out.csv"]))

    def right(outcome: Outcome) -> Any:
        rows = scored_rows(outcome, output, False)
        got = np.array([float(row["log_likelihood"]) for row in rows])
        if count >= 0 and len(rows) != count:
            yield f"other result: expected {count} rows, one for each image, got {len(rows)}"
        if not np.isfinite(got).all():
            yield f"other result: expected finite likelihoods, got {got}"
        named = [
            value for row in rows for value in row.values() if isinstance(value, str) and value.lower().endswith(tuple(FORMATS))
        ]
        if len(rows) > 1 and what == "images" and len(named) < len(rows):
            yield "other result: expected the names of the files, got row numbers"

    args = ("score", "run", what, *(["-o", output] if output else []))
    return Case("images", args, "images", files, must_succeed=plain, right=right)

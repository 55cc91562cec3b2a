"""Shows the control characters in names that a file chose, instead of sending them to a terminal or a font."""

from __future__ import annotations

import os

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) != "\n"}


def in_utf8(path: str) -> str:
    """Returns a path with the bytes that are not UTF-8 written out, which only a file system can hold."""
    return os.fsencode(path).decode(errors="backslashreplace")


def escaped(text: str) -> str:
    r"""Returns the text with every control character but a newline written out.

    >>> print(escaped("\x1b[31mred"))
    \x1b[31mred
    """
    return text.translate(_CONTROLS)

"""Shows the control characters in names that a file chose, instead of sending them to a terminal or a font."""

from __future__ import annotations

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) != "\n"}


def escaped(text: str) -> str:
    r"""Returns the text with every control character but a newline written out.

    >>> print(escaped("\x1b[31mred"))
    \x1b[31mred
    """
    return text.translate(_CONTROLS)

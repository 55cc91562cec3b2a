"""Shows the control characters in names that a file chose, instead of sending them to a terminal or a font."""

from __future__ import annotations

import codecs
import io
import os
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Marks that change the direction of text, with which a name could show itself as another.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), *_DIRECTIONS)
    if chr(code) != "\n"
}


def in_utf8(path: str) -> str:
    """Returns a path with the bytes that are not UTF-8 written out, which only a file system can hold."""
    return os.fsencode(path).decode(errors="backslashreplace")


def escaped(text: str) -> str:
    r"""Returns the text with every control character but a newline written out, as well as marks that change its direction.

    >>> print(escaped("\x1b[31mred"))
    \x1b[31mred
    """
    return text.translate(_CONTROLS)


class TerminalText(io.BufferedIOBase):
    """A file for bytes that shows them on a terminal: as UTF-8, with every control character written out."""

    def __init__(self, terminal: BinaryIO) -> None:
        self._terminal = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")  # a write may end within a character

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        content = bytes(memoryview(data))
        self._show(content)
        return len(content)

    def finish(self) -> None:
        """Writes out the bytes of a character that is incomplete at the end."""
        self._show(b"", final=True)

    def _show(self, content: bytes, final: bool = False) -> None:
        self._terminal.write(escaped(self._decoder.decode(content, final)).encode())

"""A case is one call of the command and the files that it finds; an outcome is what the call did."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from support.commandline import VERBS


class Outcome(NamedTuple):
    """What a call left behind.

    code:     the exit status, or None if an exception escaped or the call took too long.
    escaped:  the exception that escaped, as text; empty if none did.
    changed:  files that existed before and are now different, by name, with what they hold now; None if they are gone.
    made:     new files and folders, by name; a folder is None.
    """

    code: int | None
    stdout: str
    stderr: str
    escaped: str
    changed: Mapping[str, bytes | None]
    made: Mapping[str, bytes | None]


@dataclass(frozen=True)
class Case:
    """One call. In `args`, {train} stands for the file that the run was trained with, {home} for the working folder.

    kind:          what was varied: table, options, run bytes, images.
    run:           the kind of run that lies in the folder `run`; empty for none.
    files:         what lies in the working folder, by name; within `run`, they replace the run's files. None removes a file.
    note:          what a reader should know of the files instead of their bytes.
    must_succeed:  whether a refusal is wrong.
    may_change:    beginnings of the names of files that the call may change.
    right:         what is wrong with the outcome of a call that ended with 0.
    """

    kind: str
    args: tuple[str, ...]
    run: str = ""
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    note: str = ""
    must_succeed: bool = False
    may_change: tuple[str, ...] = ()
    right: Callable[[Outcome], Iterable[str]] | None = field(default=None, repr=False, compare=False)

    @property
    def verb(self) -> str:
        return self.args[0] if self.args and self.args[0] in VERBS else "none"

    @property
    def size(self) -> int:
        return sum(len(content or b"") for content in self.files.values()) + sum(map(len, self.args))

    def __str__(self) -> str:
        def brief(content: bytes | None) -> str:
            return (
                "removed" if content is None else repr(content[:400]) + (f"… {len(content)} bytes" if len(content) > 400 else "")
            )

        files = "".join(f"\n  {name}: {brief(content)}" for name, content in self.files.items())
        files = f"\n  {self.note}" if self.note else files
        return f"selfnorm {' '.join(map(ascii, self.args))}{f'  (run: {self.run})' if self.run else ''}{files}"

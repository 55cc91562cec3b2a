"""Shows how far a script with many cases is, how many of them are wrong, and the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """Context manager that yields a function to call after each case with the number of wrong ones so far."""
    console = Console(stderr=True)
    began = time.monotonic()
    done = 0
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("0 wrong", total=total)

        def advance(wrong: int) -> None:
            nonlocal done
            done += 1
            if console.is_terminal:
                bar.update(task, advance=1, description=f"{wrong} wrong")
            elif done % max(1, total // 20) == 0:
                left = (time.monotonic() - began) / done * (total - done)
                print(f"{done} of {total} cases, {wrong} wrong, {left:.0f} s left", file=sys.stderr, flush=True)

        yield advance

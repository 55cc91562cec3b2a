"""Locks that keep two processes from working on one folder."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such module; folders are not locked there
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = ".lock"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def locking(folder: Path, otherwise: str) -> Iterator[None]:
    """Context manager that locks a folder; raises ValueError(otherwise) if another process holds the lock.

    The lock is released even if the process is killed. Its file stays, since removing it would let a third process lock another.
    On a file system without locks, as some network ones are, a warning says that nothing keeps the processes apart.
    """
    with (folder / LOCK_NAME).open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(otherwise) from None
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise
                warnings.warn(
                    f"{folder}: this file system has no locks ({error.strerror}); let only one process at a time work there",
                    stacklevel=3,
                )
        yield

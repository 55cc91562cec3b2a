"""Locks on folders: one process at a time, where the file system has locks."""

import errno
import os
import warnings

import pytest

from selfnorm.runtime.locks import locking

fcntl = pytest.importorskip("fcntl")


def test_one_at_a_time(tmp_path):
    with locking(tmp_path, "busy"), pytest.raises(ValueError, match=r"^busy$"), locking(tmp_path, "busy"):
        raise AssertionError("entered twice")
    with locking(tmp_path, "busy"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, number):
    def unsupported(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    entered = False
    with pytest.warns(UserWarning, match="this file system has no locks .*; let only one process"), locking(tmp_path, "busy"):
        entered = True
    assert entered


def test_another_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    def broken(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    with warnings.catch_warnings(action="error"), pytest.raises(OSError, match="Errno 5"), locking(tmp_path, "busy"):
        pass

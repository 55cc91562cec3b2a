"""Writing files: whole or not at all, for the right reason, and without what earlier attempts left."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from selfnorm.runtime.files import is_stream, remove_leftovers, replacing, replacing_file, write_text, written_output


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_names_the_file_and_how_to_go_on(tmp_path, number):
    (tmp_path / "x.csv").write_text("old")
    with (
        pytest.raises(OSError, match=r"x\.csv: expected room to write it, got .*; free some space"),
        written_output(tmp_path / "x.csv"),
    ):
        raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match=r"^\[Errno 5\]"), written_output(tmp_path / "x.csv"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_disk_too_full_for_a_new_file_is_named_the_same(tmp_path, monkeypatch):
    def full(path, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(os, "open", full)
    expected = r"^[^:]*x\.csv: expected room to write it, got 'No space left on device'; free some space, then repeat"
    with pytest.raises(OSError, match=expected) as error:
        write_text(tmp_path / "x.csv", "new")
    assert ".part" not in str(error.value)


def test_a_folder_that_cannot_be_written_to_is_named_with_the_file(tmp_path, monkeypatch):
    def read_only(path, *args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(
        OSError, match=r"x\.csv: expected a folder that can be written to, got 'Read-only file system' at "
    ) as error:
        write_text(tmp_path / "x.csv", "new")
    assert "part" not in str(error.value)


def test_leftovers_of_the_same_file_are_removed_unless_they_are_being_written(tmp_path):
    left = [".x[1].00000000.part.csv", ".x[1].deadbeef.part.csv"]
    kept = [
        ".x[1].y.deadbeef.part.csv",
        ".x[1].deadbeef.part.npy",
        ".x[1].nothexno.part.csv",
        ".x1.deadbeef.part.csv",
        "x[1].csv",
    ]
    for name in (*left, *kept):
        (tmp_path / name).write_text("left")
    (tmp_path / ".x[1].0badcafe.part.csv").mkdir()
    os.mkfifo(tmp_path / ".x[1].0badf00d.part.csv")
    (tmp_path / ".x[1].11111111.part.csv").symlink_to(tmp_path / "x[1].csv")
    with replacing_file(tmp_path / "x[1].csv") as file, written_output(tmp_path / "x[1].csv") as other:
        assert not any((tmp_path / name).exists() for name in left)
        file.write(b"first")
        other.write(b"second")
    assert (tmp_path / "x[1].csv").read_text() == "first"
    assert all((tmp_path / name).read_text() == "left" for name in kept[:-1])


def test_every_writer_removes_what_a_killed_one_left(tmp_path):
    (tmp_path / ".x.0badf00d.part.json").write_text("left")
    write_text(tmp_path / "x.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_the_lock_is_kept_until_the_file_has_its_name(tmp_path):
    with replacing(tmp_path / "x") as temporary, temporary.open("rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_leftovers(tmp_path / "x")
        assert temporary.exists()


def descriptors():
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists descriptors")
def test_a_folder_that_vanishes_hides_no_error_and_costs_no_descriptor(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    before = descriptors()
    with pytest.raises(ZeroDivisionError), replacing(folder / "x"):
        folder.rename(tmp_path / "moved")
        folder.touch()  # a file in the place of the folder
        raise ZeroDivisionError
    assert descriptors() == before


def test_a_file_system_that_counts_no_links_is_written_to(tmp_path, monkeypatch):
    def without_links(descriptor, status=os.fstat):
        return os.stat_result([*status(descriptor)[:3], 0, *status(descriptor)[4:]])

    monkeypatch.setattr(os, "fstat", without_links)
    write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new"


def test_files_that_always_vanish_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: [path.unlink() for path in tmp_path.iterdir()])
    with pytest.raises(OSError, match=r"x: expected a folder that can be written to, got 'new files vanish at once'"):
        write_text(tmp_path / "x", "new")


def test_a_new_file_does_not_replace_one_that_was_written_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "x.csv"
    expected = pytest.raises(OSError, match=r"x\.csv: expected a new file, got one that was written meanwhile")
    with expected, written_output(path, is_new=True) as file:
        file.write(b"ours")
        path.write_text("theirs")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["theirs"]
    path.unlink()

    def unsupported(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)  # as on a memory stick
    with written_output(path, is_new=True) as file:
        file.write(b"ours")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["ours"]


def test_streams_are_told_from_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    assert all(is_stream(Path(path)) for path in (tmp_path / "pipe", "/dev/null", "/dev/stdout", "/dev/fd/1"))
    assert not any(is_stream(path) for path in (tmp_path / "file", tmp_path / "none", tmp_path))

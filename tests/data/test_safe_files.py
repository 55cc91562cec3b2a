"""What is checked before a file is read."""

import os
import re

import pytest

from selfnorm.data import safe_files
from selfnorm.data.images import image_files
from selfnorm.data.safe_files import byte_source, expect_fits_memory, expect_regular, files_below
from selfnorm.runtime import memory
from selfnorm.runtime.memory import available_memory


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "x.csv").touch()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "pipe.csv")
    expect_regular(tmp_path / "x.csv")
    for name, got in (("pipe.csv", "a named pipe"), ("link.csv", "a named pipe"), (".", "a folder"), ("none", "No such file")):
        with pytest.raises(ValueError, match=rf"expected a .*got .*{got}"):
            expect_regular(tmp_path / name)


def test_standard_input_is_read_once_and_opened_again(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"a,b\n1,2\n")
    with (tmp_path / "x").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        opened = byte_source(safe_files.STANDARD_INPUT)
    assert [opened().read(), opened().read()] == 2 * [b"a,b\n1,2\n"]
    monkeypatch.setattr(safe_files, "available_memory", lambda: 4 * 7)
    with (tmp_path / "x").open() as file, pytest.raises(ValueError, match="/dev/stdin: expected a table that fits into"):
        monkeypatch.setattr("sys.stdin", file)
        byte_source(safe_files.STANDARD_INPUT)


def test_what_does_not_fit_into_memory_is_refused():
    expect_fits_memory("here", 1)
    with pytest.raises(ValueError, match=r"here: expected data that fits into the available memory, [\d,.]+ GB, got 1,000,0.*GB"):
        expect_fits_memory("here", 10**15)


def test_available_memory_respects_the_limits_of_containers(tmp_path, monkeypatch):
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() <= total
    (tmp_path / "cgroup").write_text("0::/outer/inner\n")
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    for part, text in (("max", "5000\n"), ("current", "4000\n"), ("stat", "anon 1\ninactive_file 1500\nslab 7\n")):
        (inner.parent / f"memory.{part}").write_text(text)
    monkeypatch.setattr(memory, "_PROCESS", tmp_path)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    assert available_memory() == 2500


def test_a_folder_with_far_more_other_files_is_refused_with_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_files, "MAX_OTHERS", 5)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for index in range(3):
        (tmp_path / "a" / "b" / f"{index}.png").touch()
        (tmp_path / "a" / f"{index}.txt").touch()
    assert len(image_files(tmp_path)) == 3  # 5 others
    for index in range(3, 10):
        (tmp_path / "a" / f"{index}.txt").touch()
    with pytest.raises(ValueError, match=r"expected a folder of images .*, got [69] others and [03] images so far"):
        image_files(tmp_path)


def test_links_to_folders_and_system_folders_are_not_entered(tmp_path, monkeypatch):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "x.png").touch()
    (tmp_path / "y.png").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "folder.png").symlink_to(tmp_path)
    monkeypatch.setattr(safe_files, "SYSTEM_FOLDERS", frozenset({str(tmp_path / "proc")}))
    assert image_files(tmp_path) == [tmp_path / "y.png"]


def test_unreadable_folders_are_named(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "x.png").touch()
    original = os.scandir

    def scandir(place):
        if str(place).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(place))
        return original(place)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.warns(UserWarning, match=rf"1 folders? could not be read.*{re.escape(str(tmp_path / 'closed'))} \(Permission"):
        assert image_files(tmp_path) == [tmp_path / "x.png"]


def test_a_long_search_says_where_it_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_files, "NOTICE_SECONDS", -1.0)
    (tmp_path / "x.png").touch()
    with pytest.warns(UserWarning, match=rf"{re.escape(str(tmp_path))}: looking for images; 1 so far, and 0 others"):
        image_files(tmp_path)


def test_links_that_lead_in_circles_end(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    for name, target in {"again": folder, "up": tmp_path, "self": folder / "self", "self.png": folder / "self.png"}.items():
        (folder / name).symlink_to(target)
    found = files_below(folder, (".png",), "images")
    assert [file.name for file in found] == ["a.png", "self.png"]
    with pytest.raises(ValueError, match=r"self\.png: expected a file that can be read, got none \(Too many levels"):
        expect_regular(found[1])


@pytest.mark.parametrize("marks", [("recipe.toml", ".lock"), ("recipe.toml", "best.safetensors"), ("comparison.json", ".lock")])
def test_folders_that_hold_a_run_or_a_comparison_are_left_out(tmp_path, marks):
    folder = tmp_path / "images"
    for place in (folder, folder / "inner", folder / "inner" / "run", folder / "inner" / "settings"):
        place.mkdir()
        (place / "a.png").touch()
    for name in marks:
        (folder / name).touch()  # the folder that is named is read, whatever it holds
        (folder / "inner" / "run" / name).touch()
    (folder / "inner" / "settings" / marks[0]).touch()
    with pytest.warns(UserWarning, match=rf"images in 1 folder that holds a run are left out: {folder}/inner/run$"):
        found = image_files(folder)
    assert [file.parent.name for file in found] == ["images", "inner", "settings"]

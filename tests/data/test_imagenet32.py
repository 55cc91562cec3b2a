"""ImageNet32 is converted once, in pieces, and an unfinished conversion is never used."""

import io
import json
import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from selfnorm.data import imagenet32, load_dataset

WIDTH = 3072


def batch(path, start, count, save=np.savez):
    """Writes a batch in which the first pixel of every image is its number, 0 to 255."""
    data = np.random.RandomState(start).randint(256, size=(count, WIDTH)).astype(np.uint8)
    data[:, 0] = np.arange(start, start + count)
    save(path, data=data, labels=np.arange(count), mean=np.zeros(WIDTH))
    return data


def batches(folder, each=5, tests=3, save=np.savez):
    """Writes ten training batches and the test batch; returns their images."""
    folder.mkdir(parents=True, exist_ok=True)
    train = [batch(folder / name, i * each, each, save) for i, name in enumerate(imagenet32.BATCH_FILES[:-1])]
    return np.concatenate(train), batch(folder / imagenet32.BATCH_FILES[-1], 200, tests, save)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def first_pixels(part):
    return part[:, 0, 0, 0].tolist()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "selfnorm"


@pytest.mark.parametrize("place", ["imagenet32", ""])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("rows", [3, 4096])
def test_batches_are_split_without_loss(tmp_path, monkeypatch, place, save, rows):
    monkeypatch.setattr(imagenet32, "IMAGES_AT_ONCE", rows)
    train, test = batches(tmp_path / "data" / place, save=save)
    dataset = load_dataset("imagenet32", tmp_path / "data")
    assert (dataset.shape, dataset.levels, dataset.train.dtype) == ((3, 32, 32), 256, torch.uint8)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [45, 5, 3]
    assert np.array_equal(dataset.test.flatten(1), test)
    for part in (dataset.train, dataset.validation):
        assert np.array_equal(part.flatten(1), train[first_pixels(part)])
    assert sorted(first_pixels(dataset.train) + first_pixels(dataset.validation)) == list(range(50))
    assert first_pixels(dataset.validation) == [2, 10, 11, 28, 41]  # the fixed split


def test_the_full_set_holds_out_20_000(tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet32, "IMAGENET32_VALIDATION_SIZE", 2)
    batches(tmp_path)
    assert len(load_dataset("imagenet32", tmp_path).validation) == 2


def test_arrays_stored_by_column(tmp_path):
    train, _ = batches(tmp_path, save=lambda path, data, **others: np.savez(path, data=np.asfortranarray(data)))
    dataset = load_dataset("imagenet32", tmp_path)
    assert np.array_equal(dataset.train.flatten(1), train[first_pixels(dataset.train)])


def test_the_parts_are_memory_maps_and_the_files_stay_as_they_are(tmp_path):
    batches(tmp_path)
    dataset = load_dataset("imagenet32", tmp_path)
    written = (tmp_path / imagenet32.CONVERTED_FOLDER / "train.npy").read_bytes()
    dataset.train.zero_()
    assert (tmp_path / imagenet32.CONVERTED_FOLDER / "train.npy").read_bytes() == written
    assert load_dataset("imagenet32", tmp_path).train.any()


def test_a_few_images_are_in_memory_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet32, "IMAGES_AT_ONCE", 16)
    batches(tmp_path, each=1000, tests=10)
    load_dataset("imagenet32", tmp_path)  # so that imports and caches are not counted
    (tmp_path / imagenet32.CONVERTED_FOLDER / "sources.json").unlink()
    tracemalloc.start()
    load_dataset("imagenet32", tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1000 * WIDTH / 3  # a third of a batch, of which there are ten


# Converting only once


@pytest.fixture
def conversions(monkeypatch):
    done = []
    convert = imagenet32._convert
    monkeypatch.setattr(imagenet32, "_convert", lambda *args: (done.append(args[2]), convert(*args)))
    return done


def test_a_conversion_is_done_once_unless_the_sources_change(tmp_path, conversions):
    batches(tmp_path)
    reports = []
    load_dataset("imagenet32", tmp_path, on_progress=lambda *report: reports.append(report))
    assert reports[-1] == ("converting imagenet32", 53, 53)
    assert names(tmp_path / imagenet32.CONVERTED_FOLDER) == ["sources.json", "test.npy", "train.npy", "validation.npy"]
    load_dataset("imagenet32", tmp_path)
    assert len(conversions) == 1
    os.utime(tmp_path / "train_data_batch_4.npz", (1, 1))
    load_dataset("imagenet32", tmp_path)
    assert len(conversions) == 2
    changed = batch(tmp_path / "val_data.npz", 100, 4)
    assert np.array_equal(load_dataset("imagenet32", tmp_path).test.flatten(1), changed)
    assert len(conversions) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "sources.json").unlink(),
        lambda folder: (folder / "sources.json").write_text("{"),
        lambda folder: (folder / "sources.json").write_text(json.dumps({"layout": 0})),
        lambda folder: (folder / "validation.npy").unlink(),
        lambda folder: (folder / "sources.json").write_text("[" * 100_000),
        lambda folder: (folder / "train.npy").write_bytes((folder / "train.npy").read_bytes()[:-1]),
        lambda folder: (folder / "train.npy").write_bytes((folder / "train.npy").read_bytes().replace(b"}", b"(", 1)),
        lambda folder: np.save(folder / "train.npy", np.zeros((3, 3), np.uint8)),
        lambda folder: np.save(folder / "test.npy", np.zeros((3, 3, 32, 32))),
        lambda folder: (folder / "test.npy").write_bytes(b"PK\x03\x04"),
    ],
)
def test_what_is_not_whole_is_converted_again(tmp_path, conversions, damage):
    batches(tmp_path)
    before = load_dataset("imagenet32", tmp_path).train.clone()
    damage(tmp_path / imagenet32.CONVERTED_FOLDER)
    assert torch.equal(load_dataset("imagenet32", tmp_path).train, before)
    assert len(conversions) == 2


@pytest.mark.parametrize("name", imagenet32.CONVERTED_FILES)
def test_a_pipe_in_a_conversion_is_refused_without_waiting(tmp_path, name):
    batches(tmp_path)
    load_dataset("imagenet32", tmp_path)
    path = tmp_path / imagenet32.CONVERTED_FOLDER / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{name}: expected a regular file, got a named pipe; remove it"):
        load_dataset("imagenet32", tmp_path)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_a_conversion_that_breaks_off_leaves_nothing(tmp_path, fault):
    batches(tmp_path)

    def on_progress(what, done, total):
        if done > 20:
            raise fault

    with pytest.raises(fault):
        load_dataset("imagenet32", tmp_path, on_progress=on_progress)
    assert names(tmp_path / imagenet32.CONVERTED_FOLDER) == []
    assert len(load_dataset("imagenet32", tmp_path).train) == 45


def test_parts_of_two_conversions_are_never_taken_together(tmp_path, monkeypatch):
    _, test = batches(tmp_path)
    load_dataset("imagenet32", tmp_path)
    source = tmp_path / "val_data.npz"
    content, time = source.read_bytes(), source.stat().st_mtime_ns
    batch(source, 100, 3)
    replace = Path.replace

    def full(self, target):
        if target.name == "train.npy":
            raise OSError(28, "No space left on device")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            load_dataset("imagenet32", tmp_path)
    source.write_bytes(content)  # restores the source of the first conversion
    os.utime(source, ns=(time, time))
    assert np.array_equal(load_dataset("imagenet32", tmp_path).test.flatten(1), test)


def test_sources_that_cannot_be_written_beside_are_converted_in_the_cache(tmp_path, cache, conversions):
    batches(tmp_path / "data")
    (tmp_path / "data" / imagenet32.CONVERTED_FOLDER).touch()  # prevents creating the folder
    for _ in range(2):
        assert len(load_dataset("imagenet32", tmp_path / "data").train) == 45
    assert [folder.parent for folder in conversions] == [cache]
    batches(tmp_path / "others", each=4)
    (tmp_path / "others" / imagenet32.CONVERTED_FOLDER).touch()
    assert len(load_dataset("imagenet32", tmp_path / "others").train) == 36
    assert len(names(cache)) == 2


# Image folders


def pictures(folder, count, size=(32, 32), mode="RGB"):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        colour = (number, 1, 2) if mode == "RGB" else number
        Image.new(mode, size, colour).save(folder / f"{number:03}.png")


def test_image_folders(tmp_path):
    pictures(tmp_path / "imagenet32" / "train_32x32", 20)
    pictures(tmp_path / "imagenet32" / "valid_32x32", 4, mode="L")
    dataset = load_dataset("imagenet32", tmp_path)
    assert sorted(first_pixels(dataset.train) + first_pixels(dataset.validation)) == list(range(20))
    assert len(dataset.validation) == 2
    assert dataset.train[0, :, 5, 5].tolist() == [first_pixels(dataset.train)[0], 1, 2]
    assert dataset.test[3, :, 0, 0].tolist() == [3, 3, 3]


def test_an_image_of_another_size_is_named(tmp_path):
    pictures(tmp_path / "train_32x32", 10)
    pictures(tmp_path / "valid_32x32", 1, size=(32, 31))
    with pytest.raises(ValueError, match=r"000\.png: expected an image of 32 × 32 pixels, got 31 × 32"):
        load_dataset("imagenet32", tmp_path)


# Errors


def test_missing_batches_are_listed_with_their_publisher(tmp_path):
    with pytest.raises(
        ValueError, match=r"val_data\.npz in .*imagenet32, got none of them; get them from https://image-net\.org"
    ):
        load_dataset("imagenet32", tmp_path)
    batches(tmp_path / "imagenet32")
    (tmp_path / "imagenet32" / "train_data_batch_7.npz").unlink()
    with pytest.raises(ValueError, match=r"got all but train_data_batch_7\.npz; get"):
        load_dataset("imagenet32", tmp_path)


def test_nothing_is_asked_of_the_network(cache, monkeypatch):
    monkeypatch.delenv("SELFNORM_DATA", raising=False)
    with pytest.raises(ValueError, match=f"imagenet32: expected .* in {cache}/imagenet32, .* account"):
        load_dataset("imagenet32")


@pytest.mark.parametrize(
    ("arrays", "got"),
    [
        ({"data": np.zeros((5, WIDTH))}, r"float64 of shape \(5, 3072\)"),
        ({"data": np.zeros((5, 3, 32, 32), np.uint8)}, r"uint8 of shape \(5, 3, 32, 32\)"),
        ({"data": np.zeros((5, 12), np.uint8)}, r"uint8 of shape \(5, 12\)"),
        ({"data": np.array([{}])}, r"object of shape \(1,\)"),
        ({"images": np.zeros((5, WIDTH), np.uint8)}, r"no item named 'data\.npy'"),
    ],
)
def test_batches_of_something_else(tmp_path, arrays, got):
    batches(tmp_path)
    np.savez(tmp_path / "train_data_batch_2.npz", **arrays)
    with pytest.raises(ValueError, match=rf'train_data_batch_2\.npz: expected a whole \.npz file with "data", .* got .*{got}'):
        load_dataset("imagenet32", tmp_path)


def test_a_damaged_batch_is_named_and_nothing_kept(tmp_path):
    batches(tmp_path)
    path = tmp_path / "train_data_batch_9.npz"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[5000] ^= 1
    for content in (whole[:-500], whole[:3000], b"", bytes(flipped)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"train_data_batch_9\.npz: expected a whole \.npz file"):
            load_dataset("imagenet32", tmp_path)
    assert names(tmp_path / imagenet32.CONVERTED_FOLDER) == []


def test_a_batch_longer_than_its_header_says(tmp_path):
    batches(tmp_path)
    with zipfile.ZipFile(tmp_path / "val_data.npz", "w") as archive:
        array = io.BytesIO()
        np.save(array, np.zeros((5, WIDTH), np.uint8))
        archive.writestr("data.npy", array.getvalue() + bytes(WIDTH))
    with pytest.raises(ValueError, match=r"val_data\.npz: expected .* got more data than its header says"):
        load_dataset("imagenet32", tmp_path)


def test_too_few_images(tmp_path):
    pictures(tmp_path / "train_32x32", 9)
    pictures(tmp_path / "valid_32x32", 1)
    with pytest.raises(ValueError, match=r"expected at least 10 training and 1 test image in .*, got 9 and 1"):
        load_dataset("imagenet32", tmp_path)

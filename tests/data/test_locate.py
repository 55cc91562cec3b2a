"""MNIST and CIFAR-10 from files: where they are searched, what is read, and which errors are raised."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from selfnorm.data import cifar10, load_dataset, mnist
from selfnorm.data.locate import cache_folder, data_folder
from selfnorm.runtime.files import replacing_file
from support.data_files import idx, shrink_cifar10, shrink_mnist


@pytest.fixture
def small_mnist(monkeypatch):
    return shrink_mnist(monkeypatch)


def put(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("place", ["MNIST/raw", "raw", "mnist", ""])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist(tmp_path, small_mnist, place, packed):
    files, train, test = small_mnist
    put(tmp_path / place, {f"{name}.gz": gzip.compress(content) for name, content in files.items()} if packed else files)
    dataset = load_dataset("mnist", tmp_path)
    assert (dataset.shape, dataset.levels, dataset.train.dtype) == ((1, 28, 28), 256, torch.uint8)
    assert np.array_equal(dataset.train[:, 0], train[:4])
    assert np.array_equal(dataset.validation[:, 0], train[4:])
    assert np.array_equal(dataset.test[:, 0], test)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[:-1], r"5,488 bytes after its header, got 5,487"),
        (lambda whole: whole + b"\0", r"5,488 bytes after its header, got more"),
        (lambda whole: b"", r"starts with the numbers \(2051, 7, 28, 28\), got b''"),
        (lambda whole: idx(7, magic=2049)[0], r"starts with the numbers \(2051, 7, 28, 28\), got \(2049, 7, 28, 28\)"),
        (lambda whole: idx(8)[0], r"got \(2051, 8, 28, 28\)"),
        (lambda whole: idx(7, sides=(32, 32))[0], r"got \(2051, 7, 32, 32\)"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_files_that_are_not(tmp_path, small_mnist, damage, message, packed):
    files, _, _ = small_mnist
    content = damage(files.pop(mnist.TRAIN_FILE))
    put(
        tmp_path,
        {**files, f"{mnist.TRAIN_FILE}.gz" if packed else mnist.TRAIN_FILE: gzip.compress(content) if packed else content},
    )
    with pytest.raises(ValueError, match=rf"{mnist.TRAIN_FILE}.*: expected .*{message}"):
        load_dataset("mnist", tmp_path)


def test_damaged_gzip_is_named(tmp_path, small_mnist):
    files, _, _ = small_mnist
    whole = gzip.compress(files.pop(mnist.TRAIN_FILE))
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # in the checksum
    for content in (whole[:-9], whole[:2000], whole[:5], b"not gzip at all", bytes(flipped)):
        put(tmp_path, {**files, f"{mnist.TRAIN_FILE}.gz": content})
        with pytest.raises(ValueError, match=rf"{mnist.TRAIN_FILE}\.gz: expected a whole gzip file, got a damaged one"):
            load_dataset("mnist", tmp_path)


def test_missing_files_are_listed(tmp_path, small_mnist):
    with pytest.raises(
        ValueError, match=rf"mnist: expected {mnist.TRAIN_FILE}, {mnist.TEST_FILE} in .*MNIST/raw, got none of them; get"
    ):
        load_dataset("mnist", tmp_path)
    put(tmp_path / "MNIST" / "raw", {mnist.TRAIN_FILE: b""})
    with pytest.raises(ValueError, match=rf"got all but {mnist.TEST_FILE}; get them from https://"):
        load_dataset("mnist", tmp_path)
    put(tmp_path / "MNIST" / "raw", {f"{mnist.TEST_FILE}.gz": b""})
    (tmp_path / "MNIST" / "raw" / mnist.TRAIN_FILE).unlink()
    with pytest.raises(ValueError, match=rf"got all but {mnist.TRAIN_FILE}; get them"):
        load_dataset("mnist", tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [
        f"{mnist.TEST_FILE}.gz"
    ]  # nothing was downloaded there


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting(tmp_path, small_mnist, monkeypatch, packed):
    files, _, _ = small_mnist
    del files[mnist.TRAIN_FILE]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for folder in (tmp_path / "named", cache_folder() / "MNIST" / "raw"):
        put(folder, files)
        os.mkfifo(folder / (mnist.TRAIN_FILE + packed))
    path = f"{mnist.TRAIN_FILE}{packed}"
    with pytest.raises(ValueError, match=rf"mnist: expected a regular file at .*{path}, got a named pipe; replace it with the"):
        load_dataset("mnist", tmp_path / "named")
    monkeypatch.delenv("SELFNORM_DATA", raising=False)
    if not packed:
        with pytest.raises(ValueError, match=rf"{path}: expected a regular file, got a named pipe; replace it with the file"):
            load_dataset("mnist")


# CIFAR-10


@pytest.fixture
def small_cifar10(monkeypatch):
    return shrink_cifar10(monkeypatch)


@pytest.mark.parametrize("place", ["cifar-10-batches-bin", ""])
def test_cifar10(tmp_path, small_cifar10, place):
    put(tmp_path / place, small_cifar10)
    dataset = load_dataset("cifar10", tmp_path)
    assert (dataset.shape, dataset.levels, dataset.train.dtype) == ((3, 32, 32), 256, torch.uint8)
    firsts = [part[:, 0, 0, 0].tolist() for part in (dataset.train, dataset.validation, dataset.test)]
    assert firsts == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11]]
    record = np.frombuffer(small_cifar10["data_batch_3.bin"], np.uint8)[cifar10.RECORD_BYTES :]
    assert np.array_equal(dataset.train[5], record[1:].reshape(3, 32, 32))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_cifar10_file_of_another_size(tmp_path, small_cifar10, change):
    put(tmp_path, {**small_cifar10, "data_batch_4.bin": bytes(2 * cifar10.RECORD_BYTES + change)})
    with pytest.raises(ValueError, match=rf"data_batch_4\.bin: expected 2 records of 3073 bytes, 6,146 .* got {6146 + change:,}"):
        load_dataset("cifar10", tmp_path)


def test_missing_cifar10(tmp_path, small_cifar10):
    del small_cifar10["test_batch.bin"]
    put(tmp_path / "cifar-10-batches-bin", small_cifar10)
    with pytest.raises(ValueError, match=r"cifar10: expected data_batch_1\.bin, .* got all but test_batch\.bin; get"):
        load_dataset("cifar10", tmp_path)


def test_cifar10s_pickles_are_not_read(tmp_path):
    put(tmp_path / "cifar-10-batches-py", {"data_batch_1": b"\x80\x02"})
    with pytest.raises(ValueError, match=r"expected the binary version, .* got the Python version .* get https"):
        load_dataset("cifar10", tmp_path)


# Folders


def test_which_folder_is_looked_in(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SELFNORM_DATA", raising=False)
    assert data_folder("x", None) == (tmp_path / "cache" / "selfnorm", True)
    monkeypatch.setenv("SELFNORM_DATA", "")
    assert data_folder("x", None) == (tmp_path / "cache" / "selfnorm", True)
    (tmp_path / "named").mkdir()
    monkeypatch.setenv("SELFNORM_DATA", str(tmp_path / "named"))
    assert data_folder("x", None) == (tmp_path / "named", False)
    assert data_folder("x", str(tmp_path)) == (tmp_path, False)
    monkeypatch.setenv("SELFNORM_DATA", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"mnist: expected \$SELFNORM_DATA to be the folder .* got no such folder: .*gone"):
        load_dataset("mnist")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"mnist: expected data_dir to be the folder .* got a file"):
        load_dataset("mnist", tmp_path / "file")


@pytest.mark.parametrize("base", ["", "relative"])
def test_a_cache_home_that_is_no_absolute_path_does_not_count(tmp_path, monkeypatch, base):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert cache_folder() == tmp_path / ".cache" / "selfnorm"


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_appears_whole_or_not_at_all(tmp_path, fault):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(type(fault)), replacing_file(target) as file:
        file.write(b"half")
        raise fault
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
    with replacing_file(target) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.data
def test_the_real_mnist():
    folder = Path(os.environ.get("SELFNORM_DATA") or ".")
    if not (folder / "MNIST" / "raw" / mnist.TRAIN_FILE).exists():
        pytest.skip("needs MNIST/raw under $SELFNORM_DATA")
    dataset = load_dataset("mnist", folder)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [50_000, 10_000, 10_000]
    everything = torch.cat([dataset.train, dataset.validation])
    assert abs(everything.double().mean() / 255 - 0.1307) < 1e-4
    assert abs(everything.double().std() / 255 - 0.3081) < 1e-4

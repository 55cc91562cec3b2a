"""Data sets that need no files, how names are distinguished from paths, and the checks of a Dataset."""

import hashlib
import math

import numpy as np
import pytest
import torch

from selfnorm.data import NAMES, Dataset, load_dataset
from selfnorm.data.dataset import permutation


def parts(dataset):
    return dataset.train, dataset.validation, dataset.test


def test_digits_are_split_once_and_for_all():
    digits = load_dataset("digits")
    assert [len(part) for part in parts(digits)] == [1297, 250, 250]
    assert digits.shape == (1, 8, 8)
    assert digits.levels == 17
    assert torch.cat(parts(digits)).max() == 16
    bytes_of_test = digits.test.numpy().tobytes()
    assert hashlib.sha256(bytes_of_test).hexdigest() == "9293fef9ca3c56b2ccce7deacd2bc6053d65b6f3f09f326a60e8cff6a6e70e6c"


def test_the_fixed_order_is_a_permutation_that_stays():
    assert permutation(10).tolist() == [2, 8, 4, 9, 1, 6, 7, 3, 0, 5]
    assert sorted(permutation(1000)) == list(range(1000))


@pytest.mark.parametrize("name", ["moons", "rings", "checkerboard", "spirals"])
def test_toys_do_not_depend_on_the_default_dtype_or_generator(name):
    toy = load_dataset(name)
    assert [tuple(part.shape) for part in parts(toy)] == [(10_000, 2), (2_000, 2), (2_000, 2)]
    assert toy.train.dtype == torch.float32
    assert toy.levels is None
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(1)
    assert torch.equal(load_dataset(name).train, toy.train)
    assert toy.train.mean(0).abs().max() < 0.1


def test_toys_have_their_shapes():
    radius = load_dataset("rings").train.norm(dim=1)
    assert (radius - radius.round()).abs().mean() < 0.1
    assert radius.round().unique().tolist() == [1, 2, 3, 4]
    square = ((load_dataset("checkerboard").train + 4) / 2).floor()
    assert (square.sum(1) % 2).abs().max() == 0
    assert len(square.unique(dim=0)) == 8
    moons = load_dataset("moons").train
    upper = (moons - torch.tensor([-1.0, -0.5])).norm(dim=1)
    lower = (moons - torch.tensor([1.0, 0.5])).norm(dim=1)
    assert (upper - 2).abs().minimum((lower - 2).abs()).mean() < 0.2
    assert abs((upper < lower).float().mean() - 0.5) < 0.2
    spirals = load_dataset("spirals").train
    spirals = spirals[spirals.norm(dim=1) > 1]
    phase = torch.atan2(spirals[:, 1], spirals[:, 0]) - 0.75 * math.pi * spirals.norm(dim=1)
    assert (2 * phase).cos().mean() > 0.8  # two arms, half a turn apart


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"digits, mnist, .*or the path of a file.*'Minst'.*did you mean mnist\?"):
        load_dataset("Minst")
    with pytest.raises(ValueError, match=r"which is neither$"):
        load_dataset("no/such/table.csv")
    with pytest.raises(ValueError, match="which is neither"):
        load_dataset("")


def test_a_name_goes_before_a_path_unless_written_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert load_dataset("digits").levels == 17
    with pytest.raises(ValueError, match="expected a folder with images"):
        load_dataset("./digits")


def test_levels_of_a_built_in_set_are_its_own():
    assert load_dataset("digits", levels=17).levels == 17
    with pytest.raises(ValueError, match=r"digits, which has 17, got levels=256"):
        load_dataset("digits", levels=256)
    with pytest.raises(ValueError, match="moons, which holds real numbers, got levels=2"):
        load_dataset("moons", levels=2)


def test_every_name_can_be_asked_for(tmp_path):
    for name in NAMES:
        if name in ("mnist", "cifar10", "imagenet32"):
            with pytest.raises(ValueError, match=f"{name}: expected .* in {tmp_path}"):
                load_dataset(name, tmp_path)
        else:
            assert load_dataset(name).name == name


@pytest.mark.parametrize("name", ["digits", "rings"])
def test_a_data_folder_for_a_set_without_files_is_an_error(name, tmp_path):
    with pytest.raises(
        ValueError, match=rf"load_dataset: expected no data folder for {name}, which needs no files, got {tmp_path}"
    ):
        load_dataset(name, tmp_path)


def test_a_data_folder_for_a_file_of_ones_own_is_an_error(tmp_path):
    np.save(tmp_path / "table.npy", np.random.default_rng(0).normal(size=(20, 2)))
    with pytest.raises(ValueError, match=r"expected no data folder for .*table\.npy, which is a path of its own"):
        load_dataset(str(tmp_path / "table.npy"), tmp_path)


# Splitting your own data


@pytest.mark.parametrize(("rows", "sizes"), [(4, [2, 1, 1]), (10, [8, 1, 1]), (105, [85, 10, 10])])
def test_the_users_own_examples_are_split_without_loss(tmp_path, rows, sizes):
    np.save(tmp_path / "table.npy", np.arange(2 * rows).reshape(rows, 2))
    table = load_dataset(str(tmp_path / "table.npy"))
    assert [len(part) for part in parts(table)] == sizes
    assert sorted(torch.cat(parts(table))[:, 0].tolist()) == list(range(0, 2 * rows, 2))
    again = load_dataset(str(tmp_path / "table.npy"))
    assert torch.equal(again.validation, table.validation)
    assert table.name == "table.npy"


def test_too_few_examples_to_split(tmp_path):
    np.save(tmp_path / "table.npy", np.ones((2, 4)))
    with pytest.raises(ValueError, match=r"table\.npy: expected at least 4 examples .*, got 2"):
        load_dataset(str(tmp_path / "table.npy"))


def test_levels_of_the_users_own(tmp_path):
    np.save(tmp_path / "images.npy", np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2))
    path = str(tmp_path / "images.npy")
    assert load_dataset(path).levels == 256
    assert load_dataset(path, levels=20).levels == 20
    with pytest.raises(ValueError, match=r"expected levels 0 to 16, got 19"):
        load_dataset(path, levels=17)
    with pytest.raises(ValueError, match=r"expected 2 to 256 levels"):
        load_dataset(path, levels=1000)
    np.save(tmp_path / "table.npy", np.ones((5, 2)))
    with pytest.raises(ValueError, match="only integer images have levels"):
        load_dataset(str(tmp_path / "table.npy"), levels=17)


# Dataset


def test_a_dataset_refuses_parts_that_do_not_fit_together():
    x = torch.zeros(3, 2, dtype=torch.float32)
    Dataset("ok", x, x, x, columns=("a", "b"))
    byte = torch.zeros(3, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"Dataset\('d'\): expected train in torch.float32 with levels=None, got torch.uint8"):
        Dataset("d", byte, byte, byte)
    with pytest.raises(ValueError, match=r"expected validation in torch.uint8 with levels=4, got torch.float32"):
        Dataset("d", byte, x, byte, levels=4)
    with pytest.raises(ValueError, match=r"expected at least one example in test.*got \(0, 2\)"):
        Dataset("d", x, x, x[:0])
    with pytest.raises(ValueError, match=r"expected examples of shape \(2,\) in every part, got \(1,\) in test"):
        Dataset("d", x, x, x[:, :1])
    with pytest.raises(ValueError, match="expected one column name for each"):
        Dataset("d", x, x, x, columns=("a",))

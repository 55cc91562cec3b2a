"""Reading your own arrays and images: the resulting examples, and the errors."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from selfnorm.data import load_dataset, read_examples


def saved(tmp_path, array, name="array.npy"):
    np.save(tmp_path / name, array)
    return tmp_path / name


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint8", "float16", "float32", "float64", ">f4"])
def test_tables_become_float32(tmp_path, dtype):
    array = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
    examples, columns = read_examples(saved(tmp_path, array))
    assert examples.dtype == torch.float32
    assert examples.tolist() == [[0, 1], [1, 0], [1, 1]]
    assert columns == ()


def test_vectors_become_one_column_and_floats_keep_their_shape(tmp_path):
    assert read_examples(saved(tmp_path, np.arange(3)))[0].shape == (3, 1)
    examples, _ = read_examples(saved(tmp_path, np.asfortranarray(np.arange(24.0).reshape(2, 3, 4))))
    assert examples.shape == (2, 3, 4)
    assert examples.flatten().tolist() == list(range(24))


@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        ((2, 5, 6), (2, 1, 5, 6)),
        ((2, 3, 5, 6), (2, 3, 5, 6)),
        ((2, 5, 6, 3), (2, 3, 5, 6)),
        ((2, 5, 6, 1), (2, 1, 5, 6)),
        ((2, 5, 6, 4), (2, 4, 5, 6)),
        ((2, 3, 5, 3), (2, 3, 5, 3)),
        ((2, 7, 5, 6), (2, 7, 5, 6)),
    ],
)
def test_bytes_with_more_axes_are_images(tmp_path, stored, shape):
    array = np.arange(np.prod(stored)).astype(np.uint8).reshape(stored)
    examples, _ = read_examples(saved(tmp_path, array))
    assert examples.dtype == torch.uint8
    assert tuple(examples.shape) == shape
    assert examples.is_contiguous()
    if stored == (2, 5, 6, 3):
        assert examples[1, 2, 3, 4] == array[1, 3, 4, 2]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), complex), "expected numbers, integer or real, got an array of complex128"),
        (np.array(["a", "b"]), "expected numbers, .* got an array of <U1"),
        (np.zeros(2, "datetime64[s]"), "expected numbers, .* got an array of datetime64"),
        (np.zeros(2, [("a", "f4")]), "expected numbers"),
        (np.zeros((0, 3)), r"expected at least one example, .* got shape \(0, 3\)"),
        (np.zeros((3, 0)), r"expected at least one example, .* got shape \(3, 0\)"),
        (np.array(1.0), r"expected at least one example, .* got shape \(\)"),
        (np.array([[0, 1], [2, np.nan]]), "expected finite numbers .* got nan in row 1, column 1"),
        (np.array([0, -np.inf]), "expected finite .* got -inf in row 1, counted"),
        (np.array([[0, 1e39]]), r"expected .* float32 can hold, got 1e\+39 in row 0, column 1"),
        (
            np.zeros((2, 3, 3), np.int64),
            r"expected images as uint8 .* got int64 of shape \(2, 3, 3\); convert images with .astype",
        ),
        (np.zeros((2, 1, 1, 1, 1), np.uint8), "expected images as uint8"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(tmp_path, array, message):
    path = saved(tmp_path, array)
    with pytest.raises(ValueError, match=rf"array\.npy: {message}"):
        read_examples(path)


class Trap:
    """Unpickling this sets a flag."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_nothing_is_ever_unpickled(tmp_path):
    (tmp_path / "plain.npy").write_bytes(pickle.dumps(Trap()))
    np.save(tmp_path / "object.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "object.npz", data=np.array([Trap()], dtype=object), allow_pickle=True)
    for name in ("plain.npy", "object.npy", "object.npz"):
        with pytest.raises(ValueError, match=rf"{name}: expected an array of numbers, .* never loaded"):
            read_examples(tmp_path / name)
    assert not Trap.sprung
    pickle.loads((tmp_path / "plain.npy").read_bytes())
    assert Trap.sprung  # the trap works


def test_npz_with_one_array_or_a_known_name(tmp_path):
    path = tmp_path / "arrays.npz"
    np.savez(path, anything=np.ones((2, 3)))
    assert read_examples(path)[0].shape == (2, 3)
    np.savez_compressed(path, labels=np.ones(2), x=np.ones((2, 4)))
    assert read_examples(path)[0].shape == (2, 4)
    np.savez(path, x=np.ones((2, 4)), data=np.ones((2, 5)))
    assert read_examples(path)[0].shape == (2, 5)
    np.savez(path, a=np.ones(2), b=np.ones(2))
    with pytest.raises(ValueError, match=r'arrays\.npz: expected one array, or one named "data" or "x", got a, b'):
        read_examples(path)
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(ValueError, match="got none"):
        read_examples(path)


@pytest.mark.parametrize("name", ["array.npy", "array.npz"])
def test_cut_files_are_named(tmp_path, name):
    buffer = io.BytesIO()
    (np.save if name.endswith("npy") else np.savez)(buffer, np.ones((100, 3)))
    for kept in (0, 20, 200, 2000):
        (tmp_path / name).write_bytes(buffer.getvalue()[:kept])
        with pytest.raises(ValueError, match=rf"{name}: expected an array of numbers"):
            read_examples(tmp_path / name)


def test_unknown_files(tmp_path):
    with pytest.raises(ValueError, match=r"read_examples: expected the path of a file .* got nothing at"):
        read_examples(tmp_path / "nothing.csv")
    (tmp_path / "table.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"table\.xlsx: expected \.npy, \.npz, .* got \.xlsx"):
        read_examples(tmp_path / "table.xlsx")


# Images


def picture(path, mode="RGB", size=(4, 3), value=7):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16", "P") else (value,) * len(mode)).save(path)


def test_an_image_folder(tmp_path):
    picture(tmp_path / "b.png", value=2)
    picture(tmp_path / "a.PNG", value=1)
    picture(tmp_path / "deeper" / "c.bmp", value=3)
    picture(tmp_path / "z.webp", "RGBA", value=255)
    picture(tmp_path / ".hidden" / "d.png", size=(9, 9))
    (tmp_path / "._b.png").write_bytes(b"what some systems leave next to an image")
    (tmp_path / "notes.txt").write_text("no image")
    examples, columns = read_examples(tmp_path)
    assert examples.dtype == torch.uint8
    assert tuple(examples.shape) == (4, 3, 3, 4)
    assert examples[:, 0, 0, 0].tolist() == [1, 2, 3, 255]
    assert columns == ()
    dataset = load_dataset(str(tmp_path))
    assert (dataset.levels, dataset.shape, dataset.name) == (256, (3, 3, 4), tmp_path.name)


def test_grey_images_have_one_channel_and_keep_their_values(tmp_path):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    examples, _ = read_examples(tmp_path)
    assert np.array_equal(examples[0, 0], pixels)
    assert np.array_equal(read_examples(tmp_path / "grey.png")[0], examples)


def test_channels_are_put_first(tmp_path):
    pixels = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    Image.fromarray(pixels).save(tmp_path / "colour.png")
    assert np.array_equal(read_examples(tmp_path)[0][0], pixels.transpose(2, 0, 1))


def test_a_palette_with_transparency_is_colour(tmp_path):
    Image.new("P", (4, 3), 1).save(tmp_path / "palette.png", transparency=1)
    with Image.open(tmp_path / "palette.png") as image:
        assert isinstance(image.info["transparency"], bytes)  # Pillow warns about this
    assert read_examples(tmp_path)[0].shape == (1, 3, 3, 4)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"size": (5, 3)}, r"b\.png: expected a colour .* 3 × 4 pixels, like .*a\.png, got a colour .* 3 × 5 pixels; resize all"),
        ({"mode": "L"}, r"b\.png: .* got a grey image of 3 × 4 pixels; make all images grey, or all colour"),
        ({"mode": "I;16"}, r"b\.png: expected 8-bit grey or colour, got Pillow's mode I"),
    ],
)
def test_the_odd_image_is_named(tmp_path, odd, message):
    for name in "ac":
        picture(tmp_path / f"{name}.png")
    picture(tmp_path / "b.png", **odd)
    with pytest.raises(ValueError, match=message):
        read_examples(tmp_path)


@pytest.mark.filterwarnings("ignore")  # as a user may do
def test_images_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"expected a folder with images .* got none"):
        read_examples(tmp_path)
    picture(tmp_path / "a.png", size=(40, 30))
    whole = (tmp_path / "a.png").read_bytes()
    for content in (b"", b"text", whole[:60], whole[:20]):
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.png: expected an image, got a file that cannot be read"):
            read_examples(tmp_path)
    (tmp_path / "a.png").write_bytes(whole)
    for limit in (1000, 100):  # Pillow warns about the first and raises an error for the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(ValueError, match=r"a\.png: expected at most 1,?00?0? pixels, got more"):
            read_examples(tmp_path)


@pytest.mark.parametrize("ending", ["npy", "csv"])
def test_a_column_that_float32_cannot_resolve_stays_in_float64(tmp_path, ending):
    table = np.stack([np.linspace(0, 1, 50) ** 2, 1e8 + np.linspace(0, 1, 50)], axis=1)
    path = tmp_path / f"table.{ending}"
    np.save(path, table) if ending == "npy" else np.savetxt(path, table, delimiter=",", fmt="%.10f")
    examples, _ = read_examples(path)
    assert examples.dtype == torch.float64
    np.testing.assert_allclose(examples, table, rtol=0, atol=1e-7)
    shifted = table - [0, 1e8]
    np.save(tmp_path / "shifted.npy", shifted)
    examples, _ = read_examples(tmp_path / "shifted.npy")
    assert examples.dtype == torch.float32
    np.testing.assert_allclose(examples, shifted, atol=1e-7)

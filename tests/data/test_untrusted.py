"""Files from strangers: none chooses the program that reads it, takes more memory than there is, or makes a command wait."""

import gzip
import io
import os
import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest
from PIL import Image, ImageFile

from selfnorm.data import cifar10, images, load_dataset, mnist, numpy_files, read_examples, safe_files
from support.commandline import fails

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"
UNREADABLE = "expected an array of numbers, got a file that cannot be read as one"


def header_of(text, version=1):
    """A .npy file with this header, and no values."""
    body = text.encode()
    length = struct.pack("<H", len(body)) if version == 1 else struct.pack("<I", len(body))
    return b"\x93NUMPY" + bytes([version, 0]) + length + body


def described(descr="'<f8'", order="False", shape="(2, 2)"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def test_an_image_file_never_starts_another_program(tmp_path, monkeypatch):
    """Pillow goes by content: it gives PostScript to Ghostscript, whatever the name of the file says."""
    program, marker = tmp_path / "bin" / "gs", tmp_path / "called"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho called >> {marker}\necho 10.0\n")
    program.chmod(0o755)
    folder = tmp_path / "images"
    folder.mkdir()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / "aa.png")
    (folder / "zz.png").write_bytes(POSTSCRIPT)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    for path in (folder, folder / "zz.png"):
        with pytest.raises(ValueError, match=r"zz\.png: expected an image"):
            read_examples(path)
        assert not marker.exists()
    with Image.open(folder / "zz.png") as image, pytest.raises(Exception):  # noqa: B017  (the fake writes no picture)
        image.load()
    assert marker.exists()  # so that the test would notice


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "PCX", "SGI", "EPS", "PDF", "DDS", "JPEG2000"])
def test_other_formats_are_refused_by_name_or_content(tmp_path, kind):
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "x", kind)
    (tmp_path / "x").rename(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"x\.png: expected an image, .* read as one of PNG, JPEG, WEBP, BMP, GIF, TIFF"):
        read_examples(tmp_path / "x.png")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_the_usual_formats_are_read_by_content(tmp_path, kind):
    Image.fromarray(np.full((4, 5, 3), 90, np.uint8)).save(tmp_path / "x", kind)
    (tmp_path / "x").rename(tmp_path / "x.jpg")
    examples, _ = read_examples(tmp_path / "x.jpg")
    assert examples.shape == (1, 3, 4, 5) and abs(examples.float() - 90).max() <= 2


def test_a_cut_image_is_refused_and_not_filled_up(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16), np.uint8)).save(buffer, "PNG")
    whole = buffer.getvalue()
    for length in range(0, len(whole) - 20, 7):  # the last 20 bytes are checksums and the mark of the end
        (tmp_path / "x.png").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"x\.png: expected an image"):
            read_examples(tmp_path / "x.png")
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_further_frames_are_left_out_with_a_warning(tmp_path):
    frames = [Image.fromarray(np.full((4, 4), level, np.uint8)) for level in (10, 200)]
    frames[0].save(tmp_path / "b.png", save_all=True, append_images=frames[1:])
    frames[1].save(tmp_path / "a.png")
    with pytest.warns(UserWarning, match=r"1 of 2 images have several frames, .* one of them is .*b\.png"):
        examples, _ = read_examples(tmp_path)
    assert examples[:, 0, 0, 0].tolist() == [200, 10]


def test_the_pixel_limit_holds_even_if_pillow_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 15)
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"x\.png: expected at most 15 pixels, got 16"):
        read_examples(tmp_path / "x.png")


def test_images_that_do_not_fit_are_refused_before_they_are_read(tmp_path, monkeypatch):
    for index in range(10):
        Image.fromarray(np.zeros((10, 10), np.uint8)).save(tmp_path / f"{index}.png")
    monkeypatch.setattr(safe_files, "available_memory", lambda: 1999)
    with pytest.raises(ValueError, match="expected data that fits into the available memory"):
        read_examples(tmp_path)
    monkeypatch.setattr(safe_files, "available_memory", lambda: 2000)
    assert len(read_examples(tmp_path)[0]) == 10


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_arrays_that_do_not_fit_are_refused_before_they_are_read(tmp_path, monkeypatch, name):
    array = np.zeros((1000, 10))
    np.savez_compressed(tmp_path / "x.npz", array) if name == "x.npz" else np.save(tmp_path / "x.npy", array)
    monkeypatch.setattr(safe_files, "available_memory", lambda: 2 * array.nbytes - 1)
    monkeypatch.setattr(numpy_files.np, "empty", lambda *args: pytest.fail("was about to be read"))
    with pytest.raises(ValueError, match=rf"{name}: expected data that fits into the available memory"):
        read_examples(tmp_path / name)


def test_a_text_table_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """A number of one digit takes two bytes in the file, and eight in memory."""
    text = "1,2,3,4\n" * 5000
    (tmp_path / "t.csv").write_text(text)
    monkeypatch.setattr(safe_files, "available_memory", lambda: 3 * len(text))
    with monkeypatch.context() as patched:
        patched.setattr("selfnorm.data.delimited.np.loadtxt", lambda *args, **options: pytest.fail("was about to be read"))
        with pytest.raises(ValueError, match=r"t\.csv: expected data that fits into the available memory"):
            read_examples(tmp_path / "t.csv")
    monkeypatch.setattr(safe_files, "available_memory", lambda: 100 * len(text))
    assert len(read_examples(tmp_path / "t.csv")[0]) == 5000


def test_a_small_archive_of_a_large_array_is_refused_at_once(tmp_path):
    """The header says 8 TB; nothing of that size is ever allocated."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", header_of(described(shape="(1000000000000,)")) + bytes(1 << 20))
    with pytest.raises(ValueError, match=UNREADABLE):
        read_examples(tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "stored.npz"])
def test_every_cut_of_an_array_is_refused(tmp_path, name):
    array, buffer = np.arange(12.0).reshape(4, 3), io.BytesIO()
    {"x.npy": np.save, "x.npz": np.savez_compressed, "stored.npz": np.savez}[name](buffer, array)
    whole = buffer.getvalue()
    for length in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(ValueError, match=UNREADABLE):
            read_examples(tmp_path / name)
    (tmp_path / name).write_bytes(whole)
    assert np.array_equal(read_examples(tmp_path / name)[0], array)


@pytest.mark.parametrize(
    "content",
    [
        b"\x92NUMPY" + header_of(described())[6:] + bytes(32),
        header_of(described(), version=2)[:6] + b"\x09" + header_of(described(), version=2)[7:],
        header_of(described()) + bytes(31),
        header_of(described()) + bytes(33),
        header_of(described(shape="(-1, 2)")) + bytes(32),
        header_of(described(shape="(True, 4)")) + bytes(32),
        header_of(described(shape="(10**9, 10**9)")),
        header_of(described(shape="(" + "1, " * 70 + ")")) + bytes(8),
        header_of(described(descr="'|O'", shape="(1,)")) + pickle.dumps([1]),
        header_of(described(descr="'<f99'")) + bytes(32),
        header_of("{'descr': '<f8'}"),
        header_of("-" * 9000 + "1"),
        header_of("(" * 9000),
        header_of("[" * 90 + "]" * 90),
        header_of("{'descr': '" + "x" * 9000),
        header_of("\x00"),
        header_of("__import__('os').system('false')"),
        header_of(described() + " " * 20_000, version=1)[:60_000],
        header_of(" " * 200_000, version=2),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100),
        b"PK\x03\x04" + bytes(100),
        b"PK\x05\x06" + bytes(18),
    ],
    ids=lambda content: content[10:40].decode("latin1"),
)
def test_damaged_headers_are_refused_by_the_usual_line(tmp_path, content):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.npy: ({UNREADABLE}|expected one array)"):
        read_examples(tmp_path / "x.npy")


def test_archives_choose_neither_decompressor_nor_password(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((2, 2)))
    for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
            archive.writestr("data.npy", buffer.getvalue())
        with pytest.raises(ValueError, match=UNREADABLE):
            read_examples(tmp_path / "x.npz")
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("data.npy", buffer.getvalue())
    locked = bytearray((tmp_path / "x.npz").read_bytes())
    locked[6] |= 1  # "encrypted", in the local header and in the directory
    locked[locked.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "x.npz").write_bytes(locked)
    with pytest.raises(ValueError, match=UNREADABLE):
        read_examples(tmp_path / "x.npz")


def test_a_wrong_checksum_is_noticed(tmp_path):
    np.savez(tmp_path / "x.npz", data=np.ones((4, 4)))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[content.index(np.ones(1).tobytes())] ^= 1
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ValueError, match=UNREADABLE):
        read_examples(tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.png", "x.tiff"])
def test_pipes_are_refused_without_waiting(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}: expected a regular file, got a named pipe"):
        read_examples(tmp_path / name)


def test_a_pipe_among_images_is_refused_without_waiting(tmp_path):
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    assert "b.png: expected a regular file, got a named pipe" in fails("fit", tmp_path)


def test_pickles_of_cifar10_are_not_read(tmp_path):
    (tmp_path / cifar10.CIFAR10_PICKLES_SUBFOLDER).mkdir()
    (tmp_path / cifar10.CIFAR10_PICKLES_SUBFOLDER / "data_batch_1").write_bytes(pickle.dumps(Trap(tmp_path / "marker")))
    with pytest.raises(ValueError, match="pickles can run code"):
        load_dataset("cifar10", tmp_path)
    assert not (tmp_path / "marker").exists()


def test_a_gzip_file_that_unpacks_without_end_is_read_only_as_far_as_needed(tmp_path):
    for name, count in mnist.IMAGES_IN_FILE.items():
        with gzip.open(tmp_path / f"{name}.gz", "wb", 1) as file:
            file.write(mnist.IDX_HEADER.pack(mnist.IDX_MAGIC, count, 28, 28))
            for _ in range(60):
                file.write(bytes(1 << 20))
    with pytest.raises(ValueError, match="bytes after its header, got more"):
        load_dataset("mnist", tmp_path)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", ["training_scores.npy", "metrics.jsonl", ".lock", "result.json", "curves.png"])
def test_pipes_in_a_run_are_refused_without_waiting(table_run, tmp_path, name):
    run, data = tmp_path / "run", table_run[1]
    shutil.copytree(table_run[0], run)
    (run / name).unlink()
    os.mkfifo(run / name)
    message = f"{name}: expected a regular file, got a named pipe"
    assert f"{message}; remove it, or copy" in fails("train", "--resume", run, "-q")
    assert message in fails("score", run, data)


@pytest.mark.parametrize(
    ("byte", "message"),
    [(b"0", "expected lines of less than 4,096 characters, got a longer one"), (b"\n", "at least one row of n")],
)
def test_a_table_that_expands_without_end_is_refused_at_its_beginning(tmp_path, monkeypatch, byte, message):
    """A line of 3 GB took 6 GB of memory."""
    monkeypatch.setattr("selfnorm.data.delimited.LONGEST_LINE", 4096)
    monkeypatch.setattr("selfnorm.data.delimited.available_memory", lambda: 4 << 20)  # more would be another error
    with gzip.open(tmp_path / "t.csv.gz", "wb") as file:
        file.write(byte * (1 << 22))
    with pytest.raises(ValueError, match=message):
        read_examples(tmp_path / "t.csv.gz")


def test_what_a_header_holds_is_quoted_briefly(tmp_path):
    values = {"shape": described(shape=f"(-{'9' * 4000},)"), "type": described(descr=f"[('{'n' * 5000}', '<f8')]", shape="(1,)")}
    for name, text in values.items():
        (tmp_path / f"{name}.npy").write_bytes(header_of(text) + bytes(8))
        with pytest.raises(ValueError, match=rf"{name}\.npy: expected ") as caught:
            read_examples(tmp_path / f"{name}.npy")
        assert len(str(caught.value)) < 600 + len(str(tmp_path))
    np.savez(tmp_path / "x.npz", **{f"{index}{'n' * 5000}": np.ones(1) for index in "ab"})
    with pytest.raises(ValueError, match=r"expected one array.* … ") as caught:
        read_examples(tmp_path / "x.npz")
    assert len(str(caught.value)) < 600

"""Downloads from a local server: the content is checked, and a failure leaves no files behind."""

import gzip
import hashlib
import io
import socket
import tarfile
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from selfnorm.data import cifar10, download, load_dataset, mnist
from support.data_files import shrink_cifar10, shrink_mnist


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def site(tmp_path):
    """A folder served over HTTP, and its address."""
    folder = tmp_path / "site"
    folder.mkdir()
    with serving(partial(Quiet, directory=str(folder))) as url:
        yield folder, url


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SELFNORM_DATA", raising=False)
    return tmp_path / "cache" / "selfnorm"


def left_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# MNIST: gzip files


@pytest.fixture
def mnist_site(site, cache, monkeypatch):
    folder, url = site
    files, train, _ = shrink_mnist(monkeypatch)
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(mnist, "MNIST_URL", url)
    monkeypatch.setattr(mnist, "MNIST_CHECKSUMS", {name: sha256(content) for name, content in files.items()})
    return folder, cache, train


def test_mnist_is_downloaded_once(mnist_site, monkeypatch):
    _, cache, train = mnist_site
    reports = []
    dataset = load_dataset("mnist", on_progress=lambda *report: reports.append(report))
    assert (dataset.train[:, 0].numpy() == train[:4]).all()
    assert left_in(cache) == [f"MNIST/raw/{mnist.TEST_FILE}", f"MNIST/raw/{mnist.TRAIN_FILE}"]
    assert {what for what, _, _ in reports} == {f"downloading {name}.gz" for name in mnist.IMAGES_IN_FILE}
    assert reports[-1][1] == reports[-1][2] > 0
    monkeypatch.setattr(mnist, "MNIST_URL", f"http://127.0.0.1:{closed_port()}/")
    load_dataset("mnist")


def test_only_what_is_missing_is_downloaded(mnist_site):
    site, cache, _ = mnist_site
    load_dataset("mnist")
    (cache / "MNIST" / "raw" / mnist.TEST_FILE).unlink()
    (site / f"{mnist.TRAIN_FILE}.gz").unlink()
    load_dataset("mnist")


def test_other_content_is_not_kept(mnist_site):
    site, cache, _ = mnist_site
    whole = gzip.decompress((site / f"{mnist.TRAIN_FILE}.gz").read_bytes())
    for content, message in (
        (whole[:-1] + b"x", r"got 5,504 bytes with [0-9a-f]{64}; it was not kept"),
        (whole[:-1], "got 5,503 bytes"),
        (whole + bytes(1000), "got more bytes"),
    ):
        (site / f"{mnist.TRAIN_FILE}.gz").write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match=f"mnist: expected {mnist.TRAIN_FILE} in http.* SHA-256 .* {message}"):
            load_dataset("mnist")
        assert left_in(cache) == []


def test_a_damaged_gzip_is_not_kept(mnist_site):
    site, cache, _ = mnist_site
    whole = (site / f"{mnist.TRAIN_FILE}.gz").read_bytes()
    for content in (whole[:-9], b"<html>not found</html>"):
        (site / f"{mnist.TRAIN_FILE}.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"expected a whole archive from http.* got a damaged one"):
            load_dataset("mnist")
        assert left_in(cache) == []


def test_a_download_without_end_is_cut_off(mnist_site, monkeypatch):
    site, cache, _ = mnist_site
    monkeypatch.setattr(download, "SPARE_BYTES", 0)
    (site / f"{mnist.TRAIN_FILE}.gz").write_bytes(bytes(10_000))
    with pytest.raises(ValueError, match=r"expected at most 5,504 bytes from http.*, got more"):
        load_dataset("mnist")
    assert left_in(cache) == []


def test_without_a_network_the_files_are_named(cache, monkeypatch):
    url = f"http://127.0.0.1:{closed_port()}/"
    monkeypatch.setattr(mnist, "MNIST_URL", url)
    with pytest.raises(
        ValueError, match=rf"download {url}{mnist.TRAIN_FILE}\.gz, got .*refused.* put {mnist.TRAIN_FILE}, .* {cache}/MNIST/raw"
    ):
        load_dataset("mnist")
    assert left_in(cache) == []


def test_an_absent_page_is_named(mnist_site):
    site, _, _ = mnist_site
    (site / f"{mnist.TRAIN_FILE}.gz").unlink()
    with pytest.raises(ValueError, match=r"expected to download http.*, got HTTP Error 404"):
        load_dataset("mnist")


class Stalls(BaseHTTPRequestHandler):
    """Announces a thousand bytes and sends ten; then closes the connection, or stays silent until the test ends."""

    silent = None

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(bytes(10))
        if self.silent:
            self.silent.wait(10)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(("hangs", "message"), [(False, "10 of 1,000 bytes|IncompleteRead"), (True, "timed out")])
def test_a_connection_that_breaks_off_or_stalls(cache, monkeypatch, hangs, message):
    over = threading.Event() if hangs else None
    monkeypatch.setattr(Stalls, "silent", over)
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.2)
    with serving(Stalls) as url:
        monkeypatch.setattr(mnist, "MNIST_URL", url)
        with pytest.raises(ValueError, match=f"expected to download .* got .*({message})"):
            load_dataset("mnist")
        if over:
            over.set()
    assert left_in(cache) == []


def test_a_full_disk_is_no_network_fault(mnist_site, monkeypatch):
    _, cache, _ = mnist_site

    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.tempfile, "TemporaryFile", lambda dir: Full())
    with pytest.raises(OSError, match="No space left"):
        load_dataset("mnist")
    assert left_in(cache) == []


# CIFAR-10: a tar file


def tar(members):
    """A .tar.gz of (name, content) pairs or TarInfo members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.fixture
def cifar10_site(site, cache, monkeypatch):
    files = shrink_cifar10(monkeypatch)
    folder, url = site
    monkeypatch.setattr(cifar10, "CIFAR10_URL", f"{url}cifar.tar.gz")
    monkeypatch.setattr(cifar10, "CIFAR10_CHECKSUMS", {name: sha256(content) for name, content in files.items()})
    members = [(f"cifar-10-batches-bin/{name}", content) for name, content in files.items()]
    return folder / "cifar.tar.gz", cache, members


def test_cifar10_is_unpacked_and_nothing_besides(cifar10_site, tmp_path):
    archive, cache, members = cifar10_site
    others = [("cifar-10-batches-bin/readme.html", b"hello"), ("../../outside.bin", b"x"), (f"{tmp_path}/absolute.bin", b"x")]
    archive.write_bytes(tar([*others, link("cifar-10-batches-bin/link", "/etc/passwd"), *members]))
    before = left_in(tmp_path)
    dataset = load_dataset("cifar10")
    assert dataset.test[:, 0, 0, 0].tolist() == [10, 11]
    assert set(left_in(tmp_path)) - set(before) == {f"cache/selfnorm/{name}" for name, _ in members}
    assert len(left_in(cache)) == 6


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_a_link_in_place_of_a_file_is_refused(cifar10_site, kind):
    archive, cache, members = cifar10_site
    archive.write_bytes(tar([link(members[0][0], "/etc/passwd", kind), *members[1:]]))
    with pytest.raises(ValueError, match=r"expected cifar-10-batches-bin/data_batch_1\.bin .* to be a regular file"):
        load_dataset("cifar10")
    assert left_in(cache) == []


def test_a_changed_member_is_not_kept(cifar10_site):
    archive, cache, members = cifar10_site
    name, content = members[2]
    for changed in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], content + b"x"):
        archive.write_bytes(tar([*members[:2], (name, changed), *members[3:]]))
        with pytest.raises(ValueError, match=r"cifar10: expected data_batch_3\.bin in http.* SHA-256"):
            load_dataset("cifar10")
        assert left_in(cache) == [name for name, _ in members[:2]]


def test_an_absent_member_is_named(cifar10_site):
    archive, _, members = cifar10_site
    archive.write_bytes(tar(members[:-1]))
    with pytest.raises(ValueError, match=r"got all but cifar-10-batches-bin/test_batch\.bin"):
        load_dataset("cifar10")


def test_a_small_archive_cannot_unpack_to_any_size(cifar10_site):
    archive, cache, members = cifar10_site
    archive.write_bytes(tar([("filler", bytes(3 * download.SPARE_BYTES)), *members]))
    assert archive.stat().st_size < download.SPARE_BYTES
    with pytest.raises(ValueError, match=r"expected at most .* bytes inside http.*, got more"):
        load_dataset("cifar10")
    assert left_in(cache) == []


def test_a_damaged_tar(cifar10_site):
    archive, _, members = cifar10_site
    for content in (tar(members)[:-2000], gzip.compress(b"no tar" * 1000), b"no gzip"):
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=r"cifar10: expected a whole archive from http.* got a damaged one"):
            load_dataset("cifar10")


def test_without_a_network_cifar10s_files_are_named(cache, monkeypatch):
    monkeypatch.setattr(cifar10, "CIFAR10_URL", f"http://127.0.0.1:{closed_port()}/cifar.tar.gz")
    with pytest.raises(ValueError, match=rf"put cifar-10-batches-bin/data_batch_1\.bin, .* in {cache}, or name the folder"):
        load_dataset("cifar10")

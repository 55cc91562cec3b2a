"""Downloads data files: limited in size, checked by SHA-256, and moved to their final name only when complete."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from selfnorm.data.locate import OnProgress
from selfnorm.runtime.files import replacing_file

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0  # without receiving a byte
SPARE_BYTES = 1 << 20  # an archive may hold this much besides the expected files


class Readable(Protocol):
    """A stream that can be read."""

    def read(self, size: int, /) -> bytes: ...


class Expected(NamedTuple):
    """The size and checksum of an unpacked file."""

    size: int
    sha256: str


def fetch_gzip(
    who: str, url: str, target: Path, expected: Expected, on_progress: OnProgress | None = None, names: Sequence[str] = ()
) -> None:
    """Downloads one gzip file and unpacks it to `target`. `names`: all files of the data set, for the error message."""
    wanted = f"put {', '.join(names or [target.name])}, plain or as .gz, in {target.parent}"
    with _downloaded(who, url, target.parent, wanted, expected.size, on_progress) as archive, gzip.open(archive) as content:
        _save(who, url, content, target, expected)


def fetch_tar(who: str, url: str, folder: Path, expected: Mapping[str, Expected], on_progress: OnProgress | None = None) -> None:
    """Downloads a .tar.gz and unpacks the expected members, and only those, to their names below `folder`.

    Only regular files with the expected name, size and checksum are written, so no member can be written outside `folder`.
    """
    size = sum(file.size for file in expected.values())
    wanted = f"put {', '.join(expected)} in {folder}"
    found = set()
    with _downloaded(who, url, folder, wanted, size, on_progress) as archive, gzip.open(archive) as content:
        bounded = _Bounded(who, url, content, size + SPARE_BYTES)
        with tarfile.open(fileobj=bounded, mode="r|") as members:  # type: ignore[call-overload]  # it only calls read
            for member in members:
                if member.name not in expected:
                    continue
                file = members.extractfile(member) if member.isreg() else None
                if file is None:
                    raise ValueError(f"{who}: expected {member.name} in {url} to be a regular file, got another type of member")
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                _save(who, url, file, target, expected[member.name])
                found.add(member.name)
    if absent := [name for name in expected if name not in found]:
        raise ValueError(f"{who}: expected {', '.join(expected)} in {url}, got all but {', '.join(absent)}")


@contextmanager
def _downloaded(who: str, url: str, folder: Path, wanted: str, size: int, on_progress: OnProgress | None) -> Iterator[IO[bytes]]:
    """Yields the content of `url` as a temporary file. An unpacking error in the block becomes a ValueError about the archive."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        for chunk, done, total in _chunks(who, url, wanted):
            if done > size + SPARE_BYTES:
                raise ValueError(f"{who}: expected at most {size + SPARE_BYTES:,} bytes from {url}, got more")
            file.write(chunk)
            if on_progress:
                on_progress(f"downloading {url.rsplit('/', 1)[-1]}", done, total)
        file.seek(0)
        try:
            yield file
        except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
            raise ValueError(f"{who}: expected a whole archive from {url}, got a damaged one ({error}); try again") from error


def _chunks(who: str, url: str, wanted: str) -> Iterator[tuple[bytes, int, int | None]]:
    """Yields (chunk, bytes so far, total). The caller writes them, so that a full disk is not reported as a network error."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            length = response.headers.get("Content-Length")
            done, total = 0, int(length) if length else None
            while chunk := response.read(CHUNK_BYTES):
                done += len(chunk)
                yield chunk, done, total
        if total is not None and done < total:
            raise ConnectionError(f"{done:,} of {total:,} bytes")
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"{who}: expected to download {url}, got {str(error) or type(error).__name__}; try again, or, without a network, "
            f"{wanted}, or name the folder that has the data with data_dir or $SELFNORM_DATA"
        ) from error


def _save(who: str, url: str, source: Readable, target: Path, expected: Expected) -> None:
    digest, done = hashlib.sha256(), 0
    with replacing_file(target) as file:
        while chunk := source.read(min(CHUNK_BYTES, expected.size + 1 - done)):
            digest.update(chunk)
            file.write(chunk)
            done += len(chunk)
        if (done, digest.hexdigest()) != expected:
            raise ValueError(
                f"{who}: expected {target.name} in {url} to be {expected.size:,} bytes with the SHA-256 {expected.sha256}, "
                f"got {'more' if done > expected.size else f'{done:,}'} bytes with {digest.hexdigest()}; it was not kept"
            )


class _Bounded:
    """A stream that raises ValueError beyond `limit` bytes, since a small archive can unpack to any size."""

    def __init__(self, who: str, url: str, source: Readable, limit: int) -> None:
        self.who, self.url, self.source, self.left, self.limit = who, url, source, limit, limit

    def read(self, size: int) -> bytes:
        chunk = self.source.read(size)
        self.left -= len(chunk)
        if self.left < 0:
            raise ValueError(f"{self.who}: expected at most {self.limit:,} bytes inside {self.url}, got more")
        return chunk

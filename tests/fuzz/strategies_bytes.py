"""Run folders with damaged files: single bits, cuts, splices, other types in the headers, other tensors."""

import io
import json
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.torch import load

from fuzz.cases import Case, Outcome
from fuzz.runner import perform, run_folder

NEW_ROWS = b"a,b\n" + b"".join(b"%.6f,%.6f\n" % (3 + index / 3, index % 4 - 1.5) for index in range(12))
HOSTILE = [
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    10**30,
    65536,
    "",
    "x",
    "\x1b[31mred\x1b[0m",
    "nan",
    [],
    {},
    [[1]],
    ["a"],
    {"a": 1},
    float("nan"),
]
# Values of a result that measure this machine at this moment, and the digest of all its values.
OF_THE_MOMENT = ("seconds", "step_seconds", "peak_memory", "provenance", "digest")
CALLS: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = {
    ("score", "run", "new.csv"): ("table", ("best.safetensors", "training_scores.npy", "recipe.toml", "result.json")),
    ("score", "run/last.safetensors", "new.csv"): ("table", ("last.safetensors",)),
    ("eval", "run", "--json"): ("table", ("best.safetensors", "recipe.toml", "metrics.jsonl")),
    ("sample", "run", "-n", "6", "--inverse", "exact", "-o", "new-rows.csv"): ("table", ("best.safetensors",)),
    ("doctor", "run", "--json"): ("table", ("best.safetensors",)),
    ("train", "--resume", "run", "-q"): (
        "stopped",
        ("last.safetensors", "best.safetensors", "recipe.toml", "metrics.jsonl", "result.json", "training_scores.npy"),
    ),
}


def _flip(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


@st.composite
def damages(draw: Any, content: bytes, other: bytes) -> bytes:
    """The content with one kind of damage, by accident or by intent."""
    kinds = [_bits, _bits, _bits, _cut, _spliced, _inserted, _swapped]
    if content[8:9] == b"{":
        kinds += [_header, _header, _header, _tensors]
    elif content[:1] == b"{":
        kinds += [_json_lines, _json_lines]
    elif content[:6] == b"\x93NUMPY":
        kinds += [_scores, _scores]
    else:
        kinds += [_toml_lines, _toml_lines]
    return draw(st.sampled_from(kinds))(draw, content, other)


def _place(draw: Any, content: bytes) -> int:
    # Twice, so that the short header of an array or the small numbers at the end of a file are met, too.
    at = draw(st.integers(0, max(0, len(content) - 1)))
    return at if draw(st.booleans()) else len(content) - 1 - min(at, draw(st.integers(0, len(content))))


def _bits(draw: Any, content: bytes, other: bytes) -> bytes:
    return _flip(content, _place(draw, content), draw(st.integers(0, 7))) if content else b"\0"


def _cut(draw: Any, content: bytes, other: bytes) -> bytes:
    return content[: draw(st.integers(0, len(content)))]


def _spliced(draw: Any, content: bytes, other: bytes) -> bytes:
    at = _place(draw, content)
    length = draw(st.sampled_from([1, 4, 64, 512]))
    return content[:at] + other[at : at + length] + content[at + length :]


def _inserted(draw: Any, content: bytes, other: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + draw(st.binary(min_size=1, max_size=9)) + content[at:]


def _swapped(draw: Any, content: bytes, other: bytes) -> bytes:
    both_checkpoints = content[8:9] == other[8:9] == b"{"  # another whole checkpoint is a right one
    return _cut(draw, content, other) if both_checkpoints else other


def _header(draw: Any, content: bytes, other: bytes) -> bytes:
    """A checkpoint with another value, or another type, at one place of its metadata."""
    header, body = _split(content)
    facts = json.loads(header["__metadata__"]["facts"])
    if draw(st.integers(0, 9)) == 0:
        place: dict[str, Any] = header["__metadata__"]
        key = draw(st.sampled_from(sorted(place)))
        place[key] = draw(st.sampled_from(["", "x", "[" * 5000, "null", "7" * 5000, "{}"]))
        return _joined(header, body)
    _replace_one(draw, facts)
    header["__metadata__"]["facts"] = json.dumps(facts)
    return _joined(header, body)


def _tensors(draw: Any, content: bytes, other: bytes) -> bytes:
    """A checkpoint in which one tensor has another type of the same size, another name, or another's place."""
    header, body = _split(content)
    names = sorted(name for name in header if name != "__metadata__")
    one = draw(st.sampled_from(names))
    how = draw(st.sampled_from(["type", "name", "swap", "shape"]))
    same = {"F32": "I32", "F64": "I64", "I64": "F64", "BOOL": "U8", "I32": "F32"}
    if how == "type":
        header[one]["dtype"] = same.get(header[one]["dtype"], "F32")
    elif how == "name":
        header[one + "x"] = header.pop(one)
    elif how == "shape":
        header[one]["shape"] = [*header[one]["shape"], 1]
    else:
        like = [
            name
            for name in names
            if header[name]["dtype"] == header[one]["dtype"] and header[name]["shape"] == header[one]["shape"]
        ]
        two = draw(st.sampled_from(like))
        header[one], header[two] = header[two], header[one]
    return _joined(header, body)


def _json_lines(draw: Any, content: bytes, other: bytes) -> bytes:
    """A log or a result with another value at one place, or a line that few readers expect."""
    lines = content.decode().splitlines()
    if len(lines) > 1 and content.startswith(b"{\n"):
        lines = [json.dumps(json.loads(content))]
    at = draw(st.integers(0, len(lines) - 1))
    odd = [
        "[]",
        "null",
        "7",
        "[" * 100_000,
        '{"kind": ' + "9" * 5000 + "}",
        '{"a":' * 3000 + "1" + "}" * 3000,
        "{}",
        "\udcff",
        "\x00",
    ]
    if draw(st.booleans()):
        lines[at] = draw(st.sampled_from(odd))
    else:
        record = json.loads(lines[at])
        _replace_one(draw, record)
        lines[at] = json.dumps(record)
    return "\n".join([*lines, ""]).encode(errors="surrogateescape")


def _toml_lines(draw: Any, content: bytes, other: bytes) -> bytes:
    lines = content.decode().splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    key = lines[at].partition("=")[0]
    values = ["-1", "true", '"x"', "nan", "[" * 5000, "{a = 1}", "9" * 5000, "1e999", '"\\u001b[31m"', "", "65536", "1979-05-27"]
    odd = ["[optimiser]", 'name = "again"', "a.b.c = 1", "unknown = 3", "\x00", *(f"{key}= {value}" for value in values)]
    return "\n".join([*lines[:at], draw(st.sampled_from(odd)), *lines[at + 1 :]]).encode()


def _scores(draw: Any, content: bytes, other: bytes) -> bytes:
    scores = np.load(io.BytesIO(content))
    odd = [
        scores[::-1],
        scores[:0],
        scores.astype("U9"),
        np.full_like(scores, np.nan),
        scores[None],
        scores.astype("f4"),
        scores[0],
    ]
    stream = io.BytesIO()
    np.save(stream, draw(st.sampled_from(odd)))
    return stream.getvalue()


def _replace_one(draw: Any, value: Any) -> None:
    """Replaces, adds or removes one value somewhere in nested lists and dicts, in place."""
    while True:
        if isinstance(value, dict):
            key = draw(st.sampled_from(sorted(value))) if value else "new"
        elif isinstance(value, list) and value:
            key = draw(st.integers(0, len(value) - 1))
        else:
            return
        inner = value.get(key) if isinstance(value, dict) else value[key]
        if not (isinstance(inner, dict | list) and inner and draw(st.integers(0, 3))):
            break
        value = inner
    what = draw(st.sampled_from([*HOSTILE, "remove"]))
    if what == "remove" and isinstance(value, dict):
        value.pop(key, None)
    else:
        value[key] = what


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _joined(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


@cache
def undamaged(args: tuple[str, ...], run: str) -> Outcome:
    outcome = perform(_call(args, run, {}))
    assert outcome.code == 0, outcome
    return outcome


def _call(
    args: tuple[str, ...],
    run: str,
    files: dict[str, bytes | None],
    right: Any = None,
    note: str = "",
    must_succeed: bool = False,
) -> Case:
    may_change = ("run/",) if "--resume" in args else ()
    return Case("run bytes", args, run, {"new.csv": NEW_ROWS, **files}, note, must_succeed, may_change, right)


def same_as_undamaged(args: tuple[str, ...], run: str) -> Callable[[Outcome], Iterator[str]]:
    """Returns the check that damage was without effect: the same output and the same files, apart from times."""

    def check(outcome: Outcome) -> Iterator[str]:
        whole = undamaged(args, run)
        if outcome.stdout != whole.stdout and "--resume" not in args:
            differing = [(a, b) for a, b in zip(whole.stdout.split("\n"), outcome.stdout.split("\n"), strict=False) if a != b][:1]
            yield f"other numbers: {differing}"
        files = {**outcome.changed, **outcome.made}
        for name, content in {**whole.changed, **whole.made}.items():
            got = files.get(name)
            if content is not None and name.endswith((".csv", ".npy")) and got != content:
                yield f"other numbers: in {name}, {'missing' if got is None else 'other content'}"
        if "--resume" in args:
            yield from _other_run(whole, outcome)

    return check


def _other_run(whole: Outcome, outcome: Outcome) -> Iterator[str]:
    """Yields what differs between two resumed runs, apart from times."""
    ended, expected = ({**each.changed, **each.made} for each in (outcome, whole))
    results = [json.loads(files["run/result.json"] or b"") for files in (ended, expected)]
    timeless = [{name: value for name, value in each.items() if name not in OF_THE_MOMENT} for each in results]
    if timeless[0] != timeless[1]:
        yield f"other numbers: in result.json, {[(name, timeless[0].get(name), timeless[1][name]) for name in timeless[1]]}"
    for name in ("best", "last"):
        got, correct = (files.get(f"run/{name}.safetensors") for files in (ended, expected))
        if correct and got and not _same_tensors(got, correct):
            yield f"other numbers: in {name}.safetensors"


def _same_tensors(one: bytes, other: bytes) -> bool:
    a, b = load(one), load(other)
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@st.composite
def run_bytes(draw: Any) -> Case:
    """A call that reads a run, one file of which is damaged."""
    args = draw(st.sampled_from([call for call in CALLS for _ in range(1 if "train" in call else 4)]))
    run, files = CALLS[args]
    name = draw(st.sampled_from(files))
    folder = run_folder(run)
    path = folder / name
    if not path.exists():  # a run that was stopped has no result yet: an old or foreign one lies there
        path = run_folder("table") / name
    other = run_folder("stopped") if run == "table" else run_folder("table")
    others = [folder / "last.safetensors", other / "best.safetensors", folder / "recipe.toml"]
    before = path.read_bytes()
    content = (
        draw(damages(before, draw(st.sampled_from(others)).read_bytes()))
        if draw(st.integers(0, 30)) or "tensors" in name
        else None
    )
    if draw(st.integers(0, 11)) == 0:
        content = before
    whole = content == before and path.parent == folder
    note = f"run/{name}: {'as it was' if content == before else _difference(before, content)}"
    return _call(args, run, {f"run/{name}": content}, same_as_undamaged(args, run), note, must_succeed=whole)


def _difference(before: bytes, after: bytes | None) -> str:
    """Returns where bytes differ, and how."""
    if after is None:
        return "removed"
    at = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    end = 1
    while end < min(len(before), len(after)) - at and before[-end] == after[-end]:
        end += 1
    was, now = (each[max(0, at - 20) : len(each) - end + 2] for each in (before, after))
    return f"{len(before)} → {len(after)} bytes, from byte {at}: {was[:80]!r} → {now[:80]!r}"

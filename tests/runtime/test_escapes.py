"""What a terminal gets of text that a file chose."""

import csv
import io
import os
import tty
from pathlib import Path

import pytest
import torch

from selfnorm.runtime.escapes import escaped
from selfnorm.runtime.files import written_output
from selfnorm.train.sample_files import write_samples
from selfnorm.train.score_files import write_scores

NAME = "\x1b[31mred\x07\u202eé"
SHOWN = r"\x1b[31mred\x07\u202e" + "é"


@pytest.fixture
def terminal():
    """The name of a terminal, and a function that returns the text that it got since."""
    screen, keyboard = os.openpty()
    tty.setraw(keyboard)
    yield os.ttyname(keyboard), lambda: os.read(screen, 100_000).decode()
    os.close(screen)
    os.close(keyboard)


def test_marks_that_turn_text_around_are_shown():
    assert escaped("a\u202eb\u2066c\u200fd\ne–λ") == r"a\u202eb\u2066c\u200fd" + "\ne–λ"


def test_a_terminal_shows_what_files_and_pipes_get_as_it_is(terminal, tmp_path):
    name, got = terminal
    batch = torch.tensor([[1.5]])
    write_samples(tmp_path / "x.csv", [batch], 1, (1,), None, (NAME,))
    assert next(csv.reader(io.StringIO((tmp_path / "x.csv").read_text()))) == [NAME]
    write_samples(Path(name), [batch], 1, (1,), None, (NAME,))
    assert got() == f"{SHOWN}\n1.5\n"
    write_scores(Path(name), [{NAME: 1}])
    assert got() == f"{SHOWN}\n1\n"
    with written_output(Path(name)) as file:
        for byte in NAME.encode() + b"\xff\x1b":
            file.write(bytes([byte]))
    assert got() == SHOWN + r"\xff\x1b"
    with written_output(Path(name)) as file:
        file.write(memoryview(b"\x93NUMPY\x00"))
    assert got() == r"\x93NUMPY\x00"


def test_a_terminal_shows_a_character_that_is_incomplete_at_the_end(terminal):
    name, got = terminal
    with written_output(Path(name)) as file:
        file.write(b"ab\xe2\x80")
    assert got() == r"ab\xe2\x80"


def test_a_pipe_gets_every_byte(tmp_path):
    reader, writer = os.pipe()
    with written_output(Path(f"/dev/fd/{writer}")) as file:
        file.write(NAME.encode() + b"\x00\xff")
    assert os.read(reader, 100) == NAME.encode() + b"\x00\xff"
    for descriptor in (reader, writer):
        os.close(descriptor)

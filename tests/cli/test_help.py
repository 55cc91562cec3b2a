"""The help: flags by their names, without a type."""

import pytest

from support.commandline import VERBS, ok


@pytest.mark.parametrize(
    "words", [(), *((verb,) for verb in VERBS), ("bench",), ("bench", "steps"), ("bench", "peers")], ids=" ".join
)
def test_flags_have_no_type(words):
    text = ok(*words, "--help")
    assert "--help" in text and "bool" not in text.lower()


def test_a_flag_that_can_be_turned_off_shows_both_names():
    (line,) = [line for line in ok("bench", "peers", "--help").splitlines() if "--images" in line and "--no-images" in line]
    assert line.index("--images") < line.index("--no-images")

"""What the documents name exists: files, headings, modules, and the command's verbs and options."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from selfnorm.cli import app

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "selfnorm"
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md")
    for path in sorted(ROOT.glob(pattern))
}
# The changelog names what was, and RESULTS.md is generated, with commands as they were typed.
CURRENT = [name for name in DOCUMENTS if name not in ("CHANGELOG.md", "RESULTS.md")]
FILES = {path.name for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
PATH = re.compile(r"(?:[\w.*-]+/)+(?:[\w.*-]+\.(?:py|md|json|png))?|\w+\.py")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def spans(text):
    """Inline code."""
    return re.findall(r"`([^`\n]+)`", text)


def commands(text):
    """Calls of `selfnorm`, inline or on lines of their own, as words."""
    lines = re.findall(r"^    (selfnorm .*)$", text, re.MULTILINE) + spans(text)
    calls = [shlex.split(line.partition(" #")[0]) for line in lines if line.startswith("selfnorm ")]
    return [words[1:] for words in calls if re.fullmatch(r"[a-z]+", words[1])]


def anchors(text):
    """The headings of a document, as links spell them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options_of(verb):
    return {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)}


def verbs(group):
    for verb in group.commands.values():
        yield verb
        if isinstance(verb, TyperGroup):
            yield from verbs(verb)


def missing_links(name):
    for target in LINK.findall(DOCUMENTS[name]):
        path, _, heading = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if target.startswith("https://"):
            continue
        if not file.exists() or (heading and heading not in anchors(file.read_text(encoding="utf-8"))):
            yield target


def missing_paths(name):
    for span in spans(DOCUMENTS[name]):
        if not PATH.fullmatch(span) or span.startswith("runs/") or "NAME" in span:
            continue
        places = (ROOT, PACKAGE, (ROOT / name).parent)
        if not (any(any(place.glob(span.rstrip("/"))) for place in places) if "/" in span else span in FILES):
            yield span


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    assert list(missing_links(name)) == []


@pytest.mark.parametrize("name", CURRENT)
def test_paths_exist(name):
    assert list(missing_paths(name)) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_exist(name):
    for words in commands(DOCUMENTS[name]):
        verb = typer.main.get_command(app)
        while isinstance(verb, TyperGroup) and words and not words[0].startswith("-"):
            assert words[0] in verb.commands, f"selfnorm has no verb {words[0]}"
            verb, words = verb.commands[words[0]], words[1:]
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given - options_of(verb) - {"--help", "-h"} == set(), f"selfnorm {verb.name} has no such option"


@pytest.mark.parametrize("name", [name for name in CURRENT if not name.startswith("benchmarks")])
def test_options_exist(name):
    named = {span.split()[0].partition("=")[0] for span in spans(DOCUMENTS[name]) if span.startswith("--")}
    assert named - set().union(*map(options_of, verbs(typer.main.get_command(app)))) == set()


def test_commands_are_found():
    assert ["bench", "scaling"] in commands(DOCUMENTS["docs/speed.md"])
    assert ["train", "mnist-fc-snf", "--data", "~/data"] in commands(DOCUMENTS["README.md"])


def test_map_of_the_source_tree():
    text = DOCUMENTS["README.md"].partition("\n    src/selfnorm/\n")[2].partition("\n\n")[0]
    inside = set(re.findall(r"^      (\S+)", text, re.MULTILINE))
    modules = {f"{path.name}/" if path.is_dir() else path.name for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert inside == modules - {"py.typed"}
    outside = re.findall(r"^    (\S+/) ", text, re.MULTILINE)
    assert len(outside) == 4 and all((ROOT / folder).is_dir() for folder in outside)


def test_modules_in_the_changelog():
    rows = re.findall(r"^\| `selfnorm\..*\| (.*) \|$", DOCUMENTS["CHANGELOG.md"], re.MULTILINE)
    named = [module for cell in rows for module in re.findall(r"`(selfnorm\.[\w.]+?)(?:\.\*)?`", cell)]
    assert len(named) > 20
    paths = {module: PACKAGE.parent / module.replace(".", "/") for module in named}
    assert [module for module, path in paths.items() if not path.is_dir() and not path.with_suffix(".py").exists()] == []


def test_documents_named_in_the_code():
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    named = {
        (path.name, document) for path, text in sources.items() for document in re.findall(r"(?:docs|benchmarks)/\w+\.md", text)
    }
    assert {(file, document) for file, document in named if not (ROOT / document).exists()} == set()


def test_options_with_files_are_written_with_an_equals_sign():
    """pytest takes an existing file after a blank for a test, and then does not load the conftest that knows the option."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"--counts.", makefile) == ["--counts="] * 2

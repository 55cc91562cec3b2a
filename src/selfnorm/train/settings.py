"""Reads recipes from settings, mappings and TOML, strictly, and writes them as TOML."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from selfnorm.bijection import located
from selfnorm.data import NAMES
from selfnorm.data.layout import EVERYTHING
from selfnorm.runtime.checks import shortened
from selfnorm.train.recipe import FLAT_KEYS, REMOVED, TYPES, Recipe, path_of

TEXTS = tuple[str, ...]
LARGEST = 4_000_000  # characters of a recipe, most of them in the names of columns
LONGEST = 10_000  # characters without texts; tomllib takes time and memory quadratic in the length of a key such as a.a.a.a
# TOML's comments and texts, with the commas and spaces behind them. One that does not end goes on to where tomllib stops.
_TEXT = re.compile(
    r"""(?: \#[^\n]* | ["]{3}(?:\\.|[^\\])*?(?:["]{3,5}|\Z) | '{3}.*?(?:'{3,5}|\Z) | "(?:\\.|[^"\\\n])*"? | '[^'\n]*'? )[\s,]*""",
    re.VERBOSE | re.DOTALL,
)
# What files mean that lack a setting because they are older, if that is not its default: earlier versions trained with the
# paper's objective.
OLDER_DEFAULTS = {"objective.inverse_likelihood": True}
# The same for the user's own data, of which earlier versions used every column and every row.
OLDER_DATA_DEFAULTS = {"data.keep": (EVERYTHING,), "data.set_outliers_aside": False}


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """Returns the recipe changed by settings such as "epochs=3" or "optimiser.epochs=3".

    Raises ValueError for unknown keys, which lists the known ones, and for values of the wrong type or out of range.
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(f"--set: expected key=value, got {setting!r}")
        with located("--set"):
            path = path_of(key)
        changes[path] = _parsed(key, TYPES[path], text.strip())
    return recipe.changed(**changes)


def from_mapping(values: Mapping[str, Any], where: str) -> Recipe:
    """Returns the recipe that a file holds: groups of settings, or flat keys as in files of earlier versions.

    Raises ValueError that begins with `where` for unknown keys and for values of the wrong type or out of range.
    """
    read: dict[str, Any] = {}
    unknown = []
    for key, value in _ungrouped(values):
        path = FLAT_KEYS.get(key, key)
        if (name := path.removeprefix("objective.")) in REMOVED:
            if (off := REMOVED[name]) is not None and value not in off:
                warnings.warn(
                    f"{where}: {name} = {_shown(value)} is no longer supported and is ignored, also if the run is resumed",
                    stacklevel=2,
                )
            continue
        if path not in TYPES:
            unknown.append(key)
            continue
        if path in read:
            raise ValueError(f"{where}: expected {path} once, got it twice, the second time as {key}")
        if not has_type(value, TYPES[path]):
            raise ValueError(f"{where}: expected {path} to be {_spelled(TYPES[path])}, got {_shown(value)}")
        # TOML and JSON write 1 where a float is meant, and have lists only; a recipe read back must equal the one written.
        read[path] = float(value) if type(value) is int and float in _choices(TYPES[path]) else value
        read[path] = tuple(value) if TYPES[path] == TEXTS else read[path]
    if unknown or "name" not in read:
        wrong = f"unknown {', '.join(sorted(unknown))}" if unknown else "no name"
        raise ValueError(f"{where}: expected a recipe with the settings {', '.join(TYPES)}, got {wrong}")
    older = OLDER_DEFAULTS if read.get("data.source", NAMES[0]) in NAMES else OLDER_DEFAULTS | OLDER_DATA_DEFAULTS
    with located(where):
        return Recipe(read.pop("name")).changed(**(older | read))


def to_toml(recipe: Recipe) -> str:
    """Returns the recipe as TOML, with a table for each group; a setting that is None becomes a comment, as TOML has no null."""
    lines: list[str] = []
    table = ""
    for path, value in recipe.by_path().items():
        group, _, key = path.rpartition(".")
        if group != table:
            lines += ["", f"[{group}]"]
            table = group
        lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def checked_toml(recipe: Recipe, where: str) -> str:
    """Returns the recipe as TOML; raises ValueError unless it reads back equal, since a run could not be resumed without it."""
    text = to_toml(recipe)
    if from_toml(text.encode(errors="replace").decode(), where) != recipe:
        raise ValueError(f"{where}: expected settings that read back as they were written, got others; choose simpler names")
    return text


def from_toml(text: str, where: str) -> Recipe:
    """Returns the recipe that TOML text holds; see `from_mapping`."""
    for found, limit, what in ((text, LARGEST, ""), (_TEXT.sub("", text), LONGEST, " outside of texts")):
        if len(found) > limit:
            raise ValueError(f"{where}: expected a recipe, at most {limit:,} characters{what}, got {len(found):,}")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: no TOML, or a number with thousands of digits
        raise ValueError(f"{where}: expected TOML, got a file that does not parse: {error}") from None
    return from_mapping(values, where)


def _ungrouped(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Pairs of path and value for the settings in groups, of key and value for all others."""
    groups = {field.name for field in fields(Recipe)} - {"name", "paper"}
    for key, value in values.items():
        if key in groups and isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value


def _toml_value(value: str | bool | float | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    # A JSON string is a TOML string (except for DEL), as are JSON's true and false; numbers keep Python's exact form.
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _choices(kind: Any) -> tuple[Any, ...]:
    # A union with a Literal is a typing.Union, any other a UnionType.
    parts = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    return tuple(get_args(part)[0] if get_origin(part) is Annotated else part for part in parts)


def _shown(value: Any) -> str:
    """Returns the value as an error message shows it."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or a number with thousands of digits
        return f"a {type(value).__name__} that is too large to show"
    return shortened(text)


def has_type(value: Any, kind: Any) -> bool:
    """Returns whether a value is of a type, or of one of its choices if it is a union; a float may be written as an int.

    An int that no float can hold is of no type.
    """
    if type(value) is int and abs(value) > sys.float_info.max:
        return False
    for choice in _choices(kind):
        if choice in (TEXTS, list[str]):
            if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
                return True
        elif get_origin(choice) is Literal:
            if value in get_args(choice):
                return True
        elif choice is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif isinstance(value, choice) and not (choice is int and isinstance(value, bool)):
            return True
    return False


def _parsed(key: str, kind: Any, text: str) -> Any:
    for choice in _choices(kind):
        if choice is NoneType and text.lower() == "none":
            return None
        if choice == TEXTS and text.startswith("["):
            with suppress(tomllib.TOMLDecodeError):
                listed = tomllib.loads(f"listed = {text}")["listed"]
                if has_type(listed, TEXTS):
                    return tuple(listed)
        elif choice == TEXTS:
            return (text,) if text else ()
        if choice is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if choice is str or (get_origin(choice) is Literal and text in get_args(choice)):
            return text
        if choice in (int, float):
            try:
                return choice(text)
            except ValueError:
                continue
    raise ValueError(f"--set {key}: expected {_spelled(kind)}, got {text!r}")


def _spelled(kind: Any) -> str:
    words: dict[Any, str] = {
        TEXTS: 'a list of texts, as ["a", "b"]',
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        NoneType: "none",
    }
    return " or ".join(
        "one of " + ", ".join(get_args(choice)) if get_origin(choice) is Literal else words[choice] for choice in _choices(kind)
    )

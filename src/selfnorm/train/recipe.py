"""`Recipe`: all that decides the outcome of a run, and its strict reading from settings and files."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from selfnorm.bijection import located
from selfnorm.runtime.precision import Precision


@dataclass(frozen=True)
class Recipe:
    """All that decides the outcome of a run. `selfnorm recipes NAME` shows one, `--set key=value` changes it."""

    name: str
    paper: str = ""  # what of the paper this reproduces
    # data
    data: str = "digits"  # a built-in data set, or the path of a file or image folder
    data_dir: str | None = None  # where its files are; else $SELFNORM_DATA, else downloaded
    levels: int | None = None  # grey levels of your own integer images, if other than 256
    flip: bool = False  # mirror training images at random
    jitter: int = 0  # shift training images by up to so many pixels, reflecting the edge
    # model
    model: Literal["fc", "conv", "glow"] = "fc"
    kind: str = "selfnorm"  # of the linear, convolutional or mixing layers
    layers: int = 2  # fc: linear layers
    activation: Literal["leaky", "spline"] = "leaky"  # fc: between them
    alpha: float = 0.3  # fc: of the leaky activation
    bins: int = 5  # fc: of the spline activation
    rotate: bool = False  # fc: start from random rotations instead of near the identity
    blocks: int = 3  # conv, glow
    layers_per_block: int = 3  # conv
    steps: int = 16  # glow: steps of flow in a block
    hidden: int = 512  # glow: width of the coupling networks
    kernel_size: int = 1  # conv: of the layers; glow: of the mixing convolution
    inverse_kernel_size: int | None = None  # conv: of the learned inverse, if other than kernel_size
    standardize: bool = False  # fixed standardisation of each entry in front (images: behind the logit)
    # objective
    penalty: Literal["fixed", "geco", "mdmm"] = "fixed"
    weight: float = 1.0  # λ of the summed squared error; of geco and mdmm the first λ, of the error per dimension
    tolerance: float = 1e-4  # geco, mdmm: the error per dimension that is good enough
    weight_rate: float | None = None  # geco, mdmm: how fast λ moves, if other than their default
    damping: float | None = None  # mdmm: of the square, likewise
    probes: int = 0  # white-noise vectors to reconstruct beside the data, each layer, each step
    symmetric: bool = False  # reconstruct z from Rz beside x from RWx
    polish: Literal["newton-schulz", "low-rank", "least-squares", "tap-mean"] | None = None  # of R, by linear algebra
    polish_every: int = 100  # steps
    debias: int = 0  # white-noise vectors that estimate what Rᵀ lacks of the exact gradient, each layer, each step
    debias_keep: float = 0.5  # the probability of one more term in that estimate
    # optimisation: Adam
    epochs: int = 1000
    batch_size: int = 100
    learning_rate: float = 1e-3
    warmup_epochs: float = 10.0  # linear from 0, batch by batch
    decay: float = 0.0  # the last part of training over which the learning rate falls linearly to 0
    clip: float | None = None  # of the gradient's norm
    graphs: bool = True  # on a GPU, take steps as CUDA graphs wherever nothing in them needs the host
    precision: Precision = "tf32"  # of products in training, on a GPU; bf16 is for coupling networks. Likelihoods are float32
    init_examples: int | None = None  # how many examples data-dependent layers start from; else one batch
    seed: int = 0
    on_divergence: Literal["stop", "rollback"] = "stop"  # or go back to the best, with ten times the weight, up to 3 times
    threads: int | None = None  # CPU threads; small models are faster with one
    # evaluation, exact
    validate_every: int = 10  # epochs
    patience: int | None = None  # stop after so many validations without a new best
    eval_batch_size: int = 500
    test_samples: int = 5  # dequantisation samples for the test likelihood

    def __post_init__(self) -> None:
        for name, allowed in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not (allowed[0] <= value <= allowed[1]):
                raise ValueError(f"recipe {self.name}: expected {name} {_spanned(*allowed)}, got {value}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"recipe {self.name}: expected a finite {name}, got {value}")


_TINY, _BELOW_ONE = math.ulp(0.0), math.nextafter(1.0, 0.0)  # for ranges without their ends
_LARGE = 65_536  # of a size or a number of layers; a damaged recipe may ask for more than memory or patience hold
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("jitter", "weight", "tolerance", "damping", "probes", "debias", "warmup_epochs"), (0, math.inf)),
    "seed": (0, 2**63 - 1),
    **dict.fromkeys(("layers", "bins", "blocks", "layers_per_block", "steps", "hidden"), (1, _LARGE)),
    **dict.fromkeys(("kernel_size", "inverse_kernel_size"), (1, _LARGE)),
    **dict.fromkeys(("epochs", "batch_size", "validate_every", "patience", "polish_every"), (1, math.inf)),
    "threads": (1, 1024),
    **dict.fromkeys(("eval_batch_size", "test_samples"), (1, math.inf)),
    **dict.fromkeys(("clip", "learning_rate", "weight_rate"), (_TINY, math.inf)),
    "init_examples": (2, math.inf),
    "levels": (2, 256),
    "decay": (0, 1),
    "debias_keep": (_TINY, _BELOW_ONE),
}


_TYPES: dict[str, Any] = get_type_hints(Recipe)


def _spanned(low: float, high: float) -> str:
    if high == math.inf:
        return "above 0" if low == _TINY else f"at least {low}"
    return "between 0 and 1, neither included" if (low, high) == (_TINY, _BELOW_ONE) else f"in [{low}, {high}]"


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """The recipe with `key=value` settings: unknown keys and values of the wrong type are refused."""
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(f"--set: expected key=value, got {setting!r}")
        if key == "name" or key not in _TYPES:
            close = difflib.get_close_matches(key, _TYPES, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"--set: expected one of {', '.join(_keys())}, got {key!r}{hint}")
        changes[key] = _parsed(key, text.strip())
    return replace(recipe, **changes)


def from_mapping(values: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from a file's keys and values, as strictly as `override`."""
    unknown = sorted(set(values) - set(_TYPES))
    if unknown or "name" not in values:
        wrong = f"unknown {', '.join(unknown)}" if unknown else "no name"
        raise ValueError(f"{where}: expected a recipe with the keys name, {', '.join(_keys())}, got {wrong}")
    for key, value in values.items():
        if not _fits(value, _TYPES[key]):
            raise ValueError(f"{where}: expected {key} to be {_spelled(_TYPES[key])}, got {value!r}")
    # TOML and JSON write 1 where a float is meant; a recipe read back must equal the one written.
    read: dict[str, Any] = {
        key: float(value) if type(value) is int and float in _choices(_TYPES[key]) else value for key, value in values.items()
    }
    with located(where):
        return Recipe(**read)


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML, one line a setting; what is None is a comment, as TOML has no word for it."""
    lines = []
    for key, value in asdict(recipe).items():
        if value is None:
            lines.append(f"# {key} is not set")
        else:
            # A JSON string is a TOML string (but for DEL), and so are JSON's true and false; numbers keep Python's exact form.
            plain = isinstance(value, str | bool)
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if plain else repr(value)
            lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"


def from_toml(text: str, where: str) -> Recipe:
    try:
        return from_mapping(tomllib.loads(text), where)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: expected TOML, got a file that does not parse: {error}") from None


def _keys() -> list[str]:
    return [field.name for field in fields(Recipe) if field.name != "name"]


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)  # a Literal makes the older kind of union


def _fits(value: Any, kind: Any) -> bool:
    for choice in _choices(kind):
        if get_origin(choice) is Literal:
            if value in get_args(choice):
                return True
        elif choice is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif isinstance(value, choice) and not (choice is int and isinstance(value, bool)):
            return True
    return False


def _parsed(key: str, text: str) -> Any:
    for choice in _choices(_TYPES[key]):
        if choice is NoneType and text.lower() == "none":
            return None
        if choice is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if choice is str or (get_origin(choice) is Literal and text in get_args(choice)):
            return text
        if choice in (int, float):
            try:
                return choice(text)
            except ValueError:
                continue
    raise ValueError(f"--set {key}: expected {_spelled(_TYPES[key])}, got {text!r}")


def _spelled(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "none"}
    return " or ".join(
        "one of " + ", ".join(get_args(choice)) if get_origin(choice) is Literal else words[choice] for choice in _choices(kind)
    )

"""`Recipe`: everything that decides the outcome of a run, in groups of settings.

Each setting has a path, such as "objective.reconstruction_weight". The last part alone is accepted as well, and so are the flat
keys in `RENAMED`. `train/settings.py` reads and writes recipes, `train/experiments.py` holds the table of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, is_dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

from selfnorm.bijection import located
from selfnorm.models import CONV, LINEAR, MIX
from selfnorm.objective import MAX_PROBES
from selfnorm.runtime.checks import did_you_mean
from selfnorm.runtime.precision import Precision

MODEL_KINDS: dict[str, Collection[str]] = {"fc": LINEAR, "conv": CONV, "glow": MIX}


@dataclass(frozen=True)
class Range:
    """The values that a number may take: from low to high, with both ends unless `exclusive`."""

    low: float
    high: float = math.inf
    exclusive: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low < value < self.high if self.exclusive else self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low}" if self.exclusive else f"at least {self.low}"
        return f"between {self.low} and {self.high}, neither included" if self.exclusive else f"in [{self.low}, {self.high}]"


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
ModelSize = Annotated[int, Range(1, 65_536)]  # a damaged file may ask for more than fits in memory
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, exclusive=True)]


@dataclass(frozen=True)
class DataSettings:
    """The data to train on."""

    source: str = "digits"  # a built-in data set, or the path of a file or of a folder of images
    folder: str | None = None  # where a built-in set's files are; by default $SELFNORM_DATA, otherwise they are downloaded
    levels: Annotated[int, Range(2, 256)] | None = None  # grey levels of your own integer images, 256 by default
    header: bool | None = None  # whether the first line of your own text file holds names; by default decided by what it holds
    drop: tuple[str, ...] = ()  # columns of your own table to leave out, by name, or number from 1 where there are no names
    keep: tuple[str, ...] = ()  # columns to keep that would be left out, such as an index, but no constants; "*" for all
    set_outliers_aside: bool = True  # leave out rows of your own data that lie far from all others; keep = ["*"] keeps them, too
    flip: bool = False  # mirror training images at random
    jitter: CountOrZero = 0  # shift training images by up to this many pixels, reflecting at the edge


@dataclass(frozen=True)
class ArchitectureSettings:
    """The flow to build."""

    model: Literal["fc", "conv", "glow"] = "fc"
    kind: str = "selfnorm"  # of the linear, convolutional or mixing layers; `MODEL_KINDS` lists what each model knows
    layers: ModelSize = 2  # fc: number of linear layers
    activation: Literal["leaky", "spline"] = "leaky"  # fc: between the linear layers
    alpha: float = 0.3  # fc: slope of the leaky activation
    bins: ModelSize = 5  # fc: of the spline activation
    rotate: bool = False  # fc: start from random rotations instead of near the identity
    blocks: ModelSize = 3  # conv, glow
    layers_per_block: ModelSize = 3  # conv
    steps_per_block: ModelSize = 16  # glow: steps of flow (ActNorm, mixing, coupling) in a block
    hidden: ModelSize = 512  # glow: width of the coupling networks
    kernel_size: ModelSize = 1  # conv: of the layers; glow: of the mixing convolution
    inverse_kernel_size: ModelSize | None = None  # conv: of the learned inverse, by default kernel_size
    standardize: bool = False  # put a fixed standardisation of each entry in front; for images after the logit


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss to minimise, and how learned inverses are kept close to the exact ones."""

    penalty: Literal["fixed", "geco", "mdmm"] = "fixed"
    # λ. fixed: the weight of the summed squared error; geco, mdmm: the initial weight of the squared error per dimension.
    reconstruction_weight: NonNegative = 1.0
    tolerance: NonNegative = 1e-4  # geco, mdmm: the error per dimension that is small enough
    multiplier_rate: Positive | None = None  # geco, mdmm: how fast λ moves; by default the penalty's own rate
    damping: NonNegative | None = None  # mdmm: of the quadratic term; by default the penalty's own
    inverse_likelihood: bool = False  # as in the paper: the learned inverse takes half of the likelihood's gradient
    probes: Annotated[int, Range(0, MAX_PROBES)] = (
        0  # white-noise vectors to reconstruct in addition to the data, per layer and step
    )


@dataclass(frozen=True)
class OptimiserSettings:
    """How Adam trains the flow."""

    epochs: Count = 1000
    batch_size: Count = 100
    learning_rate: Positive = 1e-3
    warmup_epochs: NonNegative = 10.0  # the learning rate grows linearly from 0, batch by batch
    decay: Annotated[float, Range(0, 1)] = 0.0  # the final fraction of training, over which the learning rate falls linearly to 0
    clip: Positive | None = None  # the largest norm of the gradient
    graphs: bool = True  # on a GPU, run steps as CUDA graphs wherever nothing in them needs the host
    precision: Precision = "tf32"  # of products in training; tf32 only acts on GPUs, bf16 only on coupling networks
    init_examples: Annotated[int, Range(2)] | None = None  # for data-dependent initialisation; by default one batch
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    on_divergence: Literal["stop", "rollback"] = "stop"  # rollback: return to the best weights with ten times λ, up to 3 times
    threads: Annotated[int, Range(1, 1024)] | None = None  # of the CPU; small models are faster with one


@dataclass(frozen=True)
class EvaluationSettings:
    """How exact likelihoods are computed, and when training stops early."""

    validate_every: Count = 10  # epochs
    patience: Count | None = None  # stop after this many validations without a new best
    batch_size: Count = 500
    test_samples: Count = 5  # dequantisation samples for the test likelihood


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome of a run. Raises ValueError if a number is out of range or the model has no such kind.

    `selfnorm recipes NAME` shows one, `--set key=value` changes it. `paper` says which result of the paper it reproduces.

    >>> Recipe("mine").changed(epochs=20, reconstruction_weight=3.0).objective.reconstruction_weight
    3.0
    """

    name: str
    paper: str = ""
    data: DataSettings = DataSettings()
    architecture: ArchitectureSettings = ArchitectureSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    def __post_init__(self) -> None:
        with located(f"recipe {self.name}"):
            for path, value in self.by_path().items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise ValueError(f"expected a finite {path}, got {value}")
                if value is not None and (allowed := RANGES.get(path)) and value not in allowed:
                    raise ValueError(f"expected {path} {allowed}, got {value}")
            model, kind = self.architecture.model, self.architecture.kind
            if model not in MODEL_KINDS:
                raise ValueError(f"expected architecture.model to be one of {', '.join(MODEL_KINDS)}, got {model!r}")
            if not isinstance(kind, str) or kind not in MODEL_KINDS[model]:
                known = ", ".join(MODEL_KINDS[model])
                raise ValueError(f"expected architecture.kind to be one of {known} for the model {model}, got {kind!r}")

    def by_path(self) -> dict[str, Any]:
        """Returns every setting by its path, such as "optimiser.epochs"; name and paper by these names."""
        return {path: self._value(path) for path in TYPES}

    def flat(self) -> dict[str, Any]:
        """Returns every setting by its flat key, in one mapping without groups."""
        return {key: self._value(path) for key, path in FLAT_KEYS.items()}

    def changed(self, *, name: str | None = None, **settings: Any) -> Recipe:
        """Returns a copy with other values for some settings, each given by its flat key, its own name or its path.

        Paths are passed as in `recipe.changed(**{"optimiser.epochs": 3})`. Raises ValueError for a key that does not exist.
        """
        groups: dict[str, dict[str, Any]] = {}
        with located(f"recipe {self.name}"):
            for key, value in settings.items():
                group, _, setting = path_of(key).rpartition(".")
                groups.setdefault(group, {})[setting] = value
        own = {"name": self.name if name is None else name, **groups.pop("", {})}
        return replace(self, **own, **{group: replace(getattr(self, group), **values) for group, values in groups.items()})

    def differences(self, other: Recipe) -> list[str]:
        """Returns the paths of the settings in which two recipes differ."""
        theirs = other.by_path()
        return [path for path, value in self.by_path().items() if value != theirs[path]]

    def without_effect(self) -> list[str]:
        """Returns the settings that only act on learned inverses, if they are set but no layer learns its inverse."""
        settings = ("probes", "inverse_likelihood")
        learned = self.architecture.kind == "selfnorm"
        return [] if learned else [name for name in settings if getattr(self.objective, name)]

    def _value(self, path: str) -> Any:
        group, _, setting = path.rpartition(".")
        return getattr(getattr(self, group) if group else self, setting)


def path_of(key: str) -> str:
    """Returns the path of a setting, given its flat key, name or path. Raises ValueError, listing all paths, for other keys."""
    if key not in _PATHS:
        name = key.rpartition(".")[2]  # may be right without its group, as in objective.weight
        hint = f"; did you mean {_PATHS[name]}?" if name in _PATHS else did_you_mean(key, _PATHS)
        if name in REMOVED:
            hint = f"; {name} was removed: learned inverses stay accurate without it (inverse_likelihood=false)"
        raise ValueError(f"expected one of {', '.join(SETTINGS)}, got {key!r}{hint}")
    return _PATHS[key]


def _annotated_types() -> dict[str, Any]:
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(Recipe, include_extras=True).items():
        inner = get_type_hints(kind, include_extras=True) if is_dataclass(kind) else {}
        types |= {f"{name}.{setting}": each for setting, each in inner.items()} or {name: kind}
    return types


def _range_of(kind: Any) -> Range | None:
    parts = (kind, *get_args(kind))  # the latter for a range | None
    return next((note for part in parts for note in getattr(part, "__metadata__", ()) if isinstance(note, Range)), None)


TYPES = _annotated_types()  # by path; the recipe's name has one, too
SETTINGS = [path for path in TYPES if path != "name"]
RANGES = {path: allowed for path, kind in TYPES.items() if (allowed := _range_of(kind))}
# The settings whose flat key is not their name.
RENAMED = {
    "data.source": "data",
    "data.folder": "data_dir",
    "architecture.steps_per_block": "steps",
    "objective.reconstruction_weight": "weight",
    "objective.multiplier_rate": "weight_rate",
    "evaluation.batch_size": "eval_batch_size",
}
# Settings of earlier versions that are gone, with the values that switched them off; None where any value did.
REMOVED = {"symmetric": (False,), "polish": (None,), "polish_every": None, "debias": (0,), "debias_keep": None}
FLAT_KEYS = {RENAMED.get(path, path.rpartition(".")[2]): path for path in TYPES}
# Every accepted key. Where two groups use the same name, as batch_size, the flat key decides which one it means.
_PATHS = {path.rpartition(".")[2]: path for path in SETTINGS} | FLAT_KEYS | {path: path for path in SETTINGS}
del _PATHS["name"]

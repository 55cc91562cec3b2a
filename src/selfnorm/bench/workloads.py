"""The models that `selfnorm bench` can time: every recipe, on random data of the right shape, and a few others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from selfnorm.runtime.checks import did_you_mean
from selfnorm.train.experiments import RECIPES
from selfnorm.train.recipe import Recipe

# The shape of one example, and the number of grey levels.
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "digits": ((1, 8, 8), 17),
    "mnist": ((1, 28, 28), 256),
    "cifar10": ((3, 32, 32), 256),
    "imagenet32": ((3, 32, 32), 256),
    **dict.fromkeys(("moons", "rings", "checkerboard", "spirals"), ((2,), None)),
}
# Milliseconds per step in the paper: MNIST on a 1080 Ti, CIFAR-10 on a Titan X. Keller et al. (2021).
PAPER_MS = {
    "mnist-fc-snf": 18.7,
    "mnist-fc-exact": 44.9,
    "mnist-fc-relative": 7.0,
    "mnist-conv-snf": 212.5,
    "mnist-conv-exact": 372.2,
    "mnist-conv-emerging": 305.0,
    "mnist-conv-exp": 304.4,
    "mnist-glow-snf": 476.4,
    "mnist-glow-exact": 583.4,
    "cifar10-glow-snf": 1761.2,
    "cifar10-glow-exact": 1841.3,
}


@dataclass(frozen=True)
class Model:
    """A model to time.

    bare:  whether to time only the matrix products of the model, and Adam, as a lower bound.
    """

    name: str
    recipe: Recipe
    shape: tuple[int, ...]
    levels: int | None
    bare: bool = False

    @property
    def family(self) -> tuple[str, tuple[int, ...], int | None]:
        """Identifies a family: models that differ only in their layers. They take turns, with the same number of threads."""
        return self.recipe.architecture.model, self.shape, self.recipe.optimiser.threads

    @property
    def has_coupling_networks(self) -> bool:
        """Whether the model has coupling networks, which run in bfloat16 on request."""
        return self.recipe.architecture.model == "glow"

    @property
    def dimensions(self) -> int:
        """The number of values in one example."""
        return math.prod(self.shape)


def known_models() -> dict[str, Model]:
    """Returns the models of all recipes whose data have a known shape, and a few more, by name."""
    models = {
        name: Model(name, recipe, *SHAPES[recipe.data.source]) for name, recipe in RECIPES.items() if recipe.data.source in SHAPES
    }
    for name, side in (("fc3072", None), ("fc4096", 64)):
        for kind in ("snf", "exact"):
            shape = (3, 32, 32) if side is None else (1, side, side)
            models[f"{name}-{kind}"] = Model(f"{name}-{kind}", RECIPES[f"mnist-fc-{kind}"].changed(threads=None), shape, 256)
    for name in ("mnist-fc", "fc3072"):
        models[f"{name}-bare"] = replace(models[f"{name}-snf"], name=f"{name}-bare", bare=True)
    return models


MODELS = known_models()
EXTRA_NAMES = ", ".join(name for name in MODELS if name not in RECIPES)
_FC = tuple(f"mnist-fc-{kind}" for kind in ("snf", "exact", "tracked", "sketch", "relative", "lu", "bare"))
_CONV = tuple(f"mnist-conv-{kind}" for kind in ("snf", "exact", "tracked", "emerging", "exp"))
_GLOW = ("mnist-glow-snf", "mnist-glow-exact", "cifar10-glow-snf", "cifar10-glow-exact")
_DIGITS = ("digits-fc-snf", "digits-fc-exact", "digits-conv-snf", "digits-conv-exact")


def default_models(device: torch.device) -> list[Model]:
    """Returns the models of the paper; on a CPU without Glow, whose steps take seconds, but with models of digits."""
    names = (*_DIGITS, *_FC, *_CONV) if device.type == "cpu" else (*_FC, *_CONV, *_GLOW)
    return [MODELS[name] for name in names]


def choose(patterns: Iterable[str]) -> list[Model]:
    """Returns the models that match names or patterns such as "mnist-fc-*", in the given order."""
    chosen: dict[str, Model] = {}
    for pattern in (part.strip() for words in patterns for part in words.split(",")):
        matches = [name for name in MODELS if fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(
                f"--models: expected a recipe, as `selfnorm recipes` lists them, one of {EXTRA_NAMES}, or a pattern such as "
                f"'mnist-fc-*', got {pattern!r}{did_you_mean(pattern, MODELS)}"
            )
        chosen |= {name: MODELS[name] for name in matches}
    return list(chosen.values())


def families(models: Sequence[Model]) -> list[list[Model]]:
    """Returns the models grouped by family, in the given order."""
    groups: dict[tuple[str, tuple[int, ...], int | None], list[Model]] = {}
    for model in models:
        groups.setdefault(model.family, []).append(model)
    return list(groups.values())

"""The table of all experiments, each only its differences from another, and what a recipe builds."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from selfnorm.flow import Flow
from selfnorm.models import CONV, LINEAR, conv_flow, fc_flow, glow
from selfnorm.objective import GECO, MDMM, Fixed, Loss, Penalty
from selfnorm.train.recipe import Recipe

# The paper is Keller et al. (2021); its appendix A.3 has the settings, tables 1, 2, 4 and 5 the likelihoods.
_DIGITS_FC = Recipe(
    "digits-fc-snf",
    data="digits",
    standardize=True,
    weight=5.0,
    decay=0.25,
    init_examples=1297,
    threads=1,
    validate_every=20,
    test_samples=20,
)
_DIGITS_CONV = replace(
    _DIGITS_FC,
    name="digits-conv-snf",
    model="conv",
    blocks=2,
    layers_per_block=2,
    kernel_size=3,
    weight=1.0,
    epochs=100,
    validate_every=10,
)
_MNIST_FC = Recipe("mnist-fc-snf", "table 1: 947.1 ± 0.2 nats", data="mnist", epochs=6000, learning_rate=1e-4)
_MNIST_CONV = Recipe("mnist-conv-snf", "table 1: 638.6 ± 0.9 nats", data="mnist", model="conv", kernel_size=3, validate_every=5)
# The authors jitter MNIST for the self-normalizing Glow, even in the test; here both Glows get it, in training alone.
_MNIST_GLOW = Recipe(
    "mnist-glow-snf",
    "table 1: 575.4 ± 1.4 nats",
    data="mnist",
    jitter=1,
    model="glow",
    blocks=2,
    weight=100.0,
    epochs=250,
    validate_every=1,
)
_MNIST_GECO = replace(
    _MNIST_GLOW,
    name="mnist-glow5x5-geco",
    paper="table 5: 669.9 ± 2.8 nats",
    steps=4,
    hidden=16,
    kernel_size=5,
    penalty="geco",
    weight=1e4,
)
_CIFAR_GLOW = Recipe(
    "cifar10-glow-snf",
    "table 2: 3.37 bits/dim",
    data="cifar10",
    flip=True,
    jitter=1,
    model="glow",
    steps=32,
    weight=1000.0,
    clip=1e4,
    validate_every=5,
)
_IMAGENET_GLOW = Recipe(
    "imagenet32-glow-snf",
    "table 2: 4.14 bits/dim",
    data="imagenet32",
    model="glow",
    steps=48,
    weight=1000.0,
    clip=1e4,
    epochs=15,
    batch_size=64,
    warmup_epochs=0.0,
    validate_every=1,
)
_TOY = Recipe(
    "moons-fc-snf",
    data="moons",
    layers=8,
    activation="spline",
    bins=16,
    rotate=True,
    standardize=True,
    weight=10.0,
    learning_rate=5e-3,
    epochs=30,
    warmup_epochs=1.0,
    decay=0.5,
    init_examples=10_000,
    threads=1,
    validate_every=2,
    eval_batch_size=2000,
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _DIGITS_FC,
        *(replace(_DIGITS_FC, name=f"digits-fc-{kind}", kind=kind) for kind in LINEAR if kind != "selfnorm"),
        _DIGITS_CONV,
        *(replace(_DIGITS_CONV, name=f"digits-conv-{kind}", kind=kind) for kind in CONV if kind != "selfnorm"),
        _MNIST_FC,
        replace(_MNIST_FC, name="mnist-fc-exact", paper="table 1: 947.6 ± 0.2 nats", kind="exact"),
        replace(_MNIST_FC, name="mnist-fc-tracked", paper="", kind="tracked"),
        replace(_MNIST_FC, name="mnist-fc-sketch", paper="", kind="sketch"),
        replace(_MNIST_FC, name="mnist-fc-relative", paper="table 1: 1096.5 ± 0.5 nats", kind="relative"),
        replace(_MNIST_FC, name="mnist-fc-lu", paper="", kind="lu"),
        _MNIST_CONV,
        replace(_MNIST_CONV, name="mnist-conv-exact", paper="table 1: 637.4 ± 0.2 nats", kind="exact"),
        replace(_MNIST_CONV, name="mnist-conv-tracked", paper="", kind="tracked"),
        replace(_MNIST_CONV, name="mnist-conv-emerging", paper="table 1: 645.7 ± 3.6 nats", kind="emerging"),
        replace(_MNIST_CONV, name="mnist-conv-exp", paper="table 1: 638.1 ± 1.0 nats", kind="exp"),
        replace(
            _MNIST_CONV, name="mnist-conv-snf-asym", paper="section A.4: asymmetric kernels, no figure", inverse_kernel_size=7
        ),
        _MNIST_GLOW,
        replace(_MNIST_GLOW, name="mnist-glow-exact", paper="table 1: 575.7 ± 0.8 nats", kind="exact"),
        _MNIST_GECO,
        replace(_MNIST_GECO, name="mnist-glow1x1-geco", paper="table 5: 678.3 ± 9.7 nats", kernel_size=1),
        replace(_MNIST_GECO, name="mnist-glow1x1-exact", paper="table 5: 678.3 ± 2.0 nats", kernel_size=1, kind="exact"),
        _CIFAR_GLOW,
        replace(_CIFAR_GLOW, name="cifar10-glow-exact", paper="table 2: 3.36 bits/dim", kind="exact", clip=None),
        _IMAGENET_GLOW,
        replace(_IMAGENET_GLOW, name="imagenet32-glow-exact", paper="table 2: 4.12 bits/dim", kind="exact"),
        _TOY,
        replace(_TOY, name="moons-fc-exact", kind="exact"),
        replace(_TOY, name="rings-fc-snf", data="rings"),
        replace(_TOY, name="checkerboard-fc-snf", data="checkerboard"),
        replace(_TOY, name="spirals-fc-snf", data="spirals"),
    )
}
DEFAULT = _DIGITS_FC.name
TWINS = ("selfnorm", "tracked", "sketch", "relative", "lu")  # kinds whose map an exact layer has, too


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or an error that lists all."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"recipes: expected one of {', '.join(RECIPES)}, got {name!r}{hint}")
    return RECIPES[name]


def recipe_for(data: str, shape: tuple[int, ...], examples: int, max_steps: int = 5000, batch_size: int = 100) -> Recipe:
    """A recipe for somebody's own data by its shape: a deep spline flow for tables, Glow for images that can be halved twice.

    examples: how many there are to train on. It stops early, and is quick enough for a CPU rather than the best there can be.
    """
    dimensions = math.prod(shape)
    steps = max(1, examples // max(1, batch_size))  # in an epoch
    common = Recipe(
        "fit",
        data=data,
        standardize=True,
        weight=10.0,
        epochs=max(1, max_steps // steps),
        batch_size=batch_size,
        warmup_epochs=max_steps / steps / 50,
        decay=0.5,
        init_examples=10_000,
        validate_every=max(1, max_steps // steps // 50),
        patience=10,
        on_divergence="rollback",
    )
    if len(shape) == 3 and dimensions > 256 and shape[1] % 4 == 0 and shape[2] % 4 == 0:
        return replace(common, model="glow", blocks=2, steps=8, hidden=64, weight=100.0, init_examples=100, standardize=False)
    # Rotations mix a few columns at once; among many, each of its own scale and shape, the identity was the better start.
    few = dimensions <= 4
    table = replace(common, layers=5, activation="spline", rotate=few, threads=1 if dimensions <= 256 else None)
    return replace(table, bins=16, learning_rate=5e-3, layers=8) if few else table


def build_flow(recipe: Recipe, shape: tuple[int, ...], levels: int | None) -> Flow:
    """The recipe's flow for examples of a shape, from its seed, in float32; torch's own state stays as it is."""
    with torch.random.fork_rng(devices=[]), _single_precision():
        torch.manual_seed(recipe.seed)
        if recipe.model == "fc":
            return fc_flow(
                shape,
                recipe.layers,
                recipe.kind,
                recipe.alpha,
                levels,
                activation=recipe.activation,
                bins=recipe.bins,
                rotate=recipe.rotate,
                standardize=recipe.standardize,
            )
        if recipe.model == "conv":
            return conv_flow(
                shape,
                recipe.blocks,
                recipe.layers_per_block,
                recipe.kernel_size,
                recipe.inverse_kernel_size,
                recipe.kind,
                levels,
                standardize=recipe.standardize,
            )
        return glow(
            shape,
            recipe.blocks,
            recipe.steps,
            recipe.hidden,
            recipe.kind,
            recipe.kernel_size,
            levels,
            standardize=recipe.standardize,
        )


def build_loss(recipe: Recipe, flow: Flow) -> Loss:
    """The recipe's objective for a flow."""
    penalty: Penalty
    if recipe.penalty == "geco":
        penalty = GECO(recipe.weight, recipe.tolerance, **_given(rate=recipe.weight_rate))
    elif recipe.penalty == "mdmm":
        penalty = MDMM(recipe.weight, recipe.tolerance, **_given(rate=recipe.weight_rate, damping=recipe.damping))
    else:
        penalty = Fixed(recipe.weight)
    with _single_precision():
        return Loss(
            flow,
            penalty,
            recipe.probes,
            symmetric=recipe.symmetric,
            polish=recipe.polish,
            polish_every=recipe.polish_every,
            debias=recipe.debias,
            debias_keep=recipe.debias_keep,
        )


def idle_settings(recipe: Recipe) -> list[str]:
    """The settings of a recipe that are there for learned inverses, where there are none."""
    settings = ("probes", "symmetric", "polish", "debias")
    return [] if recipe.kind == "selfnorm" else [name for name in settings if getattr(recipe, name)]


def _given(**options: float | None) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def _single_precision() -> Iterator[None]:
    # Whatever the caller's default is: a run must come out the same, and fit its float32 data.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

"""Builds the flow and the objective that a recipe describes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from selfnorm.flow import Flow
from selfnorm.models import conv_flow, fc_flow, glow
from selfnorm.objective import GECO, MDMM, Fixed, Loss, Penalty
from selfnorm.train.recipe import Recipe

_building = threading.Lock()


def _renew_lock() -> None:
    """Makes a new lock in a process that was forked, where nobody would ever release the old one."""
    global _building
    _building = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


def build_flow(recipe: Recipe, shape: tuple[int, ...], levels: int | None) -> Flow:
    """Returns the recipe's flow for examples of a shape, in float32, initialised from its seed. Keeps torch's random state."""
    chosen = recipe.architecture
    with _single_precision(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.optimiser.seed)
        if chosen.model == "fc":
            return fc_flow(
                shape,
                chosen.layers,
                chosen.kind,
                chosen.alpha,
                levels,
                activation=chosen.activation,
                bins=chosen.bins,
                rotate=chosen.rotate,
                standardize=chosen.standardize,
            )
        if chosen.model == "conv":
            return conv_flow(
                shape,
                chosen.blocks,
                chosen.layers_per_block,
                chosen.kernel_size,
                chosen.inverse_kernel_size,
                chosen.kind,
                levels,
                standardize=chosen.standardize,
            )
        return glow(
            shape,
            chosen.blocks,
            chosen.steps_per_block,
            chosen.hidden,
            chosen.kind,
            chosen.kernel_size,
            levels,
            standardize=chosen.standardize,
        )


def build_loss(recipe: Recipe, flow: Flow) -> Loss:
    """Returns the recipe's objective for a flow."""
    chosen = recipe.objective
    penalty: Penalty
    if chosen.penalty == "geco":
        penalty = GECO(chosen.reconstruction_weight, chosen.tolerance, **_given(rate=chosen.multiplier_rate))
    elif chosen.penalty == "mdmm":
        options = _given(rate=chosen.multiplier_rate, damping=chosen.damping)
        penalty = MDMM(chosen.reconstruction_weight, chosen.tolerance, **options)
    else:
        penalty = Fixed(chosen.reconstruction_weight)
    with _single_precision():
        return Loss(
            flow,
            penalty,
            chosen.probes if flow.reconstruction_names else 0,  # `Recipe.without_effect` tells of them
            inverse_likelihood=chosen.inverse_likelihood,
        )


def _given(**options: float | None) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def _single_precision() -> Iterator[None]:
    # Independent of the caller's default: a run must be repeatable, and its data is float32. One thread at a time, since the
    # default and the random state belong to the process.
    with _building:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

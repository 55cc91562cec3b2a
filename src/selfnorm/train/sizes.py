"""Estimates the size of a recipe's flow from below, without building it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from selfnorm.train.recipe import Recipe


def expect_no_larger(recipe: Recipe, shape: tuple[int, ...], tensors: int, numbers: int) -> None:
    """Raises ValueError if the recipe's flow for examples of a shape needs more than so many tensors, or numbers in them.

    What the flow needs is estimated from below, by its large weights alone: a flow of the stored size always passes, and one
    that is many times larger is refused before it takes memory. Cost: O(layers).
    """
    needed = 0
    for count, size in enumerate(_matrices(recipe, shape), 1):
        needed += size
        if count > tensors or needed > numbers:
            raise ValueError(
                f"the recipe needs more than the {tensors} tensors, or more than the {numbers} numbers, that are stored"
            )


def _matrices(recipe: Recipe, shape: tuple[int, ...]) -> Iterator[int]:
    """Yields the number of entries of the large weights: of linear layers, kernels, splines and networks."""
    chosen, size = recipe.architecture, math.prod(shape)
    if chosen.standardize:
        yield size
    if chosen.model == "fc":
        for index in range(chosen.layers):
            yield size**2
            if index and chosen.activation == "spline":
                yield size * chosen.bins
        return
    channels = shape[0]
    for block in range(chosen.blocks):
        if chosen.model == "conv":
            channels *= 4 if block else 1
            for index in range(chosen.layers_per_block):
                if block or index:
                    yield size  # a spline for each entry
                yield channels**2 * (chosen.kernel_size**2 + (chosen.inverse_kernel_size or 0) ** 2)
        else:
            channels *= 2 if block else 4  # a split leaves half of them to the next block
            for _ in range(chosen.steps_per_block):
                yield channels**2 * chosen.kernel_size**2
                yield chosen.hidden**2

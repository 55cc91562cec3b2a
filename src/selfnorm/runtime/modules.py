"""A fast walk over nested modules."""

from __future__ import annotations

from torch import nn


def all_modules(module: nn.Module) -> list[nn.Module]:
    """Returns a module and all its descendants; one that is used in two places is listed twice.

    `module.modules()` takes several times as long, which shows in the time of a single sample.
    """
    found = [module]
    for each in found:  # grows while it is read
        found += (child for child in each._modules.values() if child is not None)
    return found

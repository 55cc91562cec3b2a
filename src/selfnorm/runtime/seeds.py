"""Random generators on the host, derived from a generator on a device."""

from __future__ import annotations

import numpy as np
import torch


class HostGenerators:
    """CPU generators for numbers that the host must know, without waiting for the device's generator to draw them.

    The seed of each combines the given generator's seed, the step and the number of earlier uses in that step. So no stream
    repeats another, and a resumed run draws the same numbers.
    """

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begins a step."""
        self._step, self._uses = step, 0

    def derive(self, generator: torch.Generator | None) -> torch.Generator | None:
        """Returns a new CPU generator, or None, which means torch's default one, if no generator was given."""
        if generator is None:
            return None
        self._uses += 1
        words = (generator.initial_seed() % 2**64, self._step, self._uses)
        seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
        return torch.Generator().manual_seed(seed >> 1)

"""Batches made where the data lies: gathered, augmented and dequantised on the device, from counters instead of a running state.

Every draw comes from a generator seeded by (seed, purpose, epoch, step), so that the batch of any step can be made again at any
time: a resumed run sees what the run that was never stopped would have seen. On a GPU, where a kernel for one batch would hardly
have begun before it ends, the batches of many steps are made at once, and the block that they make takes the step's place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Steps whose batches are made at once on a GPU, and the most values that those may hold. What is drawn depends on both.
BLOCK, BLOCK_VALUES = 50, 2**24


def seed_of(*counters: int | str) -> int:
    """A seed that depends on the counters alone."""
    return int.from_bytes(hashlib.blake2b(repr(counters).encode(), digest_size=8).digest(), "little") >> 1


def generator_for(device: torch.device, *counters: int | str) -> torch.Generator:
    """A generator whose draws depend on the counters alone."""
    return torch.Generator(device).manual_seed(seed_of(*counters))


def dequantise(x: Tensor, levels: int | None, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Grey levels 0 … levels−1 to real numbers in [0, levels) by uniform noise; real-valued data as it is.

    In float32 the sum of the top level and a noise just below 1 may round to `levels` itself, which a `Logit` with α > 0 takes.
    """
    if levels is None:
        return x.to(dtype)
    return x + torch.rand(x.shape, generator=generator, device=x.device, dtype=dtype)


def augment(x: Tensor, flip: bool, jitter: int, generator: torch.Generator) -> Tensor:
    """Images (N, C, H, W), each mirrored with probability ½ if `flip`, and shifted by up to `jitter` pixels each way."""
    n, _, height, width = x.shape
    if flip:
        mirrored = torch.randint(2, (n, 1, 1, 1), generator=generator, device=x.device, dtype=torch.bool)
        x = torch.where(mirrored, x.flip(-1), x)
    if jitter:
        shift = torch.randint(-jitter, jitter + 1, (2, n, 1), generator=generator, device=x.device)
        rows, columns = (
            _reflected(torch.arange(side, device=x.device) + offset, side)
            for side, offset in zip((height, width), shift, strict=True)
        )
        x = x[torch.arange(n, device=x.device)[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
    return x


def _reflected(index: Tensor, side: int) -> Tensor:
    """An index beyond the edge, mirrored at the outermost pixel."""
    index = index.abs()
    return torch.where(index < side, index, 2 * (side - 1) - index)


class Examples:
    """One part of a data set, kept on the device if it fits there in half of what is free, else streamed to it batch by batch."""

    def __init__(self, stored: Tensor, levels: int | None, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype, self.levels = device, dtype, levels
        if device.type == "cuda" and stored.nbytes < torch.cuda.mem_get_info(device)[0] // 2:
            stored = stored.to(device)
        self.stored = stored

    def __len__(self) -> int:
        return self.stored.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """One example's shape."""
        return tuple(self.stored.shape[1:])

    def gather(self, index: Tensor) -> Tensor:
        """The examples of an index, as stored, on the device."""
        batch = self.stored[index.to(self.stored.device)]
        if self.device.type == "cuda" and not batch.is_cuda:
            batch = batch.pin_memory()
        return batch.to(self.device, non_blocking=True)

    def in_order(self, batch_size: int, seed: int, sample: int = 0) -> Iterator[Tensor]:
        """All examples in their order, for evaluation; `sample` numbers the draw of dequantisation noise."""
        for start in range(0, len(self), batch_size):
            batch = self.gather(torch.arange(start, min(start + batch_size, len(self))))
            yield dequantise(batch, self.levels, self.dtype, generator_for(self.device, seed, "evaluate", sample, start))

    def spread(self, n: int, seed: int) -> Tensor:
        """n examples (or all, if fewer) drawn once, dequantised: for initialisation, diagnosis and pictures."""
        order = torch.randperm(len(self), generator=generator_for(torch.device("cpu"), seed, "spread"))[:n]
        return dequantise(self.gather(order), self.levels, self.dtype, generator_for(self.device, seed, "spread", n))


class TrainingBatches:
    """Shuffled batches of one size: each epoch its own order, each step its own noise, all from (seed, epoch, step).

    The examples that do not fill a last batch sit out that epoch; in the next one it will be others.

    block:  how many steps' batches are drawn at once: 1, but on a GPU.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int, flip: bool = False, jitter: int = 0) -> None:
        self.examples, self.seed, self.flip, self.jitter = examples, seed, flip, jitter
        self.batch_size = min(batch_size, len(examples))
        self.steps_per_epoch = len(examples) // self.batch_size
        shape = examples.shape
        if (flip or jitter) and len(shape) != 3:
            raise ValueError(f"data: expected images (C, H, W) to flip or jitter, got examples of shape {shape}")
        if jitter and jitter >= min(shape[1:]):
            raise ValueError(f"data: expected jitter below the images' {min(shape[1:])} pixels, got {jitter}")
        several = max(1, min(BLOCK, self.steps_per_epoch, BLOCK_VALUES // (self.batch_size * math.prod(shape))))
        self.block = several if examples.device.type == "cuda" else 1
        self._orders: dict[int, Tensor] = {}
        self._made: tuple[tuple[int, int], Tensor] | None = None  # the block that was made last, and which it is

    def generator(self, purpose: str, epoch: int, step: int) -> torch.Generator:
        """The generator of a step, for what else is drawn there."""
        return generator_for(self.examples.device, self.seed, purpose, epoch, step)

    def seed_of_block(self, epoch: int, number: int) -> int:
        """Of the generator that `prepare` draws a block from."""
        return seed_of(self.seed, "batch", epoch, number)

    def order(self, epoch: int) -> Tensor:
        """The examples' order in an epoch, where the data lies; asked for early, it is there in time."""
        if epoch not in self._orders:
            # Drawn on the CPU, wherever the data lies: that may depend on how much memory was free.
            order = torch.randperm(len(self.examples), generator=generator_for(torch.device("cpu"), self.seed, "order", epoch))
            if self.examples.stored.is_cuda:
                order = order.pin_memory().to(self.examples.stored.device, non_blocking=True)
            self._orders = {known: kept for known, kept in self._orders.items() if abs(known - epoch) == 1} | {epoch: order}
        return self._orders[epoch]

    def index(self, epoch: int, number: int) -> Tensor:
        """Which examples a block holds."""
        if not 0 <= number * self.block < self.steps_per_epoch:
            raise IndexError(f"batches: expected a block of {self.steps_per_epoch} steps by {self.block}, got number {number}")
        rows = self.block * self.batch_size
        return self.order(epoch)[number * rows : min((number + 1) * rows, self.steps_per_epoch * self.batch_size)]

    def prepare(self, stored: Tensor, generator: torch.Generator) -> Tensor:
        """Examples as stored to training data: augmented and dequantised."""
        if self.flip or self.jitter:
            stored = augment(stored, self.flip, self.jitter, generator)
        return dequantise(stored, self.examples.levels, self.examples.dtype, generator)

    def batch(self, epoch: int, step: int) -> Tensor:
        """The batch of a step, (batch_size, *shape)."""
        number, within = divmod(step, self.block)
        if self._made is None or self._made[0] != (epoch, number):
            generator = generator_for(self.examples.device, self.seed, "batch", epoch, number)
            made = self.prepare(self.examples.gather(self.index(epoch, number)), generator)
            self._made = (epoch, number), made
        return self._made[1][within * self.batch_size : (within + 1) * self.batch_size]

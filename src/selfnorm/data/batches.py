"""Training batches, gathered, augmented and dequantised on the device that holds the data.

Every random draw comes from a generator seeded by (seed, purpose, epoch, step), not from a running state. So the batch of any
step can be recreated at any time, and a resumed run sees the same batches as one that was never stopped. On a GPU, where a kernel
for one batch would be too short to be efficient, the batches of many steps are made at once, as one block; then the number of the
block replaces the step in the seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

# The largest number of steps in one block on a GPU, and of values in it. Changing either changes the random draws.
BLOCK_STEPS, BLOCK_VALUES = 50, 2**24


def seed_of(*counters: int | str) -> int:
    """Returns a seed that depends only on the counters."""
    return int.from_bytes(hashlib.blake2b(repr(counters).encode(), digest_size=8).digest(), "little") >> 1


def generator_for(device: torch.device, *counters: int | str) -> torch.Generator:
    """Returns a generator whose draws depend only on the counters."""
    return torch.Generator(device).manual_seed(seed_of(*counters))


def dequantise(x: Tensor, levels: int | None, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Adds uniform noise to grey levels 0 … levels−1, giving real numbers in [0, levels); leaves real-valued data unchanged.

    In float32 the top level plus noise just below 1 may round to `levels` itself; a `Logit` with α > 0 accepts that.
    """
    if levels is None:
        return x.to(dtype)
    return x + torch.rand(x.shape, generator=generator, device=x.device, dtype=dtype)


def augment(x: Tensor, flip: bool, jitter: int, generator: torch.Generator) -> Tensor:
    """Returns images (N, C, H, W), mirrored with probability ½ if `flip`, and shifted up to `jitter` pixels along each axis."""
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
    """Returns the indices with those beyond the edge mirrored at the outermost pixel."""
    index = index.abs()
    return torch.where(index < side, index, 2 * (side - 1) - index)


class Examples:
    """One part of a data set, kept on the device if it takes less than half of the free memory there, else copied per batch."""

    def __init__(self, stored: Tensor, levels: int | None, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype, self.levels = device, dtype, levels
        if device.type == "cuda" and stored.nbytes < torch.cuda.mem_get_info(device)[0] // 2:
            stored = stored.to(device)
        self.stored = stored

    @classmethod
    def exact(cls, stored: Tensor, levels: int | None, device: torch.device) -> Examples:
        """Returns examples whose batches are in float64 if they are stored so."""
        return cls(stored, levels, device, torch.float64 if stored.dtype == torch.float64 else torch.float32)

    def __len__(self) -> int:
        return self.stored.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.stored.shape[1:])

    def gather(self, index: Tensor) -> Tensor:
        """Returns the examples at the indices, as stored, on the device."""
        batch = self.stored[index.to(self.stored.device)]
        if self.device.type == "cuda" and not batch.is_cuda:
            batch = batch.pin_memory()
        return batch.to(self.device, non_blocking=True)

    def in_order(self, batch_size: int, seed: int, sample: int = 0) -> Iterator[Tensor]:
        """Yields all examples in order, dequantised, for evaluation; each `sample` number draws different noise."""
        for start in range(0, len(self), batch_size):
            batch = self.gather(torch.arange(start, min(start + batch_size, len(self))))
            yield dequantise(batch, self.levels, self.dtype, generator_for(self.device, seed, "evaluate", sample, start))

    def subset(self, n: int, seed: int, purpose: str) -> Examples:
        """Returns n of the examples (or all, if fewer), drawn at random."""
        order = torch.randperm(len(self), generator=generator_for(torch.device("cpu"), seed, purpose))[:n]
        return Examples(self.stored[order.to(self.stored.device)], self.levels, self.device, self.dtype)

    def random_examples(self, n: int, seed: int) -> Tensor:
        """Returns n random examples (or all, if fewer), dequantised: for initialisation, diagnosis and pictures."""
        order = torch.randperm(len(self), generator=generator_for(torch.device("cpu"), seed, "spread"))[:n]
        return dequantise(self.gather(order), self.levels, self.dtype, generator_for(self.device, seed, "spread", n))


class TrainingBatches:
    """Shuffled batches of one size. Order and noise depend only on (seed, epoch, step).

    Examples that do not fill a last batch are left out of that epoch; the next epoch leaves out others.

    block:  the number of steps whose batches are made at once; 1 except on a GPU.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int, flip: bool = False, jitter: int = 0) -> None:
        self.examples, self.seed, self.flip, self.jitter = examples, seed, flip, jitter
        self.batch_size = min(batch_size, len(examples))
        self.steps_per_epoch = len(examples) // self.batch_size
        shape = examples.shape
        if (flip or jitter) and len(shape) != 3:
            raise ValueError(f"data: expected images (C, H, W) for flip or jitter, got examples of shape {shape}; turn both off")
        if jitter and jitter >= min(shape[1:]):
            raise ValueError(f"data: expected jitter below the image size of {min(shape[1:])} pixels, got {jitter}")
        several = max(1, min(BLOCK_STEPS, self.steps_per_epoch, BLOCK_VALUES // (self.batch_size * math.prod(shape))))
        self.block = several if examples.device.type == "cuda" else 1
        self._orders: dict[int, Tensor] = {}
        self._made: tuple[tuple[int, int], Tensor] | None = None  # the current block, after its (epoch, number)

    def generator(self, purpose: str, epoch: int, step: int) -> torch.Generator:
        """Returns the generator of a step for a purpose other than its batch."""
        return generator_for(self.examples.device, self.seed, purpose, epoch, step)

    def seed_of_block(self, epoch: int, number: int) -> int:
        """Returns the seed of the generator that `prepare` uses for a block."""
        return seed_of(self.seed, "batch", epoch, number)

    def order(self, epoch: int) -> Tensor:
        """Returns the order of the examples in an epoch, on the data's device; ask early to overlap the copy with other work."""
        if epoch not in self._orders:
            # Always drawn on the CPU: whether the data is on the device depends on how much memory was free.
            order = torch.randperm(len(self.examples), generator=generator_for(torch.device("cpu"), self.seed, "order", epoch))
            if self.examples.stored.is_cuda:
                order = order.pin_memory().to(self.examples.stored.device, non_blocking=True)
            self._orders = {known: kept for known, kept in self._orders.items() if abs(known - epoch) == 1} | {epoch: order}
        return self._orders[epoch]

    def index(self, epoch: int, number: int) -> Tensor:
        """Returns the indices of the examples in a block."""
        if not 0 <= number * self.block < self.steps_per_epoch:
            raise IndexError(
                f"batches: expected the number of a block of {self.block} among {self.steps_per_epoch} steps, got {number}"
            )
        rows = self.block * self.batch_size
        return self.order(epoch)[number * rows : min((number + 1) * rows, self.steps_per_epoch * self.batch_size)]

    def prepare(self, stored: Tensor, generator: torch.Generator) -> Tensor:
        """Returns stored examples as training data: augmented and dequantised."""
        if self.flip or self.jitter:
            stored = augment(stored, self.flip, self.jitter, generator)
        return dequantise(stored, self.examples.levels, self.examples.dtype, generator)

    def batch(self, epoch: int, step: int) -> Tensor:
        """Returns the batch of a step, (batch_size, *shape)."""
        number, within = divmod(step, self.block)
        if self._made is None or self._made[0] != (epoch, number):
            generator = generator_for(self.examples.device, self.seed, "batch", epoch, number)
            made = self.prepare(self.examples.gather(self.index(epoch, number)), generator)
            self._made = (epoch, number), made
        return self._made[1][within * self.batch_size : (within + 1) * self.batch_size]

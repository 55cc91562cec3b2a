"""Using a trained run: evaluate, sample and score with its best weights."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.bijection import located
from selfnorm.data import load_dataset, read_examples
from selfnorm.data.batches import Examples, generator_for
from selfnorm.data.dataset import fingerprint
from selfnorm.evaluate.far import scores_of
from selfnorm.evaluate.health import FlowHealth, examine
from selfnorm.evaluate.likelihood import Likelihood, evaluating, likelihood, reference_scores
from selfnorm.evaluate.sampler import Sampler
from selfnorm.evaluate.stability import stability_ratios
from selfnorm.flow import Flow, Inverse
from selfnorm.objective import UnstableObjectiveWarning
from selfnorm.runtime.precision import Precision
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.checkpoint import Checkpoint, checkpoint_path, read_checkpoint
from selfnorm.train.folder import RunFolder
from selfnorm.train.scores import Scores
from selfnorm.train.watch import MAX_EXAMPLES


@dataclass(frozen=True)
class Trained:
    """The flow of a run's best checkpoint, or of one checkpoint file, on a device."""

    path: Path
    checkpoint: Checkpoint
    flow: Flow
    device: torch.device

    @classmethod
    def open(cls, path: Path, device: torch.device | str = "cpu") -> Trained:
        """Opens a run folder or a checkpoint file."""
        if not path.exists():
            raise ValueError(f"{path}: expected a run folder or a checkpoint, got nothing there")
        file = checkpoint_path(path)
        checkpoint = read_checkpoint(file)
        with located(str(file)):
            flow = checkpoint.flow()
        return cls(file, checkpoint, flow.to(device), torch.device(device))

    def examples(self, part: str, data_dir: str | None = None) -> Examples:
        """Returns a part of the run's own data: "train", "validation" or "test"."""
        recipe = self.checkpoint.recipe
        dataset = load_dataset(recipe.data.source, data_dir or recipe.data.folder, levels=recipe.data.levels)
        self._check_shape(dataset.train, recipe.data.source)
        if fingerprint(dataset) != self.checkpoint.data:
            raise ValueError(f"{recipe.data.source}: expected the data that {self.path} was trained with, got other data there")
        return Examples.exact(getattr(dataset, part), dataset.levels, self.device)

    def evaluate(
        self, part: str = "test", samples: int | None = None, data_dir: str | None = None, precision: Precision = "float32"
    ) -> Likelihood:
        """Returns the exact likelihood of a part of the run's data."""
        recipe = self.checkpoint.recipe
        with cpu_threads(recipe.optimiser.threads):
            return likelihood(
                self.flow,
                self.examples(part, data_dir),
                batch_size=recipe.evaluation.batch_size,
                samples=samples or recipe.evaluation.test_samples,
                seed=recipe.optimiser.seed,
                precision=precision,
            )

    def health(self, x: Tensor, train: Examples) -> FlowHealth:
        """Returns the figures of the stored inverses on a batch x, and the stability of their training on the training data."""
        recipe = self.checkpoint.recipe
        # The ratios say what the warning would.
        with cpu_threads(recipe.optimiser.threads), warnings.catch_warnings(action="ignore", category=UnstableObjectiveWarning):
            loss = self.checkpoint.loss_of(self.flow).to(self.device)
            some = train.subset(MAX_EXAMPLES, recipe.optimiser.seed, "watch")
            batches = some.in_order(recipe.evaluation.batch_size, recipe.optimiser.seed)
            return examine(self.flow, x, ratios=stability_ratios(loss, batches))

    def sample(self, n: int, inverse: Inverse, seed: int) -> Tensor:
        """Returns n samples on the CPU, drawn in batches."""
        generator = generator_for(self.device, seed, "sample")
        size = self.checkpoint.recipe.evaluation.batch_size
        with evaluating(self.flow), cpu_threads(self.checkpoint.recipe.optimiser.threads):
            sampler = Sampler(self.flow, size, inverse, generator)
            batches = [sampler().cpu() for _ in range(n // size)]
            return torch.cat([*batches, self.flow.sample(n % size, inverse, generator).cpu()])

    def score(self, file: Path, samples: int = 1, seed: int = 0) -> Scores:
        """Returns the exact log-likelihood of each row of a file, and its rank among the training data's."""
        table, columns = read_examples(file, exact=True)
        table = self._unflattened(self._in_order(table, columns, file), file)
        self._check_shape(table, str(file))
        levels = self.checkpoint.levels
        if levels is not None and int(table.max()) >= levels:
            raise ValueError(f"{file}: expected grey levels below {levels}, as in training, got {int(table.max())}")
        recipe = self.checkpoint.recipe
        with cpu_threads(recipe.optimiser.threads):
            found = scores_of(
                self.flow, table, levels, self.device, batch_size=recipe.evaluation.batch_size, samples=samples, seed=seed
            )
            return Scores.of(found.numpy(), self._training_scores())

    def _training_scores(self) -> NDArray[np.float64]:
        """Returns the sorted scores of training examples: stored by the run for its best weights, else computed."""
        recipe, folder = self.checkpoint.recipe, RunFolder(self.path.parent)
        if self.path.name == folder.best.name and folder.scores.exists():
            try:
                stored: NDArray[np.float64] = np.load(folder.scores, allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise ValueError(f"{folder.scores}: expected the training data's scores, got a damaged file ({error})") from None
            return stored
        fresh: NDArray[np.float64] = reference_scores(
            self.flow, self.examples("train"), recipe.evaluation.batch_size, recipe.optimiser.seed
        ).numpy()
        return fresh

    def _in_order(self, table: Tensor, columns: tuple[str, ...], file: Path) -> Tensor:
        """Returns the table with the columns of the training data, in their order; unnamed columns stay as they are."""
        known = self.checkpoint.columns
        if not known or not columns or columns == known:
            return table
        missing = [name for name in known if name not in columns]
        if missing:
            raise ValueError(f"{file}: expected the columns of the training data, {', '.join(known)}, got {', '.join(columns)}")
        return table[:, [columns.index(name) for name in known]]

    def _unflattened(self, table: Tensor, file: Path) -> Tensor:
        """Returns the table as images if it has one column per pixel, the format that `write_samples` uses for .csv."""
        shape, levels = self.checkpoint.shape, self.checkpoint.levels
        if levels is None or table.dim() != 2 or len(shape) == 1 or table.shape[1] != math.prod(shape):
            return table
        if not torch.equal(table, table.clamp(0, levels - 1).round()):
            raise ValueError(f"{file}: expected whole grey levels from 0 to {levels - 1}, got other numbers")
        return table.to(torch.uint8).reshape(-1, *shape)

    def _check_shape(self, table: Tensor, where: str) -> None:
        expected, got = self.checkpoint.shape, tuple(table.shape[1:])
        if expected != got:
            what = (
                f"{expected[0]} columns, as in training, got {got[0]}"
                if len(expected) == len(got) == 1
                else f"examples of shape {expected}, as in training, got {got}"
            )
            raise ValueError(f"{where}: expected {what}")
        if (self.checkpoint.levels is not None) != (table.dtype == torch.uint8):
            kind = "8-bit images" if self.checkpoint.levels else "real numbers"
            raise ValueError(f"{where}: expected {kind}, as in training, got {table.dtype}")

"""Using a trained run: evaluate, sample and score with its best weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfnorm.bijection import located
from selfnorm.data import reads_folder
from selfnorm.data.arrays import as_examples
from selfnorm.data.batches import Examples, generator_for
from selfnorm.data.dataset import fingerprint
from selfnorm.data.layout import EVERYTHING, TableLayout
from selfnorm.data.matching import read_matching
from selfnorm.evaluate.health import FlowHealth, examine
from selfnorm.evaluate.likelihood import Likelihood, evaluating, likelihood, reference_scores
from selfnorm.evaluate.sampler import Sampler
from selfnorm.evaluate.scoring import scores_of
from selfnorm.evaluate.stability import stability_ratios
from selfnorm.flow import Flow, Inverse
from selfnorm.objective import UnstableObjectiveWarning
from selfnorm.runtime.precision import Precision
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.checkpoint import Checkpoint, open_checkpoint
from selfnorm.train.folder import RunFolder
from selfnorm.train.result import Result
from selfnorm.train.scores import Scores, read_scores
from selfnorm.train.source import dataset_of
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
        file, checkpoint = open_checkpoint(path)
        with located(str(file)):
            flow = checkpoint.flow()
        trained = cls(file, checkpoint, flow.to(device), torch.device(device))
        if path.is_dir():
            folder = RunFolder(path)
            folder.expect_regular_files()
            if result := Result.stored(folder.result):
                trained.expect_weights_of(result)
        return trained

    def examples(self, part: str, data_dir: str | None = None) -> Examples:
        """Returns a part of the run's own data: "train", "validation" or "test"."""
        recipe = self.checkpoint.recipe
        stored = recipe.data.folder if reads_folder(recipe.data.source) else None  # older runs stored it for any data
        dataset = dataset_of(recipe.changed(folder=data_dir or stored), columns=self.checkpoint.columns)
        dataset = dataset if "data.origin" in self.checkpoint.tensors else dataset.narrowed()
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
        return torch.cat(list(self.sample_batches(n, inverse, seed)))

    def sample_batches(self, n: int, inverse: Inverse, seed: int) -> Iterator[Tensor]:
        """Yields the batches of `sample`, each when it is asked for, so that any number can be written to a file."""
        generator = generator_for(self.device, seed, "sample")
        size = self.checkpoint.recipe.evaluation.batch_size
        with evaluating(self.flow), cpu_threads(self.checkpoint.recipe.optimiser.threads):
            sampler = Sampler(self.flow, size, inverse, generator)
            done = 0
            while done + size <= n:  # a range could not count beyond 2**63
                yield sampler().cpu()
                done += size
            yield self.flow.sample(n - done, inverse, generator).cpu()

    @property
    def layout(self) -> TableLayout:
        """The layout of the training data's table; of a run without one, all columns as they are."""
        stored = self.checkpoint
        return stored.table or TableLayout(stored.columns, math.prod(stored.shape))

    def completed(self, samples: Tensor) -> Tensor:
        """Returns samples of a table with the columns that were constant in the training data; others as they are."""
        return torch.from_numpy(self.layout.completed(samples.numpy())) if self.layout.constant else samples

    def score(
        self,
        file: Path,
        samples: int = 1,
        seed: int = 0,
        *,
        ids: Sequence[str] = (),
        constants_count: bool = True,
        header: bool | None = None,
    ) -> Scores:
        """Returns the exact log-likelihood of each row of a file, and its rank among the training data's.

        ids:              columns of the file that identify its rows, to be carried along, besides those of text.
        constants_count:  whether a row that differs in a column that was constant in the training data has likelihood 0, as the
                          data say; else it has the likelihood of its other columns.
        header:           whether the first line of a text file holds names; by default decided by what it holds.
        """
        recipe = self.checkpoint.recipe
        numeric_names = recipe.data.header is not False and EVERYTHING not in recipe.data.keep
        matched = read_matching(file, self.layout, ids, numeric_names, header)
        table = self._unflattened(as_examples(str(file), matched.values, "exact"), file)
        self._check_shape(table, str(file))
        levels = self.checkpoint.levels
        if levels is not None and int(table.max()) >= levels:
            raise ValueError(f"{file}: expected grey levels below {levels}, as in training, got {int(table.max())}")
        with cpu_threads(recipe.optimiser.threads):
            found = scores_of(
                self.flow, table, levels, self.device, batch_size=recipe.evaluation.batch_size, samples=samples, seed=seed
            ).numpy()
            if matched.differs is not None and constants_count:
                found[np.array(matched.differs) != ""] = -math.inf
            scores = Scores.of(found, self._training_scores())
            return replace(scores, carried=matched.carried, differs=matched.differs, understood=matched.understood)

    def expect_weights_of(self, result: Result) -> None:
        """Raises ValueError if the run's result is not that of these weights, but for instance of another run's."""
        best = self.checkpoint.progress.get("best_nll")
        if best not in (None, result.validation_nll):
            folder = RunFolder(self.path.parent)
            raise ValueError(
                f"{self.path}: expected the weights with the validation NLL in {folder.result.name}, {result.validation_nll:g}, "
                f"got others, with {best:g}, to which the rest of the folder does not belong; put the run's own file back"
            )

    def _training_scores(self) -> NDArray[np.float64]:
        """Returns the sorted scores of training examples: stored by the run for its best weights, else computed."""
        recipe, folder = self.checkpoint.recipe, RunFolder(self.path.parent)
        folder.expect_regular_files()
        if self.path.name == folder.best.name and folder.scores.exists():
            result = Result.stored(folder.result)
            if result:
                self.expect_weights_of(result)
            return read_scores(folder.scores, result.scores_digest if result else None)
        fresh: NDArray[np.float64] = reference_scores(
            self.flow, self.examples("train"), recipe.evaluation.batch_size, recipe.optimiser.seed
        ).numpy()
        return fresh

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

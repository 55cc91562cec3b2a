"""Checkpoints: tensors and plain facts in one safetensors file, which cannot contain code."""

from __future__ import annotations

import json
import math
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from selfnorm.bijection import Bijection, Chain, located
from selfnorm.data.layout import TableLayout
from selfnorm.flow import Flow
from selfnorm.layers.affine import Affine
from selfnorm.objective import Loss
from selfnorm.runtime.checks import event_shape, positive_int, shortened
from selfnorm.runtime.files import replacing
from selfnorm.train.build import build_flow, build_loss
from selfnorm.train.counters import unsound_counters
from selfnorm.train.digest import digest
from selfnorm.train.folder import RunFolder
from selfnorm.train.recipe import Recipe
from selfnorm.train.settings import from_mapping
from selfnorm.train.sizes import expect_no_larger

FORMAT = "selfnorm-checkpoint-1"


class UnverifiedCheckpointWarning(UserWarning):
    """A checkpoint of an earlier version has no digest to verify it with."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume a run or to rebuild its flow.

    data:      the fingerprint of the data set.
    tensors:   under "loss." the weights and the penalty's multipliers, under "adam." the optimiser's moments, under "epoch." the
               metrics of the current epoch's steps; "data.origin" if the run was trained on the distances from it.
    progress:  the counters of the training loop, plain numbers; see `RunProgress`.
    table:     how the columns of a table were understood; None for other data, and from earlier versions.
    """

    recipe: Recipe
    shape: tuple[int, ...]
    levels: int | None
    columns: tuple[str, ...]
    data: str
    tensors: dict[str, Tensor]
    progress: dict[str, Any]
    table: TableLayout | None = None

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Returns the tensors whose names start with a prefix, with the prefix removed."""
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}

    def is_resumable(self) -> bool:
        """Returns whether training can continue from it: it is the start, or holds the optimiser's moments."""
        return self.progress.get("step") == 0 or bool(self.part("adam."))

    def expect_recipe(self, recipe: Recipe) -> None:
        """Raises ValueError if the recipe of the run's folder differs, but for where its data lies and what a divergence does."""
        before = self.recipe.changed(folder=recipe.data.folder, on_divergence=recipe.optimiser.on_divergence)
        if changed := before.differences(recipe):
            raise ValueError(
                f"expected the recipe that the run started with, got a different {', '.join(changed)} in recipe.toml: one of the "
                "two files is not the run's own, or was edited"
            )

    def flow(self) -> Flow:
        """Returns the flow of the data, on the CPU and in eval mode; in float64 if float32 cannot resolve the data."""
        learned, origin = self.learned_flow(), self.tensors.get("data.origin")
        if origin is None:
            return learned
        if origin.shape != self.shape or not torch.isfinite(origin).all():
            raise ValueError(f"checkpoint of {self.recipe.name}: expected a finite origin of shape {self.shape}, got another")
        # Before the learned layers, and in float64: it takes from the data what float32 has no digits for.
        shift = Affine(torch.zeros(self.shape), 1.0).double()
        shift.shift.copy_(-origin)
        return Flow(Chain(shift, *_layers(learned.double())), cast(nn.Module, learned.base)).eval()

    def with_weights(self, flow: Flow) -> Checkpoint:
        """Returns the checkpoint with the weights of its flow as it was changed since, and without the state of training."""
        learned = Flow(Chain(*_layers(flow)[1:]), cast(nn.Module, flow.base)) if "data.origin" in self.tensors else flow
        trained = {name: value.float() if value.is_floating_point() else value for name, value in learned.state_dict().items()}
        tensors = {f"loss.flow.{name}": value for name, value in trained.items()}
        kept = ("loss.penalty.", "data.")
        return replace(self, tensors=tensors | {name: value for name, value in self.tensors.items() if name.startswith(kept)})

    def learned_flow(self) -> Flow:
        """Returns the flow as it was trained: of the data, or of its distances from "data.origin", in float32."""
        weights = self.part("loss.flow.").values()
        try:
            expect_no_larger(self.recipe, self.shape, len(weights), sum(value.numel() for value in weights))
            flow = build_flow(self.recipe, self.shape, self.levels)
            self.load_into(flow, "loss.flow.")
        except (RuntimeError, TypeError, ValueError, MemoryError, OverflowError) as error:  # the last two for absurd sizes
            raise ValueError(
                f"checkpoint of {self.recipe.name}: expected weights that fit the recipe, got others: {error}"
            ) from None
        return flow.eval()

    def load_into(self, module: nn.Module, prefix: str) -> None:
        """Loads a part into a module. Raises ValueError or RuntimeError unless names, dtypes and shapes are the module's own."""
        state, own = self.part(prefix), module.state_dict()
        for name in state.keys() & own.keys():  # a layer may accept other names, from earlier versions, but never other types
            if state[name].dtype != own[name].dtype:
                raise ValueError(f"{prefix}{name}: expected {own[name].dtype}, got {state[name].dtype}")
            if own[name].dim() == 0 and state[name].dim() != 0:  # torch would take the first entry
                raise ValueError(f"{prefix}{name}: expected one number, got shape {tuple(state[name].shape)}")
        module.load_state_dict(state)

    def loss_of(self, flow: Flow) -> Loss:
        """Returns the run's objective for its flow, with the stored multipliers."""
        loss = build_loss(self.recipe, flow)
        # Checkpoints that earlier versions repaired have only weights; then the recipe's λ stays.
        loss.penalty.load_state_dict(self.part("loss.penalty."), strict=False)
        return loss


def _layers(flow: Flow) -> list[Bijection]:
    assert isinstance(flow.bijection, Chain)
    return list(flow.bijection)


def save_checkpoint(path: Path, checkpoint: Checkpoint, *, is_new: bool = False) -> None:
    """Writes a checkpoint atomically: at any time there is an old or a new file, never a partial one.

    is_new:  raises OSError instead of replacing a file.
    """
    facts = {
        "recipe": asdict(checkpoint.recipe),
        "shape": checkpoint.shape,
        "levels": checkpoint.levels,
        "columns": checkpoint.columns,
        "data": checkpoint.data,
        "progress": checkpoint.progress,
        "table": checkpoint.table and checkpoint.table.facts(),
    }
    tensors = {name: value.detach().cpu().contiguous() for name, value in checkpoint.tensors.items()}
    text = json.dumps(facts)
    metadata = {"format": FORMAT, "facts": text, "digest": digest(tensors, text)}
    with replacing(path, is_new=is_new) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path}: could not be written: {error}") from None


def read_checkpoint(path: Path) -> Checkpoint:
    """Returns the checkpoint in a file; raises ValueError that says what is wrong with the file.

    Warns with `UnverifiedCheckpointWarning` if the file has no digest to verify it with.
    """
    if not path.is_file():
        raise ValueError(f"{path}: expected a checkpoint, got no such file")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if (found := shortened(metadata.get("format", "none"))) != FORMAT:
                raise ValueError(f"{path}: expected a checkpoint of format {FORMAT}, got {found!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: expected a safetensors checkpoint, got a truncated or foreign file ({error})") from None
    if metadata.keys() - {"digest"} != {"format", "facts"}:  # with a flipped bit in the name, a digest would go unnoticed
        raise ValueError(f"{path}: expected readable checkpoint metadata, got a damaged header")
    if "digest" in metadata and metadata["digest"] != digest(tensors, metadata["facts"]):
        raise ValueError(f"{path}: expected the numbers and the recipe that were written, got a damaged file: its digest differs")
    try:
        facts = json.loads(metadata["facts"])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected readable checkpoint metadata, got a damaged header ({error})") from None
    checkpoint = _from_facts(path, facts, tensors)
    if "digest" not in metadata:
        warnings.warn(
            f"{path}: an earlier version wrote this file without a digest, so damage to it cannot be detected",
            UnverifiedCheckpointWarning,
            stacklevel=2,
        )
    return checkpoint


def _from_facts(path: Path, facts: Any, tensors: dict[str, Tensor]) -> Checkpoint:
    try:
        shape = event_shape(str(path), facts["shape"])
        levels = None if facts["levels"] is None else positive_int(str(path), "levels", facts["levels"])
        columns = tuple(map(str, facts["columns"]))
        if columns and (len(columns),) != shape:
            raise ValueError(f"{path}: expected one column name for each entry of the shape {shape}, got {len(columns)}")
        progress = dict(facts["progress"].items())
        if wrong := unsound_counters(progress):
            raise TypeError(f"unusable {', '.join(wrong)}")
        with located(str(path)):
            table = TableLayout.of_facts(facts["table"], math.prod(shape)) if facts.get("table") else None
            if table is not None and table.columns != columns:
                raise ValueError(f"expected the names {columns} in the layout of the table, got {table.columns}")
        recipe = from_mapping(facts["recipe"], str(path))
        return Checkpoint(recipe, shape, levels, columns, str(facts["data"]), tensors, progress, table)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: expected readable checkpoint metadata, got a damaged header ({error})") from None


class KeptCheckpoints:
    """The checkpoints that a run keeps, in a folder or, without one, in memory alone.

    best:        that of the best validation so far, or of the start before the first one.
    good:        that of the last validation that was not far above the best.
    written_at:  when the last one was written, by `time.monotonic`.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self._folder = folder
        self._best: Checkpoint | None = None  # None until it is set, or read from the folder
        self._best_on_disk: Checkpoint | None = None
        self.good: Checkpoint | None = None
        self.written_at = time.monotonic()

    @property
    def best(self) -> Checkpoint:
        """The best checkpoint; read from the folder in a resumed run."""
        if self._best is None:
            assert self._folder is not None
            self._best = self._best_on_disk = read_best(self._folder)
        return self._best

    @best.setter
    def best(self, checkpoint: Checkpoint) -> None:
        self._best = checkpoint

    def write(self, last: Checkpoint) -> None:
        """Writes the best checkpoint, if it is new, and then the last: `last` must never refer to a best that is not on disk."""
        if self._folder:
            self._folder.expect_in_place()
            if self._best is not None and self._best is not self._best_on_disk:
                save_checkpoint(self._folder.best, self._best)
                self._best_on_disk = self._best
            save_checkpoint(self._folder.last, last)
        self.written_at = time.monotonic()


def load(run_dir_or_checkpoint: str | Path) -> Flow:
    """Returns the trained flow of a run folder (its best weights) or of a checkpoint file, on the CPU and in eval mode."""
    path, checkpoint = open_checkpoint(Path(run_dir_or_checkpoint))
    with located(str(path)):
        return checkpoint.flow()


def open_checkpoint(path: Path) -> tuple[Path, Checkpoint]:
    """Returns the best checkpoint of a run folder, or the one in a file, and its path."""
    file = checkpoint_path(path)
    if not path.is_dir():
        return file, read_checkpoint(file)
    checkpoint = read_best(RunFolder(path))
    if recipe := RunFolder(path).stored_recipe():
        with located(str(file)):
            checkpoint.expect_recipe(recipe)
    return file, checkpoint


def read_best(folder: RunFolder) -> Checkpoint:
    """Returns the best checkpoint of a run; if it is damaged or gone, the error names the last one, but never uses it."""
    try:
        if not folder.best.exists():
            raise ValueError(f"{folder.best}: expected the best weights of the run, got none")
        return read_checkpoint(folder.best)
    except ValueError as error:
        if not _is_whole(folder.last):
            raise
        raise ValueError(
            f"{error}; {folder.last}, from the end of training, is whole: name it in place of the folder to evaluate, score or "
            "sample with it"
        ) from None


def _is_whole(path: Path) -> bool:
    """Returns whether a checkpoint can be read."""
    try:
        with warnings.catch_warnings(action="ignore", category=UnverifiedCheckpointWarning):
            read_checkpoint(path)
    except ValueError:
        return False
    return True


def checkpoint_path(path: Path) -> Path:
    """Returns the checkpoint file that a path stands for: in a run folder the best one."""
    if not path.is_dir():
        return path
    folder = RunFolder(path)
    if not folder.best.exists() and not folder.last.exists():
        raise ValueError(f"{path}: expected a run folder with {folder.best.name}, got none")
    return folder.best


def detached_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies that later training does not change."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """Returns Adam's state as tensors named "parameter:key", such as "flow.bijection.0.weight:exp_avg"."""
    state = optimizer.state_dict()["state"]
    return {f"{names[index]}:{key}": value for index, values in state.items() for key, value in values.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]) -> None:
    """Inverse of `optimizer_tensors`: loads the tensors into an optimiser of the same parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        owner, _, key = name.rpartition(":")
        index = names.index(owner)
        state.setdefault(index, {})[key] = value.clone() if key == "step" else _laid_out_like(parameters[index], name, value)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _laid_out_like(parameter: Tensor, name: str, value: Tensor) -> Tensor:
    """Returns a copy with the parameter's strides: files are row-major, LU factors are not, and fused Adam goes by memory."""
    if value.shape != parameter.shape:
        raise ValueError(f"{name}: expected shape {tuple(parameter.shape)}, got {tuple(value.shape)}")
    return torch.empty_like(parameter, requires_grad=False).copy_(value)

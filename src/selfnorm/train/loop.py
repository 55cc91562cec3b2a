"""The training loop: steps, exact validation, checkpoints, and what to do when training diverges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from selfnorm.data.batches import Examples, TrainingBatches
from selfnorm.data.dataset import Dataset
from selfnorm.evaluate import likelihood
from selfnorm.flow import Flow
from selfnorm.recipe import Recipe
from selfnorm.recipes import build_flow, build_loss
from selfnorm.train.checkpoint import Checkpoint, cloned, optimizer_tensors, read, restore_optimizer, save
from selfnorm.train.folder import RunFolder
from selfnorm.train.step import EagerStep, Step, adam, diagnosis, learning_rate_at, steps_taken
from selfnorm.train.stopping import DivergedError, StoppedError, StopRequests

OnDivergence = Literal["stop", "rollback"]
Report = Callable[[dict[str, Any]], None]
MAX_ROLLBACKS = 3


@dataclass
class Progress:
    """Where a run stands: everything the loop remembers from one step to the next, beside tensors."""

    step: int = 0  # steps taken
    validated: int = 0  # the step of the last validation
    best_nll: float | None = None  # exact, on the validation part
    best_step: int = 0
    stale: int = 0  # validations since the best
    worse: int = 0  # validations in a row that were far above the best
    rollbacks: int = 0
    log_length: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains a recipe's flow on a data set, exactly repeatable from its seed, stoppable and resumable at any step.

    folder:  where to keep checkpoints and metrics; without one everything stays in memory.
    report:  is given each record of the run: kind "epoch", "validation", "rollback", and, often but unsaved, "step".
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        *,
        device: torch.device | str = "cpu",
        folder: RunFolder | None = None,
        report: Report | None = None,
        on_divergence: OnDivergence = "stop",
        save_every: float = 30.0,
    ) -> None:
        self.recipe, self.dataset, self.folder = recipe, dataset, folder
        self.device = torch.device(device)
        self._report = report or (lambda record: None)
        self._on_divergence, self._save_every = on_divergence, save_every
        self.train = Examples(dataset.train, dataset.levels, self.device)
        self.validation = Examples(dataset.validation, dataset.levels, self.device)
        self.batches = TrainingBatches(self.train, recipe.batch_size, recipe.seed, recipe.flip, recipe.jitter)
        self.total = self.batches.steps_per_epoch * recipe.epochs
        self.loss = build_loss(recipe, build_flow(recipe, dataset.shape, dataset.levels)).to(self.device)
        self._names = [name for name, _ in self.loss.named_parameters()]
        self.optimizer = adam(self.loss)
        self.progress = Progress()
        self._start_sums()
        self._step: Step = self._make_step()
        self._saved_at, self._told_at = time.monotonic(), 0.0
        self._best: Checkpoint | None = None  # of the best validation, if it was in this process
        self._good: Checkpoint | None = None  # of the last validation that was not far above the best

    @property
    def flow(self) -> Flow:
        """The flow as it is now."""
        return self.loss.flow

    @property
    def epoch(self) -> int:
        """Whole epochs so far."""
        return self.progress.step // self.batches.steps_per_epoch

    def start(self) -> None:
        """Data-dependent initialisation; instead of `resume`."""
        with threads(self.recipe.threads):
            self.flow.initialize(self.train.spread(self.recipe.init_examples or self.recipe.batch_size, self.recipe.seed))
        self._best = self._good = self._capture()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        self._restore(checkpoint)
        if self.folder:
            self.folder.rewind_log(self.progress.log_length)

    def run(self) -> Checkpoint:
        """Train to the end, or to the stop that the recipe's patience asks for; the best checkpoint.

        Raises `StoppedError` after SIGINT or SIGTERM, the run saved, and `DivergedError`.
        """
        with threads(self.recipe.threads), StopRequests() as stop:
            try:
                self._loop(stop)
            except StoppedError:
                self.save()
                raise
            except DivergedError:
                self._keep_good()
                raise
            finally:
                if self.folder:
                    self.folder.close_log()
            self.save()
            return self.best()

    def best(self) -> Checkpoint:
        """The checkpoint of the best validation so far; before the first, of the start."""
        if self._best is None:
            assert self.folder is not None
            self._best = read(self.folder.best)
        return self._best

    def save(self) -> None:
        """Write both checkpoints, the best one first: `last` never knows of a best that is not on disk."""
        if self.folder:
            if self._best is not None:
                save(self.folder.best, self._best)
            save(self.folder.last, self._capture())
        self._saved_at = time.monotonic()

    def _loop(self, stop: StopRequests) -> None:
        recipe, progress = self.recipe, self.progress
        if self.folder and not self.folder.last.exists():
            self.save()
        while True:
            epoch, index = divmod(progress.step, self.batches.steps_per_epoch)
            due = epoch % recipe.validate_every == 0 or epoch == recipe.epochs
            if index == 0 and due and progress.validated != progress.step:
                self._validate(stop)
                continue
            if progress.step >= self.total or (recipe.patience and progress.stale >= recipe.patience):
                return
            started = time.monotonic()
            rate = learning_rate_at(
                progress.step,
                self.batches.steps_per_epoch,
                recipe.epochs,
                recipe.learning_rate,
                recipe.warmup_epochs,
                recipe.decay,
            )
            metrics = self._step(epoch, index, rate)
            self._surrogate += metrics.surrogate
            self._reconstruction += metrics.reconstruction
            progress.step += 1
            last = index == self.batches.steps_per_epoch - 1
            ended = time.monotonic()
            progress.seconds += ended - started
            saving = self.folder is not None and ended - self._saved_at > self._save_every
            # Reading the device makes it wait, so that is left for where it waits anyway.
            if (last or saving or self.device.type == "cpu") and self._step.failed:
                self._step_failed()
                continue
            if last:
                self._end_epoch(epoch + 1, rate)
            if ended - self._told_at > 0.2:
                self._told_at = ended
                self._report({"kind": "step", "step": progress.step, "total": self.total})
            if saving:
                self.save()
            stop.check()

    def _end_epoch(self, epoch: int, rate: float) -> None:
        steps = self.batches.steps_per_epoch
        self._log(
            {
                "kind": "epoch",
                "epoch": epoch,
                "step": self.progress.step,
                "loss": self._surrogate.item() / steps,
                "reconstruction": (self._reconstruction / steps).tolist(),
                "weight": self.loss.penalty.weight.tolist(),
                "learning_rate": rate,
                "seconds": self.progress.seconds,
            }
        )
        self._start_sums()

    def _validate(self, stop: StopRequests) -> None:
        recipe, progress = self.recipe, self.progress
        started = time.monotonic()
        try:
            found = likelihood(
                self.flow,
                self.validation,
                batch_size=recipe.eval_batch_size,
                seed=recipe.seed,
                watch=stop.check,
            )
        except ValueError as error:  # weights without an exact likelihood: singular, or not finite
            self._diverge(f"no exact likelihood at epoch {self.epoch}: {error}")
            return
        progress.validated = progress.step
        progress.seconds += time.monotonic() - started
        best = progress.best_nll
        if best is None or found.nll < best:
            progress.best_nll, progress.best_step = found.nll, progress.step
            progress.stale = progress.worse = 0
        else:
            progress.stale += 1
            progress.worse = progress.worse + 1 if found.nll > best + max(0.05 * abs(best), 5.0) else 0
        self._log(
            {
                "kind": "validation",
                "epoch": self.epoch,
                "step": progress.step,
                "nll": found.nll,
                "standard_error": found.standard_error,
                "bits_per_dim": found.bits_per_dim,
                "best": progress.best_nll,
                "seconds": progress.seconds,
            }
        )
        if progress.worse >= 2 and recipe.patience and self._overfits(stop):
            progress.stale = max(progress.stale, recipe.patience)  # it has waited long enough
        elif progress.worse >= 2:
            self._diverge(
                f"the exact validation NLL is {found.nll:.1f} nats at epoch {self.epoch}, and was {best:.1f} at epoch "
                f"{progress.best_step // self.batches.steps_per_epoch}"
            )
        elif progress.worse == 0:
            self._good = self._capture()
            if progress.stale == 0:
                self._best = self._good

    def _overfits(self, stop: StopRequests) -> bool:
        """Whether training examples, as many as validation has, became more likely since the best: then it is no divergence."""
        size, seed = self.recipe.eval_batch_size, self.recipe.seed
        some = Examples(self.dataset.train[: len(self.validation)], self.dataset.levels, self.device)
        then, now = (
            likelihood(flow, some, batch_size=size, seed=seed, watch=stop.check)
            for flow in (self.best().flow().to(self.device), self.flow)
        )
        return now.nll < then.nll

    def _step_failed(self) -> None:
        # No weight has changed since the step that failed, which is the one that Adam did not count.
        epoch, index = divmod(steps_taken(self.optimizer), self.batches.steps_per_epoch)
        where = diagnosis(self.loss, self.batches, epoch, index)
        self._diverge(f"a non-finite loss or gradient at epoch {epoch + 1}, step {index + 1}: {where}")

    def _diverge(self, reason: str) -> None:
        if self._on_divergence == "stop" or self.progress.rollbacks >= MAX_ROLLBACKS:
            raise DivergedError(
                f"{self.recipe.name} diverged: {reason}. Try a larger weight (λ is {self._weights()}), a gradient clip, a "
                "smaller learning_rate, or --on-divergence rollback"
                + (f" ({MAX_ROLLBACKS} rollbacks did not help)" if self.progress.rollbacks else "")
            )
        rollbacks, seconds, log_length = self.progress.rollbacks + 1, self.progress.seconds, self.progress.log_length
        raised = self.loss.penalty.weight.clone()
        self._restore(self.best())
        self.progress.rollbacks, self.progress.seconds, self.progress.log_length = rollbacks, seconds, log_length
        # Tenfold what just failed, not what the best checkpoint had: a second rollback must go further than the first.
        self.loss.penalty.weight.copy_(raised)
        self.loss.penalty.raise_weight(10.0)
        self._log(
            {
                "kind": "rollback",
                "epoch": self.epoch,
                "step": self.progress.step,
                "weight": self.loss.penalty.weight.tolist(),
                "reason": reason,
            }
        )

    def _weights(self) -> str:
        weights = self.loss.penalty.weight.tolist()
        return ", ".join(f"{weight:g}" for weight in sorted(set(weights))[:3]) or "not in use: no layer learns its inverse"

    def _log(self, record: dict[str, Any]) -> None:
        if self.folder:
            self.progress.log_length = self.folder.log(record)
        self._report(record)

    def _keep_good(self) -> None:
        if self.folder:
            if self._best is not None:
                save(self.folder.best, self._best)
            if self._good is not None:
                save(self.folder.last, self._good)

    def _start_sums(self) -> None:
        weight = self.loss.penalty.weight
        self._surrogate, self._reconstruction = weight.new_zeros(()), torch.zeros_like(weight)

    def _make_step(self) -> Step:
        return EagerStep(self.loss, self.optimizer, self.batches, self.recipe.clip)

    def _capture(self) -> Checkpoint:
        tensors = {f"loss.{name}": value for name, value in self.loss.state_dict().items()}
        tensors |= {f"adam.{name}": value for name, value in optimizer_tensors(self.optimizer, self._names).items()}
        tensors |= {"sums.surrogate": self._surrogate, "sums.reconstruction": self._reconstruction}
        data = self.dataset
        return Checkpoint(self.recipe, data.shape, data.levels, data.columns, cloned(tensors), asdict(self.progress))

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.loss.load_state_dict(checkpoint.part("loss."))
        restore_optimizer(self.optimizer, self._names, checkpoint.part("adam."))
        sums = checkpoint.part("sums.")
        self._surrogate = sums["surrogate"].to(self.device, copy=True)
        self._reconstruction = sums["reconstruction"].to(self.device, copy=True)
        try:
            self.progress.__dict__.update(Progress(**checkpoint.progress).__dict__)
        except TypeError as error:
            raise ValueError(f"checkpoint of {self.recipe.name}: expected the progress of a run, got another ({error})") from None
        self._step = self._make_step()


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """So many CPU threads, then as many as before; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

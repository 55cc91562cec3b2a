"""`Trainer`, the training loop: steps, exact validation, checkpoints, and rollbacks when training diverges."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from selfnorm.bijection import located
from selfnorm.data.batches import Examples, TrainingBatches
from selfnorm.data.dataset import Dataset, fingerprint
from selfnorm.data.resolution import from_origin, origin_of
from selfnorm.evaluate.likelihood import Likelihood, likelihood
from selfnorm.flow import Flow
from selfnorm.objective import Loss
from selfnorm.runtime.precision import precision
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.adam import make_adam, steps_taken
from selfnorm.train.build import build_flow, build_loss
from selfnorm.train.captured import CapturedStep, can_be_captured
from selfnorm.train.checkpoint import Checkpoint, KeptCheckpoints, detached_copies, optimizer_tensors, restore_optimizer
from selfnorm.train.counters import RunProgress
from selfnorm.train.divergence import advice, diagnosis
from selfnorm.train.folder import RunFolder
from selfnorm.train.profile import Piece, profile
from selfnorm.train.recipe import Recipe
from selfnorm.train.step import EagerStep, Step, learning_rate_at
from selfnorm.train.stopping import DivergedError, StoppedError, StopRequests
from selfnorm.train.watch import InverseWatch

Report = Callable[[dict[str, Any]], None]
MAX_ROLLBACKS = 3


class Trainer:
    """Trains a recipe's flow on a data set, exactly repeatable from its seed, stoppable and resumable at any step.

    folder:  where to keep checkpoints and metrics; without one everything stays in memory.
    report:  called with each record of the run, of kind "note", "epoch", "validation", "warning", "rollback", or "step", which
             is not logged.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        *,
        device: torch.device | str = "cpu",
        folder: RunFolder | None = None,
        report: Report | None = None,
        save_every: float = 30.0,
    ) -> None:
        self.recipe, self.dataset, self.folder = recipe, dataset, folder
        self.device = torch.device(device)
        self.report = report or (lambda record: None)
        self._save_every = save_every
        self.origin = origin_of(dataset.train)
        self.train = Examples(from_origin(dataset.train, self.origin), dataset.levels, self.device)
        self.validation = Examples(from_origin(dataset.validation, self.origin), dataset.levels, self.device)
        optimiser, data = recipe.optimiser, recipe.data
        self.batches = TrainingBatches(self.train, optimiser.batch_size, optimiser.seed, data.flip, data.jitter)
        self.total = self.batches.steps_per_epoch * optimiser.epochs
        self.loss = build_loss(recipe, build_flow(recipe, dataset.shape, dataset.levels)).to(self.device)
        self._fingerprint = fingerprint(dataset)
        self._trackers = self.flow.inverse_trackers()
        self._names = [name for name, _ in self.loss.named_parameters()]
        self.optimizer = make_adam(self.loss)
        self.progress = RunProgress()
        # Surrogate and reconstruction errors of each step of the current epoch.
        self._metrics = torch.zeros(self.batches.steps_per_epoch, 1 + len(self.flow.reconstruction_names), device=self.device)
        self._step: Step = self._make_step(self.loss, self.optimizer)
        self._clock = time.monotonic()
        self._reported_at = 0.0  # so that the first step is reported at once
        self._epoch_at: float | None = None  # when the epoch began; None for one that was resumed in its middle
        self._kept = KeptCheckpoints(folder)
        self._watch = InverseWatch(self.loss, self.train, recipe.evaluation.batch_size, optimiser.seed)

    @property
    def flow(self) -> Flow:
        """The flow with its current weights."""
        return self.loss.flow

    @property
    def epoch(self) -> int:
        """Whole epochs so far."""
        return self.progress.step // self.batches.steps_per_epoch

    def start(self) -> None:
        """Initialises data-dependent layers; call this or `resume` before `run`."""
        optimiser = self.recipe.optimiser
        with cpu_threads(optimiser.threads):
            self.flow.initialize(self.train.random_examples(optimiser.init_examples or optimiser.batch_size, optimiser.seed))
        self._kept.best = self._kept.good = self._make_checkpoint()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint of the same recipe."""
        self._restore(checkpoint)
        just_validated = self.progress.validated == self.progress.step and self.progress.worse == 0
        self._kept.good = checkpoint if just_validated else self.best()
        if self.folder:
            self.folder.rewind_log(self.progress.log_length)

    def run(self) -> Checkpoint:
        """Trains to the end, or until the recipe's patience runs out, and returns the best checkpoint.

        Raises `StoppedError` after SIGINT or SIGTERM, once the run is saved, and `DivergedError`.
        """
        with cpu_threads(self.recipe.optimiser.threads), precision(self.recipe.optimiser.precision), StopRequests() as stop:
            for _ in self.advance(stop):
                pass
        return self.best()

    def advance(self, stop: StopRequests) -> Iterator[None]:
        """Does the same as `run`, but yields after each call of the step, so that several runs can take turns."""
        self._clock = time.monotonic()
        try:
            try:
                yield from self._loop(stop)
            except StoppedError:
                self.save()
                raise
            self.save()
            stop.check()
        except DivergedError:
            assert self._kept.good is not None
            self._kept.write(self._kept.good)
            raise
        finally:
            if self.folder:
                self.folder.close_log()

    def judge(self) -> None:
        """Validates the current weights of a trainer without a folder, so that `best` takes them into account."""
        if self.progress.step != self.progress.validated:
            with cpu_threads(self.recipe.optimiser.threads), precision(self.recipe.optimiser.precision), StopRequests() as stop:
                self._validate(stop)

    def best(self) -> Checkpoint:
        """Returns the checkpoint of the best validation so far, or of the start before the first one."""
        return self._kept.best

    def save(self) -> None:
        """Writes checkpoints of the best and of the present state."""
        self._handle_flags()
        self._kept.write(self._make_checkpoint())

    def _loop(self, stop: StopRequests) -> Iterator[None]:
        recipe = self.recipe
        if self.folder and not self.folder.last.exists():
            self.save()  # before anything is logged: a folder with a log but no checkpoint would be neither new nor resumable
        if not self.progress.step and not self.progress.log_length:
            for note in self.dataset.notes:
                self._log("note", message=note)
        while True:
            progress = self.progress  # validations and rollbacks replace it
            epoch, index = divmod(progress.step, self.batches.steps_per_epoch)
            due = epoch % recipe.evaluation.validate_every == 0 or epoch == recipe.optimiser.epochs
            if index == 0 and due and progress.validated != progress.step:
                self._validate(stop)
                continue
            if progress.step >= self.total or (recipe.evaluation.patience and progress.stale >= recipe.evaluation.patience):
                return
            rates = [self._learning_rate(progress.step + ahead) for ahead in range(self._step.steps_per_call(index))]
            if index == 0:
                self._epoch_at = time.monotonic()
            try:
                metrics = self._step(epoch, index, *rates)
            except ValueError as error:  # from `after_step` of a layer or of the loss
                if progress.step == 0:
                    raise  # before any training, so not a divergence
                self._diverge(f"at epoch {epoch + 1}, step {index + 1}: {error}")
                continue
            self._metrics[index : index + len(rates), 0] = metrics.surrogate
            self._metrics[index : index + len(rates), 1:] = metrics.reconstruction
            progress.step += len(rates)
            last = index + len(rates) == self.batches.steps_per_epoch
            if last and epoch + 1 < recipe.optimiser.epochs:
                self.batches.order(epoch + 1)  # while the device is still busy
            # Reading flags makes a GPU wait, so it is done where the loop waits anyway.
            if (last or self.device.type == "cpu") and self._handle_flags():
                continue
            if last:
                self._end_epoch(epoch + 1, rates[-1])
            now = time.monotonic()
            if now - self._reported_at > 0.2:
                self._reported_at = now
                self.report({"kind": "step", "step": progress.step, "total": self.total})
            if self.folder and now - self._kept.written_at > self._save_every:
                self.save()
            stop.check()
            yield

    def _end_epoch(self, epoch: int, rate: float) -> None:
        steps = self.batches.steps_per_epoch
        # Of all steps at once, so that the result does not depend on the number of steps per call.
        surrogate, *reconstruction = self._metrics.double().mean(0).tolist()
        # After the reads above, which wait for the device.
        step_seconds = None if self._epoch_at is None else (time.monotonic() - self._epoch_at) / steps
        weight = self.loss.penalty.reconstruction_weight.tolist()
        self._log(
            "epoch",
            epoch=epoch,
            surrogate=surrogate,
            reconstruction=reconstruction,
            reconstruction_weight=weight,
            learning_rate=rate,
            step_seconds=step_seconds,
            **({"fallbacks": sum(int(tracker.fallbacks) for tracker in self._trackers.values())} if self._trackers else {}),
        )

    def _validate(self, stop: StopRequests) -> None:
        try:
            found = self._likelihood(self.flow, self.validation, stop)
            inverses = self._watch.measure(stop.check)
        except ValueError as error:  # weights without an exact likelihood: singular, or not finite
            self._diverge(f"no exact likelihood at epoch {self.epoch}: {error}")
            return
        after = replace(self.progress)
        after.judge(found.nll)
        patience = self.recipe.evaluation.patience
        if after.diverged and patience and self._overfits(stop):
            after.stale, after.worse = max(after.stale, patience), 0  # overfitting: stop early instead
        # No interruption from here on: a validation counts completely or not at all.
        self.progress = after
        self._log(
            "validation",
            epoch=self.epoch,
            nll=found.nll,
            standard_error=found.standard_error,
            bits_per_dim=found.bits_per_dim,
            best=self.progress.best_nll,
            **inverses.record(),
        )
        causes = inverses.causes()
        for kind in self.progress.warn(causes.keys(), inverses.recovered()):
            self._log("warning", epoch=self.epoch, message=causes[kind])
        if self.progress.diverged:
            best, then = self.progress.best_nll, self.progress.best_step // self.batches.steps_per_epoch
            epoch = self.epoch
            self._diverge(
                f"the exact validation NLL is {found.nll:.1f} nats at epoch {epoch}, and was {best:.1f} at epoch {then}"
            )
        elif self.progress.worse == 0:
            self._kept.good = self._make_checkpoint()
            if self.progress.stale == 0:
                self._kept.best = self._kept.good

    def _likelihood(self, flow: Flow, examples: Examples, stop: StopRequests) -> Likelihood:
        size, seed = self.recipe.evaluation.batch_size, self.recipe.optimiser.seed
        return likelihood(flow, examples, batch_size=size, seed=seed, watch=stop.check)

    def _overfits(self, stop: StopRequests) -> bool:
        """Returns whether training examples became more likely since the best: then the run overfits and did not diverge."""
        some = Examples(self.train.stored[: len(self.validation)], self.dataset.levels, self.device)
        then = self._likelihood(self.best().learned_flow().to(self.device), some, stop)
        return self._likelihood(self.flow, some, stop).nll < then.nll

    def _learning_rate(self, step: int) -> float:
        chosen, steps = self.recipe.optimiser, self.batches.steps_per_epoch
        return learning_rate_at(step, steps, chosen.epochs, chosen.learning_rate, chosen.warmup_epochs, chosen.decay)

    def _handle_flags(self) -> bool:
        """Reads the flags. If one is raised, handles its cause and continues from the first step that changed no weight."""
        if self._step.lost:  # first: later steps, which changed nothing, may have failed because of it
            reached, self.progress.step = self.progress.step, steps_taken(self.optimizer)
            try:
                for name, tracker in self._trackers.items():
                    with located(f"layer {name}"):
                        tracker.recompute_if_lost()
            except ValueError as error:  # W has no inverse
                epoch, index = divmod(self.progress.step - 1, self.batches.steps_per_epoch)
                self._diverge(f"at epoch {epoch + 1}, step {index + 1}: {error}")
                return True
            self._step.unfreeze()
            return self.progress.step != reached
        if self._step.failed:
            self._step_failed()
            return True
        return False

    def _step_failed(self) -> None:
        # Adam did not count the step that failed, and no later step has changed a weight.
        epoch, index = divmod(steps_taken(self.optimizer), self.batches.steps_per_epoch)
        where = diagnosis(self.loss, self.batches, epoch, index)
        self._diverge(f"a non-finite loss or gradient at epoch {epoch + 1}, step {index + 1}: {where}")

    def _diverge(self, reason: str) -> None:
        """Rolls back to the best checkpoint with ten times the λ, or raises `DivergedError` if that is not possible."""
        before, weight = self.progress, self.loss.penalty.reconstruction_weight.clone()
        if self.recipe.optimiser.on_divergence == "stop" or before.rollbacks >= MAX_ROLLBACKS or not (weight > 0).any():
            raise DivergedError(f"{self.recipe.name} diverged: {reason}. {advice(self.loss, before.rollbacks)}")
        self._restore(self.best())
        self.progress.rollbacks, self.progress.seconds = before.rollbacks + 1, before.seconds
        self.progress.warned = before.warned
        # Ten times the λ that failed, not that of the best checkpoint: each rollback must go further than the one before.
        self.loss.penalty.reconstruction_weight.copy_(weight)
        self.loss.penalty.raise_weight(10.0)
        raised = self.loss.penalty.reconstruction_weight.tolist()
        self._log("rollback", epoch=self.epoch, reconstruction_weight=raised, reason=reason)
        # At once, so that a kill cannot leave a `best` from after the rollback next to a `last` from before it.
        self._kept.good = self._make_checkpoint()
        self._kept.write(self._kept.good)

    def _log(self, kind: str, **facts: Any) -> None:
        now = time.monotonic()
        self.progress.seconds += now - self._clock
        self._clock = now
        record = {"kind": kind, "step": self.progress.step, **facts, "seconds": self.progress.seconds}
        if self.folder:
            self.progress.log_length = self.folder.log(record)
        self.report(record)

    def profile(self) -> list[Piece]:
        """Returns where a step's time goes, at the present weights; measured on a copy, so that the run is unchanged."""
        with cpu_threads(self.recipe.optimiser.threads), precision(self.recipe.optimiser.precision):
            loss = copy.deepcopy(self.loss)
            return profile(self._make_step(loss, make_adam(loss)))

    def _make_step(self, loss: Loss, optimizer: torch.optim.Adam) -> EagerStep | CapturedStep:
        kind = CapturedStep if self.recipe.optimiser.graphs and can_be_captured(loss, self.batches) else EagerStep
        return kind(loss, optimizer, self.batches, self.recipe.optimiser.clip)

    def _make_checkpoint(self) -> Checkpoint:
        tensors = {f"loss.{name}": value for name, value in self.loss.state_dict().items()}
        tensors |= {f"adam.{name}": value for name, value in optimizer_tensors(self.optimizer, self._names).items()}
        index = self.progress.step % self.batches.steps_per_epoch
        tensors |= {"epoch.metrics": self._metrics[:index]}
        tensors |= {} if self.origin is None else {"data.origin": self.origin}
        data = self.dataset
        own, progress = detached_copies(tensors), asdict(self.progress)
        return Checkpoint(self.recipe, data.shape, data.levels, data.columns, self._fingerprint, own, progress, table=data.table)

    def _restore(self, checkpoint: Checkpoint) -> None:
        try:
            progress = RunProgress(**checkpoint.progress)
            checkpoint.load_into(self.loss, "loss.")
            restore_optimizer(self.optimizer, self._names, checkpoint.part("adam."))
            known = checkpoint.part("epoch.").get("metrics", self._metrics[:0])  # older checkpoints had only their sums
            self._metrics[: len(known)] = known.to(self.device)
        except (TypeError, KeyError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.recipe.name}: expected a checkpoint of this recipe, got a different one ({error})") from None
        self.progress = progress
        self._epoch_at = None
        self._step = self._make_step(self.loss, self.optimizer)

"""Several runs at once in one process. On a GPU each has its own stream, so that small models fill a large card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress

import torch

from selfnorm.runtime.precision import precision
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train.loop import Trainer
from selfnorm.train.stopping import DivergedError, StoppedError, StopRequests


def run_together(trainers: Sequence[Trainer]) -> list[DivergedError | None]:
    """Trains all runs to completion; returns for each the error with which it diverged, or None.

    Each run gives the same result as on its own. The runs take turns after every step, or every few steps on a GPU, where the
    device works on all of them while the host launches more. Their recipes may differ in everything except threads and precision,
    which belong to the process. After SIGINT or SIGTERM all runs are saved and `StoppedError` is raised. Any other error in one
    run ends all of them; the others are saved if possible.
    """
    settings = {(trainer.recipe.optimiser.threads, trainer.recipe.optimiser.precision) for trainer in trainers}
    if len(settings) != 1:
        places = [each.folder.path if each.folder else each.recipe.name for each in trainers]
        optimisers = [each.recipe.optimiser for each in trainers]
        got = ", ".join(f"{each.threads} and {each.precision} in {at}" for each, at in zip(optimisers, places, strict=True))
        raise ValueError(
            f"expected runs trained together to have the same threads and precision, got {got}; train them one by one"
        )
    ((thread_count, rounding),) = settings
    diverged: list[DivergedError | None] = [None] * len(trainers)
    stopped: StoppedError | None = None
    with cpu_threads(thread_count), precision(rounding), StopRequests() as stop:
        streams = [_own_stream(trainer.device) for trainer in trainers]
        live = {index: trainer.advance(stop) for index, trainer in enumerate(trainers)}
        while live:
            for index, run in list(live.items()):
                try:
                    with streams[index]:
                        next(run)
                except StopIteration:
                    del live[index]
                except DivergedError as error:
                    diverged[index] = error
                    del live[index]
                except StoppedError as error:
                    stopped = error
                    del live[index]
                except Exception:
                    for other in live.keys() - {index}:
                        with suppress(Exception), streams[other]:
                            trainers[other].save()
                    raise
    if any(trainer.device.type == "cuda" for trainer in trainers):
        torch.cuda.synchronize()  # later work runs on another stream
    if stopped is not None:
        raise stopped
    return diverged


def _own_stream(device: torch.device) -> torch.cuda.StreamContext | nullcontext[None]:
    """Returns a context with a new stream, which first waits for the work that built the run on the current one."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)

"""Several runs at once in one process: on a GPU each on a stream of its own, so that small models fill a large card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress

import torch

from selfnorm.runtime.precision import precision
from selfnorm.train.loop import Trainer, threads
from selfnorm.train.stopping import DivergedError, StoppedError, StopRequests


def run_together(trainers: Sequence[Trainer]) -> list[DivergedError | None]:
    """Train all of them to their ends, in turns; for each, how it diverged, or None.

    They train as each would alone, but take turns after a step, or on a GPU a few: there the work of all of them is under way
    while the host asks for more. Their recipes may differ in anything but threads and precision, which belong to the process.
    Raises `StoppedError` after SIGINT or SIGTERM, when all runs are saved. What else goes wrong in one ends all of them, the
    others saved as far as that is possible.
    """
    settings = {(trainer.recipe.optimiser.threads, trainer.recipe.optimiser.precision) for trainer in trainers}
    if len(settings) != 1:
        places = [each.folder.path if each.folder else each.recipe.name for each in trainers]
        optimisers = [each.recipe.optimiser for each in trainers]
        got = ", ".join(f"{each.threads} and {each.precision} in {at}" for each, at in zip(optimisers, places, strict=True))
        raise ValueError(f"expected runs at once to have the same threads and precision, got {got}; train them one by one")
    ((thread_count, rounding),) = settings
    diverged: list[DivergedError | None] = [None] * len(trainers)
    stopped: StoppedError | None = None
    with threads(thread_count), precision(rounding), StopRequests() as stop:
        streams = [_stream(trainer.device) for trainer in trainers]
        live = {index: trainer.advance(stop) for index, trainer in enumerate(trainers)}
        while live:
            for index, course in list(live.items()):
                try:
                    with streams[index]:
                        next(course)
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
        torch.cuda.synchronize()  # what comes next is on another stream
    if stopped is not None:
        raise stopped
    return diverged


def _stream(device: torch.device) -> torch.cuda.StreamContext | nullcontext[None]:
    """A stream of its own, which waits for what built the run on the default one."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)

"""Messages about a divergence: where it began, and what to try."""

from __future__ import annotations

import torch

from selfnorm.data.batches import TrainingBatches
from selfnorm.objective import Loss


def diagnosis(loss: Loss, batches: TrainingBatches, epoch: int, index: int) -> str:
    """Says which layer was the first to give a non-finite number, at the present weights and on the batch of a step."""
    x = batches.batch(epoch, index)
    try:
        with torch.no_grad():
            loss.flow.log_prob(x)
    except ValueError as error:
        return str(error)
    value, metrics = loss(x, generator=batches.generator("probes", epoch, index))
    for name, error_ in zip(loss.flow.reconstruction_names, metrics.reconstruction.tolist(), strict=True):
        if not abs(error_) < float("inf"):
            return f"layer {name}: its reconstruction error is {error_}"
    loss.zero_grad(set_to_none=True)
    value.backward()
    sizes = {name: p.grad.abs().max().item() for name, p in loss.named_parameters() if p.grad is not None}
    loss.zero_grad(set_to_none=True)
    # The backward pass goes from the last layer to the first and carries a NaN along: the last one named is where it began.
    bad = [name for name, size in sizes.items() if not size < float("inf")]
    if bad:
        return f"{bad[-1]} is the first to get a non-finite gradient"
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"the loss is {value.item():.3g}; the largest gradient, {sizes[largest]:.3g}, is that of {largest}, and its square "
        "overflows"
    )


def advice(loss: Loss, rollbacks: int) -> str:
    """Returns advice after a divergence and this many rollbacks."""
    weights = sorted(set(loss.penalty.reconstruction_weight.tolist()))
    if not weights:
        return "Try a gradient clip or a smaller learning_rate; no layer learns its inverse, so a rollback has no λ to raise"
    now = ", ".join(f"{weight:g}" for weight in weights[:3])
    other_objective = "inverse_likelihood=false, " if loss.inverse_likelihood else ""
    return (
        f"Try {other_objective}a larger reconstruction_weight (λ is {now}), a gradient clip, a smaller "
        "learning_rate, or --on-divergence rollback" + (f" ({rollbacks} rollbacks did not help)" if rollbacks else "")
    )

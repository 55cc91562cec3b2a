"""Why a learned inverse is far off, or will be, and what to do about it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from selfnorm.flow import LARGEST_ERROR


class Cause(NamedTuple):
    """What is wrong with a learned inverse: its stability or its error, and one line that says so."""

    kind: Literal["stability", "error"]
    line: str


def cause_of_error(
    layer: str,
    error: float | None,
    ratio: float | None = None,
    inverse_likelihood: bool = False,
    reconstruction: tuple[float, float] | None = None,
) -> Cause | None:
    """Returns what is wrong with the learned inverse of a layer; None if nothing is.

    error:               ‖RW − I‖_F/√D.
    ratio:               its stability ratio, where `stability_ratios` knows it; for k×k kernels an estimate.
    inverse_likelihood:  whether the paper's objective trains it.
    reconstruction:      its mean squared errors per dimension on data and on white noise.
    """
    place = f"layer {layer}".strip()
    far_off = error is not None and not error <= LARGEST_ERROR  # true for NaN
    if ratio is not None and not ratio <= 1:
        return Cause(
            "stability",
            f"{place} {'has lost' if far_off else 'is predicted to lose'} its learned inverse: its stability ratio is "
            f"{ratio:.3g}, and the paper's objective is stable only below 1. Train with inverse_likelihood=false, or with a "
            "larger reconstruction_weight (docs/stability.md)",
        )
    if not far_off:
        return None
    where = ""
    if reconstruction is not None:
        data, noise = reconstruction
        where = ", in directions in which the data hardly varies" if 100 * data < noise else ", on the data as well"
    objective = "inverse_likelihood=false, " if inverse_likelihood else ""
    return Cause(
        "error",
        f"{place} has a learned inverse that is off by ‖RW − I‖/√D = {error:.2g}, above {LARGEST_ERROR}{where}. Train "
        f"with {objective}a larger reconstruction_weight or a smaller learning_rate; a k×k kernel may need a larger "
        "inverse_kernel_size. Samples by the default inverse remain correct, but take longer",
    )

"""Adam: checks, clips and applies gradients, and keeps the flags that decide whether weights may change.

A training step never waits for the device, so it cannot stop when a loss is not finite. Flags on the device do that instead. Each
is a float32 scalar, 0 or 1:

    failed         a step had a non-finite loss or gradient. From that step on no weight changes, except after a
                   `late_failure`.
    lost           a tracked inverse is too far off to give a gradient (`layers.tracked`). The steps after that change no weight,
                   until the loop has recomputed the lost inverses and calls `unfreeze`; they are then taken again.
    late_failure   an update found a non-finite gradient while it multiplied it (`kernels.dense.adam`). The other weights have
                   taken that step by then. The next update moves this flag to `failed`, and the step is not counted.
    frozen         max(failed, lost): the flag that the updates read.

The loop reads `failed` and `lost` when it waits for the device anyway. `step` counts the updates that changed weights.

On a GPU a dense layer's gradient arrives as factors (`runtime.collector`), and one kernel multiplies and applies it. All other
parameters take torch's fused Adam.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from selfnorm.kernels.dispatch import usable
from selfnorm.objective import Fixed, Loss, Metrics
from selfnorm.runtime.collector import AdamArguments, FactoredGradient, Moments
from selfnorm.runtime.streams import Branches, branching
from selfnorm.train.stopping import signals_wait

BETAS, EPS = (0.9, 0.999), 1e-8  # the paper's, and torch's


class UpdateFlags(NamedTuple):
    """The flags of this module's docstring, and the number of the update, float32 scalars on the device."""

    failed: Tensor
    late_failure: Tensor
    lost: Tensor
    frozen: Tensor
    step: Tensor


class Unchecked(NamedTuple):
    """A loss and gradients that have yet to be checked; None and () if there are none."""

    loss: Tensor | None
    gradients: Sequence[Tensor]


NOTHING_UNCHECKED = Unchecked(None, ())


def make_adam(loss: Loss) -> torch.optim.Adam:
    """Returns the paper's Adam, β = (0.9, 0.999), in torch's fused form; the learning rate is set at each step."""
    capturable = next(loss.parameters()).is_cuda
    # The first optimiser imports much of torch. An interrupt in between would leave modules that no later one can use.
    with signals_wait():
        return torch.optim.Adam(loss.parameters(), lr=0.0, betas=BETAS, eps=EPS, fused=True, capturable=capturable)


def moments_of(optimizer: torch.optim.Adam, parameter: Tensor) -> Moments:
    """Returns a parameter's moments and count of steps, made as Adam itself makes them if there are none yet."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    return Moments(state["exp_avg"], state["exp_avg_sq"], state["step"])


def steps_taken(optimizer: torch.optim.Adam) -> int:
    """Returns the number of updates that changed the weights, by Adam's own count."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def share_step_count(optimizer: torch.optim.Adam, parameters: Sequence[Tensor]) -> Tensor:
    """Returns one tensor that counts the steps of all parameters, since all of them take every step."""
    shared = torch.stack([moments_of(optimizer, parameter).step for parameter in parameters]).amax()
    for parameter in parameters:
        optimizer.state[parameter]["step"] = shared
    return shared


def check_eagerly(parameters: Sequence[nn.Parameter], loss: Tensor, clip: float | None, failed: Tensor) -> Tensor:
    """Clips the gradients, and returns `failed`, raised to 1 if the loss or the gradients' norm is not finite."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # nn.utils.get_total_norm without its grouping by device and dtype, which takes as long as the norm itself.
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if clip is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    return torch.where(norm + loss.abs() < torch.inf, failed, 1.0)  # false for NaN, too


def update_eagerly(optimizer: torch.optim.Adam, rate: float, failed: Tensor) -> None:
    """Takes one step of torch's own fused Adam; it changes nothing if `failed` is 1."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    # The switch of torch's gradient scaling: a fused step with found_inf = 1 leaves weights and moments as they are.
    optimizer.found_inf = failed  # type: ignore[attr-defined]
    optimizer.step()


def metrics_unless_frozen(loss: Loss, metrics: Metrics, frozen: Tensor) -> Metrics:
    """Returns the metrics for `loss.after_step`, with NaN for errors if the step changed no weight: multipliers then stay."""
    if type(loss.penalty) is Fixed:  # it has no multipliers
        return metrics
    return metrics._replace(reconstruction=torch.where(frozen > 0, torch.nan, metrics.reconstruction))


@torch.no_grad()
def update_from_factors(gradient: FactoredGradient, moments: Sequence[Moments], adam: AdamArguments) -> None:
    """Takes one step for the parameters of a factored gradient, in place: by one kernel if it fits, else in plain PyTorch."""
    matrices = [*gradient.parameters, *itertools.chain(*moments)]
    contiguous = all(matrix.is_contiguous() for matrix in matrices)
    if contiguous and usable(*matrices, *gradient.factors, adam.rate, adam.frozen, adam.late_failure):
        gradient.update_by_kernel(moments, adam)
        return
    for parameter, grad, state in zip(gradient.parameters, gradient.multiplied(), moments, strict=True):
        _update_plainly(parameter, grad, state, adam)


@torch.no_grad()
def _update_plainly(parameter: nn.Parameter, gradient: Tensor, moments: Moments, adam: AdamArguments) -> None:
    """Computes the kernels' update in plain PyTorch: the reference, used where the kernels do not fit."""
    average, square, step = moments
    squared = gradient.square()
    fine = squared + (parameter - parameter) < torch.inf  # false for NaN, too
    live = adam.frozen == 0
    changed = fine & live
    corrections = [1 - beta ** step.double() for beta in adam.betas]
    new_average = adam.betas[0] * average + (1 - adam.betas[0]) * gradient
    new_square = adam.betas[1] * square + (1 - adam.betas[1]) * squared
    denominator = new_square.sqrt() / corrections[1].sqrt() + adam.eps
    moved = parameter - (adam.rate / corrections[0]) * new_average / denominator
    for old, new in ((average, new_average), (square, new_square), (parameter, moved)):
        old.copy_(torch.where(changed, new, old))
    # A maximum in one operation: reading the flag and writing it back could undo what an update on another stream has raised.
    here = torch.zeros(1, dtype=torch.int64, device=adam.late_failure.device)
    adam.late_failure.view(1).scatter_reduce_(0, here, (~fine & live).any().to(adam.late_failure).view(1), "amax")


class GuardedAdam:
    """Adam's updates for captured steps: it checks gradients, keeps the flags and counts steps without waiting for the device.

    A step calls `check`, `begin` and `update`. After the last one, `begin(advance=False)` notices a failure in its update.
    """

    def __init__(self, optimizer: torch.optim.Adam, parameters: Sequence[nn.Parameter], clip: float | None) -> None:
        self.optimizer, self.parameters, self.clip = optimizer, parameters, clip
        zeros = parameters[0].detach().new_zeros
        count = share_step_count(optimizer, parameters)
        self.flags = UpdateFlags(failed=zeros(()), late_failure=zeros(()), lost=zeros(()), frozen=zeros(()), step=count)
        self._one = zeros(()) + 1

    def unfreeze(self) -> None:
        """Clears `lost` and `failed`: the steps that changed nothing are repeated, and raise `failed` if they fail again."""
        self.flags.lost.zero_()
        self.flags.failed.zero_()

    def raise_lost(self, residuals: Tensor, limits: Tensor) -> None:
        """Raises `lost` unless each residual is below its limit; a NaN raises it, too."""
        if usable(self.flags.lost):
            from selfnorm.kernels.dense.adam import raise_lost

            raise_lost(self.flags.lost, residuals, limits)
        else:
            within = (residuals < limits).all().to(self.flags.lost)
            self.flags.lost.copy_(torch.maximum(self.flags.lost, 1 - within))

    def check(self, loss: Tensor) -> Unchecked:
        """Clips the gradients, and raises `failed` if the loss or a gradient is not finite.

        Where the kernel of `begin` can check them without another launch, it returns them for `begin` instead.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.clip is None and usable(self.flags.failed, *gradients):
            from selfnorm.kernels.dense.adam import few_and_small

            if few_and_small(gradients):
                return Unchecked(loss, gradients)
        # Norms, because Adam cannot use a gradient whose square overflows either.
        checked = [torch.stack(torch._foreach_norm(gradients))] if gradients else []
        if self.clip is not None:
            checked = [torch.linalg.vector_norm(checked[0])]
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip, checked[0])
        # From torch's gradient scaling: one kernel checks everything (and multiplies by 1), and raises the flag.
        torch._amp_foreach_non_finite_check_and_unscale_([*checked, loss], self.flags.failed, self._one)
        return NOTHING_UNCHECKED

    def begin(self, unchecked: Unchecked = NOTHING_UNCHECKED, *, advance: bool = True) -> None:
        """Sets `frozen` and counts the update that follows; a failure inside the previous update is first noticed here.

        unchecked:  what `check` has left to this call.
        advance:    whether an update follows.
        """
        failed, late_failure, lost, frozen, step = self.flags
        if usable(failed):
            from selfnorm.kernels.dense.adam import begin_update

            begin_update(*self.flags, advance=advance, loss=unchecked.loss, gradients=unchecked.gradients)
            return
        step.sub_(late_failure * (1 - failed))
        failed.copy_(torch.maximum(failed, late_failure))
        late_failure.zero_()
        frozen.copy_(torch.maximum(failed, lost))
        if advance:
            step.add_(1 - frozen)

    def update(self, rate: Tensor, factored: Sequence[FactoredGradient], branches: Branches | None) -> None:
        """Updates all parameters once: those of factored gradients on branches, the others by torch's fused Adam."""
        arguments = AdamArguments(rate, self.flags.frozen, self.flags.late_failure, BETAS, EPS)
        with branching(branches) as step:
            for gradient in factored:
                with step.on_side_stream():
                    update_from_factors(gradient, [self._moments(parameter) for parameter in gradient.parameters], arguments)
            self._update_others(rate)
        self.optimizer.zero_grad(set_to_none=True)

    def _update_others(self, rate: Tensor) -> None:
        """Takes the optimiser's own step for all parameters with a gradient, without counting it."""
        updated = [(parameter, parameter.grad, *self._moments(parameter)) for parameter in self.parameters]
        updated = [each for each in updated if each[1] is not None]
        if not updated:
            return
        parameters, gradients, averages, squares, steps = zip(*updated, strict=True)
        torch._fused_adam_(
            parameters,
            gradients,
            averages,
            squares,
            [],
            steps,
            lr=rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=0.0,
            eps=EPS,
            amsgrad=False,
            maximize=False,
            found_inf=self.flags.frozen,
        )

    def _moments(self, parameter: nn.Parameter) -> Moments:
        return moments_of(self.optimizer, parameter)

"""`StoredInverse`: layers that store an R ≈ W⁻¹ next to W, whether R is learned or tracked."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfnorm.bijection import InversePlan, PlannedInverse
from selfnorm.layers.linear import LinearMap, drop_stored_inverse
from selfnorm.linalg.condition import is_copy
from selfnorm.linalg.factors import to_float64
from selfnorm.linalg.iterations import (
    count_refinements,
    default_tolerance,
    error_probes,
    refine,
    sampling_tolerance,
    white_noise,
)
from selfnorm.linalg.refined_solve import RefinedSolve, RefinedSolver
from selfnorm.runtime.autograd import in_full_precision, is_differentiated, is_transformed
from selfnorm.runtime.checks import describe
from selfnorm.runtime.context import current_step
from selfnorm.runtime.precision import full_float32


class _Planned(NamedTuple):
    """A plan, and the copies of W and R for which it was made."""

    plan: InversePlan
    copies: tuple[Tensor, Tensor]


class StoredInverse(LinearMap):
    """z = Wx + b with an approximate inverse R at hand: one product instead of a factorisation. Abstract.

    `auto_inverse` decides once for each set of weights, by a few products with white noise, how many steps of refinement R needs,
    or that it needs the exact inverse (`InversePlan`). Like the cache of exact factors, the plan is kept with copies of W and R,
    which are compared at each use, so that it is never stale.
    """

    weight_inv: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._planned: _Planned | None = None  # swapped as a whole, for threads

    def multiply_inverse(self, R: Tensor, z: Tensor) -> Tensor:
        """Returns Rz, for an R in the form of `weight_inv`."""
        raise NotImplementedError

    def apply_inverse(self, z: Tensor) -> Tensor:
        """Returns Rz, where R is `weight_inv`."""
        return self.multiply_inverse(self.weight_inv, z)

    def inverse_of(self, weight: Tensor) -> Tensor:
        """Returns the weight_inv for a weight, in the weight's precision; raises `SingularWeightError` if there is none."""
        raise NotImplementedError

    @in_full_precision
    def approx_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        self.check_input(z)
        return self.apply_inverse(z - self.broadcast_bias())

    @in_full_precision
    def refined_inverse(self, z: Tensor, *, context: Tensor | None = None, tolerance: float | None = None) -> Tensor:
        """Returns R(z − b), iterated to ‖z − f(x)‖ ≤ tolerance·‖z − b‖; exact, with a warning, if that does not converge."""
        self.check_input(z)
        tolerance = default_tolerance(z.dtype) if tolerance is None else tolerance
        x, residual = refine(self.apply_weight, self.apply_inverse, z - self.broadcast_bias(), tolerance)
        if residual <= tolerance:
            return x
        warnings.warn(
            f"{describe(self)}: refining the stored inverse stopped at a relative residual of {residual:.1e}, above the "
            f"tolerance {tolerance:.1e}: either R is too far from the inverse (the spectral radius of I − RW must be well below "
            f"1), or {z.dtype} resolves no more; using the exact inverse instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return self.inverse(z)[0]

    @in_full_precision
    def auto_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Returns x with ‖x − W⁻¹(z − b)‖ ≤ √eps·‖W⁻¹(z − b)‖ for every z: R(z − b), refined by a fixed number of steps if that
        reaches the tolerance in at most 32 of them, else the exact inverse.

        √eps is 3e-4 in float32 and 1.5e-8 in float64. The bound holds with probability 1 − 10⁻¹⁶ over the white noise that
        decides. Rounding comes on top: it moves f(x) by about eps·‖W‖·‖x‖, as much as storing x in this dtype does. The layers
        before this one may amplify its error, as they amplify a change of z. A change of the weights costs 16 products with W
        and R for each power of I − RW that the decision looks at, at least 8; other calls cost one comparison with the copies.

        Derivatives of any order are those of the exact inverse, to a similar tolerance; R has none. Under a transform of
        torch.func, or in forward mode, this is the exact inverse.
        """
        self.check_input(z)
        plan = None if is_transformed() else self._plan_for(z)
        if plan is None or plan.steps is None:
            return self.inverse(z)[0]
        target, R = z - self.broadcast_bias(), self.weight_inv.detach()
        solver = RefinedSolver(self.apply_weight, lambda z: self.multiply_inverse(R, z), plan.steps)
        with full_float32():  # TF32 is coarser than the tolerance
            if not is_differentiated(target, self.weight):
                return solver.solve(target, self.weight)
            x: Tensor = RefinedSolve.apply(target, self.weight, solver)
            return x

    @property
    def planned_inverse(self) -> PlannedInverse:
        return self

    @property
    def last_plan(self) -> InversePlan | None:
        """What the last `auto_inverse` did; None before the first one."""
        planned = self._planned
        return None if planned is None else planned.plan

    def planned_weights(self) -> tuple[Tensor, ...]:
        """Returns the copies of W and R for which `last_plan` was made."""
        planned = self._planned
        return () if planned is None else planned.copies

    @torch.no_grad()
    def plan_holds(self) -> Tensor:
        """Returns whether W and R still equal those copies, as a scalar on the device, without waiting for it."""
        pairs = zip(self.planned_weights(), (self.weight, self.weight_inv), strict=True)
        return torch.stack([(copy == value).all() for copy, value in pairs]).all()

    @torch.inference_mode(False)
    @torch.no_grad()
    def inverse_error(self) -> float | None:
        """Returns ‖RW − I‖_F/√D on examples of the shape that the layer saw last; None before the first batch.

        Exact up to 256 dimensions. In more, an estimate from 256 random vectors, fewer for large examples, with a relative
        standard error of 4 % (256 vectors) to 18 % (16).
        """
        if not self.example_shape:
            return None
        probes = error_probes(self._probed_shape(self.example_shape), self.weight)
        with full_float32(), torch.autocast(probes.device.type, enabled=False):
            error = self.apply_inverse(self.apply_weight(probes)) - probes
        return math.sqrt(float(error.square().mean()))

    @in_full_precision
    def reconstruction(self, h: Tensor) -> Tensor:
        """Returns ‖RWh − h‖², (N,), for any h: on white noise its mean estimates ‖RW − I‖²."""
        self.check_input(h)
        return (self.apply_inverse(self.apply_weight(h)) - h).square().flatten(1).sum(1)

    # The copies outlive the call, and a later one may overwrite them outside of inference mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _plan_for(self, z: Tensor) -> InversePlan:
        """Returns the plan for the present weights and examples like z: the last one, if it is still right, else a new one."""
        shape, trusts, last = self._probed_shape(tuple(z.shape[1:])), current_step().trusts_plans, self._planned
        if last is not None and last.plan.shape == shape:
            same = trusts or all(map(is_copy, last.copies, (self.weight, self.weight_inv)))
            if same and self._planned is last:  # else another thread has written other weights into the copies
                return last.plan
        elif trusts:
            raise RuntimeError(f"{describe(self)}: expected a plan for examples of shape {shape}, got {last and last.plan}")
        with full_float32():
            noise = white_noise(shape, self.weight)
            steps, error = count_refinements(self.apply_weight, self.apply_inverse, noise, sampling_tolerance(z.dtype))
        W, R = (None, None) if last is None else last.copies
        self._planned = None  # while the copies change
        made = _Planned(InversePlan(steps, error, shape), (_copied(self.weight, W), _copied(self.weight_inv, R)))
        self._planned = made
        return made.plan

    def _probed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the smallest shape of examples on which I − RW has the norms that it has on examples of the given shape."""
        taps = math.prod(self.weight.shape[2:] + self.weight_inv.shape[2:])
        return (shape[0], 1, 1) if len(shape) == 3 and taps == 1 else shape  # 1×1 kernels treat all pixels alike

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if "fallbacks" not in self._buffers and prefix + "fallbacks" in state_dict:
            drop_stored_inverse(state_dict, prefix)  # of a tracked twin, whose inverse may have a different shape
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.shape == self.weight.shape and prefix + "weight_inv" not in state_dict:
            # The state of an exact twin.
            if not weight.is_meta and not torch.isfinite(weight).all():
                raise ValueError(f"{describe(self)}: expected finite weights to compute weight_inv from, got non-finite ones")
            state_dict[prefix + "weight_inv"] = self.inverse_of(to_float64(weight)).to(weight)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _copied(value: Tensor, memory: Tensor | None) -> Tensor:
    """Returns a copy, in the memory of an earlier one if it fits: a captured graph compares with that memory."""
    if memory is None or (memory.shape, memory.dtype, memory.device) != (value.shape, value.dtype, value.device):
        return value.detach().clone()
    return memory.copy_(value)

"""`Flow`: a density made of a bijection and a base distribution, to score, train and sample."""

from __future__ import annotations

import math
import warnings
import weakref
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from selfnorm.accurate import Compared, forward_accurately, inverse_accurately
from selfnorm.base import BaseDistribution, StandardNormal
from selfnorm.bijection import Bijection, Chain, InversePlan, InverseTracker, PlannedInverse, Surrogate
from selfnorm.linalg.iterations import MAX_REFINEMENTS
from selfnorm.linalg.wide import in_float64
from selfnorm.runtime.autograd import is_transformed, is_vectorised
from selfnorm.runtime.checks import describe, expect_finite, expect_float
from selfnorm.runtime.context import current_step
from selfnorm.runtime.marks import TensorMark, marks_of, unchanged
from selfnorm.runtime.modules import all_modules

Inverse = Literal["auto", "learned", "exact", "refined"]

# ‖RW − I‖_F/√D of a learned inverse above which `inverse="learned"` warns. Samples are then off by about a tenth in each layer.
LARGEST_ERROR = 0.1


class InaccurateInverseWarning(RuntimeWarning):
    """Issued when samples by the learned inverse do not follow the density, because the learned inverse is too far off."""


class Flow(nn.Module):
    """A density over x: z = bijection(x) follows the base distribution, N(0, I) unless another is given.

    base: a module with `log_prob(z) -> (N,)` and `sample(n, generator=None) -> z`.

    >>> from selfnorm import Chain, SelfNormLinear, SmoothLeakyReLU
    >>> flow = Flow(Chain(SelfNormLinear(2), SmoothLeakyReLU(), SelfNormLinear(2)))
    >>> x = torch.randn(8, 2)
    >>> flow.log_prob(x).shape, flow.sample(3).shape
    (torch.Size([8]), torch.Size([3, 2]))
    """

    _last_inverse: Inverse | None = None  # of the last call of `decode`
    _compared: Compared | None = None  # how far float32 suffices for these weights

    def __init__(self, bijection: Bijection, base: nn.Module | BaseDistribution | None = None) -> None:
        super().__init__()
        if not isinstance(bijection, Bijection):
            raise ValueError(f"Flow: expected a Bijection, got {type(bijection).__name__}")
        self.bijection = bijection
        made = StandardNormal() if base is None else base
        if not isinstance(made, nn.Module) or not all(hasattr(made, name) for name in ("log_prob", "sample")):
            raise ValueError(
                f"Flow: expected base to be a module with log_prob(z) and sample(n, generator=None), got {type(base).__name__}"
            )
        self.base = cast(BaseDistribution, made)

    @property
    def reconstruction_names(self) -> tuple[str, ...]:
        """The path in `bijection` of the layer behind each column of `surrogate(x).reconstruction`."""
        return self.bijection.reconstruction_names

    @property
    def surrogate_is_exact(self) -> bool:
        """Whether `surrogate(x).log_det` is log p(x), as it is if every layer trains by its exact log-determinant."""
        return all(layer.surrogate_is_exact for layer in self._layers().values())

    @property
    def draws_after_step(self) -> bool:
        """Whether a layer draws random numbers in `after_step`."""
        return any(layer.draws_after_step for layer in self._layers().values())

    def inverse_trackers(self) -> dict[str, InverseTracker]:
        """Returns the layers that update a stored inverse after each step, by their path in `bijection`."""
        trackers = {name: layer.inverse_tracker for name, layer in self._layers().items()}
        return {name: tracker for name, tracker in trackers.items() if tracker is not None}

    def planned_inverses(self) -> dict[str, PlannedInverse]:
        """Returns the layers that store an inverse, by their path in `bijection`."""
        layers = {name: layer.planned_inverse for name, layer in self._layers().items()}
        return {name: layer for name, layer in layers.items() if layer is not None}

    @property
    def inverse_used(self) -> str:
        """What the last `decode`, `sample` or `sample_and_log_prob` computed x by, in words; empty before the first one.

        For "auto" this tells the layers that used the learned inverse, and in how many steps, from those that used the exact one.
        """
        if not self._last_inverse:
            return ""
        layers = self.planned_inverses()
        if not layers or self._last_inverse == "exact":
            return "exact inverse"
        stored = "learned" if self.reconstruction_names else "tracked"
        if self._last_inverse == "auto":
            return _in_words({name: layer.last_plan for name, layer in layers.items()}, stored)
        return f"{stored} inverse" + (", refined, or the exact one where that failed" if self._last_inverse == "refined" else "")

    def log_prob(self, x: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Returns log p(x), (N,): exact. Linear layers factorise their weight once; further batches cost no factorisation.

        Up to condition numbers of 1e8 in each layer, the error is below 1e-3 nats a dimension before the result is rounded to
        x's dtype, in float32 too: where float32 would not do, the whole flow is evaluated in float64. A warning says so if a
        layer is above that, or if even float64 does not resolve the chain, once for each set of weights. Under transforms of
        torch.func and in forward mode, where there are no numbers to judge by, float32 is always evaluated in float64,
        without such warnings, and under vmap no value is checked.
        """
        z, log_det = self._encode("log_prob", x, context)
        log_prob = (self._base_log_prob(z, wide=z.dtype != x.dtype) + log_det).to(x)
        if not is_vectorised() and torch.isnan(log_prob).any():
            raise ValueError(f"Flow.log_prob: expected numbers, got NaN from the base distribution {type(self.base).__name__}")
        return log_prob

    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        """Returns the training surrogate: `log_det` includes the base's log-density. It is made to be differentiated and is not a
        likelihood.

        loss = −log_det.mean() + λ·reconstruction.sum(1).mean()
        """
        self.expect_context("surrogate", context)
        expect_float("Flow.surrogate", x)
        step = current_step()
        z, log_det, reconstruction = step.surrogate_of(self.bijection, x, context)
        step.join()
        return Surrogate(z, self._base_log_prob(z) + log_det, reconstruction)

    def split_preprocessing(self) -> tuple[Chain, Flow]:
        """Returns the leading layers without parameters, and a flow of the rest; both share their layers with this flow.

        Training can preprocess many batches at once: `rest.surrogate(preprocessing(x))` is this flow's surrogate of x without the
        log-determinant of the preprocessing.
        """
        if not isinstance(self.bijection, Chain):
            return Chain(), self
        trained = [next(layer.parameters(), None) is not None for layer in self.bijection]
        preprocessing = trained.index(True) if True in trained else len(trained)
        return Chain(*list(self.bijection)[:preprocessing]), Flow(Chain(*list(self.bijection)[preprocessing:]), self.base)

    def encode(self, x: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Maps x → z, exactly."""
        return self._encode("encode", x, context)[0].to(x)

    def decode(self, z: Tensor, inverse: Inverse = "auto", *, context: Tensor | None = None) -> Tensor:
        """Maps z → x. `inverse` says how, in layers with a learned inverse R of their weight W; other layers are exact.

        auto:     R, refined by as many steps as a relative error of √eps takes (3e-4 in float32), where refining converges; the
                  exact inverse elsewhere. Rounding adds about eps·cond(W). Decided once for each set of weights, by a few
                  products with white noise.
        learned:  R alone, one product: the fastest, and as accurate as R, also in its derivatives. Warns with an
                  `InaccurateInverseWarning` if ‖RW − I‖_F/√D is above 0.1 in a layer, once for each set of weights (see
                  `check_learned_inverses`).
        exact:    a factorisation of W for each set of weights, kept in eval mode; the whole flow in float64 where the layers'
                  condition numbers ask for it. Each call warns of a condition number above 1e8 in float32.
        refined:  R, refined until the residual of each z is below a tolerance; exact with a warning where that does not converge.

        `inverse_used` tells afterwards what "auto" did.
        """
        if inverse not in get_args(Inverse):
            raise ValueError(f"Flow.decode: expected inverse to be one of {', '.join(get_args(Inverse))}, got {inverse!r}")
        self.expect_context("decode", context)
        expect_float("Flow.decode", z)
        if inverse != self._last_inverse:  # a module takes long to set an attribute
            self._last_inverse = inverse
        if inverse == "auto":
            x = self.bijection.auto_inverse(z, context=context)
        elif inverse == "learned":
            x = self.bijection.approx_inverse(z, context=context)
            self.check_learned_inverses()
        elif inverse == "refined":
            x = self.bijection.refined_inverse(z, context=context)
        else:
            x = inverse_accurately("Flow.decode", self.bijection, z, context)
        expect_finite(f"Flow.decode(inverse={inverse!r})", "result", x, self._non_finite_parameters)
        return x

    def check_learned_inverses(self) -> None:
        """Warns if ‖RW − I‖_F/√D is above 0.1 in a layer that has seen a batch, once for each set of weights and shape.

        A write through `.data` may go unnoticed (see `TensorMark`); `auto` compares all values. Under a transform of torch.func
        nothing is checked.
        """
        if is_transformed():
            return
        # Not `planned_inverses`, which takes several times as long (`all_modules`): this runs at every call.
        planned = [layer.planned_inverse for layer in all_modules(self.bijection) if isinstance(layer, Bijection)]
        weights = [value for layer in planned if layer for value in (layer.weight, layer.weight_inv)]
        shapes = [layer.example_shape for layer in planned if layer]  # the error of a k×k kernel depends on the size of the image
        marks, measured_shapes = _MEASURED.get(self, ([], []))
        if shapes == measured_shapes and unchanged(weights, marks):
            return
        _MEASURED[self] = marks_of(weights), shapes
        layers = self.planned_inverses()
        errors = {name: layer.inverse_error() for name, layer in layers.items()}
        far = {name: error for name, error in errors.items() if error is not None and not error <= LARGEST_ERROR}
        if far:
            worst = max(far, key=lambda name: math.inf if math.isnan(far[name]) else far[name])
            others = f" (and {len(far) - 1} more layer{'s' * (len(far) > 2)})" if len(far) > 1 else ""
            place = f"layer {worst}, " if worst else ""
            remedy = (
                "train with `Loss`, which also trains R"
                if self.reconstruction_names
                else "call `after_step` after each optimiser step, which updates R"
            )
            warnings.warn(
                f"Flow.decode(inverse='learned'): {place}{describe(layers[worst])}{others}: expected a learned inverse with "
                f"‖RW − I‖/√D of at most {LARGEST_ERROR}, got {far[worst]:.2g}; these samples do not follow the density. Use "
                f"inverse='auto', or {remedy}",
                InaccurateInverseWarning,
                stacklevel=3,
            )

    @torch.no_grad()
    def sample(
        self,
        n: int,
        inverse: Inverse = "auto",
        generator: torch.Generator | None = None,
        *,
        context: Tensor | None = None,
    ) -> Tensor:
        """Returns n draws of x, without gradient: from p(x) by default, see `decode`.

        "learned" is the cheapest, and only as accurate as the learned inverse. `inverse_used` tells afterwards what "auto" did.
        """
        self.expect_context("sample", context)
        return self.decode(self._draw(n, generator), inverse, context=context)

    def sample_and_log_prob(
        self,
        n: int,
        inverse: Inverse = "auto",
        generator: torch.Generator | None = None,
        *,
        context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns n draws of x and the exact log p(x) of each, (n,), for any kind of inverse; see `decode`. Differentiable."""
        self.expect_context("sample_and_log_prob", context)
        x = self.decode(self._draw(n, generator), inverse, context=context)
        return x, self.log_prob(x, context=context)

    def initialize(self, x: Tensor, *, context: Tensor | None = None) -> None:
        """Initialises layers from a first batch of data (`ActNorm`); call it once, before the first step."""
        self.expect_context("initialize", context)
        expect_float("Flow.initialize", x)
        expect_finite("Flow.initialize", "input", x)
        self.bijection.initialize(x, context=context)

    def after_step(self, *, generator: torch.Generator | None = None) -> None:
        """Runs the layers' hooks; call it after each optimiser step. `generator` is for layers that draw random numbers."""
        self.bijection.after_step(generator=generator)

    def expect_context(self, method: str, context: Tensor | None) -> None:
        """Raises ValueError for a context that no layer would use."""
        if context is not None and not self.bijection.takes_context:
            raise ValueError(
                f"Flow.{method}: expected no context, since no layer of this flow ({_in_short(self.bijection)}) takes one, "
                "got one; leave it out, or build a layer for it, such as AffineCoupling(…, context_channels=…)"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local: dict[str, Any], *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local, *args)
        given = next((value for value in state_dict.values() if isinstance(value, Tensor) and value.is_floating_point()), None)
        if local.get("assign_to_params_buffers") and given is not None and isinstance(self.base, StandardNormal):
            self.base.leave_meta(given)  # the state dict holds nothing of it

    def _layers(self) -> dict[str, Bijection]:
        return {name: module for name, module in self.bijection.named_modules() if isinstance(module, Bijection)}

    def _draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        if n < 0:
            raise ValueError(f"Flow.sample: expected a number of samples of at least 0, got {n}")
        return self.base.sample(n, generator=generator)

    def _base_log_prob(self, z: Tensor, wide: bool = False) -> Tensor:
        # A StandardNormal has no numbers, and remembers the shape of z.
        base = in_float64(self.base) if wide and type(self.base) is not StandardNormal else self.base  # type: ignore[type-var]
        log_prob = base.log_prob(z)
        if log_prob.shape != z.shape[:1]:
            raise ValueError(
                f"Flow: expected {type(self.base).__name__}.log_prob(z) to give one number for each example, shape "
                f"{tuple(z.shape[:1])}, got {tuple(log_prob.shape)}"
            )
        return log_prob

    def _non_finite_parameters(self) -> str:
        names = [name for name, value in self.named_parameters() if not torch.isfinite(value).all()]
        return f"; non-finite parameters: {', '.join(names)}" if names else ""

    def _encode(self, method: str, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns z and log|det ∂z/∂x|, in float64 where float32 is not enough."""
        self.expect_context(method, context)
        expect_float(f"Flow.{method}", x)
        expect_finite(f"Flow.{method}", "input", x)
        last = self._compared

        def log_base(z: Tensor) -> Tensor:
            return self._base_log_prob(z, wide=z.dtype != x.dtype)

        z, log_det, compared = forward_accurately(
            f"Flow.{method}", self.bijection, x, context, last, None if type(self.base) is StandardNormal else log_base
        )
        if compared is not last:
            self._compared = compared
        expect_finite(f"Flow.{method}", "latent", z, self._non_finite_parameters)
        expect_finite(f"Flow.{method}", "log-determinant", log_det, self._non_finite_parameters)
        return z, log_det


def _in_short(bijection: Bijection) -> str:
    """Returns the names of a flow's layers, of a long chain the first five."""
    names = [type(layer).__name__ for layer in bijection] if isinstance(bijection, Chain) else [type(bijection).__name__]
    return ", ".join(names[:5]) + (f", … {len(names)} in all" if len(names) > 5 else "")


def _in_words(plans: dict[str, InversePlan | None], stored: str) -> str:
    """Returns what `auto_inverse` does by these plans, by layer; layers without a plan are not used.

    stored: how the stored inverses came about, "learned" or "tracked".
    """
    known = {name: plan for name, plan in plans.items() if plan is not None}
    steps = [plan.steps for plan in known.values() if plan.steps is not None]
    exact = {name: plan.error for name, plan in known.items() if plan.steps is None}
    if not known:
        return "exact inverse"
    parts = []
    if steps:
        span = f"{steps[0]}" if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}"
        times = f"refined by {span} step{'s' * (span != '1')}" if any(steps) else "as it is"
        parts.append(f"{stored} inverse, {times}, in {_counted(len(steps))}")
    if exact:
        listed = [f"{error:.2g}" + f" in layer {name}" * bool(name) for name, error in list(exact.items())[:3]]
        more = f" and {len(exact) - len(listed)} more" if len(exact) > len(listed) else ""
        parts.append(
            f"exact inverse in {_counted(len(exact))}, where {MAX_REFINEMENTS} steps do not refine the {stored} one to the "
            f"tolerance: ‖RW − I‖/√D ≈ {', '.join(listed)}{more}"
        )
    return "; ".join(parts)


def _counted(layers: int) -> str:
    return f"{layers} layer{'s' * (layers != 1)}"


# The weights whose learned inverses each flow has measured last, and the shapes of examples on which it did. Not an attribute,
# which copies and pickles would include.
_MEASURED: weakref.WeakKeyDictionary[Flow, tuple[list[TensorMark], list[tuple[int, ...]]]] = weakref.WeakKeyDictionary()

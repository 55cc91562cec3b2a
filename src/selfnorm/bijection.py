"""`Bijection`, the contract of every layer, and `Chain`, which composes layers under the same contract."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from selfnorm.runtime.checks import expect_finite, sums_are_finite
from selfnorm.runtime.context import current_step


class Surrogate(NamedTuple):
    """A layer's result for training, whose gradient is that of the layer's method.

    z:               the layer's output.
    log_det:         (N,) its *gradient* is the method's estimate of the log-determinant's gradient. Its value is not a
                     likelihood; a self-normalizing layer returns zeros.
    reconstruction:  (N, K) squared error ‖g(f(h)) − h‖² of each of the K self-normalizing layers inside.
    """

    z: Tensor
    log_det: Tensor
    reconstruction: Tensor

    @classmethod
    def exact(cls, z: Tensor, log_det: Tensor) -> Surrogate:
        """Returns the surrogate of a layer that has nothing to reconstruct: K = 0."""
        return cls(z, log_det, z.new_zeros(z.shape[0], 0))


class InverseTracker(Protocol):
    """Interface, for the training loop, of a layer whose inverse R is updated after each step; see `layers.tracked`.

    residual:            ‖I − RW‖ as measured by the last `after_step`, a scalar on the device.
    largest_residual:    the residual at which R counts as lost.
    fallbacks:           how often R had to be factorised again.
    reads_inverse_late:  whether a training step reads R only in its update, so that R may be updated during the
                         next forward and backward pass.
    """

    weight_inv: Tensor
    residual: Tensor
    fallbacks: Tensor

    @property
    def largest_residual(self) -> float: ...

    @property
    def reads_inverse_late(self) -> bool: ...

    def write_residual_to(self, entry: Tensor) -> None:
        """Stores `residual` in the scalar `entry` from now on, so that one tensor can hold those of several layers."""
        ...

    def track(self, *, generator: torch.Generator | None = None) -> None:
        """Updates R for the new W, without waiting for the device."""
        ...

    def recompute_if_lost(self) -> None:
        """Factorises W if R is lost; waits for the device."""
        ...


class InversePlan(NamedTuple):
    """How `auto_inverse` of a layer with a stored inverse R ≈ W⁻¹ computes x = W⁻¹z.

    steps:  the number of steps x ← x + R(z − Wx) after x = Rz; None for the exact inverse, where R is too far off for that.
    error:  ‖RW − I‖_F/√D, estimated by white noise.
    shape:  the shape of the examples that the plan was made for.
    """

    steps: int | None
    error: float
    shape: tuple[int, ...]


class PlannedInverse(Protocol):
    """Interface, for sampling, of a layer that stores an inverse R of its weight W; see `layers.stored_inverse`."""

    weight: Tensor
    weight_inv: Tensor
    example_shape: tuple[int, ...]

    def extra_repr(self) -> str: ...

    @property
    def last_plan(self) -> InversePlan | None:
        """What the last `auto_inverse` did; None before the first one."""
        ...

    def planned_weights(self) -> tuple[Tensor, ...]:
        """Returns the copies of W and R for which `last_plan` was made."""
        ...

    def plan_holds(self) -> Tensor:
        """Returns whether W and R still equal those copies, as a scalar on the device, without waiting for it."""
        ...

    def inverse_error(self) -> float | None:
        """Returns ‖RW − I‖_F/√D on examples of the shape that the layer saw last, in many dimensions an estimate; None before the
        first batch."""
        ...


class Bijection(nn.Module):
    """An invertible map x → z of examples, batch first. Data → latent is `forward`, everywhere.

    To write your own layer, define two methods. Both are exact and take any batch size, zero included:

        forward(x, *, context=None) -> z, log_det    log_det = log|det ∂z/∂x|, shape (N,)
        inverse(z, *, context=None) -> x, log_det    log_det = log|det ∂x/∂z|, the negative of the above

    Everything else follows from these two. Override it only where the layer has something better:

        surrogate(x)        what training calls. It must never wait for the device: no `.item()`, no check of values, so that a
                            whole training step can be captured as one graph. If `forward` checks values, override this.
        approx_inverse(z)   a cheaper, learned inverse
        refined_inverse(z)  that inverse, iterated until it is exact to a tolerance
        auto_inverse(z)     the cheapest inverse that is exact to a tolerance; what samples use unless told otherwise
        initialize(x)       data-dependent initialisation; called once, before the first step
        after_step()        called by the training loop after each optimiser step; random numbers come from the generator that
                            it is given (set `draws_after_step` if it draws any)
        reconstruction_names  define it if the surrogate returns reconstruction errors; `Loss` then needs `example_shape`, and
                            with probes all of `linalg.learned.LearnedInverse`. Also set `surrogate_is_exact = False`.
        inverse_tracker     return the layer itself if `after_step` updates a stored inverse
        takes_context       set it to False if the layer ignores `context`, so that a flow of such layers refuses one
        planned_inverse     return the layer itself if `auto_inverse` decides how to use a stored inverse
        notes_rounding      set it to True if `forward` reports how much it can amplify rounding errors (see
                            `runtime/rounding.py`), or amplifies none; `inverse` has to report matrices only. `Flow.log_prob`
                            in float32 then has less to compare

    Layers inside a layer are called as `layer(x)`, so that hooks see them.

    Keep all state in parameters and buffers, hard-code neither device nor dtype, and raise a `ValueError` that says who
    expected what, and what it got. `context` conditions the layers that are built for one; the others ignore it. Add the layer
    to the registry in `tests/support/registry.py`, and it is tested like every other.
    """

    # Whether `surrogate` returns the exact z and log_det. If that holds for all layers, the training loss is a likelihood.
    surrogate_is_exact = True
    # Whether `after_step` draws random numbers.
    draws_after_step = False
    # Whether the layer, or one inside it, uses `context`. Assumed of layers that do not say otherwise.
    takes_context: bool = True
    # Whether the layer tells how much it can amplify rounding errors. Nothing is assumed of layers that do not say so.
    notes_rounding = False

    @property
    def inverse_tracker(self) -> InverseTracker | None:
        """This layer as an `InverseTracker`, if it updates a stored inverse after each step; otherwise None."""
        return None

    @property
    def planned_inverse(self) -> PlannedInverse | None:
        """This layer as a `PlannedInverse`, if it stores an inverse; otherwise None."""
        return None

    @property
    def reconstruction_names(self) -> tuple[str, ...]:
        """The path of the layer behind each column of `Surrogate.reconstruction`: `bijection.get_submodule(name)`."""
        return ()

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps x → z, log|det ∂z/∂x| (N,), both exact."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(x, *, context=None) -> z, log_det")

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps z → x, log|det ∂x/∂z| (N,), both exact."""
        raise NotImplementedError(f"{type(self).__name__} must define inverse(z, *, context=None) -> x, log_det")

    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        """Maps x → `Surrogate`; by default the exact z and log_det, and nothing to reconstruct."""
        z, log_det = self.forward(x, context=context)
        return Surrogate.exact(z, log_det)

    def approx_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Maps z → x by the learned inverse where there is one, else exactly."""
        return self.inverse(z, context=context)[0]

    def refined_inverse(self, z: Tensor, *, context: Tensor | None = None, tolerance: float | None = None) -> Tensor:
        """Maps z → x by the learned inverse, iterated until ‖z − f(x)‖ ≤ tolerance·‖z‖ in each layer."""
        return self.inverse(z, context=context)[0]

    def auto_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Maps z → x, exact to a tolerance: by the learned inverse where refining it converges, else by the exact one."""
        return self.inverse(z, context=context)[0]

    def initialize(self, x: Tensor, *, context: Tensor | None = None) -> None:
        """Sets data-dependent state from a first batch; a layer that has been initialised keeps its state."""

    def after_step(self, *, generator: torch.Generator | None = None) -> None:
        """Hook that runs after each optimiser step.

        It may wait for the device, except while a CUDA graph is captured: replays repeat what it does on the device, and nothing
        else.

        generator: on the layer's device, for random draws.
        """


class Chain(Bijection):
    """Layers one after another: f = f_K ∘ … ∘ f_1, log-dets added, reconstructions side by side.

    >>> from selfnorm import Chain, SelfNormLinear, SmoothLeakyReLU
    >>> chain = Chain(SelfNormLinear(4), SmoothLeakyReLU(), SelfNormLinear(4))
    >>> z, log_det = chain(torch.randn(8, 4))
    >>> z.shape, log_det.shape, chain.reconstruction_names
    (torch.Size([8, 4]), torch.Size([8]), ('0', '2'))
    """

    notes_rounding = True  # through its layers

    def __init__(self, *layers: Bijection) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            if not isinstance(layer, Bijection):
                raise ValueError(f"Chain: expected every layer to be a Bijection, got {type(layer).__name__} at {index}")
            self.add_module(str(index), layer)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Bijection]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, index: int | slice) -> Bijection:
        """Returns one layer, or a chain of a slice of them; both share their parameters with this chain."""
        return Chain(*list(self)[index]) if isinstance(index, slice) else list(self)[index]

    @property
    def takes_context(self) -> bool:  # type: ignore[override]
        return any(layer.takes_context for layer in self)

    @property
    def reconstruction_names(self) -> tuple[str, ...]:
        return joined_names((str(index), layer) for index, layer in enumerate(self))

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(x.shape[0])
        for index, layer in enumerate(self):
            with located(f"layer {index}"):
                x, log_det = layer(x, context=context)
                _check_finite(layer, "forward", x, log_det)
            total = total + log_det
        return x, total

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = z.new_zeros(z.shape[0])
        for index, layer in reversed(list(enumerate(self))):
            with located(f"layer {index}"):
                z, log_det = layer.inverse(z, context=context)
                _check_finite(layer, "inverse", z, log_det)
            total = total + log_det
        return z, total

    def surrogate(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        z, log_dets, reconstruction = self.surrogate_by_layer(x, context=context)
        return Surrogate(z, log_dets.sum(0), reconstruction)

    def surrogate_by_layer(self, x: Tensor, *, context: Tensor | None = None) -> Surrogate:
        """Returns the surrogate with a log_det for each layer, (L, N)."""
        step, log_dets, columns = current_step(), [], [x.new_zeros(x.shape[0], 0)]
        for index, layer in enumerate(self):
            with located(f"layer {index}"):
                x, log_det, reconstruction = step.surrogate_of(layer, x, context)
            log_dets.append(log_det)
            if reconstruction.shape[1]:
                columns.append(reconstruction)
        step.join()
        stacked = torch.stack(log_dets) if log_dets else x.new_zeros(0, x.shape[0])
        return Surrogate(x, stacked, torch.cat(columns, dim=1))

    def approx_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        for index, layer in reversed(list(enumerate(self))):
            with located(f"layer {index}"):
                z = layer.approx_inverse(z, context=context)
        return z

    def refined_inverse(self, z: Tensor, *, context: Tensor | None = None, tolerance: float | None = None) -> Tensor:
        for index, layer in reversed(list(enumerate(self))):
            with located(f"layer {index}"):
                z = layer.refined_inverse(z, context=context, tolerance=tolerance)
        return z

    def auto_inverse(self, z: Tensor, *, context: Tensor | None = None) -> Tensor:
        for index, layer in reversed(list(enumerate(self))):
            with located(f"layer {index}"):
                z = layer.auto_inverse(z, context=context)
        return z

    @torch.no_grad()
    def initialize(self, x: Tensor, *, context: Tensor | None = None) -> None:
        for index, layer in enumerate(self):
            with located(f"layer {index}"):
                layer.initialize(x, context=context)
                x, log_det, _ = layer.surrogate(x, context=context)
                _check_finite(layer, "initialize", x, log_det)

    def after_step(self, *, generator: torch.Generator | None = None) -> None:
        for index, layer in enumerate(self):
            with located(f"layer {index}"):
                layer.after_step(generator=generator)


def joined_names(parts: Iterable[tuple[str, Bijection]]) -> tuple[str, ...]:
    """Returns the reconstruction names of a module's parts, as seen from the module."""
    return tuple(f"{part}.{name}".rstrip(".") for part, layer in parts for name in layer.reconstruction_names)


@contextmanager
def located(place: str) -> Iterator[None]:
    """Prefixes a layer's `ValueError` with its place: in a Glow of 96 layers the class name is not enough."""
    try:
        yield
    except ValueError as error:
        error.args = (f"{place}: {error}",)
        raise


def _check_finite(layer: Bijection, method: str, out: Tensor, log_det: Tensor) -> None:
    if sums_are_finite(out, log_det):  # the usual case
        return
    for what, value in (("output", out), ("log_det", log_det)):
        expect_finite(f"{type(layer).__name__}.{method}", what, value, lambda: "; look for non-finite inputs or parameters")

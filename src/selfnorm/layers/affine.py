"""Fixed affine maps of each element, with given numbers or with a data set's mean and standard deviation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfnorm.bijection import Bijection
from selfnorm.runtime.checks import describe, event_shape, expect_batch, expect_shape
from selfnorm.runtime.rounding import note_affine


class Affine(Bijection):
    """z = (x + shift)·scale, fixed. shift, scale: numbers, or tensors that broadcast against one example."""

    takes_context = False
    notes_rounding = True
    shift: Tensor
    scale: Tensor

    def __init__(self, shift: float | Tensor, scale: float | Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", torch.as_tensor(shift, dtype=torch.get_default_dtype()).detach().clone())
        self.register_buffer("scale", torch.as_tensor(scale, dtype=torch.get_default_dtype()).detach().clone())
        if self.scale.is_meta:  # its numbers come with a state
            return
        if not (torch.isfinite(self.scale) & (self.scale != 0)).all() or not torch.isfinite(self.shift).all():
            raise ValueError(f"Affine: expected a finite shift and a finite scale other than 0, got {shift} and {scale}")

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={value.item():g}" if value.dim() == 0 and not value.is_meta else f"{name} of shape {tuple(value.shape)}"
            for name, value in (("shift", self.shift), ("scale", self.scale))
        )

    def forward(self, x: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(x)
        log_scale = self.scale.abs().log()
        z = (x + self.shift) * self.scale
        note_affine(self.shift, log_scale, z)
        return z, _log_det(x, log_scale)

    def inverse(self, z: Tensor, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(z)
        return z / self.scale - self.shift, -_log_det(z, self.scale.abs().log())

    def _check(self, x: Tensor) -> None:
        expect_batch(self, x)
        event = x.shape[1:]
        for name, value in (("shift", self.shift), ("scale", self.scale)):
            sides = zip(reversed(value.shape), reversed(event), strict=False)
            if value.dim() > len(event) or any(want not in (1, got) for want, got in sides):
                raise ValueError(
                    f"{describe(self)}: expected examples that a {name} of shape {tuple(value.shape)} broadcasts to, "
                    f"got {tuple(event)}"
                )


class Standardize(Affine):
    """z = (x − mean) / standard deviation of each entry, as `initialize` finds them; fixed from then on, never trained.

    shape: that of one example. Buffers: shift = −mean and scale = 1 / standard deviation, the identity until `initialize`.
    """

    initialized: Tensor

    def __init__(self, shape: int | Sequence[int]) -> None:
        shape = event_shape("Standardize", shape)
        super().__init__(torch.zeros(shape), torch.ones(shape))
        self.register_buffer("initialized", torch.tensor(False))

    @torch.no_grad()
    def initialize(self, x: Tensor, *, context: Tensor | None = None) -> None:
        expect_shape(self, x, *self.shift.shape)
        if self.initialized:
            return
        deviation, mean = torch.std_mean(x, 0, correction=0)
        constant = (~(deviation > 0)).flatten().nonzero().flatten().tolist()  # catches NaN too
        if constant:
            raise ValueError(
                f"{describe(self)}: expected entries that vary over the {x.shape[0]} examples to standardise by, got constant "
                f"ones at {constant[:10]}{' …' if len(constant) > 10 else ''} of the flattened example; a constant has no "
                "density, so leave it out"
            )
        self.shift.copy_(-mean)
        self.scale.copy_(1 / deviation)
        self.initialized.fill_(True)


def _log_det(x: Tensor, log_scale: Tensor) -> Tensor:
    return log_scale.expand(x.shape[1:]).sum().repeat(x.shape[0])

"""`in_float64`: the same module, computing in float64, next to the original."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from selfnorm.linalg.factors import to_float64

Module = TypeVar("Module", bound=nn.Module)


def in_float64(module: Module) -> Module:
    """Returns a copy of a module whose floating-point parameters and buffers are float64 tensors computed from the original's.

    Gradients flow back to the original's parameters. Everything else, such as caches and hooks, is shared; attributes that the
    copy sets stay its own. The original is not touched, so that other threads may use it meanwhile.
    """
    return _copied_in_float64(module, {})


def _copied_in_float64(module: Module, done: dict[int, nn.Module]) -> Module:
    if id(module) not in done:
        wide = done[id(module)] = object.__new__(type(module))
        wide.__dict__.update(module.__dict__, _compiled_call_impl=None)  # a compiled call would run the original
        for name in ("_parameters", "_buffers"):
            wide.__dict__[name] = {key: widened(value) for key, value in getattr(module, name).items()}
        wide.__dict__["_modules"] = {
            key: None if child is None else _copied_in_float64(child, done) for key, child in module._modules.items()
        }
    return done[id(module)]  # type: ignore[return-value]


def widened(value: Tensor | None) -> Tensor | None:
    """Returns a tensor in float64, on a device that has it; None and integers stay what they are."""
    if value is None:
        return None
    if value.is_floating_point():
        return to_float64(value)
    return value.cpu() if value.device.type == "mps" else value  # where `to_float64` puts the others

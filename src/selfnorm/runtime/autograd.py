"""Decorators and checks for differentiation: keep functions out of autocast, refuse second derivatives, notice transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Method = TypeVar("Method", bound=Callable[..., Any])


def in_full_precision(method: Method) -> Method:
    """Decorator that runs a layer's method with autocast disabled: half precision is too coarse for determinants.

    Under autocast the input is converted to the dtype of the layer's parameters first.
    """

    @wraps(method)
    def run(self: nn.Module, x: Tensor, **options: Any) -> Any:
        if not torch.is_autocast_enabled(x.device.type):
            return method(self, x, **options)
        with torch.autocast(x.device.type, enabled=False):
            return method(self, x.to(next(self.parameters()).dtype), **options)

    return cast(Method, run)


def backward_in_full_precision(backward: Method) -> Method:
    """Decorator that runs a backward pass with autocast disabled, in case a loss is differentiated inside autocast."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> Any:
        if not torch.is_autocast_enabled(gradients[0].device.type):
            return backward(ctx, *gradients)
        with torch.autocast(gradients[0].device.type, enabled=False):
            return backward(ctx, *gradients)

    return cast(Method, run)


def is_transformed() -> bool:
    """Returns whether a transform of torch.func or forward mode is active: tensors may then be wrappers that must not be kept."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def is_vectorised() -> bool:
    """Returns whether torch.func.vmap is active: tensors may then stand for a batch, whose values Python code cannot read."""
    if not torch._C._are_functorch_transforms_active():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(each.key() == torch._C._functorch.TransformType.Vmap for each in stack)


def is_differentiated(*tensors: Tensor) -> bool:
    """Returns whether a derivative with respect to one of the tensors may be asked for, in reverse or forward mode."""
    reverse = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return reverse or is_transformed()


def refuse_nested_forward_mode() -> None:
    """Raises RuntimeError in a `jvp` inside another forward mode, of which torch would silently lose the derivative."""
    transforms = torch._C._functorch.get_interpreter_stack() or []
    if sum(each.key() == torch._C._functorch.TransformType.Jvp for each in transforms) > 1:
        raise RuntimeError(
            "exact layers: expected at most one level of forward mode, got two, in which torch loses derivatives of custom "
            "functions; use torch.func.hessian or jacrev for the inner one"
        )


def refuse_second_derivative() -> None:
    """Raises RuntimeError if the backward pass is itself being differentiated. Call it in the backward pass of a surrogate."""
    if torch.is_grad_enabled():  # in a backward pass only with create_graph=True
        raise RuntimeError(
            "surrogate: the training gradient cannot be differentiated again; differentiate log_prob twice instead"
        )

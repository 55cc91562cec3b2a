"""Decorators and checks for autograd functions: keep them out of autocast, and refuse second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

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


def refuse_second_derivative() -> None:
    """Raises RuntimeError if the backward pass is itself being differentiated. Call it in the backward pass of a surrogate."""
    if torch.is_grad_enabled():  # in a backward pass only with create_graph=True
        raise RuntimeError(
            "surrogate: the training gradient cannot be differentiated again; differentiate log_prob twice instead"
        )

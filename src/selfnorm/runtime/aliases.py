"""`accepts_old_names`: lets a function accept arguments by their former names."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def accepts_old_names(**new_names: str) -> Callable[[Function], Function]:
    """Decorator that lets a function also accept arguments by their old names, given as old="new".

    >>> @accepts_old_names(weight="reconstruction_weight")
    ... def penalty(reconstruction_weight):
    ...     return reconstruction_weight
    >>> penalty(weight=3)
    3
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for old in new_names.keys() & options.keys():
                new = new_names[old]
                if new in options:
                    raise TypeError(f"{function.__qualname__}: expected {new} once, got it also by its old name, {old}")
                options[new] = options.pop(old)
            return function(*args, **options)

        return cast(Function, call)

    return decorate

"""What single layers receive while a flow encodes data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from selfnorm.linalg.factors import to_float64


@contextmanager
def recorded_inputs(who: str, named: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Context manager that yields a mapping, filled by the block with the first input of each layer, in float64.

    Raises ValueError, which begins with `who`, for a layer that the block does not call.
    """
    inputs: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if name not in inputs:
                inputs[name] = to_float64(args[0].detach())

        return keep

    hooks = [layer.register_forward_hook(keeper(name)) for name, layer in named.items()]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
    for name in named.keys() - inputs.keys():
        raise ValueError(
            f"{who}: expected the flow to call its layer {name!r} as layer(x), got no call; a bijection of your own must call "
            "its parts like that, not through forward()"
        )

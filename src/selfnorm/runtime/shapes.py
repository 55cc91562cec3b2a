"""`ShapeMemory`: modules that learn a shape from data and keep it in their state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ShapeMemory(nn.Module):
    """A module that needs the shape of the examples it saw last, unless it was built with a fixed one. Abstract.

    The shape is an entry "shape" of the state dict, so that a flow can sample as soon as it has loaded its state. The entry is
    optional: older states have none, and a module with a fixed shape neither writes nor reads it. It is no buffer, because it
    changes its size, and is needed on the host.
    """

    _fixed: tuple[int, ...] | None = None
    _seen: tuple[int, ...] | None = None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._fixed is None and self._seen is not None:
            destination[prefix + "shape"] = torch.tensor(self._seen, dtype=torch.int64, device="cpu")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        stored = state_dict.pop(prefix + "shape", None)
        if stored is not None and self._fixed is None:
            self._seen = tuple(map(round, stored.tolist()))  # an average of states has floats
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

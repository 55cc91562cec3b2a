"""Choosing a device, and waiting for it."""

from __future__ import annotations

import torch


def available_device(who: str, name: str) -> torch.device:
    """Returns the device of this name, or for "auto" an accelerator, if there is one. Raises ValueError if it is not there."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # read back, which fails on "meta"
    except (RuntimeError, AssertionError):
        raise ValueError(f"{who}: expected a device of this machine, got {name!r}; use auto to choose one") from None
    return device


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all work queued on it; returns at once for the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""Waiting for a device."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all work queued on it; returns at once for the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

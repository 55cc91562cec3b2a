"""Fixtures for tests of sampling."""

import pytest

from selfnorm.evaluate import sampler
from support.sampling import pretend_to_capture


@pytest.fixture
def captures(device, monkeypatch):
    """Lists the captured graphs. Without CUDA they are pretended."""
    found = []
    original = sampler._capture_inverse if device.type == "cuda" else pretend_to_capture

    def counted(function, z):
        found.append(original(function, z))
        return found[-1]

    monkeypatch.setattr(sampler, "GRAPH_DEVICE_TYPE", device.type)
    monkeypatch.setattr(sampler, "_capture_inverse", counted)
    return found

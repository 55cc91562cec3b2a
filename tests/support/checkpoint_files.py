"""Writes checkpoint files without using the library."""

import hashlib
import json
import zlib

import torch
from safetensors.torch import save_file

FORMAT = "selfnorm-checkpoint-1"


def write_checkpoint(path, tensors, facts, metadata=lambda metadata: metadata):
    """Writes a checkpoint with tensors and facts, a dict or JSON text, under their right digest; returns its path."""
    text = facts if isinstance(facts, str) else json.dumps(facts)
    described = [
        [name, str(value.dtype), list(value.shape), zlib.crc32(value.flatten().view(torch.uint8).numpy().tobytes())]
        for name, value in sorted(tensors.items())
    ]
    found = hashlib.sha256(json.dumps([text, described]).encode()).hexdigest()
    save_file(tensors, path, metadata=metadata({"format": FORMAT, "facts": text, "digest": found}))
    return path

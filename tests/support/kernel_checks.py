"""Random inputs and comparisons for the tests of kernels."""

import torch
from torch.testing import assert_close


def normal(*shape, device, scale=1.0):
    """Returns random normal numbers in float32."""
    return (scale * torch.randn(shape)).to(device, torch.float32)


def strided(tensor):
    """Returns the same values, stored neither contiguously nor in the usual order."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def in_float64(*tensors):
    """Returns float64 copies that require gradients; None stays None."""
    return [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]


def agree(got, expected, tolerance=3e-6):
    """Asserts equality up to rounding, relative to the largest entry, because sums may cancel."""
    assert len(got) == len(expected)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        scale = max(1.0, other.abs().max().item())
        assert_close(
            one.double() / scale, other.double() / scale, atol=tolerance, rtol=0, msg=lambda text, index=index: f"{index}: {text}"
        )


def random_layer(layer, device):
    """Returns the layer in float32 on a device, with perturbed parameters."""
    layer = layer.to(device, torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(normal(*parameter.shape, device=device, scale=0.1))
    return layer


def trained(layer, x):
    """Returns the outputs of the surrogate, and the gradients of a loss for x and the parameters."""
    x = x.clone().requires_grad_()
    z, log_det, reconstruction = layer.surrogate(x)
    weights = torch.linspace(0.5, 1.5, x.shape[0], dtype=x.dtype, device=x.device)
    loss = (weights * (z.square().flatten(1).sum(1) - log_det + 3 * reconstruction.sum(1))).sum()
    return [z, log_det, reconstruction, *torch.autograd.grad(loss, [x, *layer.parameters()])]

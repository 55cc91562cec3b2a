"""Compares float32 flows with float64 at the same weights and the same x."""

import copy

import torch
from torch import nn

from selfnorm import Flow

FLOAT32 = torch.float32


def conditioned(rows, condition):
    """A random matrix whose singular values lie evenly in logarithm between √condition and its inverse."""
    left, right = (torch.linalg.qr(torch.randn(rows, rows))[0] for _ in range(2))
    return (left * torch.logspace(0.5, -0.5, rows, base=condition)) @ right


def with_weights(bijection, *weights):
    """A flow in float32 whose layers have these weights, in order, and biases."""
    layers = [layer for layer in bijection.modules() if isinstance(getattr(layer, "weight", None), nn.Parameter)]
    with torch.no_grad():
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.copy_(weight)
            layer.bias.normal_()
    return Flow(bijection).float().eval()


def oracle(flow):
    """The same weights in float64."""
    return copy.deepcopy(flow).double()


def assert_exact(flow, x, context=None):
    """The error must be below 1e-3 nats a dimension, plus half a unit in the last place for storing the result in float32."""
    expected = oracle(flow).log_prob(x.double(), context=context if context is None else context.double())
    found = flow.log_prob(x, context=context)
    assert found.dtype == FLOAT32 and torch.isfinite(expected).all()
    stored = expected.abs() * torch.finfo(FLOAT32).eps / 2
    assert ((found - expected).abs() <= 1e-3 * x[0].numel() + stored).all()


def typical(flow, rows, n=100):
    """Draws of the flow's own density: x is as large as W⁻¹ makes it."""
    return oracle(flow).decode(torch.randn(n, rows), "exact").detach().float()

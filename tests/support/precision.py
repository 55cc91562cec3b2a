"""Compares float32 flows with float64 at the same weights and the same x."""

import copy

import torch
from torch import nn

from selfnorm import Chain, Flow, SelfNormLinear

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


def aligned(condition, layers):
    """A flow whose layers stretch the same directions, so that their condition numbers multiply."""
    turned = torch.linalg.qr(torch.randn(4, 4))[0]
    weight = turned @ torch.logspace(0, 1, 4, base=condition).diag() @ turned.mT
    flow = with_weights(Chain(*(SelfNormLinear(4) for _ in range(layers))), *[weight] * layers)
    for layer in flow.bijection:
        nn.init.zeros_(layer.bias)
    return flow


def shaken(layer, scale=1.0):
    """The layer, with noise added to its weight."""
    with torch.no_grad():
        layer.weight.add_(scale * torch.randn_like(layer.weight))
    return layer

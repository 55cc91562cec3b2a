"""Small flows and comparisons for tests of `Sampler`."""

import torch

from selfnorm import Chain, Flow, SelfNormLinear, SmoothLeakyReLU, StandardNormal
from selfnorm.evaluate import sampler as module


def twins(device, seed=3):
    return torch.Generator(device).manual_seed(seed), torch.Generator(device).manual_seed(seed)


def small(device, dtype=torch.float32, features=6):
    chain = Chain(SelfNormLinear(features), SmoothLeakyReLU(), SelfNormLinear(features))
    return Flow(chain, StandardNormal(features)).to(device, dtype)


def check(sampler, generator, times=4, tolerance=1e-5, inverse=None):
    """Compares the sampler with `Flow.sample`, given a generator in the same state as the sampler's."""
    for _ in range(times):
        found, expected = sampler(), sampler.flow.sample(sampler.n, inverse or sampler.inverse, generator)
        assert found.dtype == expected.dtype and found.device == expected.device and not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class PretendedGraph:
    """A graph for tests without CUDA: a replay reads the current weights, and takes the steps planned at its capture."""

    def __init__(self, function, z):
        self.layers = function.__self__._layers
        self.plans = [layer.last_plan for layer in self.layers]
        self.function, self.z = function, z.clone()
        self.x, self.valid = map(torch.empty_like, function(z))

    def replay(self):
        plans = [layer.last_plan for layer in self.layers]
        self._plan(self.plans)
        for memory, value in zip((self.x, self.valid), self.function(self.z), strict=True):
            memory.copy_(value)
        self._plan(plans)

    def _plan(self, plans):
        for layer, plan in zip(self.layers, plans, strict=True):
            layer._planned = layer._planned and layer._planned._replace(plan=plan)


@torch.inference_mode(False)
@torch.no_grad()
def pretend_to_capture(function, z):
    """Stands in for `_capture_inverse`."""
    try:
        graph = PretendedGraph(function, z)
    except RuntimeError:
        return None
    return module._CapturedInverse(graph, graph.z, graph.x, graph.valid)

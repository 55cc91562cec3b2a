"""A Sampler of the auto inverse follows the exact one, even if weights change after the steps of its graph were fixed."""

import pytest
import torch

from selfnorm import Flow, InaccurateInverseWarning, Sampler, SelfNormConv2d, StandardNormal
from selfnorm.models import conv_flow, fc_flow
from support.sampling import check, small, twins


@pytest.fixture
def captured(device, captures):
    """A sampler with a captured graph, in float64, a generator in the same state, and the list of captures."""
    mine, theirs = twins(device)
    sampler = Sampler(small(device, torch.float64).eval(), 5, "auto", mine)
    check_exact(sampler, theirs)
    assert sampler.captured and len(captures) == 1
    return sampler, theirs, captures


def check_exact(sampler, generator, times=4):
    """Compares with the exact inverse, which leaves the plans alone."""
    check(sampler, generator, times, tolerance=1e-6, inverse="exact")


def steps_of(flow):
    return [layer.last_plan.steps for layer in flow.planned_inverses().values()]


@torch.no_grad()
def test_other_weights_with_the_same_steps_keep_the_graph(captured):
    sampler, generator, captures = captured
    before = steps_of(sampler.flow)
    for layer in (sampler.flow.bijection[0], sampler.flow.bijection[2]):
        layer.weight.mul_(1.7)
        layer.weight_inv.div_(1.7)
    check_exact(sampler, generator)
    assert steps_of(sampler.flow) == before and len(captures) == 1 and sampler.captured


@torch.no_grad()
@pytest.mark.parametrize("write", ["in place", "through data", "state dict"])
def test_weights_that_need_more_steps_are_captured_again(captured, write):
    sampler, generator, captures = captured
    flow, before = sampler.flow, steps_of(sampler.flow)
    layer = flow.bijection[2]
    worse = layer.weight_inv + 0.03 * torch.randn_like(layer.weight_inv)
    if write == "state dict":
        flow.load_state_dict({**flow.state_dict(), "bijection.2.weight_inv": worse})
    else:
        (layer.weight_inv.data if write == "through data" else layer.weight_inv).copy_(worse)
    check_exact(sampler, generator)
    assert steps_of(flow)[1] > before[1] and steps_of(flow)[0] == before[0]
    assert len(captures) == 2 and sampler.captured


@torch.no_grad()
def test_a_layer_that_needs_the_exact_inverse_is_not_captured(captured):
    sampler, generator, captures = captured
    layer = sampler.flow.bijection[0]
    right = layer.weight_inv.clone()
    layer.weight_inv.mul_(-1)
    check_exact(sampler, generator)
    assert steps_of(sampler.flow)[0] is None and len(captures) == 1 and not sampler.captured
    layer.weight_inv.copy_(right)
    check_exact(sampler, generator)
    assert len(captures) == 2 and sampler.captured


@torch.no_grad()
def test_plans_that_change_elsewhere_are_seen(captured):
    """`flow.sample` plans anew, so that the graph's copies agree with the weights while its steps are those of old."""
    sampler, generator, captures = captured
    layer = sampler.flow.bijection[2]
    layer.weight_inv.add_(0.03 * torch.randn_like(layer.weight_inv))
    sampler.flow.sample(1)
    check_exact(sampler, generator)
    assert len(captures) == 2


@torch.no_grad()
def test_a_plan_for_another_image_size_is_not_used(device, captures):
    """Even if its number of steps and its copies of the weights are those of the graph."""
    layer = SelfNormConv2d(1, 3)
    layer.weight.zero_()[0, 0, 1, 1] = 1
    layer.weight_inv.zero_()[0, 0, 1, 1] = 1 - 1e-5
    mine, theirs = twins(device)
    sampler = Sampler(Flow(layer, StandardNormal((1, 6, 6))).eval().to(device), 3, "auto", mine)
    check_exact(sampler, theirs)
    assert sampler.captured and steps_of(sampler.flow) == [1]
    layer.weight[0, 0, 0, 0] = 0.05  # which a single pixel does not see
    sampler.flow.decode(torch.randn(1, 1, 1, 1, device=device))
    assert steps_of(sampler.flow) == [1] and layer.plan_holds()
    check_exact(sampler, theirs)
    assert layer.last_plan.shape == (1, 6, 6) and sampler.captured


@torch.no_grad()
def test_samples_that_are_not_finite_raise_an_error(captured):
    sampler, generator, _ = captured
    bias = sampler.flow.bijection[2].bias
    bias[0] = torch.nan
    with pytest.raises(ValueError, match=r"expected a finite result.*bijection\.2\.bias"):
        sampler()
    bias[0] = 0.0
    generator.set_state(sampler.generator.get_state())
    check_exact(sampler, generator)


@torch.no_grad()
def test_replays_of_the_learned_inverse_warn_once_for_each_set_of_weights(device, captures):
    sampler = Sampler(small(device), 2, "learned")
    for _ in range(3):
        sampler()
    for _ in range(2):
        sampler.flow.bijection[0].weight_inv.mul_(3)
        with pytest.warns(InaccurateInverseWarning, match=r"layer 0, SelfNormLinear\(6"):
            sampler()
        sampler()  # a second warning would be an error
    assert len(captures) == 1


@torch.no_grad()
def test_weights_that_change_before_the_graph_is_captured_are_checked(device, captures):
    sampler = Sampler(small(device), 2, "learned")
    sampler()
    sampler.flow.bijection[0].weight_inv.mul_(3)
    with pytest.warns(InaccurateInverseWarning, match=r"layer 0, SelfNormLinear\(6"):
        sampler()
    sampler()
    assert len(captures) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("make", [lambda: fc_flow((1, 4, 4)), lambda: conv_flow((1, 8, 8), blocks=2, layers_per_block=2)])
def test_weights_that_change_under_a_graph_on_a_gpu(make):
    flow = make().float().cuda().eval()
    mine, theirs = twins("cuda")
    sampler = Sampler(flow, 3, "auto", mine)
    for scale in (0.0, 1e-3, 0.02, 0.5):  # the last one does not contract
        with torch.no_grad():
            for layer in flow.planned_inverses().values():
                layer.weight_inv.add_(scale * torch.randn_like(layer.weight_inv))
        check(sampler, theirs, tolerance=1e-2, inverse="exact")
        assert sampler.captured == (None not in steps_of(flow))
    assert not sampler.captured

"""Flows without a fixed latent shape keep the one they saw in the state dict, and need nothing else to sample."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from selfnorm import Chain, Flatten, Flow, SelfNormConv2d, SelfNormLinear, SmoothLeakyReLU, Split, Squeeze, StandardNormal


def hand_built():
    return {
        "flat": (lambda: Flow(Chain(SelfNormLinear(4), SmoothLeakyReLU(), SelfNormLinear(4))), (4,)),
        "image": (lambda: Flow(Chain(SelfNormConv2d(2, 3), SelfNormConv2d(2, 1))), (2, 4, 6)),
        "flattened": (lambda: Flow(Chain(SelfNormConv2d(1, 3), Flatten(), SelfNormLinear(12))), (1, 3, 4)),
        "split": (lambda: Flow(Chain(Squeeze(), Split(SelfNormConv2d(2, 3)))), (1, 4, 4)),
    }


@pytest.mark.parametrize("name", ["flat", "image", "flattened", "split"])
@pytest.mark.parametrize("seen_by", ["log_prob", "surrogate"])
def test_a_hand_built_flow_samples_right_after_loading_its_state(name, seen_by, tmp_path):
    make, shape = hand_built()[name]
    flow, x = make(), torch.randn(5, *shape)
    getattr(flow, seen_by)(x)
    save_file(flow.state_dict(), tmp_path / "flow.safetensors")
    other = make()
    with pytest.raises(ValueError, match="expected a known latent shape, got none"):
        other.sample(2)
    other.load_state_dict(load_file(tmp_path / "flow.safetensors"))
    for each in (other, copy.deepcopy(other), copy.deepcopy(other).to(torch.float32)):
        for inverse in ("auto", "learned", "exact"):
            assert each.sample(2, inverse).shape == (2, *shape)
    one, two = (each.sample(3, generator=torch.Generator().manual_seed(0)) for each in (flow, other))
    assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_the_state_holds_a_shape_only_if_one_was_learned():
    flow = Flow(SelfNormLinear(3))
    assert "base.shape" not in flow.state_dict()
    flow.log_prob(torch.randn(2, 3))
    state = flow.state_dict()
    assert state["base.shape"].tolist() == [3] and state["base.shape"].dtype == torch.int64
    assert dict(flow.named_buffers()).keys() == {"base._like"}  # nothing that is moved, cast or broadcast
    fixed = Flow(SelfNormLinear(3), StandardNormal(3))
    fixed.log_prob(torch.randn(2, 3))
    assert "base.shape" not in fixed.state_dict()
    fixed.load_state_dict({**state, "base.shape": torch.tensor([7])})  # is ignored
    assert fixed.sample(2).shape == (2, 3)
    del state["base.shape"]
    flow.load_state_dict(state)  # from before there was one: what was seen stays
    assert flow.sample(2).shape == (2, 3)
    Flow(SelfNormLinear(3)).load_state_dict(state)


def test_a_loaded_shape_replaces_the_one_seen_before():
    flow, other = Flow(SelfNormConv2d(1, 3)), Flow(SelfNormConv2d(1, 3))
    flow.log_prob(torch.randn(2, 1, 4, 4))
    other.log_prob(torch.randn(2, 1, 6, 6))
    other.load_state_dict(flow.state_dict())
    assert other.sample(1).shape == (1, 1, 4, 4)
    other.log_prob(torch.randn(2, 1, 5, 5))
    assert other.sample(1).shape == (1, 1, 5, 5)


def test_a_state_whose_numbers_are_all_floats_still_has_a_shape():
    """As an average of states has."""
    flow = Flow(Chain(SelfNormLinear(4)))
    flow.log_prob(torch.randn(2, 4))
    other = Flow(Chain(SelfNormLinear(4)))
    other.load_state_dict({name: value.double() for name, value in flow.state_dict().items()})
    assert other.sample(3).shape == (3, 4)

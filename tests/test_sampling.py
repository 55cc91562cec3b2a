"""Samples of a flow follow its density unless told otherwise, say what they used, and need nothing but the state dict."""

import copy
import warnings

import pytest
import torch
from torch.testing import assert_close

from selfnorm import (
    Bijection,
    Chain,
    Flow,
    InaccurateInverseWarning,
    SelfNormConv2d,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    StandardNormal,
)
from selfnorm.evaluate.health import examine
from selfnorm.linalg.iterations import white_noise
from selfnorm.models import conv_flow, fc_flow, glow
from selfnorm.objective import Loss


def trained(flow, x, steps, loss=None):
    """Trains with `loss`, or by the likelihood alone, which leaves R as it was."""
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    for _ in range(steps):
        value = -flow.log_prob(x).mean() if loss is None else loss(x)[0]
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return flow


@pytest.mark.parametrize("training", [True, False])
def test_a_flow_trained_by_its_likelihood_alone_samples_from_its_density(training):
    """As users of other libraries train: R is never trained, and no inverse of W."""
    x = torch.randn(400, 4) @ torch.diag(torch.tensor([3.0, 1.0, 0.3, 0.1])) @ torch.randn(4, 4) + 1
    flow = trained(fc_flow(4), x, 300).train(training)

    def mean_log_prob(inverse):
        drawn = flow.sample(2000, *inverse, generator=torch.Generator().manual_seed(0))
        return flow.log_prob(drawn).mean().item()

    exact = mean_log_prob(["exact"])
    assert abs(mean_log_prob([]) - exact) < 1e-6
    assert flow.inverse_used.startswith("exact inverse in 2 layers")
    with pytest.warns(InaccurateInverseWarning, match=r"‖RW − I‖/√D of at most 0.1, got"):
        assert mean_log_prob(["learned"]) < exact - 1
    _, log_prob = flow.sample_and_log_prob(2000, generator=torch.Generator().manual_seed(0))
    assert abs(log_prob.mean().item() - exact) < 1e-6


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: fc_flow((1, 4, 4)), (1, 4, 4)),
        (lambda: conv_flow((1, 8, 8), blocks=2, layers_per_block=2), (1, 8, 8)),
        (lambda: glow((1, 4, 4), steps=2, hidden=4, mix_kernel_size=3), (1, 4, 4)),
        (lambda: Flow(Chain(SelfNormConv2d(1, 3, 5, padding_mode="circular"), SplineActivation((1, 6, 6)))), (1, 6, 6)),
    ],
    ids=["fc", "conv", "glow", "circular"],
)
def test_samples_of_trained_flows_are_the_exact_ones(make, shape, factorisations):
    flow = make()
    x = torch.randn(64, *shape).cumsum(-1) / 2
    flow.initialize(x)
    trained(flow, x, 40, Loss(flow, 1.0)).eval()
    found = examine(flow, x)
    assert found.sample_error["auto"] < 1e-6 < 1e-3 < found.sample_error["learned"]
    assert found.round_trip["auto"] < 1e-6
    assert found.auto.startswith("learned inverse, refined by") and "exact" not in found.auto
    factorisations.clear()
    flow.sample(3)
    assert not factorisations


def test_samples_of_zero_padded_convolutions_follow_the_exact_ones_in_float32():
    """Where no kernel r is an inverse; 0.05 is the bound that users were promised."""
    flow = conv_flow((1, 8, 8)).float()
    x = torch.randn(64, 1, 8, 8, dtype=torch.float32).cumsum(-1) / 2
    trained(flow, x, 60, Loss(flow, 0.1))
    found = examine(flow, x)
    assert found.sample_error["auto"] < 0.05 / 10 and found.sample_error["learned"] > 0.05


# What was used


def with_errors(*errors):
    flow = Flow(Chain(*(SelfNormLinear(3) for _ in errors)), StandardNormal(3))
    with torch.no_grad():
        for layer, error in zip(flow.bijection, errors, strict=True):
            layer.weight_inv.copy_((1 - error) * torch.linalg.inv(layer.weight))
    return flow


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ((0.0,), "learned inverse, as it is, in 1 layer"),
        ((1e-6,), "learned inverse, refined by 1 step, in 1 layer"),
        ((1e-6, 1e-6), "learned inverse, refined by 1 step, in 2 layers"),
        ((1e-6, 0.0), "learned inverse, refined by 0 to 1 steps, in 2 layers"),
        ((0.0, 2.0), "learned inverse, as it is, in 1 layer; exact inverse in 1 layer, {why} {error} in layer 1"),
        ((2.0,) * 5, "exact inverse in 5 layers, {why} {error} in layer 0, {error} in layer 1, {error} in layer 2 and 2 more"),
    ],
)
def test_a_flow_says_what_auto_used(errors, words):
    flow = with_errors(*errors)
    assert flow.inverse_used == ""
    flow.sample(2)
    why = "where 32 steps do not refine the learned one to the tolerance: ‖RW − I‖/√D ≈"
    error = 2 * white_noise((3,), torch.zeros(())).square().mean().sqrt().item()
    assert flow.inverse_used == words.format(why=why, error=f"{error:.2g}")


def test_a_flow_says_which_inverse_it_was_told_to_use():
    flow = with_errors(0.01)
    for inverse in ("exact", "learned"):
        flow.sample(1, inverse)
        assert flow.inverse_used == f"{inverse} inverse"
    flow = Flow(SmoothLeakyReLU(), StandardNormal(3))
    flow.sample(1)
    assert flow.inverse_used == "exact inverse"


class OwnInverse(Bijection):
    """A user's layer with a rough learned inverse."""

    def forward(self, x, *, context=None):
        return 2 * x, x.new_full((len(x),), x.shape[1] * torch.tensor(2.0).log().item())

    def inverse(self, z, *, context=None):
        return z / 2, -self.forward(z)[1]

    def approx_inverse(self, z, *, context=None):
        return z / 3


def test_layers_that_know_nothing_of_auto_are_exact():
    flow, z = Flow(OwnInverse(), StandardNormal(3)), torch.randn(4, 3)
    assert_close(flow.decode(z), z / 2)


# The warning


@torch.no_grad()
def test_the_learned_inverse_warns_once_for_each_set_of_weights():
    flow = with_errors(0.01, 0.5, 0.2)
    with pytest.warns(InaccurateInverseWarning) as caught:
        flow.sample(2, "learned")
    assert len(caught) == 1 and issubclass(InaccurateInverseWarning, RuntimeWarning)
    message = str(caught[0].message)
    assert "layer 1, SelfNormLinear(3, bias=True) (and 1 more layer)" in message and "inverse='auto'" in message
    figure = float(message.split("got ")[1].split(";")[0])
    assert figure == pytest.approx(0.5, rel=0.15)
    for _ in range(3):
        flow.sample(2, "learned")  # a warning would be an error
        flow.decode(torch.randn(2, 3), "learned")
    flow.bijection[0].weight_inv.mul_(5)
    with pytest.warns(InaccurateInverseWarning, match=r"layer 0, .*and 2 more layers"):
        flow.sample(2, "learned")
    other = copy.deepcopy(flow)
    with pytest.warns(InaccurateInverseWarning):
        other.sample(2, "learned")


def test_an_accurate_learned_inverse_does_not_warn():
    flow = with_errors(0.06)
    flow.sample(2, "learned")
    flow.sample(2)
    with_errors(0.5).sample(2)  # nor does any other inverse
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_errors(0.5).sample(2, "exact")


@torch.no_grad()
def test_the_learned_inverse_of_a_convolution_warns_again_on_images_of_another_size():
    """On one pixel only the central tap counts, and its inverse is exact."""
    flow = Flow(SelfNormConv2d(1, 3))
    flow.bijection.weight.copy_(torch.tensor([[0, 0.2, 0], [0.2, 1, 0.2], [0, 0.2, 0]]))
    flow.bijection.weight_inv.zero_()[..., 1, 1] = 1
    flow.log_prob(torch.randn(1, 1, 1, 1))
    flow.sample(1, "learned")  # a warning would be an error
    flow.log_prob(torch.randn(1, 1, 8, 8))
    with pytest.warns(InaccurateInverseWarning, match=r"got 0.3"):
        flow.sample(1, "learned")
    flow.sample(1, "learned")


def test_a_flow_of_one_layer_warns_by_its_name():
    flow = Flow(SelfNormLinear(3), StandardNormal(3))
    with torch.no_grad():
        flow.bijection.weight_inv.mul_(2)
    with pytest.warns(InaccurateInverseWarning, match=r"^Flow.decode\(inverse='learned'\): SelfNormLinear\(3, bias=True\): "):
        flow.sample(1, "learned")


@pytest.mark.parametrize(
    ("linear", "inverse", "used"),
    [
        ("exact", "learned", "exact inverse"),
        ("exact", "auto", "exact inverse"),
        ("tracked", "auto", "tracked inverse, "),
        ("tracked", "learned", "tracked inverse"),
        ("selfnorm", "learned", "learned inverse"),
        ("selfnorm", "refined", "learned inverse, refined, or the exact one where that failed"),
        ("selfnorm", "exact", "exact inverse"),
    ],
)
def test_the_inverse_used_is_one_that_the_flow_has(linear, inverse, used):
    flow = fc_flow(3, linear=linear)
    assert flow.inverse_used == ""
    flow.sample(2, inverse)
    assert flow.inverse_used.startswith(used)

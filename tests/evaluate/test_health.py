"""The figures of `examine` against dense float64 matrices; that it changes nothing; and that `repair` repairs."""

import math

import pytest
import torch
from torch.testing import assert_close

from selfnorm import (
    Chain,
    Flow,
    SelfNormConv2d,
    SelfNormLinear,
    SingularWeightError,
    SmoothLeakyReLU,
    StandardNormal,
    TrackedConv2d,
    TrackedLinear,
)
from selfnorm.evaluate import health as health_module
from selfnorm.evaluate.health import examine, repair
from selfnorm.models import conv_flow, fc_flow, glow
from support.oracles import dense_matrix

LAYERS = {
    "linear": (lambda: SelfNormLinear(6), (6,)),
    "1x1": (lambda: SelfNormConv2d(3, 1), (3, 4, 3)),
    "1x1-groups": (lambda: SelfNormConv2d(4, 1, groups=2), (4, 2, 3)),
    "1x1-wider-inverse": (lambda: SelfNormConv2d(2, 1, inverse_kernel_size=3), (2, 4, 3)),
    "3x3": (lambda: SelfNormConv2d(2, 3), (2, 5, 4)),
    "3x3-groups-dilation": (lambda: SelfNormConv2d(4, 3, groups=2, dilation=(2, 1)), (4, 4, 3)),
    "3x3-circular": (lambda: SelfNormConv2d(2, 3, padding_mode="circular"), (2, 5, 4)),
    "3x3-circular-asymmetric": (lambda: SelfNormConv2d(2, 3, inverse_kernel_size=5, padding_mode="circular"), (2, 5, 6)),
}


def perturbed_flow(name):
    """One layer with W close to the identity and R close to the inverse of W, but neither exact."""
    make, shape = LAYERS[name]
    layer = make()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Flow(layer, StandardNormal(shape)), 2 * torch.randn(7, *shape) + 1


def jacobian(function, shape):
    """The (D, D) matrix of a linear map of one example, by autograd."""
    matrix = torch.autograd.functional.jacobian(lambda x: function(x[None])[0], torch.zeros(shape))
    return matrix.reshape(math.prod(shape), math.prod(shape))


def degrees(a, b):
    return math.degrees(math.acos(min(1.0, (a * b).sum().item() / (a.norm() * b.norm()).item())))


@pytest.mark.parametrize("name", LAYERS)
def test_figures_match_dense_matrices(name):
    flow, x = perturbed_flow(name)
    layer = flow.bijection
    (found,) = examine(flow, x).layers
    W = jacobian(lambda h: layer.surrogate(h).z, x.shape[1:])
    R = jacobian(lambda z: layer.approx_inverse(z), x.shape[1:])
    E = R @ W - torch.eye(len(W))
    values = torch.linalg.svdvals(W)
    assert found.dimensions == len(W)
    assert found.distance == pytest.approx(E.norm().item() / len(W) ** 0.5, rel=1e-9)
    assert found.condition == pytest.approx((values[0] / values[-1]).item(), rel=1e-9)
    errors = (x.flatten(1) @ E.T).square().sum(1) / len(W)
    assert found.data_reconstruction == pytest.approx(errors.mean().item(), rel=1e-9)
    assert found.noise_reconstruction == pytest.approx(found.distance**2, rel=0.25)


class ApplyWeight(torch.nn.Module):
    """Wx alone, for `functional_call`."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer.apply_weight(x)


@pytest.mark.parametrize("name", LAYERS)
def test_angles_match_gradients_written_out(name):
    """The gradient for the matrix, ½(δxᵀ + Rᵀ) against δxᵀ + W⁻ᵀ, pulled back to the kernel by the matrix's own derivative."""
    flow, x = perturbed_flow(name)
    layer = flow.bijection
    found = examine(flow, x).layers[0]
    weight, apply = layer.weight.detach(), ApplyWeight(layer)

    def matrix(w):
        units = torch.eye(x[0].numel()).reshape(-1, *x.shape[1:])
        return torch.func.functional_call(apply, {"layer.weight": w}, (units,)).flatten(1).T

    W, R = matrix(weight), jacobian(lambda z: layer.approx_inverse(z), x.shape[1:]).detach()
    _, pull_back = torch.func.vjp(matrix, weight)
    data = layer(x)[0].detach().flatten(1).T @ x.flatten(1) / len(x)  # δ = z for a standard normal
    (data_g,), (exact_g,), (learned_g,) = pull_back(data), pull_back(torch.linalg.inv(W).T), pull_back(R.T)
    assert found.log_det_angle == pytest.approx(degrees(learned_g, exact_g), abs=1e-5)
    assert found.angle == pytest.approx(degrees(data_g - learned_g, data_g - exact_g), abs=1e-5)
    assert found.gradient_size == pytest.approx(((data_g - exact_g).norm() / (data_g.norm() + exact_g.norm())).item(), rel=1e-9)
    assert found.angle > 0.1 and found.log_det_angle > 0.1


@pytest.mark.parametrize("name", ["linear", "1x1", "1x1-groups", "1x1-wider-inverse"])
def test_an_exact_inverse_is_healthy(name):
    flow, x = perturbed_flow(name)
    before = examine(flow, x).layers[0]
    assert repair(flow) == ("",)
    found = examine(flow, x)
    after = found.layers[0]
    assert before.distance > 1e-2 and before.angle > 0.1
    assert after.distance < 1e-12 and after.data_reconstruction < 1e-24 and after.noise_reconstruction < 1e-24
    assert after.angle < 1e-10 and after.log_det_angle < 1e-10
    assert all(error < 1e-12 for error in found.round_trip.values())


def test_a_circular_kernel_as_large_as_the_image_can_be_an_exact_inverse():
    layer = SelfNormConv2d(2, 3, inverse_kernel_size=5, padding_mode="circular")
    flow, x = Flow(layer, StandardNormal((2, 5, 5))), torch.randn(7, 2, 5, 5)
    with torch.no_grad():
        layer.weight.add_(0.1 * torch.randn_like(layer.weight))
        impulse = torch.zeros(2, 2, 5, 5)
        impulse[[0, 1], [0, 1], 2, 2] = 1
        answer = layer.inverse(impulse + layer.broadcast_bias())[0]  # [i] holds T(w)⁻¹ of a unit in channel i, at the centre
        layer.weight_inv.copy_(answer.transpose(0, 1).flip(-2, -1))
    found = examine(flow, x)
    assert found.layers[0].distance < 1e-12 and found.layers[0].angle < 1e-10
    assert found.round_trip["learned"] < 1e-12


def test_drift_is_seen_where_the_data_has_no_variance():
    """The penalty cannot detect it: the reconstruction of the data is perfect."""
    flow, x = perturbed_flow("linear")
    repair(flow)
    x = x * (torch.arange(6) != 0)
    W = flow.bijection.weight.detach()
    with torch.no_grad():
        flow.bijection.weight_inv += 5 * torch.outer(torch.ones(6), torch.linalg.inv(W)[0])  # only for h along the first axis
    (found,) = examine(flow, x).layers
    assert found.data_reconstruction < 1e-24
    assert found.distance == pytest.approx(5.0) and found.log_det_angle > 10
    assert repair(flow, x) == ("",)
    assert examine(flow, x).layers[0].distance < 1e-12


def flows():
    return {
        "fc": (fc_flow((1, 4, 4), levels=17), torch.rand(9, 1, 4, 4) * 17),
        "conv": (conv_flow((1, 4, 4), blocks=2, layers_per_block=2), torch.randn(9, 1, 4, 4)),
        "glow": (glow((1, 4, 4), blocks=2, steps=2, hidden=4), torch.randn(9, 1, 4, 4)),
    }


@pytest.mark.parametrize("name", ["fc", "conv", "glow"])
def test_whole_flows(name, device):
    flow, x = flows()[name]
    flow, x = flow.to(device), x.to(device)
    flow.initialize(x)
    with torch.no_grad():
        for layer in flow.reconstruction_names:
            R = flow.bijection.get_submodule(layer).weight_inv
            R.add_(0.05 * torch.randn_like(R))
    found = examine(flow, x)
    assert tuple(layer.name for layer in found.layers) == flow.reconstruction_names
    assert all(math.isfinite(v) for layer in found.layers for v in vars(layer).values() if isinstance(v, float))
    assert set(found.round_trip) == {"auto", "learned", "exact", "refined"}
    assert found.round_trip["learned"] > 0.01
    assert all(found.round_trip[kind] < 1e-7 for kind in ("auto", "exact", "refined"))
    D = x[0].numel()
    reconstruction = flow.surrogate(x).reconstruction.mean(0)
    for layer, column in zip(found.layers, reconstruction, strict=True):
        assert layer.data_reconstruction == pytest.approx(column.item() / layer.dimensions, rel=1e-9)
        assert layer.dimensions in (D, D // 2)


def test_each_angle_comes_from_the_gradients_of_its_layer():
    flow, x = flows()["fc"]
    first, second = (flow.bijection.get_submodule(name) for name in flow.reconstruction_names)
    with torch.no_grad():
        second.weight_inv.copy_(torch.linalg.inv(second.weight))
    found = examine(flow, x).layers
    exact = torch.autograd.grad(-flow.log_prob(x).mean(), first.weight)[0]
    estimate = torch.autograd.grad(-flow.surrogate(x).log_det.mean(), first.weight)[0]
    assert found[0].angle == pytest.approx(degrees(exact, estimate), abs=1e-5)
    assert found[0].angle > 1e-3 and found[1].angle < 1e-9


def test_exact_twins_have_no_layer_figures_but_round_trips():
    found = examine(fc_flow(6, linear="exact"), torch.randn(4, 6))
    assert found.layers == ()
    assert all(error < 1e-12 for error in found.round_trip.values()) and len(found.round_trip) == 4
    assert all(error < 1e-12 for error in found.sample_error.values()) and found.auto == "exact inverse"


@pytest.mark.parametrize("training", [True, False])
def test_examine_changes_nothing(training):
    flow, x = flows()["glow"]
    flow.train(training)
    flow.initialize(x)
    flow.log_prob(x).mean().backward()
    frozen = next(flow.parameters()).requires_grad_(False)
    weight = flow.bijection.get_submodule(flow.reconstruction_names[0]).weight.requires_grad_(False)
    state = {key: value.clone() for key, value in flow.state_dict().items()}
    grads = {key: None if p.grad is None else p.grad.clone() for key, p in flow.named_parameters()}
    random = torch.get_rng_state()
    with torch.inference_mode():
        examine(flow, x)
    assert all(module.training is training for module in flow.modules())
    assert not any(module._forward_hooks for module in flow.modules())
    assert not frozen.requires_grad and not weight.requires_grad
    assert_close(flow.state_dict(), state, rtol=0, atol=0)
    for key, parameter in flow.named_parameters():
        assert (parameter.grad is None) == (grads[key] is None)
        assert parameter.grad is None or torch.equal(parameter.grad, grads[key])
    assert torch.equal(torch.get_rng_state(), random)


def test_the_same_generator_gives_the_same_figures():
    flow, x = perturbed_flow("linear")
    one, two, other = (examine(flow, x, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert one == two == examine(flow, x, torch.Generator().manual_seed(1))
    assert one != other and examine(flow, x) == examine(flow, x)


def test_estimates_for_large_layers_are_noted(monkeypatch):
    flow, x = perturbed_flow("3x3")
    exact = examine(flow, x).layers[0]
    monkeypatch.setattr(health_module, "MAX_EXACT_SIZE", 39)  # D is 40
    found = examine(flow, x)
    assert found.layers[0].distance == pytest.approx(exact.distance, rel=0.15) and found.layers[0].distance != exact.distance
    assert found.layers[0].condition is None
    assert "estimate" in found.notes[0] and "condition" in found.notes[1]


def test_a_failed_refinement_is_noted():
    flow, x = perturbed_flow("linear")
    with torch.no_grad():
        flow.bijection.weight_inv.mul_(3)
    found = examine(flow, x)
    assert found.round_trip["refined"] < 1e-12 and found.round_trip["learned"] > 1
    assert (
        len(found.notes) == 2
        and "off by ‖RW − I‖/√D = 2.3, above 0.1, on the data as well" in found.notes[0]
        and "using the exact inverse" in found.notes[1]
    )


def test_a_failed_decode_counts_as_infinite():
    flow, x = perturbed_flow("linear")
    with torch.no_grad():
        flow.bijection.weight_inv[0, 0] = math.nan
    assert examine(flow, x).round_trip["learned"] == math.inf


def test_a_layer_used_twice_is_listed_once():
    layer = SelfNormLinear(3)
    flow = Flow(Chain(layer, SmoothLeakyReLU(), layer), StandardNormal(3))
    assert [found.name for found in examine(flow, torch.randn(5, 3)).layers] == ["0"]
    assert repair(flow) == ("0",)


@pytest.mark.parametrize("name", ["3x3", "3x3-groups-dilation", "3x3-circular-asymmetric"])
def test_repair_brings_kernels_closer(name):
    flow, x = perturbed_flow(name)
    before = examine(flow, x).layers[0]
    assert repair(flow, x) == ("",)
    assert examine(flow, x).layers[0].distance < before.distance


def test_repair_with_data_keeps_a_better_inverse():
    """On a 1×1 image a 3×3 kernel is one number: a trained kernel can exploit that, the least-squares one cannot."""
    layer = SelfNormConv2d(1, 3)
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn_like(layer.weight))
        layer.weight_inv.copy_(1 / layer.weight[0, 0, 1, 1])
    flow, x = Flow(layer, StandardNormal((1, 1, 1))), torch.randn(5, 1, 1, 1)
    kept = layer.weight_inv.clone()
    assert repair(flow, x) == () and torch.equal(layer.weight_inv, kept)
    assert not layer._forward_hooks
    assert repair(flow) == ("",) and not torch.equal(layer.weight_inv, kept)


def test_repair_is_all_or_nothing():
    flow = fc_flow(3)
    first, second = (flow.bijection.get_submodule(name) for name in flow.reconstruction_names)
    kept = first.weight_inv.clone()
    with torch.no_grad():
        second.weight.zero_()
    with pytest.raises(SingularWeightError, match=f"layer {flow.reconstruction_names[1]}: SelfNormLinear"):
        repair(flow)
    assert torch.equal(first.weight_inv, kept)


def test_errors():
    flow, x = perturbed_flow("linear")
    with pytest.raises(ValueError, match="at least one example"):
        examine(flow, x[:0])

    class CallsForward(Chain):
        def forward(self, x, *, context=None):
            return self[0].forward(x, context=context)

    with pytest.raises(ValueError, match="'0' as layer"):
        examine(Flow(CallsForward(SelfNormLinear(6))), x)


def test_fallbacks_of_a_tracker_are_noted():
    layer = TrackedLinear(4)
    layer.fallbacks.fill_(3)
    health = examine(Flow(Chain(layer)), torch.randn(5, 4))
    assert any("layer 0: its tracker lost R" in note and "3 times" in note for note in health.notes)
    assert health.layers[0].distance < 1e-12


def test_a_tracked_inverse_is_examined_and_repaired_like_a_learned_one():
    layer = TrackedConv2d(2, 3, (4, 3))
    with torch.no_grad():
        layer.weight_inv.add_(0.1 * torch.randn_like(layer.weight_inv))
    flow, x = Flow(Chain(layer)), torch.randn(5, 2, 4, 3)
    T = dense_matrix(layer.weight.detach(), (4, 3), layer.geometry)
    (found,) = examine(flow, x).layers
    assert found.distance == pytest.approx(float((layer.weight_inv @ T - torch.eye(24)).norm() / 24**0.5))
    assert repair(flow, x) == ("0",)
    assert examine(flow, x).layers[0].distance < 1e-12


def test_an_inverse_of_nan_is_repaired():
    flow = Flow(Chain(SelfNormLinear(4)))
    with torch.no_grad():
        flow.bijection[0].weight_inv.fill_(math.nan)
    assert repair(flow, torch.randn(5, 4)) == ("0",)

"""The self-normalizing gradient: against plain autograd, against the exact gradient, and its scaling laws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from selfnorm import Chain, ExactConv2d, ExactLinear, Flow, SelfNormConv2d, SelfNormLinear, SingularWeightError, SmoothLeakyReLU
from selfnorm.linalg.convmatrix import flip, resize_kernel, tap_counts
from selfnorm.objective import Loss
from selfnorm.runtime.context import step_context
from support.oracles import dense_matrix, exact_log_likelihood, plain_surrogate

LAYERS = {
    "linear": (lambda: SelfNormLinear(6), (6,)),
    "linear-64": (lambda: SelfNormLinear(64), (64,)),  # of which a CPU makes transposed copies otherwise
    "linear-no-bias": (lambda: SelfNormLinear(4, bias=False), (4,)),
    "1x1": (lambda: SelfNormConv2d(3, 1), (3, 4, 3)),
    "3x3": (lambda: SelfNormConv2d(2, 3), (2, 5, 4)),
    "3x3-circular": (lambda: SelfNormConv2d(2, 3, padding_mode="circular"), (2, 5, 4)),
    "asymmetric": (lambda: SelfNormConv2d(2, 3, inverse_kernel_size=7), (2, 5, 4)),
    "asymmetric-circular": (lambda: SelfNormConv2d(2, (1, 3), (5, 3), padding_mode="circular"), (2, 5, 4)),
    "smaller-inverse": (lambda: SelfNormConv2d(2, (5, 3), inverse_kernel_size=(3, 5)), (2, 4, 6)),
    "groups-dilation": (lambda: SelfNormConv2d(4, 3, groups=2, dilation=(2, 1)), (4, 6, 5)),
    "wider-than-image": (lambda: SelfNormConv2d(1, 7), (1, 3, 2)),
}


def random_layer(name):
    """With random W *and* random R, not near to its inverse: the formula must hold anywhere."""
    make, shape = LAYERS[name]
    layer = make()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer, torch.randn(5, *shape)


def gradients(outputs, cotangents, layer, x):
    total = sum((o * c).sum() for o, c in zip(outputs, cotangents, strict=True))
    return torch.autograd.grad(total, [x, *layer.parameters()])


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_is_plain_autograds(name, inverse_likelihood, device):
    """For W, R, b and x, under any gradient that arrives at z, log_det and reconstruction, a different one for each example."""
    layer, x = random_layer(name)
    layer, x = layer.to(device), x.to(device).requires_grad_()
    with step_context(inverse_likelihood=inverse_likelihood):
        ours = layer.surrogate(x)
    plain = plain_surrogate(layer, x, inverse_likelihood)
    for mine, oracle in zip(ours, plain, strict=True):
        assert_close(mine, oracle, rtol=1e-10, atol=1e-10)
    cotangents = [torch.randn_like(o) for o in plain]
    for mine, oracle in zip(gradients(ours, cotangents, layer, x), gradients(plain, cotangents, layer, x), strict=True):
        assert_close(mine, oracle, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_get_the_same_gradient_if_the_input_needs_none(name, inverse_likelihood):
    layer, x = random_layer(name)
    cotangents = [torch.randn_like(output) for output in layer.surrogate(x)]

    def gradients_of_weights(x):
        with step_context(inverse_likelihood=inverse_likelihood):
            total = sum((o * c).sum() for o, c in zip(layer.surrogate(x), cotangents, strict=True))
        return torch.autograd.grad(total, list(layer.parameters()))

    for mine, oracle in zip(gradients_of_weights(x), gradients_of_weights(x.clone().requires_grad_()), strict=True):
        assert_close(mine, oracle, rtol=1e-12, atol=1e-12)


def test_the_last_loss_decides_for_calls_outside_of_one():
    """As activation checkpointing makes them. Before any loss, a layer follows the paper."""
    flow, x = Flow(Chain(SelfNormLinear(3))), torch.randn(4, 3)
    layer = flow.bijection[0]
    layer.weight_inv.data.normal_()

    def gradient():
        return torch.autograd.grad(layer.surrogate(x).log_det.sum(), [layer.weight_inv], allow_unused=True)[0]

    assert_close(gradient(), -4 * layer.weight.detach().T / 2)
    Loss(flow)(x)
    assert not gradient().any()
    Loss(flow, inverse_likelihood=True)(x)
    assert_close(gradient(), -4 * layer.weight.detach().T / 2)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 3, 5, 7]),
    st.sampled_from([1, 3, 5, 7]),
    st.sampled_from([1, 3, 5]),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from(["zeros", "circular"]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_conv_gradient_is_plain_autograds_over_shapes(k, r, width, dilation, groups, mode, inverse_likelihood, seed):
    torch.manual_seed(seed)
    layer = SelfNormConv2d(2 * groups, (k, width), (r, 3), dilation=dilation, groups=groups, padding_mode=mode)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    least = max(dilation * (max(k, r) - 1), dilation * (max(width, 3) - 1)) + 1 if mode == "circular" else 3
    x = torch.randn(2, 2 * groups, least, least + 1, requires_grad=True)
    with step_context(inverse_likelihood=inverse_likelihood):
        ours = layer.surrogate(x)
    plain = plain_surrogate(layer, x, inverse_likelihood)
    cotangents = [torch.randn_like(o) for o in plain]
    for mine, oracle in zip(gradients(ours, cotangents, layer, x), gradients(plain, cotangents, layer, x), strict=True):
        assert_close(mine, oracle, rtol=1e-10, atol=1e-10)


def surrogate_and_exact(layer, x):
    """Gradients for (x, weight, …) of Σ⟨z, g⟩ + log|det|, by the surrogate and exactly."""
    x = x.clone().requires_grad_()
    weights = torch.randn_like(x)
    z, log_det, _ = layer.surrogate(x)
    ours = torch.autograd.grad((z * weights).sum() + log_det.sum(), [x, layer.weight])
    return ours, torch.autograd.grad(exact_log_likelihood(layer, x, weights), [x, layer.weight])


def with_exact_inverse(name):
    """Layers whose R can be W⁻¹, set so."""
    if name == "linear":
        layer, x = SelfNormLinear(6), torch.randn(4, 6)
        inverse = torch.linalg.inv(layer.weight)
    elif name == "1x1":
        layer, x = SelfNormConv2d(3, 1), torch.randn(4, 3, 2, 5)
        inverse = torch.linalg.inv(layer.weight[:, :, 0, 0])[:, :, None, None]
    else:
        # The inverse of a circular convolution is one whose kernel is as large as the (odd) image: the response to an impulse.
        layer, x = SelfNormConv2d(2, 3, (5, 7), padding_mode="circular"), torch.randn(4, 2, 5, 7)
        with torch.no_grad():
            layer.weight.add_(0.1 * torch.randn_like(layer.weight))
        impulse = torch.zeros(2, 2, 5, 7)
        impulse[range(2), range(2), 2, 3] = 1
        inverse = ExactConv2d(2, 3, padding_mode="circular", bias=False)
        inverse.load_state_dict({"weight": layer.weight.detach()})
        inverse = inverse.inverse(impulse)[0].transpose(0, 1).flip(-2, -1)
    with torch.no_grad():
        layer.weight_inv.copy_(inverse)
    return layer, x


@pytest.mark.parametrize("name", ["linear", "1x1", "circular"])
def test_at_the_exact_inverse_the_gradient_is_half_the_exact_one(name):
    layer, x = with_exact_inverse(name)
    assert_close(layer.surrogate(x).reconstruction, torch.zeros(4, 1), rtol=0, atol=1e-20)
    (ours_x, ours_w), (exact_x, exact_w) = surrogate_and_exact(layer, x)
    assert_close(ours_x, exact_x, rtol=1e-10, atol=1e-10)
    assert_close(2 * ours_w, exact_w, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("groups", [1, 2])
def test_zero_padded_log_det_term_is_exact_for_the_tap_mean_of_the_inverse(groups):
    """No k×k kernel inverts a zero-padded convolution, but the tap-mean of T(w)⁻¹ gives its log-det gradient all the same."""
    layer = SelfNormConv2d(4, 3, groups=groups)
    x = torch.randn(3, 4, 5, 6)
    with torch.no_grad():
        layer.weight.add_(0.1 * torch.randn_like(layer.weight))
    W = dense_matrix(layer.weight, (5, 6), layer.geometry)
    (exact,) = torch.autograd.grad(torch.linalg.slogdet(W).logabsdet, layer.weight)
    counts = tap_counts((3, 3), (5, 6), layer.geometry)
    with torch.no_grad():
        layer.weight_inv.copy_(flip(exact / counts, groups))
    (ours,) = torch.autograd.grad(layer.surrogate(x).log_det.sum(), layer.weight)
    assert_close(2 * ours, 3 * exact, rtol=1e-10, atol=1e-10)


def loss_of(chain, x, penalty=0.7):
    z, log_det, reconstruction = chain.surrogate(x)
    return (0.5 * z.square().flatten(1).sum(1) - log_det + penalty * reconstruction.sum(1)).mean()


def small_flow(kind="linear"):
    if kind == "linear":
        return Chain(SelfNormLinear(5), SmoothLeakyReLU(), SelfNormLinear(5)), torch.randn(8, 5)
    return Chain(SelfNormConv2d(2, 3), SmoothLeakyReLU(), SelfNormConv2d(2, 3, 5)), torch.randn(8, 2, 4, 3)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_every_gradient_scales_with_the_loss(kind, scale):
    chain, x = small_flow(kind)
    plain = torch.autograd.grad(loss_of(chain, x), list(chain.parameters()))
    scaled = torch.autograd.grad(scale * loss_of(chain, x), list(chain.parameters()))
    for one, other in zip(plain, scaled, strict=True):
        assert_close(other, scale * one, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_accumulation_over_micro_batches_is_one_batch(kind):
    chain, x = small_flow(kind)
    whole = torch.autograd.grad(loss_of(chain, x), list(chain.parameters()))
    for micro in x.split([2, 5, 1]):
        (loss_of(chain, micro) * len(micro) / len(x)).backward()
    for parameter, expected in zip(chain.parameters(), whole, strict=True):
        assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_reconstruction_reaches_no_earlier_layer(kind):
    chain, x = small_flow(kind)
    x.requires_grad_()
    first, _, second = chain
    with torch.no_grad():
        for layer in (first, second):
            layer.weight_inv.copy_(torch.randn_like(layer.weight_inv))
    chain.surrogate(x).reconstruction[:, 1].sum().backward()
    for parameter in (x, *first.parameters()):
        assert parameter.grad is None or not parameter.grad.any()
    assert second.weight.grad.any() and second.weight_inv.grad.any()


def test_the_gap_to_the_exact_gradient_shrinks_linearly_with_the_inverses_error():
    """‖2·∂W − exact‖ ∝ ‖I − RW‖: the slope in log–log is 1 over five decades."""
    layer, x = SelfNormLinear(6), torch.randn(4, 6)
    inverse, direction = torch.linalg.inv(layer.weight).detach(), torch.randn(6, 6)
    sizes, gaps = [], []
    for exponent in range(-6, 0):
        with torch.no_grad():
            layer.weight_inv.copy_(inverse + 10.0**exponent * direction)
        torch.manual_seed(1)
        (_, ours), (_, exact) = surrogate_and_exact(layer, x)
        sizes.append(torch.linalg.norm(torch.eye(6) - layer.weight_inv @ layer.weight).item())
        gaps.append(torch.linalg.norm(2 * ours - exact).item())
    slopes = torch.tensor(gaps).log().diff() / torch.tensor(sizes).log().diff()
    assert_close(slopes, torch.ones(5), rtol=0, atol=1e-4)


def test_frozen_weights_and_a_frozen_input_get_no_gradient():
    layer, x = SelfNormLinear(4), torch.randn(3, 4)
    layer.weight.requires_grad_(False)
    loss_of(layer, x).backward()
    assert layer.weight.grad is None and x.grad is None and layer.weight_inv.grad.any()


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_and_gradients_are_contiguous(name):
    """LBFGS, parameters_to_vector and safetensors take nothing else."""
    layer, x = random_layer(name)
    loss_of(layer, x).backward()
    for parameter in layer.parameters():
        assert parameter.is_contiguous() and parameter.grad.is_contiguous()
    torch.nn.utils.parameters_to_vector(layer.parameters())


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_second_derivative_of_the_surrogate_is_refused(kind):
    chain, x = small_flow(kind)
    with pytest.raises(RuntimeError, match="differentiate log_prob twice instead"):
        torch.autograd.grad(chain.surrogate(x).log_det.sum(), list(chain.parameters()), create_graph=True, allow_unused=True)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_autocast_leaves_self_normalizing_layers_in_full_precision(kind, device):
    chain, x = small_flow(kind)
    chain, x = chain.float().to(device), x.float().to(device)
    expected = torch.autograd.grad(loss_of(chain, x), list(chain.parameters()))
    exact = chain(x)[1]
    with torch.autocast(device.type, torch.bfloat16):
        loss = loss_of(chain, x)
        assert_close(chain(x)[1], exact)
        assert chain.approx_inverse(x).dtype == torch.float32
    assert_close(torch.autograd.grad(loss, list(chain.parameters())), expected)


# Initialisation and the twins


def test_initialisation_is_the_papers():
    linear = SelfNormLinear(200)
    noise = linear.weight - torch.eye(200)
    assert_close(noise.std().item(), 0.01 * (2 / 400) ** 0.5, rtol=0.05, atol=0)
    assert_close(linear.weight_inv, linear.weight.T)
    assert not linear.bias.any()
    conv = SelfNormConv2d(16, 3)
    noise = conv.weight.clone()
    noise[:, :, 1, 1] -= torch.eye(16)
    assert_close(noise.std().item(), 0.01 * (2 / (16 * 9 + 16 * 9)) ** 0.5, rtol=0.1, atol=0)
    assert_close(conv.weight_inv, flip(conv.weight))
    grouped = SelfNormConv2d(6, 3, groups=2)
    assert_close(grouped.weight_inv, flip(grouped.weight, groups=2))
    wider = SelfNormConv2d(4, 3, 7)
    assert_close(wider.weight_inv[:, :, 2:5, 2:5], flip(wider.weight))
    assert_close(wider.weight_inv.abs().sum(), wider.weight.abs().sum())


@pytest.mark.parametrize("groups", [1, 2])
def test_1x1_starts_as_a_rotation(groups):
    blocks = SelfNormConv2d(6, 1, groups=groups).weight[:, :, 0, 0].reshape(groups, 6 // groups, 6 // groups)
    assert_close(blocks @ blocks.mT, torch.eye(6 // groups).expand_as(blocks))
    assert (blocks - torch.eye(6 // groups)).abs().max() > 0.1
    assert groups == 1 or not torch.allclose(blocks[0], blocks[1])


TWINS = {
    "linear": (lambda: SelfNormLinear(5), lambda: ExactLinear(5), (5,)),
    "1x1": (lambda: SelfNormConv2d(4, 1, groups=2), lambda: ExactConv2d(4, 1, groups=2), (4, 3, 2)),
    "3x3": (lambda: SelfNormConv2d(2, 3, 5), lambda: ExactConv2d(2, 3), (2, 4, 3)),
}


@pytest.mark.parametrize("name", TWINS)
def test_twins_load_each_others_state(name):
    make_selfnorm, make_exact, shape = TWINS[name]
    selfnorm, exact, x = make_selfnorm(), make_exact(), torch.randn(3, *shape)
    exact.load_state_dict(selfnorm.state_dict())
    assert_close(exact(x), selfnorm(x))

    fresh = make_selfnorm()
    fresh.load_state_dict(make_exact().state_dict())
    state = make_exact().state_dict()
    fresh.load_state_dict(state)
    assert "weight_inv" not in state  # the caller's own is left alone
    exact.load_state_dict(state)
    assert_close(fresh(x), exact(x))
    limit = 1e-20 if name != "3x3" else 1e-3
    relative = fresh.surrogate(x).reconstruction.sum() / x.square().sum()
    assert relative < limit


def test_the_inverse_kernel_computed_for_a_twin_is_better_than_a_transpose():
    exact, selfnorm, x = ExactConv2d(3, 3), SelfNormConv2d(3, 3, 5), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        exact.weight.add_(0.05 * torch.randn_like(exact.weight))
    selfnorm.load_state_dict(exact.state_dict())
    computed = selfnorm.surrogate(x).reconstruction.mean()
    with torch.no_grad():
        selfnorm.weight_inv.copy_(resize_kernel(flip(exact.weight), (5, 5)))
    assert computed < 0.2 * selfnorm.surrogate(x).reconstruction.mean()


def test_a_singular_1x1_twin_is_refused_too_and_a_good_one_inverted():
    exact, selfnorm = ExactConv2d(4, 1, groups=2), SelfNormConv2d(4, 1, 3, groups=2)
    with torch.no_grad():
        exact.weight.add_(0.3 * torch.randn_like(exact.weight))
    selfnorm.load_state_dict(exact.state_dict())
    assert_close(selfnorm.surrogate(torch.randn(3, 4, 5, 5)).reconstruction, torch.zeros(3, 1), rtol=0, atol=1e-20)
    exact.weight.data[1] = exact.weight.data[0]
    with pytest.raises(SingularWeightError, match=r"SelfNormConv2d\(4"):
        selfnorm.load_state_dict(exact.state_dict())


def test_a_state_of_another_size_is_refused_as_torch_does():
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        SelfNormLinear(3).load_state_dict(ExactLinear(4).state_dict())


def test_a_singular_twin_is_refused_when_its_inverse_is_asked_for():
    exact = ExactLinear(3)
    torch.nn.init.ones_(exact.weight)
    with pytest.raises(SingularWeightError, match=r"SelfNormLinear\(3, bias=True\): expected an invertible weight"):
        SelfNormLinear(3).load_state_dict(exact.state_dict())


def test_loading_twins_inside_a_chain():
    selfnorm = Chain(SelfNormLinear(3), SmoothLeakyReLU(), SelfNormLinear(3))
    exact = Chain(ExactLinear(3), SmoothLeakyReLU(), ExactLinear(3))
    exact.load_state_dict(selfnorm.state_dict())
    selfnorm.load_state_dict(exact.state_dict())
    assert_close(selfnorm[0].weight_inv @ selfnorm[0].weight, torch.eye(3))

"""The coupling network, written out by hand."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from selfnorm import AffineCoupling, ConditionalAffine
from selfnorm.kernels.coupling.choice import MAX_CHANGED_CHANNELS
from selfnorm.runtime.precision import PRECISIONS, precision


def network_by_hand(affine, context):
    """3×3 → ReLU → 1×1 → ReLU → 3×3·exp(3·logs); log s = 2·tanh(h/2) from the even channels, t from the odd ones."""
    first, _, second, _ = affine.network
    assert first.kernel_size == affine.last.kernel_size == (3, 3) and second.kernel_size == (1, 1)
    h = F.relu(F.conv2d(context, first.weight, first.bias, padding=1))
    h = F.relu(F.conv2d(h, second.weight, second.bias))
    h = F.conv2d(h, affine.last.weight, affine.last.bias, padding=1)
    h = h * torch.exp(3 * affine.last_log_scale)[None, :, None, None]
    return 2 * torch.tanh(h[:, 0::2] / 2), h[:, 1::2]


def shaken(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer


def test_conditional_affine_is_the_papers():
    layer, x, context = shaken(ConditionalAffine(2, 3, hidden=5)), torch.randn(4, 2, 5, 4), torch.randn(4, 3, 5, 4)
    log_s, t = network_by_hand(layer, context)
    z, log_det = layer(x, context=context)
    assert_close(z, x * log_s.exp() + t)
    assert_close(log_det, log_s.sum((1, 2, 3)))


def test_affine_coupling_keeps_the_first_half_and_reads_the_rest_from_it():
    layer, x = shaken(AffineCoupling(5, hidden=4, context_channels=2)), torch.randn(3, 5, 4, 4)
    context = torch.randn(3, 2)
    z, _ = layer(x, context=context)
    network_input = torch.cat([x[:, :2], context[:, :, None, None].expand(3, 2, 4, 4)], dim=1)
    log_s, t = network_by_hand(layer.affine, network_input)
    assert_close(z[:, :2], x[:, :2])
    assert_close(z[:, 2:], x[:, 2:] * log_s.exp() + t)


def test_under_autocast_only_the_network_is_in_half_precision(device):
    """A log-det summed over 2,000 elements in bfloat16 would be off by whole nats."""
    layer, x = AffineCoupling(4, hidden=8), torch.randn(3, 4, 32, 32)
    with torch.no_grad():
        layer.affine.last.weight.add_(0.1 * torch.randn_like(layer.affine.last.weight))
    layer, x = layer.float().to(device), x.float().to(device)
    z, log_det = layer(x)
    with torch.autocast(device.type, torch.bfloat16):
        half_z, half_log_det = layer(x)
    assert half_z.dtype == half_log_det.dtype == torch.float32
    assert log_det.abs().min() > 1 and not torch.equal(half_log_det, log_det)
    assert_close(half_log_det, log_det, rtol=0.02, atol=0.5)
    assert_close(half_z, z, rtol=0.05, atol=0.05)


def test_a_coupling_starts_as_the_identity_512_wide():
    layer, x = AffineCoupling(4), torch.randn(2, 4, 3, 3)
    z, log_det = layer(x)
    assert torch.equal(z, x) and not log_det.any()
    assert layer.affine.hidden == ConditionalAffine(1, 1).hidden == 512


def test_the_names_in_a_state_dict_are_what_they_were():
    network = ["network.0.weight", "network.0.bias", "network.2.weight", "network.2.bias", "last.weight", "last.bias"]
    assert list(ConditionalAffine(2, 3, hidden=5).state_dict()) == ["last_log_scale", *network]
    assert list(AffineCoupling(4, hidden=5).state_dict()) == [f"affine.{name}" for name in ["last_log_scale", *network]]


# (N, channels, H, W), hidden, context channels: odd sizes, one row, one pixel, channels beyond what is fused into one kernel.
COUPLINGS = [
    ((3, 4, 5, 4), 24, 0),
    ((2, 5, 3, 7), 33, 0),
    ((1, 2, 1, 1), 1, 0),
    ((1, 3, 1, 6), 7, 2),
    ((2, 20, 3, 2), 40, 0),
    ((7, 4, 9, 5), 17, 1),
]
# Largest relative error, in norm, of values and of gradients.
TOLERANCE = {
    "cpu": {"float32": (5e-6, 2e-5), "tf32": (5e-6, 2e-5), "bf16": (5e-6, 2e-2)},
    "cuda": {"float32": (5e-6, 2e-5), "tf32": (5e-6, 3e-3), "bf16": (5e-6, 2e-2)},
}


def decided(layer):
    """The layer shaken, with small whole numbers in its hidden layers. For an input of whole numbers they are the same in any
    precision, so that no ReLU is open in one and closed in the other, as would happen to numbers near 0 that are rounded: it
    moves a gradient by a hundredth, and now and then by a tenth."""
    affine = shaken(layer).affine if isinstance(layer, AffineCoupling) else shaken(layer)
    first, _, second, _ = affine.network
    with torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.copy_(torch.randn_like(parameter).round())
        for bias in (first.bias, second.bias):  # so that few ReLUs are not all closed
            bias.abs_().add_(1)
        affine.last.weight.div_(9 * affine.hidden)
        for parameter in layer.parameters():  # Triton's interpreter rounds to bfloat16 towards zero: let there be little to round
            parameter.copy_(parameter.bfloat16())
    return layer


def surrogate_and_gradients(layer, x, context, grad_z, grad_log_det):
    inputs = [tensor.clone().requires_grad_() for tensor in (x, context) if tensor is not None]
    z, log_det, reconstruction = layer.surrogate(inputs[0], context=inputs[1] if context is not None else None)
    assert reconstruction.shape == (x.shape[0], 0)
    gradients = torch.autograd.grad([z, log_det], [*inputs, *layer.parameters()], [grad_z, grad_log_det])
    return (z, log_det), gradients


def expect_close_to_float64(layer, shape, context_shape, value, device):
    """The layer in float32 by kernels against float64, where they have no part."""
    layer, x = decided(layer).to(device), torch.randn(shape, device=device).round()
    context = torch.randn(context_shape, device=device).round() if context_shape else None
    grad_z, grad_log_det = (torch.randn(size, device=device).bfloat16().double() for size in (shape, shape[:1]))
    given = [x, context, grad_z, grad_log_det]
    with precision(value):
        expected = surrogate_and_gradients(layer, *given)
        got = surrogate_and_gradients(layer.float(), *(None if tensor is None else tensor.float() for tensor in given))
    for ours, theirs, limit in zip(got, expected, TOLERANCE[device.type][value], strict=True):
        assert all(a.dtype == torch.float32 and a.shape == b.shape for a, b in zip(ours, theirs, strict=True))
        found = torch.stack([(a - b).norm() / (b.norm() + 1e-30) for a, b in zip(ours, theirs, strict=True)])
        assert (found <= limit).all(), f"{found.tolist()}, at most {limit}"


@pytest.mark.parametrize("value", PRECISIONS)
@pytest.mark.parametrize(("shape", "hidden", "context_channels"), COUPLINGS)
def test_the_fused_coupling_is_the_plain_one(device, kernels, poisoned, monkeypatch, value, shape, hidden, context_channels):
    from selfnorm.kernels.coupling import affine

    dtypes, pack = [], affine.pack_weights
    monkeypatch.setattr(affine, "pack_weights", lambda *args: dtypes.append(args[-1]) or pack(*args))
    context_shape = (shape[0], context_channels, *shape[2:]) if context_channels else None
    expect_close_to_float64(AffineCoupling(shape[1], hidden, context_channels), shape, context_shape, value, device)
    assert dtypes == [torch.bfloat16 if value == "bf16" else torch.float32]


@pytest.mark.parametrize("value", PRECISIONS)
def test_a_fused_prior_is_the_plain_one(device, kernels, poisoned, value):
    expect_close_to_float64(ConditionalAffine(3, 2, 9), (2, 3, 4, 3), (2, 2, 4, 3), value, device)


def counted_inverses(monkeypatch):
    """A list to which each call of the fused inverse adds its result."""
    from selfnorm.kernels.coupling import affine

    calls, original = [], affine.matrix_inverse
    monkeypatch.setattr(affine, "matrix_inverse", lambda *args: calls.append(original(*args)) or calls[-1])
    return calls


@pytest.mark.parametrize("value", PRECISIONS)
@pytest.mark.parametrize(("shape", "hidden", "context_channels"), COUPLINGS)
def test_the_fused_inverse_is_the_plain_one(device, kernels, poisoned, monkeypatch, value, shape, hidden, context_channels):
    calls = counted_inverses(monkeypatch)
    layer = decided(AffineCoupling(shape[1], hidden, context_channels)).to(device)
    z = torch.randn(shape, device=device).round()
    context = torch.randn(shape[0], context_channels, *shape[2:], device=device).round() if context_channels else None
    with precision(value), torch.no_grad():
        expected = layer.approx_inverse(z, context=context)
        assert not calls
        layer, z, context = layer.float(), z.float(), None if context is None else context.float()
        found = layer.approx_inverse(z, context=context)
        strided = layer.approx_inverse(z.to(memory_format=torch.channels_last), context=context)
    assert len(calls) == (0 if value == "bf16" else 2)
    assert value == "bf16" or torch.equal(found, strided)
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= TOLERANCE[device.type][value][0] * expected.norm()


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("convolutions", [False, True])
def test_the_inverse_reads_the_network_that_the_forward_pass_reads(device, kernels, monkeypatch, products, convolutions):
    """By convolutions if products round differently, as they do by default in torch: the network would not be the same."""
    calls, layer = counted_inverses(monkeypatch), AffineCoupling(4, hidden=512).float().to(device)
    torch.nn.init.normal_(layer.affine.last.weight, std=0.02)
    x = torch.randn(3, 4, 6, 5).float().to(device)
    with precision("float32"), torch.no_grad():
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions
        z = layer(x)[0]
        back = layer.approx_inverse(z)
    assert len(calls) == (products == convolutions)
    assert (back - x).norm() <= (5e-3 if products and convolutions else 1e-5) * x.norm()


def test_a_fused_inverse_is_for_those_who_want_no_gradient(device, kernels):
    layer, z = shaken(AffineCoupling(4, hidden=8)).float().to(device), torch.randn(3, 4, 5, 6).float().to(device)
    found = layer.approx_inverse(z)
    assert found.requires_grad
    with torch.no_grad():
        assert_close(layer.approx_inverse(z), found, rtol=1e-3, atol=1e-3)


def test_the_fused_coupling_takes_any_strides(device, kernels, poisoned):
    layer = shaken(AffineCoupling(4, hidden=8)).float().to(device)
    x = torch.randn(3, 4, 5, 6).float().to(device)
    with precision("float32"):
        z, log_det, _ = layer.surrogate(x)
        strided = [
            x.to(memory_format=torch.channels_last),
            x.transpose(2, 3).contiguous().transpose(2, 3),
            torch.stack([x, x], dim=-1)[..., 0],
            torch.cat([x, x], dim=1)[:, 4:],
        ]
        for other in strided:
            assert all(torch.equal(a, b) for a, b in zip(layer.surrogate(other)[:2], (z, log_det), strict=True))
        # A sum's gradient has a stride of 0.
        parameters = list(layer.parameters())
        spread = torch.autograd.grad(z.sum() + log_det.sum(), parameters)
    z, log_det, _ = layer.surrogate(x)
    dense = torch.autograd.grad([z, log_det], parameters, [torch.ones_like(z), torch.ones_like(log_det)])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(spread, dense, strict=True))


def test_what_is_fused_is_inverted_exactly(device, kernels):
    layer, x = shaken(AffineCoupling(6, hidden=8)).float().to(device), torch.randn(3, 6, 5, 4).float().to(device)
    with precision("float32"):
        z, log_det, _ = layer.surrogate(x)
        back, back_log_det = layer.inverse(z)
    assert type(z.grad_fn).__name__ == "MatrixAffineBackward"
    assert_close(back, x, rtol=1e-4, atol=1e-4)
    assert_close(back_log_det, -log_det, rtol=1e-5, atol=1e-4)


def test_the_fused_coupling_starts_as_the_identity(device, kernels):
    layer, x = AffineCoupling(4, hidden=8).float().to(device), torch.randn(2, 4, 3, 3).float().to(device)
    z, log_det, _ = layer.surrogate(x)
    assert torch.equal(z, x) and not log_det.any()


def test_a_fused_surrogate_has_no_second_derivative(device, kernels):
    layer, x = shaken(AffineCoupling(4, hidden=8)).float().to(device), torch.randn(2, 4, 3, 3).float().to(device)
    z, log_det, _ = layer.surrogate(x.requires_grad_())
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(z.sum() + log_det.sum(), x, create_graph=True)


@pytest.mark.parametrize("why", ["float64", "autocast", "empty", "wide"])
def test_what_kernels_cannot_take_is_left_to_the_plain_code(device, kernels, why, monkeypatch):
    from selfnorm.kernels.coupling import affine

    monkeypatch.setattr(affine, "matrix_inverse", lambda *args: pytest.fail("went to the kernels"))
    monkeypatch.setattr(affine.MatrixAffine, "apply", lambda *args: pytest.fail("went to the kernels"))
    layer = shaken(AffineCoupling(2 * (MAX_CHANGED_CHANNELS + 1) if why == "wide" else 4, hidden=8)).to(device)
    x = torch.randn(0 if why == "empty" else 2, layer.channels, 3, 3, device=device)
    if why != "float64":
        layer, x = layer.float(), x.float()
    with torch.autocast(device.type, torch.bfloat16, enabled=why == "autocast"):
        z, log_det, _ = layer.surrogate(x)
        exact_z, exact_log_det = layer(x)
        with torch.no_grad():
            assert torch.equal(layer.approx_inverse(x), layer.inverse(x)[0])
    assert torch.equal(z, exact_z) and torch.equal(log_det, exact_log_det)


@pytest.mark.gpu
def test_the_fused_coupling_never_waits_for_the_device(never_waiting):
    layer, x = shaken(AffineCoupling(4, hidden=64)).float().cuda(), torch.randn(5, 4, 14, 14).float().cuda()
    for value in PRECISIONS:
        with precision(value):
            for context in (nullcontext, never_waiting):  # the first call compiles
                with context():
                    z, log_det, _ = layer.surrogate(x)
                    (z.square().sum() - log_det.sum()).backward()

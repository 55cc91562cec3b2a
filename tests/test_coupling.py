"""The coupling network, written out by hand."""

import torch
import torch.nn.functional as F
from torch.testing import assert_close

from selfnorm import AffineCoupling, ConditionalAffine


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
    guide = torch.cat([x[:, :2], context[:, :, None, None].expand(3, 2, 4, 4)], dim=1)
    log_s, t = network_by_hand(layer.affine, guide)
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

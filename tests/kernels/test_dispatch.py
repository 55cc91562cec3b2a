"""When kernels leave a call to plain PyTorch."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from selfnorm import AffineCoupling, SelfNormConv2d
from selfnorm.kernels.dispatch import usable, used_on


class Marked(torch.Tensor):
    """A subclass of Tensor."""


def single(device, *shape):
    return torch.randn(*shape, dtype=torch.float32, device=device)


def test_plain_float32_tensors_of_one_device_are_usable(device, kernels):
    x = single(device, 2, 3)
    assert usable(x, None, torch.nn.Parameter(x))
    for other in (x.double(), x[:0], x.as_subclass(Marked)):
        assert not usable(x, other)
    with used_on():
        assert not usable(x)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_are_for_the_current_device():
    assert usable(single("cuda:0", 2)) and not usable(single("cuda:1", 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")  # of `torch.jit.trace`
@pytest.mark.parametrize("make", [lambda: AffineCoupling(4, hidden=8), lambda: SelfNormConv2d(4, 3)], ids=["coupling", "conv"])
@torch.no_grad()
def test_tracers_and_tangents_see_plain_code(device, kernels, make):
    layer, z = make().to(device, torch.float32), single(device, 2, 4, 5, 5)
    assert usable(z)

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, z):
            assert not usable(z)
            return self.layer.approx_inverse(z)

    decode = Decoder()
    expected = layer.approx_inverse(z)
    for traced in (make_fx(decode)(z), torch.jit.trace(decode, z, check_trace=False)):
        torch.testing.assert_close(traced(z), expected, rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        moved = forward_ad.unpack_dual(decode(forward_ad.make_dual(z, single(device, 2, 4, 5, 5))))
    torch.testing.assert_close(moved.primal, expected, rtol=1e-4, atol=1e-4)
    assert moved.tangent is not None and moved.tangent.any()

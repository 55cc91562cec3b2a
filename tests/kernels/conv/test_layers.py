"""Convolutional layers that train through kernels: the same gradients as in plain PyTorch."""

import pytest
import torch

from selfnorm import Conv1x1, ExactConv2d, SelfNormConv2d
from selfnorm.kernels.dispatch import used_on
from selfnorm.layers.emerging import AutoregressiveConv2d
from selfnorm.layers.exponential import ConvExponential
from selfnorm.linalg.convmatrix import convolve
from support.kernel_checks import agree, normal, random_layer, trained

pytestmark = pytest.mark.usefixtures("kernels", "poisoned", "short_sums")

LAYERS = {
    "exact": lambda: ExactConv2d(3, 3),
    "exact without bias": lambda: ExactConv2d(3, (1, 5), bias=False),
    "exact 1×1": lambda: ExactConv2d(3, 1, dilation=2, padding_mode="circular", bias=False),
    "mixing": lambda: Conv1x1(3),
    "autoregressive": lambda: AutoregressiveConv2d(3, 3),
    "mirrored": lambda: AutoregressiveConv2d(3, 3, mirrored=True, bias=False, mask="raster"),
    "selfnorm": lambda: SelfNormConv2d(3, 3, inverse_kernel_size=5),
    "selfnorm without bias": lambda: SelfNormConv2d(3, 3, bias=False),
    "exponential": lambda: ConvExponential(3, 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_the_same_with_kernels_and_without(name, device, monkeypatch):
    layer, x = random_layer(LAYERS[name](), device), normal(4, 3, 5, 6, device=device)
    calls = []
    for module in ("linear", "emerging", "selfnorm", "exponential"):  # the plain code's
        monkeypatch.setattr(f"selfnorm.layers.{module}.convolve", lambda *args: calls.append(args) or convolve(*args))
    fused = trained(layer, x)
    assert not calls
    with used_on():
        plain = trained(layer, x)
    assert calls
    agree([value for value in fused if value.numel()], [value for value in plain if value.numel()], tolerance=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_are_refused(name, device):
    layer, x = random_layer(LAYERS[name](), device), normal(2, 3, 4, 4, device=device).requires_grad_()
    z, log_det, _ = layer.surrogate(x)
    with pytest.raises(RuntimeError, match="surrogate: the training gradient cannot be differentiated again"):
        torch.autograd.grad(z.square().sum() + log_det.sum(), x, create_graph=True)

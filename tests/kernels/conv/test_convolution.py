"""Kernels for one convolution of small images, and the layers that train through them, against float64 and plain PyTorch."""

import pytest
import torch
from torch.testing import assert_close

from selfnorm import Conv1x1, ExactConv2d, ExactLinear
from selfnorm.linalg.convmatrix import Geometry, convolve
from support.kernel_checks import agree, in_float64, normal, random_layer, strided, trained

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")

# Images (N, C, H, W) and the kernel's sides: one channel and several, tiles that end inside of an image or hold several images,
# kernels that reach beyond the image, and more channels than a k×k kernel may have.
SHAPES = {
    "one channel": ((3, 1, 6, 5), (3, 3)),
    "several tiles of one channel": ((2, 1, 23, 17), (3, 1)),
    "four channels": ((3, 4, 5, 7), (3, 3)),
    "odd channels": ((2, 3, 4, 5), (5, 3)),
    "many channels": ((2, 17, 3, 3), (3, 3)),
    "larger than the image": ((3, 2, 2, 3), (7, 5)),
    "mixing one": ((3, 1, 6, 5), (1, 1)),
    "mixing four": ((5, 4, 3, 7), (1, 1)),
    "mixing many": ((7, 48, 2, 3), (1, 1)),
    "eight channels of a square": ((3, 8, 2, 2), (3, 3)),
    "a single value": ((1, 1, 1, 1), (1, 1)),
}


@pytest.fixture(params=[256, 2], ids=["", "few rows"])
def rows(request, monkeypatch):
    """With few rows of partial sums, a program takes several tiles; sums take several steps."""
    from selfnorm.kernels.conv import convolution, tiles

    original = convolution.batch_sum_tiles
    monkeypatch.setattr(tiles, "MAX_PARTIAL_ROWS", request.param)
    monkeypatch.setattr(convolution, "batch_sum_tiles", lambda rows, examples: original(64 * rows, 64 * examples) | {"ROWS": 2})
    return original


@pytest.mark.parametrize("number", [1, 127, 128, 129, 257, 1000])
def test_sums_reach_the_last_row(rows, number):
    tiles = rows(number, 3 * number)
    assert number <= tiles["ROWS"] * tiles["STEPS"] < 2 * number + 2 * tiles["ROWS"]
    assert 3 * number <= tiles["ROWS"] * tiles["EXAMPLE_STEPS"] < 6 * number + 2 * tiles["ROWS"]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", SHAPES)
def test_plain_convolutions(name, device):
    from selfnorm.kernels.conv.convolution import conv_backward, conv_forward

    shape, sides = SHAPES[name]
    x, k, b = normal(*shape, device=device), normal(shape[1], shape[1], *sides, device=device), normal(shape[1], device=device)
    grad = normal(*shape, device=device)
    z, log_det = conv_forward(strided(x), strided(k), strided(b.repeat(2, 1).T)[:, 0])
    assert log_det is None
    gradients = conv_backward(strided(x), strided(k), strided(grad))
    X, K, B = in_float64(x, k, b)
    Z = convolve(X, K, Geometry()) + B[:, None, None]
    Z.backward(grad.double())
    agree([z, *gradients], [Z, X.grad, K.grad, B.grad])
    assert_close(conv_forward(x, k, None)[0] + b[:, None, None], z)
    assert conv_backward(x, k, grad, wants_x=False)[0] is None
    agree(conv_backward(x, k, grad, wants_x=False)[1:], [K.grad, B.grad])


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", SHAPES)
def test_triangular_ones(name, device):
    from selfnorm.kernels.conv.convolution import conv_backward, conv_forward

    shape, sides = SHAPES[name]
    n, channels = shape[:2]
    x, k = normal(*shape, device=device), normal(channels, channels, *sides, device=device)
    taps = torch.rand(k.shape, device=device) < 0.7
    centre = slice(None), slice(None), sides[0] // 2, sides[1] // 2
    taps[centre] |= torch.eye(channels, device=device, dtype=torch.bool)
    arriving = normal(*shape, device=device), normal(n, device=device)
    made = conv_forward(x, k, None, strided(taps), triangular=True)
    gradients = conv_backward(x, k, arriving[0], taps, strided(arriving[1]))
    X, K, B = in_float64(x, k, torch.zeros(channels, device=device))
    Z = convolve(X, torch.where(taps, K, 0.0), Geometry()) + B[:, None, None]
    expected = [Z, (shape[2] * shape[3] * K[centre].diagonal().abs().log().sum()).repeat(n)]
    torch.autograd.backward(expected, [grad.double() for grad in arriving])
    agree(made, expected)
    agree(gradients, [X.grad, K.grad, B.grad])


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("mixing")])
def test_mixing(name, device):
    from selfnorm.kernels.conv.convolution import FusedConv

    shape, _ = SHAPES[name]
    x, b = normal(*shape, device=device).requires_grad_(), normal(shape[1], device=device).requires_grad_()
    w = (torch.eye(shape[1]) + 0.1 * torch.randn(shape[1], shape[1])).to(device, torch.float32)[:, :, None, None].requires_grad_()
    arriving = normal(*shape, device=device), normal(shape[0], device=device)
    made = FusedConv.apply(x, w, b, "mixing")
    torch.autograd.backward(made, arriving)
    X, W, B = in_float64(x, w, b)
    log_det = shape[2] * shape[3] * torch.linalg.slogdet(W.flatten(1)).logabsdet
    expected = [convolve(X, W, Geometry()) + B[:, None, None], log_det.repeat(shape[0])]
    torch.autograd.backward(expected, [grad.double() for grad in arriving])
    agree([*made, x.grad, w.grad, b.grad], [*expected, X.grad, W.grad, B.grad])


def test_more_examples_than_a_store_takes(device):
    from selfnorm.kernels.conv.convolution import conv_forward
    from selfnorm.kernels.dense.small_determinants import repeated_slogdet

    matrix = torch.tensor([[0.0, 2.0], [-3.0, 1.0]], dtype=torch.float32, device=device)
    log_det, inverse_transposed = repeated_slogdet(matrix, 5, 131)
    assert_close(log_det, 5 * torch.full((131,), 6.0, dtype=torch.float32, device=device).log())
    assert_close(inverse_transposed, torch.linalg.inv(matrix).mT)
    x, k = normal(131, 1, 1, 2, device=device), torch.full((1, 1, 1, 1), -3.0, dtype=torch.float32, device=device)
    assert_close(conv_forward(x, k, None, triangular=True)[1], 2 * torch.full_like(log_det, 3.0).log())
    with pytest.raises(ValueError, match=r"repeated_slogdet: expected a square matrix of at most 64 rows, got \(1, 2, 2\)"):
        repeated_slogdet(matrix[None], 5, 131)


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((2, 2, 4, 4), lambda: ExactConv2d(2, 3, dilation=2)),
        ((2, 2, 4, 4), lambda: ExactConv2d(2, 1, groups=2)),
        ((2, 2, 4, 4), lambda: ExactConv2d(2, 3, padding_mode="circular")),
        ((1, 1, 65, 64), lambda: Conv1x1(1)),
        ((1, 65, 2, 2), lambda: Conv1x1(65)),
        ((1, 33, 1, 1), lambda: ExactConv2d(33, 3)),
    ],
)
def test_what_kernels_do_not_take_is_left_to_plain_code(shape, layer, device, monkeypatch):
    calls = []
    monkeypatch.setattr("selfnorm.layers.linear.convolve", lambda *args: calls.append(args) or convolve(*args))
    random_layer(layer(), device).surrogate(normal(*shape, device=device))
    assert len(calls) == 1


@pytest.mark.parametrize("layer", [lambda: ExactLinear(4), lambda: ExactConv2d(1, 3), lambda: Conv1x1(4)])
def test_the_weight_has_one_way_in(layer, device):
    """So that what accumulates its gradient belongs to the main stream, though the log-determinant is taken on another."""
    layer = random_layer(layer(), device)
    x = normal(2, *([4] if isinstance(layer, ExactLinear) else [layer.channels, 2, 2]), device=device)
    z, log_det, _ = layer.surrogate(x)
    users, seen, todo = set(), set(), [z.grad_fn, log_det.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if getattr(following, "variable", None) is layer.weight:
                users.add(node)
            todo.append(following)
    assert len(users) == 1


def test_the_order_of_programs_does_not_matter(device):
    layer, x = random_layer(Conv1x1(4), device), normal(9, 4, 6, 6, device=device)
    for one, other in zip(trained(layer, x), trained(layer, x), strict=True):
        assert torch.equal(one, other)

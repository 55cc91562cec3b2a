"""Products of small batches by kernels, against the same in float64."""

import pytest
import torch

from selfnorm import RelativeLinear, SelfNormLinear, TrackedLinear
from selfnorm.kernels.dispatch import used_on
from selfnorm.runtime.context import step_context

pytest.importorskip("triton")

from selfnorm.kernels.dense import products, relative, selfnorm, tracking
from selfnorm.kernels.dense.products import SplitTiles, add_penalty, affine, pull_back, reconstruct, times

pytestmark = pytest.mark.usefixtures("poisoned")
SHAPES = [(1, 1), (3, 5), (16, 32), (37, 70), (33, 17), (5, 129)]
TILES = {
    "whole": SplitTiles(32, 32, 64, 1, 4, 3),
    "deep": SplitTiles(16, 32, 16, 1, 4, 2),
    "split": SplitTiles(16, 32, 16, 3, 4, 2),
    "one program": SplitTiles(64, 128, 32, 2, 4, 2),
}


def single(device, *shape):
    return torch.randn(*shape, dtype=torch.float32, device=device)


def close(got, expected, features):
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=2e-5, atol=2e-6 * features)


@pytest.mark.parametrize("by", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_right_for_any_shape_and_tiles(device, kernels, shape, by):
    examples, features = shape
    x, grad_z = single(device, *shape), single(device, *shape)
    W, R = (single(device, features, features) / features**0.5 for _ in range(2))
    b, grad_reconstruction = single(device, features), single(device, examples, 3)[:, 1:2]  # a column of a wider gradient
    x_, g, W_, R_, b_, r = (tensor.double() for tensor in (x, grad_z, W, R, b, grad_reconstruction))

    log_det = torch.full((examples,), torch.nan, dtype=torch.float32, device=device)
    z, out = affine(x, W, b, zeros=log_det, by=by)
    close(z, x_ @ W_.T, features)
    close(out, x_ @ W_.T + b_, features)
    assert not log_det.any()
    z, out = affine(x, W, None, by=by)
    assert out is z
    close(z, x_ @ W_.T, features)

    error, squares = reconstruct(z, R, x, by=by)
    error_ = x_ @ W_.T @ R_.T - x_
    close(error, error_, features)
    assert squares.shape == (examples, 1)
    close(squares, error_.square().sum(1, keepdim=True), 10 * features)

    grad_x, towards_w, towards_r, grad_b = pull_back(grad_z, W, R, error, grad_reconstruction, True, by=by)
    close(grad_x, g @ W_, features)
    close(towards_w, g / 2 + 2 * r * error_ @ R_, 10 * features)
    close(towards_r, 2 * r * error_ - g @ W_ / 2, 10 * features)
    close(grad_b, g.sum(0), features)
    assert pull_back(grad_z, W, R, error, grad_reconstruction, by=by)[3] is None

    # One-sided.
    grad_x, *others = pull_back(grad_z, W, R, error, grad_reconstruction, True, False, by=by)
    close(grad_x, g @ W_, features)
    for towards_w, towards_r, grad_b in (others, add_penalty(grad_z, error, error @ R, grad_reconstruction, True)):
        close(towards_w, g + 2 * r * error_ @ R_, 10 * features)
        close(towards_r, 2 * r * error_, 10 * features)
        close(grad_b, g.sum(0), features)
    assert add_penalty(grad_z, error, error @ R, grad_reconstruction)[2] is None

    one, other = times(x, W, grad_z, R, by=by)
    close(one, x_ @ W_, features)
    close(other, g @ R_, features)
    one, other = times(grad_z, R, by=by)
    close(one, g @ R_, features)
    assert other is None


def test_strides_do_not_matter(device, kernels):
    x, W, R = single(device, 9, 7).T, single(device, 9, 9).T, single(device, 9, 18)[:, ::2]
    grad_z, weight = single(device, 1, 9).expand(7, 9), single(device, 1, 1).expand(7, 1)
    x_, W_, R_, g = (tensor.double() for tensor in (x, W, R, grad_z))
    z, out = affine(x, W, W[0])
    close(out, x_ @ W_.T + W_[0], 9)
    error, _ = reconstruct(z, R, x)
    close(error, x_ @ W_.T @ R_.T - x_, 90)
    grad_x, towards_w, towards_r, _ = pull_back(grad_z, W, R, error, weight)
    close(grad_x, g @ W_, 9)
    grad_error = 2 * weight.double() * error.double()
    close(towards_w, g / 2 + grad_error @ R_, 90)
    close(towards_r, grad_error - g @ W_ / 2, 90)


def test_a_nan_in_a_row_stays_in_it(device, kernels):
    x, W = single(device, 5, 40), single(device, 40, 40)
    x[2, 39] = torch.nan
    z, _ = affine(x, W, None)
    assert z[2].isnan().all() and z.isfinite().all(1).sum() == 4


def test_repetition_gives_the_same_bits(device, kernels):
    x, W, R = single(device, 40, 70), single(device, 70, 70), single(device, 70, 70)
    first, second = (pull_back(x, W, R, x, x[:, :1], True, by=TILES["split"]) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_large_shapes_are_left_to_cublas():
    assert products.split_tiles(100, 784) is not None
    assert products.split_tiles(100, 8192) is None
    assert products.split_tiles(4096, 784) is None


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [SelfNormLinear, RelativeLinear, TrackedLinear])
def test_layers_agree_with_their_plain_selves_in_float64(device, kernels, monkeypatch, kind, bias, large):
    if large:
        monkeypatch.setattr(products, "split_tiles", lambda *shape, products=1: None)
    layer = kind(21, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    x, weights = torch.randn(9, 21), torch.randn(9, 21)

    def run(layer, x, weights):
        layer.zero_grad(set_to_none=True)
        x = x.clone().requires_grad_()
        z, log_det, reconstruction = layer.surrogate(x)
        (3 * (z * weights).sum() + 0.7 * log_det.sum() + (reconstruction * weights[:, :1]).sum()).backward()
        return [z, log_det, reconstruction, x.grad, *(parameter.grad for parameter in layer.parameters())]

    with used_on():
        expected = run(layer, x, weights)
    called = []
    for name in ("affine", "reconstruct", "pull_back", "times"):
        original = getattr(products, name)
        for user in (selfnorm, relative, tracking):
            if hasattr(user, name):
                monkeypatch.setattr(user, name, lambda *a, o=original, n=name, **k: called.append(n) or o(*a, **k))
    got = run(layer.to(device, torch.float32), x.to(device, torch.float32), weights.to(device, torch.float32))
    assert called[0] == "affine" and called[-1] in ("pull_back", "times")
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [SelfNormLinear, RelativeLinear, TrackedLinear])
def test_layers_refuse_a_second_derivative(device, kernels, kind):
    layer = kind(4).to(device, torch.float32)
    z = layer.surrogate(single(device, 3, 4).requires_grad_()).z
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        z.square().sum().backward(create_graph=True)


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
@pytest.mark.parametrize("kind", [SelfNormLinear, RelativeLinear, TrackedLinear])
def test_weights_get_the_same_gradient_if_the_input_needs_none(device, kernels, kind, inverse_likelihood):
    layer, x, weights = kind(37).to(device, torch.float32), single(device, 35, 37), single(device, 35, 37)

    def gradients(x):
        with step_context(inverse_likelihood=inverse_likelihood):
            z, log_det, reconstruction = layer.surrogate(x)
        total = (z * weights).sum() + log_det.sum() + (reconstruction * weights[:, :1]).sum()
        return torch.autograd.grad(total, list(layer.parameters()))

    with torch.no_grad():
        layer.weight.add_(0.2 * torch.randn_like(layer.weight))
    for one, other in zip(gradients(x), gradients(x.clone().requires_grad_()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

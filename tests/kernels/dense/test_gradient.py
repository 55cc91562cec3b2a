"""A matrix's gradient from its factors, against float64."""

import pytest
import torch

pytest.importorskip("triton")

from selfnorm import RelativeLinear, SelfNormLinear, TrackedLinear
from selfnorm.kernels.dense import gradient as module
from selfnorm.kernels.dense.gradient import MAX_FACTORED_EXAMPLES, gradient_from_factors, gradient_tiles
from selfnorm.kernels.matrix_tiles import ProductTiles

TILES = [ProductTiles(32, 64, 32, 4, 2), ProductTiles(16, 16, 16, 4, 2), ProductTiles(64, 32, 16, 4, 2), None]


def expect_float64(device, examples, features, scale, transposed, by, factor=-0.5):
    # All matrices but one have an unfavourable memory layout.
    a = torch.randn(features, examples, dtype=torch.float32, device=device).mT
    b = torch.randn(examples, 2 * features, dtype=torch.float32, device=device)[:, ::2]
    M = torch.randn(features, features, dtype=torch.float32, device=device).mT
    got = gradient_from_factors(a, b, M, transposed, scale, factor, by=by)
    M, s = M.double(), factor * scale.double().sum()
    expected = a.double().mT @ b.double() + s * (M.mT if transposed else M)
    assert got.dtype == torch.float32 and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6 * (examples + s.abs().item()))


@pytest.mark.parametrize("by", TILES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (33, 70), (20, 64), (130, 33), (16, 32)], ids=str)
def test_it_is_the_product_and_the_scaled_matrix(device, kernels, poisoned, shape, transposed, by):
    expect_float64(device, *shape, torch.randn(shape[0], dtype=torch.float32, device=device), transposed, by)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_scale_may_be_one_number_spread_out_or_not(device, kernels, poisoned, transposed):
    one = torch.tensor(0.3, dtype=torch.float32, device=device)
    for scale in (one, one.expand(9), torch.randn(9, 2, dtype=torch.float32, device=device)[:, 1]):
        expect_float64(device, 9, 21, scale, transposed, None)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("examples", [MAX_FACTORED_EXAMPLES + 3, 1030])
def test_many_examples_are_left_to_cublas(device, kernels, poisoned, examples, transposed):
    scale = torch.randn(examples, dtype=torch.float32, device=device)
    expect_float64(device, examples, 18, scale, transposed, None)


@pytest.mark.parametrize("kind", [SelfNormLinear, RelativeLinear, TrackedLinear])
def test_a_backward_pass_uses_it(device, kernels, monkeypatch, kind):
    calls = []
    monkeypatch.setattr(module, "gradient_from_factors", lambda *args: calls.append(args) or gradient_from_factors(*args))
    layer, x = kind(5).float().to(device), torch.randn(3, 5, dtype=torch.float32, device=device)
    z, log_det, reconstruction = layer.surrogate(x)
    (z.sum() + log_det.sum() + reconstruction.sum()).backward()
    assert len(calls) == (2 if kind is SelfNormLinear else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("features", [500, 784, 2049])
def test_large_matrices(kernels, poisoned, features, transposed):
    device = torch.device("cuda")
    assert gradient_tiles(500) != gradient_tiles(784)
    expect_float64(device, 100, features, torch.randn(100, dtype=torch.float32, device=device), transposed, None)

"""The factorised linear layer: what its factors mean, and how it takes the weights of others."""

import copy

import pytest
import torch
from torch.testing import assert_close

from selfnorm import ExactLinear, LULinear, SelfNormLinear, SingularWeightError, TrackedLinear
from selfnorm.models import fc_flow


def test_the_weight_is_the_product_of_its_factors():
    layer = LULinear(6)
    with torch.no_grad():
        layer.factors.add_(torch.randn(6, 6))
    lower = layer.factors.tril(-1) + torch.eye(6)
    upper = layer.factors.triu(1) + torch.diag(layer.signs * layer.factors.diagonal().exp())
    permutation = torch.eye(6)[layer.permutation]
    assert_close(layer.weight, permutation @ lower @ upper)
    x = torch.randn(4, 6)
    assert_close(layer(x)[0], x @ layer.weight.T + layer.bias)
    assert_close(layer(x)[1], torch.linalg.slogdet(layer.weight).logabsdet.repeat(4))


def test_starts_where_the_other_kinds_start():
    torch.manual_seed(3)
    factorised = LULinear(20)
    torch.manual_seed(3)
    assert_close(factorised.weight, ExactLinear(20).weight)


@pytest.mark.parametrize("kind", [ExactLinear, SelfNormLinear, TrackedLinear])
def test_takes_the_weight_of_another_kind(kind):
    source = kind(7)
    with torch.no_grad():
        source.weight.copy_(torch.randn(7, 7))  # with pivots, and a determinant of either sign
        source.bias.normal_()
    layer = LULinear(7)
    layer.load_state_dict(source.state_dict())
    assert_close(layer.weight, source.weight)
    x = torch.randn(3, 7)
    assert_close(layer(x), source(x))


def test_a_singular_weight_is_refused_by_name():
    with pytest.raises(SingularWeightError, match=r"LULinear\(3, bias=False\): expected an invertible weight"):
        LULinear(3, bias=False).load_state_dict({"weight": torch.ones(3, 3)})


def test_neither_training_nor_inverting_factorises(factorisations):
    layer = LULinear(5)
    factorisations.clear()
    x = torch.randn(4, 5)
    z, log_det, _ = layer.surrogate(x)
    (z.square().sum() - log_det.sum()).backward()
    layer.inverse(layer(x)[0])
    assert factorisations == []


def test_the_inverse_is_solved_in_double_precision():
    layer = LULinear(40).float()
    with torch.no_grad():
        layer.factors.add_(0.5 * torch.randn(40, 40))
    x = torch.randn(10, 40, dtype=torch.float32)
    weight = copy.deepcopy(layer).double().weight.detach()
    z = (x.double() @ weight.T).float()
    expected = torch.linalg.solve(weight, z.double().T).T
    with torch.no_grad():
        error = (layer.inverse(z)[0] - expected).norm() / expected.norm()
    condition = torch.linalg.cond(weight)
    assert condition > 1e4, "the test needs a weight on which single precision would fail"
    assert error < 1e-5


def test_the_diagonal_never_meets_zero():
    """The sign of each pivot is fixed and its size is an exponential, so that no step can make W singular."""
    layer = LULinear(4)
    with torch.no_grad():
        layer.factors.diagonal().fill_(-50.0)
    z, log_det = layer(torch.randn(2, 4))
    assert_close(log_det, torch.full((2,), -200.0))
    assert torch.isfinite(layer.inverse(z)[0]).all()


def test_can_start_from_a_rotation():
    flow = fc_flow(5, linear="lu", rotate=True)
    for layer in (m for m in flow.modules() if isinstance(m, LULinear)):
        assert_close(layer.weight @ layer.weight.T, torch.eye(5))


def test_the_inverse_undoes_a_permutation_that_is_not_its_own():
    layer = LULinear(5)
    layer.load_state_dict({"weight": torch.eye(5).roll(1, 0) + 0.1 * torch.randn(5, 5), "bias": torch.randn(5)})
    assert not torch.equal(layer.permutation, layer.permutation.argsort())
    x = torch.randn(4, 5)
    assert_close(layer.inverse(layer(x)[0])[0], x)


def test_a_state_with_factors_and_a_weight_is_refused():
    with pytest.raises(RuntimeError, match="Unexpected key"):
        LULinear(3).load_state_dict(LULinear(3).state_dict() | {"weight": torch.eye(3)})

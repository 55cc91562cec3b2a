"""Adam's step from factors, against torch's own Adam in float64."""

import pytest
import torch

from selfnorm.kernels.dense.factored import PairGradient
from selfnorm.kernels.dispatch import used_on

pytest.importorskip("triton")

from selfnorm.kernels.dense import adam, gradient
from selfnorm.kernels.dense.adam import adam_dense, adam_pair, adam_single
from selfnorm.kernels.matrix_tiles import ProductTiles
from selfnorm.runtime.collector import AdamArguments, Moments
from selfnorm.train.adam import update_from_factors

TILES = [ProductTiles(32, 64, 32, 4, 2), ProductTiles(16, 16, 16, 4, 2), ProductTiles(64, 32, 16, 4, 2)]
# A large ε: where a first gradient happens to be tiny, Adam with the usual one makes a whole step of its rounding.
BETAS, EPS = (0.8, 0.99), 1e-2


def single(device, *shape):
    return torch.randn(*shape, dtype=torch.float32, device=device)


def scalar(device, value):
    return torch.tensor(value, dtype=torch.float32, device=device)


def fresh(device, features):
    zeros = torch.zeros(features, features, dtype=torch.float32, device=device)
    return Moments(zeros.clone(), zeros.clone(), scalar(device, 0.0))


def switches(device, lr=0.03):
    return AdamArguments(scalar(device, lr), scalar(device, 0.0), scalar(device, 0.0), BETAS, EPS)


def expect_state(optimizer, matrix, state, parameter):
    kept = optimizer.state[matrix]
    torch.testing.assert_close(parameter.double(), matrix.detach().to(parameter.device), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.average.double(), kept["exp_avg"].to(parameter.device), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.square.double(), kept["exp_avg_sq"].to(parameter.device), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
@pytest.mark.parametrize("by", TILES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (33, 70), (20, 64), (16, 32)], ids=str)
def test_a_pair_takes_the_steps_of_torchs_adam(device, kernels, shape, by, inverse_likelihood):
    examples, features = shape
    W, R = single(device, features, features), single(device, features, features)
    states = (fresh(device, features), fresh(device, features))
    exact = [torch.nn.Parameter(matrix.double().cpu()) for matrix in (W, R)]
    optimizer = torch.optim.Adam(exact, lr=0.03, betas=BETAS, eps=EPS)
    options = switches(device)
    for _ in range(3):
        towards_w, x, towards_r, z = (single(device, examples, features) for _ in range(4))
        scale = single(device, examples)
        a, b, c, d, s = (factor.double().cpu() for factor in (towards_w, x, towards_r, z, scale))
        of_w, of_r = (0.5, 0.5) if inverse_likelihood else (1.0, 0.0)
        exact[0].grad = a.T @ b + of_w * s.sum() * exact[1].detach().T
        exact[1].grad = c.T @ d - of_r * s.sum() * exact[0].detach().T
        optimizer.step()
        for state in states:
            state.step.add_(1)
        adam_pair(W, R, states, towards_w, x, towards_r, z, scale, inverse_likelihood, options, by=by)
    for matrix, state, parameter in zip(exact, states, (W, R), strict=True):
        expect_state(optimizer, matrix, state, parameter)
    assert options.late_failure == 0


@pytest.mark.parametrize("by", [*TILES, None], ids=str)
@pytest.mark.parametrize("addend_transposed", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_single_takes_the_steps_of_torchs_adam(device, kernels, own, addend_transposed, by):
    W, M, state = single(device, 37, 37), single(device, 37, 37), fresh(device, 37)
    exact = torch.nn.Parameter(W.double().cpu())
    optimizer = torch.optim.Adam([exact], lr=0.03, betas=BETAS, eps=EPS)
    options = switches(device)
    for _ in range(3):
        a, b = single(device, 13, 37), single(device, 13, 37)
        scale = scalar(device, 0.3).expand(13)
        addend = exact.detach().clone() if own else M.double().cpu()
        addend = addend.T if addend_transposed else addend
        exact.grad = a.double().cpu().T @ b.double().cpu() + 2 * 13 * scale[0].double().cpu() * addend
        optimizer.step()
        state.step.add_(1)
        adam_single(W, state, a, b, W.clone() if own else M, addend_transposed, scale, 2.0, options, by=by)
    expect_state(optimizer, exact, state, W)


def test_a_matrix_is_its_own_addend_in_place(device, kernels):
    W, a = single(device, 70, 70), single(device, 3, 70)
    other, states = W.clone(), (fresh(device, 70), fresh(device, 70))
    for matrix, addend, state in ((W, W, states[0]), (other, other.clone(), states[1])):
        state.step.add_(1)
        adam_single(matrix, state, a, a, addend, False, scalar(device, 0.5), 1.0, switches(device))
    assert torch.equal(W, other)


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
def test_large_batches_are_multiplied_by_cublas_and_step_alike(device, kernels, monkeypatch, inverse_likelihood):
    def run():
        torch.manual_seed(3)
        W, R, states = single(device, 20, 20), single(device, 20, 20), (fresh(device, 20), fresh(device, 20))
        factors = [single(device, 9, 20) for _ in range(4)]
        for state in states:
            state.step.add_(1)
        adam_pair(W, R, states, *factors, single(device, 9), inverse_likelihood, switches(device))
        for state in states:
            state.step.add_(1)
        adam_single(W, states[0], *factors[:2], R, True, single(device, 9), 1.0, switches(device))
        adam_single(R, states[1], *factors[:2], R, False, single(device, 9), 1.0, switches(device))
        return W, R, *states[0], *states[1]

    small = run()
    monkeypatch.setattr(adam, "MAX_FACTORED_EXAMPLES", 8)
    monkeypatch.setattr(gradient, "MAX_FACTORED_EXAMPLES", 8)
    for one, other in zip(run(), small, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # of numpy, in the interpreter
def test_frozen_changes_nothing_and_raises_nothing(device, kernels):
    W, R, states = single(device, 20, 20), single(device, 20, 20), (fresh(device, 20), fresh(device, 20))
    before = [tensor.clone() for tensor in (W, R, *states[0], *states[1])]
    options = switches(device)._replace(frozen=scalar(device, 1.0))
    x = single(device, 4, 20)
    x[0, 0] = torch.nan
    adam_pair(W, R, states, x, x, x, x, x[1:, 0], True, options)
    adam_single(W, states[0], x, x, R, False, x[1:, 0], 0.5, options)
    assert all(torch.equal(one, other) for one, other in zip((W, R, *states[0], *states[1]), before, strict=True))
    assert options.late_failure == 0


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e25])
def test_an_element_without_a_gradient_stays_and_tells(device, kernels, bad):
    """1e25 is a gradient, but has no square."""
    W, state = single(device, 40, 40), fresh(device, 40)
    before, gradient = W.clone(), single(device, 40, 40)
    gradient[3, 39] = bad
    options = switches(device)
    state.step.add_(1)
    adam_dense(W, state, gradient, options)
    assert options.late_failure == 1
    changed = before != W
    assert not changed[3, 39] and changed.sum() == 1599
    assert state.average[3, 39] == 0 and state.square[3, 39] == 0 and W.isfinite().all() and state.square.isfinite().all()


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
def test_of_a_pair_both_are_seen(device, kernels, inverse_likelihood):
    for which in (0, 2):
        W, R, states = single(device, 20, 20), single(device, 20, 20), (fresh(device, 20), fresh(device, 20))
        factors = [single(device, 4, 20) for _ in range(4)]
        factors[which][1, 2] = torch.nan
        options = switches(device)
        for state in states:
            state.step.add_(1)
        adam_pair(W, R, states, *factors, factors[3][:, 0], inverse_likelihood, options)
        assert options.late_failure == 1
        stayed = [(state.average == 0).any(1) for state in states]
        assert stayed[which // 2].nonzero().tolist() == [[2]] and not stayed[1 - which // 2].any()


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # of numpy, in the interpreter
def test_the_first_of_many_steps_is_corrected_in_full_precision(device, kernels):
    """1 − β₂ has few digits in float32; the first step of Adam is the gradient's sign times lr."""
    W, state = torch.zeros(4, 4, dtype=torch.float32, device=device), fresh(device, 4)
    state.step.add_(1)
    adam_dense(W, state, torch.full_like(W, 1e3), switches(device, lr=1.0)._replace(betas=(0.9, 0.9999), eps=0.0))
    torch.testing.assert_close(W, -torch.ones_like(W), rtol=2e-6, atol=0)


def test_matrices_that_cannot_be_updated_in_place_are_refused(device, kernels):
    W, state = single(device, 4, 4).T, fresh(device, 4)
    with pytest.raises(ValueError, match="expected contiguous matrices"):
        adam_dense(W, state, single(device, 4, 4), switches(device))


@pytest.mark.parametrize("inverse_likelihood", [True, False], ids=["paper", "one-sided"])
def test_each_of_a_pair_has_its_own_count_of_steps(device, kernels, inverse_likelihood):
    W, R = (torch.nn.Parameter(single(device, 6, 6)) for _ in range(2))
    twins = [torch.nn.Parameter(matrix.detach().clone()) for matrix in (W, R)]
    factors, scale, options = [single(device, 3, 6) for _ in range(4)], single(device, 3), switches(device)
    states = [Moments(single(device, 6, 6), single(device, 6, 6).square(), scalar(device, step)) for step in (1.0, 7.0)]
    copies = [Moments(*(part.clone() for part in state)) for state in states]
    with used_on():
        update_from_factors(PairGradient(*twins, *factors, scale, inverse_likelihood), copies, options)
    with torch.no_grad():
        adam_pair(W, R, tuple(states), *factors, scale, inverse_likelihood, options)
    torch.testing.assert_close([W, R], twins, rtol=1e-5, atol=1e-5)

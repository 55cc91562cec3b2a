"""Tracked inverses: the gradient against the exact one, how fast the error falls, and what happens when R is lost."""

import copy
import math
import warnings

import pytest
import torch
from torch.testing import assert_close

from selfnorm import (
    ExactConv2d,
    ExactLinear,
    RelativeLinear,
    SelfNormConv2d,
    SelfNormLinear,
    SingularWeightError,
    TrackedConv2d,
    TrackedLinear,
)
from selfnorm.linalg.convmatrix import Geometry, conv_matrix, tap_sums
from selfnorm.linalg.iterations import sketch_and_project
from support.oracles import dense_matrix
from support.small_runs import started

LAYERS = {
    "linear": (lambda tracker: TrackedLinear(12, tracker=tracker), (12,)),
    "3x3": (lambda tracker: TrackedConv2d(2, 3, (4, 3), tracker), (2, 4, 3)),
    "1x1": (lambda tracker: TrackedConv2d(5, 1, (3, 2), tracker), (5, 3, 2)),
    "5x1": (lambda tracker: TrackedConv2d(1, (5, 1), (3, 4), tracker, bias=False), (1, 3, 4)),
}


def make(name, tracker="newton-schulz"):
    build, shape = LAYERS[name]
    return build(tracker), shape


def moved(layer, size):
    """The layer's weight, a random step of that size further, and R left where it was."""
    with torch.no_grad():
        step = torch.randn_like(layer.weight)
        layer.weight.add_(size * step / step.norm())
    return layer


def error_of(layer):
    """I − RW as a matrix, by what the layer does to unit vectors."""
    rows = layer.weight_inv.shape[0]
    W = layer.weight.flatten(1)
    if layer.weight.dim() == 4 and layer.kernel_size != (1, 1):
        W = dense_matrix(layer.weight, layer.size, layer.geometry)
    return torch.eye(rows).to(W) - layer.weight_inv @ W


def gradients(layer, x, weights):
    z, log_det, _ = layer.surrogate(x)
    return torch.autograd.grad((z * weights).sum() - log_det.sum(), list(layer.parameters()))


@pytest.mark.parametrize("name", LAYERS)
def test_at_the_exact_inverse_the_gradient_is_exact(name, device):
    layer, shape = make(name)
    layer = moved(layer, 0.5).to(device)
    layer.load_state_dict({"weight": layer.weight.detach().clone(), **({"bias": layer.bias} if layer.bias is not None else {})})
    x, weights = torch.randn(7, *shape, device=device), torch.randn(7, *shape, device=device)
    exact = gradients(layer, x, weights)
    z, log_det = layer(x)
    expected = torch.autograd.grad((z * weights).sum() - log_det.sum(), list(layer.parameters()))
    for one, other in zip(exact, expected, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_newton_schulz_leaves_the_square_of_the_step(name):
    """Quadratic: halving the step quarters what the gradient lacks, a slope of 2."""
    sizes, missing, residuals = [0.02, 0.01, 0.005, 0.0025], [], []
    for size in sizes:
        torch.manual_seed(5)
        layer, shape = make(name)
        x, weights = torch.randn(3, *shape), torch.zeros(3, *shape)
        moved(layer, size).after_step()
        (tracked, *_) = gradients(layer, x, weights)
        z, log_det = layer(x)
        (exact, *_) = torch.autograd.grad((z * weights).sum() - log_det.sum(), list(layer.parameters()), allow_unused=True)
        missing.append(float((tracked - exact).norm() / exact.norm()))
        residuals.append(float(error_of(layer).detach().norm()))
    for values in (missing, residuals):
        slope = math.log(values[0] / values[-1]) / math.log(sizes[0] / sizes[-1])
        assert slope == pytest.approx(2, abs=0.1), values


def test_newton_schulz_squares_the_error_exactly():
    layer = moved(TrackedLinear(9), 0.3)
    before = torch.eye(9) - layer.weight_inv @ layer.weight
    layer.after_step()
    assert_close(torch.eye(9) - layer.weight_inv @ layer.weight, before @ before)
    assert_close(layer.residual, before.norm())


@pytest.mark.parametrize("name", LAYERS)
def test_the_tracked_gradient_is_as_good_as_the_residual(name):
    """The gradient's error in log|det W| is at most ‖I − RW‖·‖W⁻¹‖, taken where the weight takes it."""
    layer, shape = make(name)
    moved(layer, 0.01)
    x = torch.randn(1, *shape)
    (tracked, *_) = gradients(layer, x, torch.zeros(1, *shape))
    log_det = layer(x)[1].sum()
    (exact,) = torch.autograd.grad(-log_det, layer.weight)
    error = error_of(layer)
    copies = math.prod(shape) // error.shape[0]
    inverse = layer.inverse_of(layer.weight.detach())
    # R − W⁻¹ = −(I − RW)W⁻¹; a kernel's tap collects at most D of its entries.
    bound = copies * math.sqrt(error.shape[0]) * (error @ inverse).norm()
    assert 0 < (tracked - exact).norm() <= bound


def test_sketching_makes_the_inverse_right_where_it_looked_and_never_worse(device):
    W = torch.randn(10, 10, device=device)
    R = torch.linalg.inv(W) + 0.1 * torch.randn(10, 10, device=device)
    Q = torch.randn(10, 3, device=device)
    mended = sketch_and_project(R, Q - R @ W @ Q, W @ Q)
    assert_close(mended @ W @ Q, Q)
    assert (mended - torch.linalg.inv(W)).norm() < (R - torch.linalg.inv(W)).norm()
    # The least change that does: R + missing·pinv(WQ).
    assert_close(mended, R + (Q - R @ W @ Q) @ torch.linalg.pinv(W @ Q))


@pytest.mark.parametrize("name", LAYERS)
def test_sketching_converges_on_a_weight_that_stays(name):
    layer, _ = make(name, "sketch")
    moved(layer, 0.02)
    first = error_of(layer).norm()
    for _ in range(300):
        layer.after_step()
    assert error_of(layer).norm() < 1e-3 * first and int(layer.fallbacks) == 0


def test_the_sketchs_residual_estimates_the_true_one():
    layer = moved(TrackedLinear(30, tracker="sketch", rank=3), 0.05)
    true = (torch.eye(30) - layer.weight_inv @ layer.weight).norm()
    start = layer.weight_inv.clone()
    found = []
    for _ in range(400):
        layer.weight_inv.copy_(start)
        layer.track()
        found.append(layer.residual.square())
    mean = torch.stack(found).mean()
    assert_close(mean, true.square(), rtol=4 * float(torch.stack(found).std() / 20 / mean), atol=0.0)


def test_a_sketch_draws_from_the_generator_it_is_given():
    def after(seed):
        torch.manual_seed(0)
        layer = moved(TrackedLinear(8, tracker="sketch"), 0.05)
        before = torch.get_rng_state()
        layer.after_step(generator=torch.Generator().manual_seed(seed))
        assert torch.equal(torch.get_rng_state(), before)
        return layer.weight_inv

    assert torch.equal(after(1), after(1)) and not torch.equal(after(1), after(2))


@pytest.mark.parametrize("tracker", ["newton-schulz", "sketch"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_lost_inverse_is_factorised_again_counted_and_reported(name, tracker, device):
    layer, _ = make(name, tracker)
    layer = moved(layer, 8.0).to(device)
    with pytest.warns(RuntimeWarning, match=rf"{type(layer).__name__}.*{tracker} cannot keep up.*\.fallbacks"):
        layer.after_step()
    assert int(layer.fallbacks) == 1
    assert error_of(layer).norm() < 1e-8
    moved(layer, 8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.after_step()  # counted in silence
    assert int(layer.fallbacks) == 2
    moved(layer, 1e-4).after_step()
    assert int(layer.fallbacks) == 2


@pytest.mark.parametrize("tracker", ["newton-schulz", "sketch"])
def test_a_singular_weight_is_named(tracker):
    layer = TrackedLinear(4, tracker=tracker)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    with pytest.raises(SingularWeightError, match=r"TrackedLinear\(4.*expected an invertible weight, got a singular one"):
        for _ in range(3):
            layer.after_step()
    with pytest.raises(SingularWeightError, match="TrackedLinear"):
        TrackedLinear(2).load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})


def test_a_weight_that_is_not_finite_is_named():
    layer = TrackedLinear(4)
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"TrackedLinear.*expected finite weights"):
        layer.after_step()


@pytest.mark.parametrize("tracker", ["newton-schulz", "sketch"])
def test_tracking_alone_never_factorises(tracker, factorisations):
    layer, shape = make("3x3", tracker)
    layer.after_step()
    factorisations.clear()
    moved(layer, 1e-3)
    gradients(layer, torch.randn(2, *shape), torch.randn(2, *shape))
    layer.after_step()
    assert set(factorisations) <= {"qr"}  # of the thin sketch


@pytest.mark.parametrize("name", ["linear", "3x3", "1x1"])
def test_twins_load_each_others_state(name):
    layer, shape = make(name)
    if name == "linear":
        exact, learned = ExactLinear(12), SelfNormLinear(12)
    else:
        exact, learned = (kind(shape[0], layer.kernel_size) for kind in (ExactConv2d, SelfNormConv2d))
    moved(layer, 0.3)
    x = torch.randn(3, *shape)
    for twin in (exact, learned):
        twin.load_state_dict(layer.state_dict())
        assert_close(twin(x), layer(x))
        moved(twin, 0.3)
        layer.load_state_dict(twin.state_dict())
        assert_close(layer(x), twin(x))
        assert error_of(layer).norm() < 1e-8  # its own inverse, not what the twin had learned


def test_state_keeps_the_inverse_and_the_count():
    layer, _ = make("linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        moved(layer, 9.0).after_step()
    moved(layer, 0.01)
    other, _ = make("linear")
    other.load_state_dict(layer.state_dict())
    assert int(other.fallbacks) == 1 and torch.equal(other.weight_inv, layer.weight_inv)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TrackedLinear(3, tracker="newton"), "TrackedLinear: expected tracker to be one of newton-schulz, sketch, got"),
        (lambda: TrackedLinear(3, rank=0), "TrackedLinear: expected rank to be a whole number of at least 1, got 0"),
        (lambda: TrackedConv2d(3, 3, (64, 64)), r"TrackedConv2d: expected at most 4096 dimensions.*got 12288 \(3×64×64\)"),
        (lambda: TrackedConv2d(3, 2, (4, 4)), "TrackedConv2d: expected odd sides for kernel_size"),
        (lambda: TrackedConv2d(3, 3, (4, 4, 4)), "TrackedConv2d: expected size to be a number or"),
    ],
)
def test_what_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_1x1_may_be_as_large_as_it_likes():
    assert TrackedConv2d(3, 1, (64, 64)).weight_inv.shape == (3, 3)


@pytest.mark.parametrize("geometry", [Geometry(), Geometry((2, 1), 2), Geometry((1, 1), 1, "circular")])
def test_tap_sums_are_the_adjoint_of_the_matrix(geometry):
    w, size = torch.randn(4, 4 // geometry.groups, 3, 5), (6, 5)
    T = conv_matrix(w, size, geometry)
    M = torch.randn_like(T)
    assert_close((M * T).sum(), (tap_sums(M, (3, 5), size, geometry) * w).sum())


@pytest.mark.parametrize("tracker", ["newton-schulz", "sketch"])
@pytest.mark.parametrize(("error", "lost"), [(0.9, 0), (1.1, 1)])
def test_where_a_tracker_gives_up(tracker, error, lost):
    """At ‖I − RW‖ = 1 Newton–Schulz need not converge; for sketching the limit is √D/10, which is 1 here too."""
    layer = TrackedLinear(100, tracker=tracker, rank=100)  # with a whole basis the sketch's residual is no guess
    with torch.no_grad():
        layer.weight_inv.copy_((1 - error / 10) * torch.linalg.inv(layer.weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        layer.after_step()
    assert int(layer.fallbacks) == lost


@pytest.mark.parametrize("tracker", ["newton-schulz", "sketch"])
def test_tracking_leaves_a_lost_inverse_alone_and_settling_replaces_it_once(tracker):
    layer = TrackedLinear(6, tracker=tracker)
    with torch.no_grad():
        layer.weight.mul_(9)
    before = layer.weight_inv.clone()
    layer.track()
    assert torch.equal(layer.weight_inv, before) and layer.residual > layer.largest_residual
    with pytest.warns(RuntimeWarning):
        layer.recompute_if_lost()
    layer.recompute_if_lost()
    assert int(layer.fallbacks) == 1


def test_the_sketchs_rank():
    assert TrackedLinear(20, tracker="sketch").rank == 3 and TrackedLinear(4, tracker="sketch", rank=9).rank == 4


def test_the_largest_matrix_that_is_kept(monkeypatch):
    monkeypatch.setattr("selfnorm.layers.tracked.MAX_DENSE_INVERSE", 16)
    assert TrackedConv2d(1, 3, (4, 4)).weight_inv.shape == (16, 16)
    with pytest.raises(ValueError, match="at most 16 dimensions"):
        TrackedConv2d(1, 3, (4, 5))


AUTOCAST = {**LAYERS, "relative": (lambda _: RelativeLinear(6), (6,)), "selfnorm": (lambda _: SelfNormLinear(6), (6,))}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_reaches_neither_gradient_nor_tracking(name):
    """Whether only the forward pass is in it, or all of the step."""
    build, shape = AUTOCAST[name]
    layer = build("newton-schulz").float()
    x = torch.randn(4, *shape, dtype=torch.float32)

    def found(forward, rest):
        twin = copy.deepcopy(layer)
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            z, log_det, reconstruction = twin.surrogate(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=rest):
            (z.square().sum() - log_det.sum() + reconstruction.sum()).backward()
            with torch.no_grad():
                twin.weight.sub_(1e-3 * twin.weight.grad)
            twin.after_step()
        return twin

    assert_close(found(True, False).state_dict(), found(False, False).state_dict(), rtol=0, atol=0)
    # In a backward pass autocast reaches torch's own products, as it would any layer's, but not what was written here.
    twin = found(True, True)
    if name in LAYERS:
        assert error_of(twin).detach().norm() <= twin.residual**2 + 1e-5


@pytest.mark.parametrize("name", [*LAYERS, "relative"])
def test_a_second_derivative_of_the_surrogate_is_refused(name):
    build, shape = AUTOCAST[name]
    layer = build("newton-schulz")
    with pytest.raises(RuntimeError, match="differentiate log_prob twice"):
        torch.autograd.grad(layer.surrogate(torch.randn(2, *shape)).log_det.sum(), layer.weight, create_graph=True)


def test_a_weight_of_another_shape_is_refused_as_torch_does():
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        TrackedLinear(3).load_state_dict({"weight": torch.zeros(4, 4), "bias": torch.zeros(3)})


def test_a_real_run_stays_with_its_exact_twin():
    """2,000 steps on digits in float32: R never leaves W⁻¹, and the exact NLL is the twin's all along."""
    tracked, residuals = curve("tracked")
    exact, _ = curve("exact")
    assert len(residuals) >= 2 * 2000 and max(residuals) <= 1e-3
    assert len(exact) > 10
    for one, other in zip(tracked, exact, strict=True):
        assert one == pytest.approx(other, rel=0.005)


def curve(kind):
    """The exact validation NLLs of a run, and ‖RW − I‖_F/√D of its tracked layers after every step."""
    found, residuals = [], []
    trainer = started(
        f"kind={kind}",
        "epochs=167",
        "learning_rate=0.001",
        "validate_every=16",
        report=lambda record: found.append(record["nll"]) if record["kind"] == "validation" else None,
    )
    layers = [m for m in trainer.flow.modules() if isinstance(m, TrackedLinear)]
    after_step = trainer.loss.after_step

    def looked_at(*args, **options):
        after_step(*args, **options)
        with torch.no_grad():
            residuals.extend(float(error_of(layer).norm() / 8) for layer in layers)

    trainer.loss.after_step = looked_at
    trainer.run()
    return found, residuals

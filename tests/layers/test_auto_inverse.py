"""The auto inverse: right to its tolerance, by the learned inverse where that contracts, and never by a stale plan."""

import copy

import pytest
import torch
from torch.testing import assert_close

from selfnorm import SelfNormConv2d, SelfNormLinear, TrackedConv2d, TrackedLinear
from selfnorm.linalg.iterations import (
    MAX_REFINEMENTS,
    NORM_FACTOR,
    NORM_PROBES,
    POWERS_PER_READ,
    count_refinements,
    error_probes,
    sampling_tolerance,
    white_noise,
)
from selfnorm.runtime.context import step_context
from selfnorm.runtime.precision import products_in_tf32

TOLERANCE = sampling_tolerance(torch.float64)


def linear_with_error(E, condition=3.0):
    """A layer with I − RW = E and a weight of the given condition number."""
    features = len(E)
    layer = SelfNormLinear(features)
    U, V = (torch.linalg.qr(torch.randn(features, features))[0] for _ in range(2))
    with torch.no_grad():
        layer.weight.copy_(U @ torch.diag(torch.logspace(0, float(torch.tensor(condition).log10()), features)) @ V)
        layer.weight_inv.copy_((torch.eye(features) - E) @ torch.linalg.inv(layer.weight))
        layer.bias.copy_(torch.randn(features))
    return layer.eval()


def with_radius(radius, features=12):
    E = torch.randn(features, features)
    return E * radius / torch.linalg.eigvals(E).abs().max()


def jordan(value, coupling, features=5):
    """Far from normal: the norms of its powers grow before they fall."""
    return torch.diag(torch.full((features,), value)) + torch.diag(torch.full((features - 1,), coupling), 1)


ERRORS = {
    "tiny": lambda: with_radius(1e-6),
    "small": lambda: with_radius(0.1),
    "large": lambda: with_radius(0.4),
    "one direction": lambda: 0.3 * torch.outer(torch.eye(12)[0], torch.eye(12)[1]) + 0.2 * torch.outer(*[torch.eye(12)[2]] * 2),
    "nilpotent": lambda: jordan(0.0, 8.0),
    "grows first": lambda: jordan(0.2, 3.0),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_z_is_inverted_to_the_tolerance(name, factorisations):
    E = ERRORS[name]()
    layer = linear_with_error(E)
    W, features = layer.weight.detach(), layer.features
    worst = torch.linalg.svd(torch.linalg.matrix_power(E, 3))[2][0]
    x = torch.cat([torch.randn(20, features), worst[None], torch.eye(features)])
    factorisations.clear()
    found = layer.auto_inverse(x @ W.T + layer.bias)
    assert not factorisations
    assert ((found - x).norm(dim=1) / x.norm(dim=1)).max() < TOLERANCE
    assert layer.last_plan.steps is not None


def test_powers_that_amplify_rounding_errors_are_not_used():
    """The 32nd power of this error is zero, but the 31st is 5³¹."""
    layer = SelfNormLinear(32)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(32))
        layer.weight_inv.copy_(torch.eye(32) - torch.diag(torch.full((31,), 5.0), 1))
    z = torch.randn(4, 32)
    assert (layer.auto_inverse(z) - layer.inverse(z)[0]).norm() <= TOLERANCE * z.norm()
    assert layer.last_plan.steps is None


@pytest.mark.parametrize("name", ERRORS)
def test_the_steps_are_the_fewest_that_the_bound_allows(name):
    E = ERRORS[name]()
    probes = white_noise((len(E),), E)
    assert probes.shape == (NORM_PROBES, len(E))
    steps, error = count_refinements(lambda v: v, lambda v: v - v @ E.T, probes, TOLERANCE)
    powers = [torch.linalg.matrix_power(E, k + 1) for k in range(MAX_REFINEMENTS + 1)]
    bounds = [float(NORM_FACTOR * (probes @ power.T).norm(dim=1).max()) for power in powers]
    assert bounds[steps] <= TOLERANCE and all(bound > TOLERANCE for bound in bounds[:steps])
    assert all(torch.linalg.matrix_norm(A, 2) <= bound + 1e-15 for A, bound in zip(powers, bounds, strict=True))
    assert error == pytest.approx(float((probes @ E.T).square().mean().sqrt()), rel=1e-9)


@pytest.mark.parametrize(
    ("rate", "steps", "products"),
    [(1e-12, 0, POWERS_PER_READ), (0.05, 7, POWERS_PER_READ), (0.4, 23, 24), (0.8, None, 33), (1.5, None, 33), (1e60, None, 8)],
)
def test_the_decision_costs_few_products_and_stops_at_overflow(rate, steps, products):
    uses = []

    def forward(v):
        uses.append(len(v))
        return v

    found, error = count_refinements(forward, lambda v: (1 - rate) * v, white_noise((4,), torch.zeros(())), TOLERANCE)
    assert found == steps and uses == [NORM_PROBES] * products
    assert error == pytest.approx(rate * float(white_noise((4,), torch.zeros(())).square().mean().sqrt()), rel=1e-3)


@pytest.mark.parametrize(
    "E", [1.2 * torch.eye(6), torch.full((6, 6), float("nan")), 5 * torch.ones(6, 6)], ids=["grows", "nan", "far"]
)
def test_an_inverse_that_does_not_contract_is_replaced_by_the_exact_one(E, factorisations):
    layer = linear_with_error(E.double())
    x = torch.randn(4, 6)
    z, _ = layer(x)
    factorisations.clear()
    assert_close(layer.auto_inverse(z), x, rtol=1e-12, atol=1e-12)
    assert layer.last_plan.steps is None and "lu_factor_ex" in factorisations
    factorisations.clear()
    layer.auto_inverse(z)
    assert not factorisations  # kept in eval mode


def test_float32_is_refined_even_where_its_rounding_is_above_the_tolerance_of_an_ill_conditioned_weight():
    layer = linear_with_error(with_radius(0.05, 64), condition=1e4).float()
    x = torch.randn(10, 64, dtype=torch.float32)
    z = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double()).float()
    found = layer.auto_inverse(z)
    assert layer.last_plan.steps is not None
    assert layer.last_plan.error == pytest.approx(0.05, rel=0.5)
    eps = torch.finfo(torch.float32).eps
    residual = torch.nn.functional.linear(found.double() - x.double(), layer.weight.double()).norm(dim=1)
    assert (residual / (layer.weight.double().norm(2) * x.double().norm(dim=1))).max() < 20 * eps  # backward stable


CONVOLUTIONS = {
    "zeros": (lambda: SelfNormConv2d(2, 3), (2, 6, 5)),
    "zeros, wide r": (lambda: SelfNormConv2d(2, 3, inverse_kernel_size=5), (2, 6, 5)),
    "circular": (lambda: SelfNormConv2d(2, 3, 5, padding_mode="circular"), (2, 6, 5)),
    "1×1": (lambda: SelfNormConv2d(4, 1), (4, 3, 5)),
    "1×1, wide r": (lambda: SelfNormConv2d(4, 1, 3), (4, 3, 5)),
    "groups": (lambda: SelfNormConv2d(4, 3, groups=2, dilation=2), (4, 5, 4)),
    "tracked": (lambda: TrackedConv2d(2, 3, (4, 5)), (2, 4, 5)),
    "tracked 1×1": (lambda: TrackedConv2d(3, 1, (4, 5)), (3, 4, 5)),
    "tracked linear": (lambda: TrackedLinear(7), (7,)),
}


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.04, 0.6])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_layers_of_every_kind(name, noise):
    make, shape = CONVOLUTIONS[name]
    layer, x = make().eval(), torch.randn(5, *shape)
    with torch.no_grad():
        layer.weight_inv.add_(noise * torch.randn_like(layer.weight_inv))
        layer.bias.add_(torch.randn_like(layer.bias))
    z, _ = layer(x)
    found = layer.auto_inverse(z)
    assert ((found - x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).max() < TOLERANCE
    if noise < 0.1:
        assert layer.last_plan.steps is not None
    # The plan has an estimate of ‖RW − I‖/√D.
    units = torch.eye(x[0].numel()).unflatten(1, shape)
    distance = layer.reconstruction(units).mean().sqrt().item()
    assert layer.last_plan.error == pytest.approx(distance, rel=0.35, abs=1e-12)
    layer.approx_inverse(z)
    assert layer.inverse_error() == pytest.approx(distance, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("features", "tolerance"), [(256, 1e-9), (300, 0.15)])
def test_an_error_in_a_single_direction_is_measured(features, tolerance):
    layer = SelfNormLinear(features)
    directions = torch.nn.functional.normalize(torch.randn(20, features))
    for direction in directions:
        with torch.no_grad():
            layer.weight.copy_(torch.eye(features))
            layer.weight_inv.copy_(torch.eye(features) + 5 * torch.outer(direction, direction))
        layer.approx_inverse(torch.zeros(1, features))
        assert layer.inverse_error() == pytest.approx(5 / features**0.5, rel=tolerance)


def test_images_of_many_pixels_are_probed_with_few_vectors():
    assert len(error_probes((3, 256, 256), torch.zeros(()))) == NORM_PROBES
    assert len(error_probes((1, 64, 64), torch.zeros(()))) == 256


def test_a_larger_image_does_not_change_the_plan_of_a_1x1_convolution():
    layer = SelfNormConv2d(4, 1).eval()
    layer.auto_inverse(torch.randn(1, 4, 2, 2))
    plan = layer.last_plan
    layer.auto_inverse(torch.randn(1, 4, 30, 30))
    assert layer.last_plan is plan and plan.shape == (4, 1, 1)


# A plan is never stale


def replaced(layer):
    layer.weight = torch.nn.Parameter(layer.weight.detach() @ torch.diag(torch.tensor([3.0, 1, 1, 1, 0.1])))


def loaded(layer):
    other = SelfNormLinear(5)
    with torch.no_grad():
        other.weight.mul_(4)
    layer.load_state_dict(other.state_dict())


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(3),
    "in place, R": lambda layer: layer.weight_inv.mul_(3),
    "one entry": lambda layer: layer.weight[0].fill_(2),
    "through data": lambda layer: layer.weight.data.copy_(4 * layer.weight.data),
    "through data, R": lambda layer: layer.weight_inv.data.copy_(-layer.weight_inv.data),
    "through numpy": lambda layer: layer.weight.detach().numpy().__imul__(3),
    "state dict": loaded,
    "another parameter": replaced,
}


@torch.no_grad()
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_weights_is_seen(name, training):
    layer, z = linear_with_error(with_radius(0.1, 5)).train(training), torch.randn(4, 5)
    layer.auto_inverse(z)
    before = layer.last_plan
    layer.auto_inverse(z)
    assert layer.last_plan is before
    CHANGES[name](layer)
    expected = torch.linalg.solve(layer.weight, (z - layer.bias).T).T
    assert_close(layer.auto_inverse(z), expected, rtol=1e-6, atol=1e-6)
    assert layer.last_plan is not before
    CHANGES["in place"](layer)  # once more: the copies are overwritten, not kept
    expected = torch.linalg.solve(layer.weight, (z - layer.bias).T).T
    assert_close(layer.auto_inverse(z), expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_another_image_size_makes_another_plan():
    """On one pixel r inverts the centre of w alone, and so does not on larger images."""
    layer = SelfNormConv2d(1, 3).eval()
    layer.weight[0, 0] += 0.5
    layer.weight_inv.zero_()
    layer.weight_inv[0, 0, 1, 1] = 1 / layer.weight[0, 0, 1, 1]
    layer.auto_inverse(torch.randn(3, 1, 1, 1))
    assert layer.last_plan.steps == 0
    x = torch.randn(3, 1, 6, 6)
    assert_close(layer.auto_inverse(layer(x)[0]), x, rtol=1e-6, atol=1e-6)


def test_another_dtype_makes_another_plan():
    layer, z = linear_with_error(with_radius(0.1, 5)), torch.randn(4, 5)
    layer.auto_inverse(z)
    fine = layer.last_plan.steps
    layer.float().auto_inverse(z.float())
    coarse = layer.last_plan.steps
    layer.double().auto_inverse(z)
    assert coarse < fine == layer.last_plan.steps


@torch.no_grad()
def test_a_copy_plans_for_itself():
    layer, z = linear_with_error(with_radius(0.1, 5)), torch.randn(4, 5)
    layer.auto_inverse(z)
    other = copy.deepcopy(layer)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(layer.planned_weights(), other.planned_weights(), strict=True))
    other.weight.mul_(3)
    assert_close(other.auto_inverse(z), other.inverse(z)[0], rtol=1e-6, atol=1e-6)
    assert_close(layer.auto_inverse(z), layer.inverse(z)[0], rtol=1e-6, atol=1e-6)


def test_plans_made_in_inference_mode_can_be_renewed_outside():
    layer, z = linear_with_error(with_radius(0.1, 5)), torch.randn(4, 5)
    with torch.inference_mode():
        layer.auto_inverse(z)
    with torch.no_grad():
        layer.weight.mul_(1.01)
    assert_close(layer.auto_inverse(z), layer.inverse(z)[0], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_trusted_plan_is_not_compared_but_can_be_checked_later():
    layer, z = linear_with_error(with_radius(0.1, 5)), torch.randn(4, 5)
    with step_context(trusts_plans=True), pytest.raises(RuntimeError, match="expected a plan for examples of shape"):
        layer.auto_inverse(z)
    right = layer.auto_inverse(z)
    plan = layer.last_plan
    assert layer.plan_holds()
    memory = [copy.data_ptr() for copy in layer.planned_weights()]
    layer.weight.mul_(3)
    with step_context(trusts_plans=True):
        wrong = layer.auto_inverse(z)
    assert layer.last_plan is plan and not layer.plan_holds() and not torch.allclose(wrong, right / 3, rtol=1e-3)
    layer.auto_inverse(z)
    assert layer.plan_holds() and memory == [copy.data_ptr() for copy in layer.planned_weights()]
    layer.weight_inv.mul_(3)
    assert not layer.plan_holds()


def test_a_plan_draws_no_random_numbers_of_others():
    layer, z = linear_with_error(with_radius(0.1, 5)), torch.randn(4, 5)
    before = torch.get_rng_state()
    layer.auto_inverse(z)
    assert torch.equal(before, torch.get_rng_state())


# Gradients and precision


@pytest.mark.parametrize("name", ["linear", "zeros", "circular"])
def test_gradients_are_those_of_the_exact_inverse(name):
    if name == "linear":
        layer, z = linear_with_error(with_radius(0.1, 5)), torch.randn(4, 5, requires_grad=True)
    else:
        layer, z = CONVOLUTIONS[name][0]().eval(), torch.randn(4, *CONVOLUTIONS[name][1], requires_grad=True)
    probe = torch.randn_like(z)
    inputs = [z, layer.weight, layer.bias]
    found = torch.autograd.grad((layer.auto_inverse(z) * probe).sum(), inputs)
    expected = torch.autograd.grad((layer.inverse(z)[0] * probe).sum(), inputs)
    assert layer.last_plan.steps is not None
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_products_are_not_rounded_to_tf32():
    """Neither those of the decision nor those of the steps: TF32 is coarser than the tolerance."""
    seen = []

    class Watched(SelfNormLinear):
        def multiply_inverse(self, R, z):
            seen.append(products_in_tf32())
            return super().multiply_inverse(R, z)

    layer, before = Watched(4), torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        layer.auto_inverse(torch.randn(2, 4))
        assert products_in_tf32()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(seen) > POWERS_PER_READ and not any(seen)


def test_the_tolerance_is_the_square_root_of_eps():
    assert sampling_tolerance(torch.float32) == pytest.approx(3.45e-4, rel=1e-2)
    assert sampling_tolerance(torch.float64) == pytest.approx(1.49e-8, rel=1e-2)

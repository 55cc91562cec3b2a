"""What is known of rounding errors: condition numbers, when they are looked at, what is said of them, and float64 copies."""

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.testing import assert_close

from selfnorm import (
    ActNorm,
    Chain,
    Conv1x1,
    EmergingConv2d,
    ExactConv2d,
    ExactLinear,
    Flatten,
    Flow,
    Logit,
    LULinear,
    SelfNormConv2d,
    SelfNormLinear,
    SmoothLeakyReLU,
    accurate,
)
from selfnorm.layers.emerging import AutoregressiveConv2d
from selfnorm.linalg.condition import KnownCondition
from selfnorm.linalg.wide import in_float64
from selfnorm.models import fc_flow
from selfnorm.runtime.context import step_context
from selfnorm.runtime.rounding import Rounding
from support.precision import FLOAT32, aligned, conditioned, oracle, shaken, typical, with_weights
from support.transforms import LogProb

# What well-conditioned flows do


def well_conditioned():
    flow = fc_flow(6, layers=3, rotate=True)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return flow.float().eval()


def test_well_conditioned_flows_stay_in_float32(monkeypatch):
    monkeypatch.setattr(accurate, "in_float64", None)
    flow, x = well_conditioned(), torch.randn(20, 6, dtype=FLOAT32)
    z, log_det = flow.bijection(x)
    assert torch.equal(flow.log_prob(x), flow.base.log_prob(z) + log_det)
    assert torch.equal(flow.encode(x), z)
    assert torch.equal(flow.decode(z, "exact"), flow.bijection.inverse(z)[0])


def test_many_harmless_layers_are_looked_at_once_for_rows_of_a_size(evaluations):
    """The product of their condition numbers bounds the error, but far from closely."""
    layers = [SelfNormLinear(12) for _ in range(8)]
    flow = with_weights(Chain(*layers), *(conditioned(12, 4) for _ in layers))
    x = torch.randn(30, 12, dtype=FLOAT32) / 10
    z, log_det = flow.bijection(x)
    for _ in range(3):
        assert torch.equal(flow.log_prob(x), flow.base.log_prob(z) + log_det)
    assert len(evaluations) == 1
    flow.log_prob(1.5 * x)
    assert len(evaluations) == 1
    flow.log_prob(3 * x)
    flow.log_prob(x)
    assert len(evaluations) == 2
    with torch.no_grad():
        layers[3].weight[0].mul_(2)
    flow.log_prob(x)
    flow.encode(x)
    assert len(evaluations) == 3


def test_factors_are_shared_between_dtypes(factorisations):
    flow = with_weights(SelfNormLinear(4), conditioned(4, 1e6))
    x = torch.randn(5, 4, dtype=FLOAT32)
    factorisations.clear()
    for _ in range(3):
        flow.log_prob(x)
    assert factorisations == ["lu_factor_ex"]


def test_training_never_looks_at_condition_numbers(factorisations, evaluations):
    flow = with_weights(Chain(ExactLinear(4), SmoothLeakyReLU()), conditioned(4, 1e6))
    factorisations.clear()
    flow.surrogate(torch.randn(5, 4, dtype=FLOAT32)).log_det.mean().backward()
    assert factorisations == ["slogdet"] and evaluations == []


# What is said above the limit


def test_above_the_limit_a_warning_names_the_layer_once_for_each_set_of_weights():
    flow, x = with_weights(Chain(SmoothLeakyReLU(), SelfNormLinear(4)), conditioned(4, 1e10)), torch.randn(5, 4, dtype=FLOAT32)
    for _ in range(2):
        with torch.no_grad():
            flow.bijection[1].weight.copy_(conditioned(4, 1e10))
        with pytest.warns(
            RuntimeWarning, match=r"Flow.log_prob: SelfNormLinear\(4, .*condition number of at most 1e\+08"
        ) as told:
            flow.log_prob(x)
        assert told[0].filename == __file__
        flow.log_prob(x)  # warnings are errors
        flow.encode(x)


def test_above_the_limit_an_exact_inverse_warns_as_well():
    """Rounding x to float32 then moves f(x) by units, however exactly x was computed."""
    flow, z = with_weights(SelfNormLinear(4), conditioned(4, 1e10)), torch.randn(5, 4, dtype=FLOAT32)
    with pytest.warns(
        RuntimeWarning, match=r"Flow.decode: SelfNormLinear\(4, .*at most 1e.*rounding alone may move the latent by"
    ) as told:
        flow.decode(z, "exact")
    assert told[0].filename == __file__
    with torch.no_grad():
        flow.bijection.weight.copy_(conditioned(4, 1e7))
    flow.decode(z, "exact")  # warnings are errors


@pytest.mark.parametrize(("condition", "layers", "told"), [(1e6, 3, True), (1e6, 2, False), (1e7, 3, True), (30, 12, True)])
@pytest.mark.parametrize("dtype", [FLOAT32, torch.float64])
def test_a_chain_that_float64_does_not_resolve_is_told_once(condition, layers, told, dtype):
    """No layer of it is to blame alone. The product of condition numbers, 1e18, is also that of harmless chains."""
    flow = aligned(condition, layers).to(dtype)
    x = typical(flow, 4).to(dtype)
    if told:
        with pytest.warns(RuntimeWarning, match=r"Flow.log_prob: expected layers that together magnify .*by about \de") as told:
            flow.log_prob(x)
        assert told.list[0].filename == __file__
    flow.log_prob(x)  # warnings are errors


def test_many_turned_layers_are_no_reason_to_warn():
    flow = with_weights(Chain(*(SelfNormLinear(12) for _ in range(30))), *(conditioned(12, 8) for _ in range(30)))
    flow.log_prob(torch.randn(30, 12, dtype=FLOAT32))


def test_float64_is_good_for_more():
    flow, x = with_weights(SelfNormLinear(4), conditioned(4, 1e10)).double(), torch.randn(5, 4)
    flow.log_prob(x)
    with torch.no_grad():
        flow.bijection.weight.copy_(conditioned(4, 1e13))
    with pytest.warns(RuntimeWarning, match=r"at most 1e\+12 for data in torch.float64"):
        flow.log_prob(x)


# Estimates


LAYERS = {
    "dense": (lambda: shaken(SelfNormLinear(30)), (30,)),
    "1x1": (lambda: shaken(Conv1x1(6)), (6, 3, 2)),
    "1x1 in groups": (lambda: shaken(SelfNormConv2d(6, 1, groups=2)), (6, 3, 2)),
    "zero padding": (lambda: shaken(ExactConv2d(2, 3)), (2, 5, 4)),
    "zero padding in groups": (lambda: shaken(SelfNormConv2d(4, 3, groups=2)), (4, 3, 4)),
    "circular": (lambda: shaken(ExactConv2d(3, 3, padding_mode="circular")), (3, 5, 4)),
    "triangular by rows": (lambda: shaken(AutoregressiveConv2d(2, 3)), (2, 4, 3)),
    "triangular by fronts": (lambda: shaken(AutoregressiveConv2d(24, 3, mirrored=True, mask="raster"), 0.1), (24, 2, 3)),
    "LU": (lambda: LULinear(30), (30,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_condition_numbers_are_estimated_within_a_factor_of_two(name):
    make, shape = LAYERS[name]
    layer = make().eval()
    if name == "LU":
        layer.load_state_dict({"weight": torch.randn(30, 30), "bias": torch.zeros(30)})
    rounding = Rounding()
    for _ in range(2):
        with step_context(rounding=rounding):
            layer(torch.randn(3, *shape))
    noted = rounding.conditions
    matrix = torch.func.jacrev(lambda x: layer(x)[0])(torch.zeros(1, *shape)).reshape(math.prod(shape), -1)
    exact = torch.linalg.cond(matrix).item()
    assert [who for who, _ in noted] == [layer, layer]
    assert all(0.5 * exact < condition < 1.001 * exact for _, condition in noted)


def test_an_image_of_another_size_has_another_condition():
    layer, rounding = shaken(AutoregressiveConv2d(1, 3), 2.0), Rounding()
    for side in (2, 6):
        with step_context(rounding=rounding):
            layer(torch.randn(1, 1, side, side))
    assert rounding.conditions[1][1] > 2 * rounding.conditions[0][1]


# The copy in float64


def test_the_copy_computes_in_float64_and_leaves_the_original_alone():
    shared = SelfNormLinear(3)
    flow = Flow(Chain(Flatten(), shared, ActNorm(3), shared)).float()
    before = {name: value.clone() for name, value in flow.state_dict().items()}
    wide = in_float64(flow)
    assert type(wide) is Flow and wide.bijection[1] is wide.bijection[3] is not shared
    x = torch.randn(4, 3)
    assert_close(wide.bijection(x), oracle(flow).bijection(x))
    assert wide.bijection[2].initialized.dtype == torch.bool
    assert all(
        torch.equal(value, before[name]) and value.dtype == before[name].dtype for name, value in flow.state_dict().items()
    )
    wide.bijection(x)[0].sum().backward()
    assert shared.weight.grad.dtype == FLOAT32


# Under autocast and transforms, and on other devices


def test_autocast_does_not_round_what_float32_cannot_hold():
    flow = with_weights(SelfNormLinear(4), conditioned(4, 1e7))
    x = torch.randn(20, 4, dtype=FLOAT32)
    expected = flow.log_prob(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flow.log_prob(x), expected)


def in_forward_mode(flow, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(flow.log_prob(forward_ad.make_dual(x, torch.ones_like(x)))).primal


TRANSFORMS = {
    "vmap": lambda flow, x: vmap(lambda row: flow.log_prob(row[None])[0])(x),
    "vjp": lambda flow, x: vjp(flow.log_prob, x)[0],
    "jvp": lambda flow, x: jvp(flow.log_prob, (x,), (torch.ones_like(x),))[0],
    "forward mode": in_forward_mode,
    "weights": lambda flow, x: vjp(lambda *values: with_parameters(LogProb(flow), values)(x), *flow.parameters())[0],
}


def with_parameters(module, values):
    names = dict(module.named_parameters())
    return lambda x: functional_call(module, dict(zip(names, values, strict=True)), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # from torch, on its first forward-mode derivative
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_likelihoods_are_exact_under_transforms(transform):
    flow = with_weights(Chain(SelfNormLinear(4), SmoothLeakyReLU(), SelfNormLinear(4)), conditioned(4, 3), conditioned(4, 1e8))
    x = typical(flow, 4)
    found = TRANSFORMS[transform](flow, x)
    assert found.dtype == FLOAT32
    assert_close(found.double(), oracle(flow).log_prob(x.double()), rtol=1e-6, atol=4e-3)


def test_gradients_are_exact_under_transforms():
    flow = with_weights(SelfNormLinear(4), conditioned(4, 1e8))
    x = typical(flow, 4)
    gradient = grad(lambda x: flow.log_prob(x).sum())(x)
    wide = oracle(flow)
    exact = grad(lambda x: wide.log_prob(x).sum())(x.double())
    assert gradient.dtype == FLOAT32
    assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())
    z = torch.randn(20, 4, dtype=FLOAT32)
    decoded = vmap(lambda row: flow.decode(row[None], "exact")[0])(z)
    assert_close(decoded.double(), oracle(flow).decode(z.double(), "exact"), rtol=1e-6, atol=1e-30)


def test_an_error_under_a_transform_is_the_layers_own():
    with pytest.raises(ValueError, match=r"Logit.*expected values in"):
        grad(lambda x: Flow(Logit()).log_prob(x).sum())(torch.full((2, 3), 2.0, dtype=FLOAT32))
    wide = Flow(SelfNormLinear(3))
    for call in (wide.log_prob, lambda z: wide.decode(z, "exact")):
        with pytest.raises(ValueError, match=r"expected torch.float64"):
            grad(lambda x, call=call: call(x).sum())(torch.zeros(2, 3, dtype=FLOAT32))


@pytest.mark.parametrize("far", [1e19, 1e20, 1e25])
@pytest.mark.parametrize("place", [0, 30])
def test_a_far_row_does_not_change_the_others(far, place):
    """In float32 the square of its norm overflows."""
    flow = with_weights(SelfNormLinear(4), conditioned(4, 1e7))
    x = typical(flow, 4, 30)
    with_far = torch.cat([x[:place], torch.full((1, 4), far, dtype=FLOAT32), x[place:]])
    others = [row for row in range(31) if row != place]
    assert_close(flow.log_prob(with_far)[others], flow.log_prob(x), rtol=1e-6, atol=1e-4)
    assert_close(flow.encode(with_far)[others], flow.encode(x), rtol=1e-6, atol=1e-6)


def test_a_far_row_is_not_taken_for_a_proof_that_others_are_right():
    layers = [SelfNormLinear(12) for _ in range(8)]
    flow = with_weights(Chain(*layers), *(conditioned(12, 20) for _ in layers))
    x = typical(flow, 12, 30)
    expected = oracle(flow).log_prob(x.double())
    flow.log_prob(torch.cat([x, 1e25 * x[:1]]))
    assert_close(flow.log_prob(x).double(), expected, rtol=1e-6, atol=12e-3)


def test_a_known_condition_is_not_taken_for_that_of_a_weight_on_another_device():
    known, weight = KnownCondition(), torch.eye(3)
    assert known.of(weight, (3,), lambda _: torch.tensor(2.0)) == 2.0
    assert known.of(weight, (3,), lambda _: torch.tensor(3.0)) == 2.0
    assert known.of(weight.to("meta"), (3,), lambda _: torch.tensor(4.0)) == 4.0
    assert known.of(weight.float(), (3,), lambda _: torch.tensor(5.0)) == 5.0


@pytest.mark.parametrize("kind", [LULinear, EmergingConv2d])
def test_a_flow_may_move_to_another_device_between_two_calls(kind, device):
    layer, x = (kind(4), torch.randn(5, 4)) if kind is LULinear else (kind(2), torch.randn(5, 2, 4, 4))
    flow = Flow(layer)
    before = flow.log_prob(x)
    assert_close(flow.to(device).log_prob(x.to(device)).cpu(), before)
    assert_close(flow.cpu().log_prob(x), before)

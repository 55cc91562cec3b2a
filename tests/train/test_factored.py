"""Gradients that reach the optimiser as factors: the same steps as without, and no weight updated twice or not at all."""

import threading

import pytest
import torch

from selfnorm import Chain, Flow, RelativeLinear, SelfNormLinear, SmoothLeakyReLU, TrackedLinear
from selfnorm.kernels.dense.factored import PairGradient, SingleGradient
from selfnorm.kernels.dispatch import used_on
from selfnorm.runtime.collector import AdamArguments, GradientCollector, add_to_grad, collected_gradients
from selfnorm.runtime.collector import Moments as AdamMoments
from selfnorm.train.adam import update_from_factors

BETAS, EPS = (0.9, 0.999), 1e-8
KINDS = [SelfNormLinear, RelativeLinear, TrackedLinear]


def made(kind, device, dtype=torch.float32):
    torch.manual_seed(1)
    layer = kind(12)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if kind is TrackedLinear:
            layer.weight_inv.copy_(layer.inverse_of(layer.weight))
    return layer.to(device, dtype)


def loss_of(layer, x):
    z, log_det, reconstruction = layer.surrogate(x)
    return (z.square().sum(1) / 2 - 0.9 * log_det).mean() + reconstruction.sum()


def batches(device, dtype=torch.float32, number=4):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(7, 12, generator=generator).to(device, dtype) for _ in range(number)]


class Moments:
    """Adam's state of each parameter, made when first asked for."""

    def __init__(self):
        self.kept = {}

    def __call__(self, parameter):
        if parameter not in self.kept:
            self.kept[parameter] = AdamMoments(torch.zeros_like(parameter), torch.zeros_like(parameter), parameter.new_zeros(()))
        return self.kept[parameter]

    def count_step(self):
        for _, _, step in self.kept.values():
            step.add_(1)


def apply_adam(record, state, lr, frozen, failed):
    update_from_factors(record, [state(p) for p in record.parameters], AdamArguments(lr, frozen, failed, BETAS, EPS))


def train(layer, data, plain=False):
    """Steps by records for those that have one, and by torch's Adam for the biases."""
    like = next(layer.parameters())
    lr, frozen, failed = like.new_tensor(0.01), like.new_zeros(()), like.new_zeros(())
    state, rest = Moments(), torch.optim.Adam([layer.bias], lr=0.01)
    for x in data:
        rest.zero_grad()
        with collected_gradients() as collected:
            loss_of(layer, x).backward()
        records = collected.take()
        assert [p for record in records for p in record.parameters] == [p for p in layer.parameters() if p is not layer.bias]
        assert all(parameter.grad is None for record in records for parameter in record.parameters)
        assert layer.bias.grad is not None
        for record in records:
            for parameter in record.parameters:
                state(parameter)
        state.count_step()
        for record in records:
            if plain:
                with used_on():
                    apply_adam(record, state, lr, frozen, failed)
            else:
                apply_adam(record, state, lr, frozen, failed)
        rest.step()
        layer.after_step()
        assert failed == 0
    return [parameter.detach() for parameter in layer.parameters()]


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_by_factors_takes_the_steps_of_adam(device, kernels, kind, plain):
    layer = made(kind, "cpu", torch.float64)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01, betas=BETAS, eps=EPS)
    with used_on():
        for x in batches("cpu", torch.float64):
            optimizer.zero_grad()
            loss_of(layer, x).backward()
            optimizer.step()
            layer.after_step()
    got = train(made(kind, device), batches(device), plain)
    for one, other in zip(got, layer.parameters(), strict=True):
        torch.testing.assert_close(one.cpu().double(), other.detach(), rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize(("pair", "inverse_likelihood"), [(True, True), (True, False), (False, False)])
def test_the_plain_step_is_torchs_adam_to_the_last_digits(pair, inverse_likelihood):
    W, R = (torch.nn.Parameter(torch.randn(5, 5)) for _ in range(2))
    twins = [torch.nn.Parameter(matrix.detach().clone()) for matrix in (W, R)]
    optimizer, state = torch.optim.Adam(twins, lr=0.02, betas=BETAS, eps=EPS), Moments()
    for _ in range(4):
        a, b, c, d, s = *(torch.randn(3, 5) for _ in range(4)), torch.randn(3)
        of_w, of_r = (0.5, 0.5) if inverse_likelihood else (1.0, 0.0)
        twins[0].grad = a.T @ b + of_w * s.sum() * twins[1].detach().T
        twins[1].grad = c.T @ d - of_r * s.sum() * twins[0].detach().T if pair else None
        record = PairGradient(W, R, a, b, c, d, s, inverse_likelihood) if pair else SingleGradient(W, a, b, R, True, s)
        for parameter, gradient in zip(record.parameters, record.multiplied(), strict=True):
            torch.testing.assert_close(gradient, twins[0 if parameter is W else 1].grad)
            state(parameter)
        optimizer.step()
        state.count_step()
        apply_adam(record, state, torch.tensor(0.02), torch.zeros(()), torch.zeros(()))
    for one, other in zip((W, R), twins, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_plain_step_heeds_its_switches():
    def step(a, frozen):
        W, state, failed = torch.nn.Parameter(torch.ones(3, 3)), Moments(), torch.zeros(())
        state(W)
        state.count_step()
        record = SingleGradient(W, a, torch.ones(2, 3), torch.ones(3, 3), False, torch.ones(2))
        apply_adam(record, state, torch.tensor(0.1), torch.tensor(frozen), failed)
        return W.detach(), float(failed)

    bad = torch.ones(2, 3)
    bad[0, 1] = torch.nan
    W, failed = step(bad, 0.0)
    assert failed == 1 and (W[1] == 1).all() and (W[[0, 2]] != 1).all()
    W, failed = step(bad, 1.0)
    assert failed == 0 and (W == 1).all()
    W, failed = step(torch.full((2, 3), 1e200), 0.0)
    assert failed == 1 and (W == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_collector_or_kernels_all_is_as_ever(device, kernels, kind):
    layer, (x,) = made(kind, device), batches(device, number=1)
    loss_of(layer, x).backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    with used_on(), collected_gradients() as collected:
        loss_of(layer, x).backward()
    assert collected.take() == []
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    layer.zero_grad()
    with collected_gradients() as collected:
        loss_of(layer, x).backward()
    add_to_grad(collected.take())
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["twice in a pass", "two passes", "a gradient beside"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shared_becomes_an_ordinary_gradient(device, kernels, kind, how):
    layer, (x, y) = made(kind, device), batches(device, number=2)
    other = made(kind, device)

    def run():
        if how == "twice in a pass":
            (loss_of(layer, x) + loss_of(layer, y) + loss_of(other, x)).backward()
        elif how == "two passes":
            loss_of(layer, x).backward()
            (loss_of(layer, y) + loss_of(other, x)).backward()
        else:
            (loss_of(layer, x) + layer.weight.square().sum() + loss_of(other, x)).backward()

    run()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    other.zero_grad()
    with collected_gradients() as collected:
        run()
    before = []  # whether .grad was None when `wait` was called, which must come first
    (record,) = collected.take(wait=lambda: before.append(layer.weight.grad is None))
    assert before == [how != "a gradient beside"]
    assert record.parameters[0] is other.weight and other.weight.grad is None
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_a_record_goes_where_the_forward_pass_said(device, kernels):
    layer, (x,) = made(SelfNormLinear, device), batches(device, number=1)
    with collected_gradients() as first:
        value = loss_of(layer, x)
        with collected_gradients() as second:
            thread = threading.Thread(target=value.backward)
            thread.start()
            thread.join()
    assert second.take() == [] and len(first.take(wait=lambda: pytest.fail("nothing to wait for"))) == 1
    with collected_gradients():
        pass
    loss_of(layer, x).backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("frozen", ["weight", "weight_inv"])
def test_a_frozen_weight_has_no_record(device, kernels, frozen):
    layer, (x,) = made(SelfNormLinear, device), batches(device, number=1)
    getattr(layer, frozen).requires_grad_(False)
    with collected_gradients() as collected:
        loss_of(layer, x).backward()
    assert collected.take() == [] and getattr(layer, frozen).grad is None
    assert getattr(layer, "weight_inv" if frozen == "weight" else "weight").grad is not None


def test_a_chain_leaves_a_record_for_each_layer(device, kernels):
    flow = Flow(Chain(SelfNormLinear(12), SmoothLeakyReLU(), TrackedLinear(12), RelativeLinear(12))).to(device, torch.float32)
    (x,) = batches(device, number=1)
    with collected_gradients() as collected:
        _, log_det, reconstruction = flow.surrogate(x)
        (reconstruction.sum() - log_det.mean()).backward()
    records = collected.take()
    weights = {id(p) for name, p in flow.named_parameters() if "weight" in name}
    assert {id(p) for record in records for p in record.parameters} == weights and len(records) == 3
    assert all((parameter.grad is None) == (id(parameter) in weights) for parameter in flow.parameters())


def test_a_collector_starts_empty():
    assert GradientCollector().take() == []

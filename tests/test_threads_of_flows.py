"""Flows that several threads use at once give what one thread gets."""

import multiprocessing
import os
import sys
import threading

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from selfnorm import (
    Chain,
    ExactConv2d,
    Flow,
    SelfNormDensity,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    StandardNormal,
    TrackedLinear,
)
from selfnorm.evaluate.likelihood import evaluating, log_likelihoods
from selfnorm.layers.emerging import AutoregressiveConv2d
from selfnorm.linalg.blocks import Dense
from selfnorm.linalg.factors import ExactFactors
from selfnorm.runtime.context import current_step
from selfnorm.runtime.precision import convolutions_in_tf32, full_float32, networks_in_bf16, precision, products_in_tf32
from selfnorm.runtime.threads import cpu_threads
from selfnorm.train import build
from selfnorm.train.build import build_flow
from selfnorm.train.experiments import find_recipe

THREADS = 8
CALLS = {
    "log_prob": lambda flow, x: flow.log_prob(x),
    "encode": lambda flow, x: flow.encode(x),
    "exact": lambda flow, x: flow.decode(x, "exact"),
    "auto": lambda flow, x: flow.decode(x, "auto"),
    "learned": lambda flow, x: flow.bijection.approx_inverse(x),
}


@pytest.fixture(autouse=True)
def eager_switches():
    """Makes Python switch threads after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*functions):
    """Calls functions in threads that start together, and returns their results in order; raises the first error."""
    results, errors, start = [None] * len(functions), [], threading.Barrier(len(functions))

    def call(index):
        start.wait()
        try:
            results[index] = functions[index]()
        except BaseException as error:  # an assertion, too
            errors.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def dense():
    return Flow(Chain(SelfNormLinear(6), SmoothLeakyReLU(), TrackedLinear(6)), StandardNormal(6))


def ill_conditioned():
    flow = Flow(Chain(SelfNormLinear(6), SplineActivation(6)), StandardNormal(6)).float()
    with torch.no_grad():
        flow.bijection[0].weight[0].mul_(1e-5)
    return flow


@pytest.mark.parametrize("make", [dense, ill_conditioned])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_threads_get_what_one_thread_gets(make, training):
    """With cold caches, and weights that have changed since they were filled."""
    flow = make().train(training)
    names = [name for name in CALLS for _ in range(2)]
    for _ in range(25):
        with torch.no_grad():
            flow.bijection[0].weight.mul_(1 + 0.01 * torch.rand(6, 6).to(flow.bijection[0].weight))
        x = torch.randn(5, 6).to(flow.bijection[0].weight)
        found = at_once(*(lambda name=name, x=x: CALLS[name](flow, x) for name in names))
        fresh = make()
        fresh.load_state_dict(flow.state_dict())
        for name, result in zip(names, found, strict=True):
            assert_close(result, CALLS[name](fresh.train(training), x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep_lu", [True, False])
def test_a_reader_never_sees_half_a_factorisation(keep_lu):
    """Readers and writers of two weights at once, each of which must get the factors of its own."""
    factors, weights = ExactFactors(), [torch.randn(4, 4) for _ in range(2)]

    def use(weight):
        for _ in range(60):
            found = factors.factorise("test", weight, Dense(), with_lu=True, keep_lu=keep_lu)
            assert torch.equal(found.weight, weight)
            assert_close(found.log_det, torch.linalg.slogdet(weight).logabsdet)
            assert_close(torch.linalg.lu_solve(*found.lu, weight), torch.eye(4))

    at_once(*(lambda weight=weight: use(weight) for weight in weights * 3))


def test_a_convolution_serves_images_of_several_sizes_at_once():
    flow = Flow(Chain(ExactConv2d(1, 3), AutoregressiveConv2d(1, 3)))
    batches = [torch.randn(3, 1, side, side) for side in (2, 3, 4, 5)]
    expected = [flow.log_prob(x) for x in batches]
    for _ in range(10):
        for found, wanted in zip(at_once(*(lambda x=x: flow.log_prob(x) for x in batches)), expected, strict=True):
            assert_close(found, wanted)


def test_evaluation_in_threads_restores_the_mode():
    flow = dense().train()
    flow.bijection[1].eval()  # a part that the user has frozen
    modes = [module.training for module in flow.modules()]
    for _ in range(20):
        at_once(*(lambda: log_likelihoods(flow, [torch.randn(3, 6)]) for _ in range(THREADS)))
        assert [module.training for module in flow.modules()] == modes


def overlapping(block, look):
    """Two threads in the same kind of block: what the second sees inside it after the first, which entered before, has left."""
    first_inside, second_inside, first_left = (threading.Event() for _ in range(3))

    def first():
        with block():
            first_inside.set()
            second_inside.wait(10)
        first_left.set()

    def second():
        first_inside.wait(10)
        with block():
            second_inside.set()
            first_left.wait(10)
            return look()

    return at_once(first, second)[1]


def test_the_mode_holds_until_the_last_thread_is_done():
    flow = dense().train()
    assert overlapping(lambda: evaluating(flow), lambda: flow.training) is False
    assert flow.training


def test_full_precision_holds_until_the_last_thread_is_done():
    with precision("tf32"):
        assert overlapping(full_float32, products_in_tf32) is False
        assert products_in_tf32()
    assert not products_in_tf32()


def test_blocks_of_threads_that_end_in_any_order_leave_what_was_before():
    """The first thread ends while the second, which entered later, goes on."""
    first_inside, second_inside, first_left = (threading.Event() for _ in range(3))
    before = current_step(), products_in_tf32(), convolutions_in_tf32()

    def first():
        with precision("bf16"):
            first_inside.set()
            second_inside.wait(10)
        first_left.set()

    def second():
        first_inside.wait(10)
        with precision("tf32"):
            second_inside.set()
            first_left.wait(10)
            return networks_in_bf16(), products_in_tf32()

    assert at_once(first, second)[1] == (False, True)
    assert (current_step(), products_in_tf32(), convolutions_in_tf32()) == before


def test_the_number_of_cpu_threads_is_each_threads_own():
    def count():
        with cpu_threads(1):
            return torch.get_num_threads()

    before = torch.get_num_threads()
    assert at_once(*[count] * THREADS) == [1] * THREADS
    assert torch.get_num_threads() == before


def test_fits_in_threads_are_those_of_one_thread():
    """They shared torch's random state, and changed it for the rest of the program."""
    rows = np.random.default_rng(0).normal(size=(100, 3))

    def fitted(found=None):
        score = SelfNormDensity(max_steps=10, random_state=0).fit(rows).score(rows)
        return score if found is None else found.append(score)

    alone, before, together = fitted(), torch.get_rng_state(), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(3):
            threads = [threading.Thread(target=fitted, args=(together,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert together == [alone] * 12
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_while_a_thread_builds_can_build():
    with build._building:
        child = multiprocessing.get_context("fork").Process(
            target=build_flow, args=(find_recipe("digits-fc-snf"), (1, 8, 8), 17), daemon=True
        )
        child.start()
        child.join(timeout=60)
    assert child.exitcode == 0
    child.kill()

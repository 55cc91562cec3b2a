"""Exact likelihoods of a data set: conversion to bits, averages and standard errors."""

import math

import pytest
import torch

from selfnorm import Chain, Flow, SelfNormLinear
from selfnorm.data.batches import Examples
from selfnorm.evaluate.likelihood import bits_per_dim, evaluating, likelihood, log_likelihoods, reference_scores
from selfnorm.models import fc_flow

CPU = torch.device("cpu")


def test_bits_per_dim_of_known_codes():
    # A uniform byte takes 8 bits; Glow's 3.35 bits/dim on CIFAR-10 are 3.35·3072·log 2 nats.
    assert bits_per_dim(784 * math.log(256), 784) == pytest.approx(8)
    assert bits_per_dim(7133.4, 3072) == pytest.approx(3.35, abs=1e-3)


def test_a_standard_normal_scores_its_entropy():
    flow = Flow(Chain(SelfNormLinear(3)))
    flow.load_state_dict({"bijection.0.weight": torch.eye(3), "bijection.0.bias": torch.zeros(3)})
    x = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0))
    found = likelihood(flow, Examples(x, None, CPU, torch.float64), batch_size=999, samples=7)
    entropy = 1.5 * math.log(2 * math.pi * math.e)
    assert found.nll == pytest.approx(entropy, abs=4 * found.standard_error)
    assert found.standard_error == pytest.approx(math.sqrt(3 / 2 / 20_000), rel=0.05)  # −log p = ½χ²₃ + …
    assert (found.examples, found.samples) == (20_000, 1), "real numbers need no noise"


def test_samples_of_an_example_are_averaged_first():
    x = torch.randint(0, 4, (30, 2), dtype=torch.uint8)
    flow = fc_flow(2, levels=4)
    examples = Examples(x, 4, CPU, torch.float64)
    found = likelihood(flow, examples, batch_size=7, samples=3, seed=5)
    with torch.no_grad():
        draws = [torch.cat([flow.log_prob(batch) for batch in examples.in_order(7, 5, sample)]) for sample in range(3)]
    scores = torch.stack(draws).mean(0)
    assert found.nll == pytest.approx(-scores.mean().item(), rel=1e-12)
    assert found.standard_error == pytest.approx(scores.std().item() / math.sqrt(30), rel=1e-12)
    assert found.bits_per_dim == pytest.approx(found.nll / 2 / math.log(2))
    assert "exact, 30 examples × 3 dequantisation samples" in str(found)


def test_scores_do_not_depend_on_the_batch_size():
    flow, examples = fc_flow(3), Examples(torch.randn(50, 3), None, CPU, torch.float64)
    torch.testing.assert_close(
        log_likelihoods(flow, examples.in_order(7, 0)), log_likelihoods(flow, examples.in_order(50, 0)), rtol=1e-13, atol=0
    )


def test_evaluation_leaves_the_mode_as_it_was():
    flow = fc_flow(2)
    for training in (True, False):
        flow.train(training)
        with evaluating(flow):
            assert not flow.training
            assert not torch.is_grad_enabled()
        assert flow.training is training


def test_an_evaluation_can_be_interrupted_between_batches():
    class InterruptedEvaluationError(Exception):
        pass

    calls = []

    def watch():
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedEvaluationError

    flow = fc_flow(2)
    with pytest.raises(InterruptedEvaluationError):
        likelihood(flow, Examples(torch.randn(50, 2), None, CPU, torch.float64), batch_size=10, watch=watch)
    assert flow.training


def test_reference_scores_are_the_sorted_scores_of_the_training_data():
    flow, train = fc_flow(2).float(), Examples(torch.randn(60, 2), None, CPU)
    found = reference_scores(flow, train, 7, 0)
    torch.testing.assert_close(found, log_likelihoods(flow, train.in_order(60, 0)).sort().values, rtol=1e-5, atol=1e-5)


def test_noise_differs_from_batch_to_batch():
    x = torch.zeros(20, 3, dtype=torch.uint8)
    noise = torch.cat(list(Examples(x, 4, CPU, torch.float64).in_order(10, 0)))
    assert not torch.equal(noise[:10], noise[10:])

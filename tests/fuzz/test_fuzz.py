"""A short profile of the fuzzing that `benchmarks/fuzz.py` does at length: the same strategies, the same property."""

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz import strategies_bytes, strategies_images, strategies_options, strategies_tables
from fuzz.properties import violations
from fuzz.runner import remove_workshop

# Always the same cases, so that a change of the code is the only reason for a failure.
short = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)


@pytest.fixture(scope="module", autouse=True)
def workshop():
    yield
    remove_workshop()


def expect_no_violation(case):
    outcome, wrong = violations(case)
    assert not wrong, f"{wrong}\n{case}\n{outcome.stderr}"


@settings(short, max_examples=120)
@given(strategies_tables.tables)
def test_tables(case):
    expect_no_violation(case)


@settings(short, max_examples=120)
@given(strategies_bytes.run_bytes())
def test_run_bytes(case):
    expect_no_violation(case)


@settings(short, max_examples=80)
@given(strategies_options.options())
def test_options(case):
    expect_no_violation(case)


@settings(short, max_examples=40)
@given(strategies_images.images())
def test_images(case):
    expect_no_violation(case)

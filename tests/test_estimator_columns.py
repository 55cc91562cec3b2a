"""Columns that `SelfNormDensity` cannot learn: what are no numbers, and what varies by rounding alone."""

import math

import numpy as np
import pytest

from selfnorm import SelfNormDensity
from selfnorm.data.resolution import expect_distinguishable


class Frame:
    """What a data frame of any library offers: named columns, and itself as an array."""

    def __init__(self, **columns):
        self.columns, self._held = list(columns), columns
        self.shape = len(next(iter(columns.values()))), len(columns)

    def __getitem__(self, name):
        return self._held[name]

    def __len__(self):
        return self.shape[0]

    def __array__(self, dtype=None, copy=None):
        return np.array(list(zip(*self._held.values(), strict=True)), dtype or object)


@pytest.mark.parametrize("bad", ["x", math.nan, math.inf, None])
def test_an_error_names_the_columns_of_a_frame(bad):
    good = [float(row) for row in range(30)]
    frame = Frame(good=good, late=[*good[:20], bad, *good[:9]])
    with pytest.raises(ValueError, match=r"SelfNormDensity: expected finite numbers, got others in 'late'$"):
        SelfNormDensity(max_steps=2).fit(frame)
    fitted = SelfNormDensity(max_steps=2).fit(np.random.default_rng(0).normal(size=(30, 2)))
    with pytest.raises(ValueError, match=r"got others in 'late'$"):
        fitted.score_samples(frame)


class OfOneType(Frame):
    """As pandas, refuses to mix numbers and times in an array."""

    def __array__(self, dtype=None, copy=None):
        return np.stack(list(self._held.values()), 1)


@pytest.mark.parametrize("unit", ["M8[D]", "m8[D]"])
def test_an_error_names_a_column_of_times(unit):
    frame = OfOneType(good=np.arange(30.0), when=np.arange(30).astype(unit))
    with pytest.raises(ValueError, match=r"expected finite numbers, got others in 'when'$"):
        SelfNormDensity(max_steps=2).fit(frame)


@pytest.mark.parametrize("unit", ["M8[D]", "m8[s]"])
def test_times_alone_are_no_numbers(unit):
    """NumPy takes them for whole numbers of their unit."""
    times = np.arange(60).reshape(30, 2).astype(unit)
    with pytest.raises(ValueError, match="SelfNormDensity: expected numbers, got times; subtract a time"):
        SelfNormDensity(max_steps=2).fit(times)
    fitted = SelfNormDensity(max_steps=2).fit(np.random.default_rng(0).normal(size=(30, 2)))
    with pytest.raises(ValueError, match="expected numbers, got times"):
        fitted.score_samples(times)
    with pytest.raises(ValueError, match="expected numbers, got times"):
        fitted.score_samples(list(times))
    frame = OfOneType(first=times[:, 0], second=times[:, 1])
    frame.dtypes = [column.dtype for column in (times[:, 0], times[:, 1])]
    with pytest.raises(ValueError, match=r"expected finite numbers, got others in 'first', 'second'$"):
        SelfNormDensity(max_steps=2).fit(frame)


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: g.dirichlet(np.ones(5), 400).sum(1),
        lambda g: 1 + 1e-15 * g.normal(size=400),
        lambda g: 1e6 + 1e-9 * g.normal(size=400),
        lambda g: np.where(g.uniform(size=400) < 0.1, np.nextafter(3.0, 4.0), 3.0),
        lambda g: 1 + np.spacing(1.0) * g.integers(0, 40, 400),
        lambda g: np.r_[1e5, 999, 1 + np.spacing(1.0) * g.integers(0, 3, 398)],
    ],
    ids=["sums", "noise", "offset", "two", "even", "outliers"],
)
@pytest.mark.parametrize("columns", [1, 30_000], ids=["few", "many"])
def test_a_column_that_varies_by_rounding_alone_is_refused(draw, columns):
    """Its spike gave each row 35 nats."""
    generator = np.random.default_rng(0)
    rows = np.column_stack([generator.normal(size=(400, columns)), draw(generator)])
    with pytest.raises(ValueError, match=rf"float64 can tell apart, got a spread .* in column 'x{columns}', .*rounding alone$"):
        SelfNormDensity(max_steps=2).fit(rows)


def test_large_whole_numbers_that_become_the_same_are_pointed_out():
    table = np.column_stack([1_700_000_000_000_000_000 + np.arange(60), np.random.default_rng(0).integers(0, 99, 60)])
    with pytest.warns(UserWarning, match=r"'x0': left out.*as large as 1.7e\+18, in 'x0', are rounded to multiples of 256"):
        SelfNormDensity(max_steps=2).fit(table)


def test_a_series_is_told_to_be_a_table():
    class Series(np.ndarray):
        dtypes = np.dtype(float)  # one for all, in pandas

    with pytest.raises(ValueError, match="Expected 2D array, got 1D"):
        SelfNormDensity(max_steps=2).fit(np.random.default_rng(0).normal(size=30).view(Series))


@pytest.mark.parametrize("rows", [5, 10, 50, 300])
def test_the_spread_of_few_rows_is_not_underestimated(rows):
    refused = 0
    for seed in range(100):
        try:
            expect_distinguishable("who", 1 + np.spacing(1.0) * 30 * np.random.default_rng(seed).normal(size=(rows, 1)))
        except ValueError:
            refused += 1
    assert refused <= (30 if rows < 10 else 8), "of 100 columns with a spread of 30 steps"


def test_in_float32_as_well():
    generator = np.random.default_rng(0)
    rows = np.column_stack([generator.normal(size=400), generator.dirichlet(np.ones(5), 400).astype(np.float32).sum(1)])
    with pytest.raises(ValueError, match=r"float32 can tell apart, .*column 'x1', where float32 rounds to multiples of 1.19e-07"):
        SelfNormDensity(max_steps=2).fit(rows.astype(np.float32))


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: np.where(g.uniform(size=400) < 0.8, 1 / (1 + np.exp(-g.normal(33, 1, 400))), g.uniform(size=400)),
        lambda g: np.where(g.uniform(size=400) < 0.85, 100 / 3 + 2e-15 * g.integers(-3, 4, 400), 100 * g.uniform(size=400)),
        lambda g: 1.7e9 + 5e-5 * g.normal(size=400),
        lambda g: (1e6 + g.normal(size=400)).astype(np.float32),
        lambda g: np.where(g.uniform(size=400) < 0.1, g.normal(size=400), 0),
        lambda g: (g.uniform(size=400) < 0.02).astype(np.float32),
        lambda g: 10**15 + g.integers(0, 100, 400),
    ],
    ids=["saturated", "shares", "times", "float32", "zeros", "rare", "large"],
)
def test_columns_that_hardly_vary_but_not_by_rounding_are_fine(draw):
    expect_distinguishable("who", draw(np.random.default_rng(0))[:, None])

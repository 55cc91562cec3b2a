"""Gross outliers: rows far from all others are found, and those of clean tables with heavy tails are not."""

import numpy as np
import pytest
import torch

from selfnorm.data import load_dataset
from selfnorm.data.outliers import crowd_of_outliers, describe_outliers, gross_outliers

GENERATOR = np.random.default_rng


def normal(*shape, seed=0):
    return GENERATOR(seed).normal(size=shape)


@pytest.mark.parametrize("factor", [10, 30, 100, 1e4, 1e6, 1e300])
def test_a_row_times_a_factor_is_a_gross_outlier(factor):
    table = normal(2001, 50)
    table[77] *= factor
    assert [each.row for each in gross_outliers(table)] == [77]


@pytest.mark.parametrize("rows", [150, 240, 600])
def test_a_row_of_many_columns_times_ten_is_one_in_small_tables(rows):
    """Among 240 rows of 20 columns it cost the others 0.5 nats; among those of 3 columns 0.02."""
    for seed in range(5):
        table = normal(rows, 30, seed=seed)
        table[7] *= 10
        assert [each.row for each in gross_outliers(table)] == [7]


@pytest.mark.parametrize("rows", [60, 150, 240])
def test_up_to_three_rows_of_small_tables_are(rows):
    table = normal(rows, 3)
    table[[2, 5, 9]] *= 1e4
    assert [each.row for each in gross_outliers(table)] == [2, 5, 9]
    assert [each.row for each in gross_outliers(np.column_stack([table, np.ones((rows, 40))]))] == [2, 5, 9]


@pytest.mark.parametrize("value", [1e4, -1e30, 1e300])
def test_one_cell_is_enough(value):
    table = normal(300, 5)
    table[4, 2] = value
    (found,) = gross_outliers(table)
    assert (found.row, found.entry, found.value) == (4, 2, value)
    assert found.usual == (np.delete(table[:, 2], 4).min(), np.delete(table[:, 2], 4).max())


@pytest.mark.parametrize(
    "draw",
    [
        lambda g, n: g.normal(size=(n, 20)),
        lambda g, n: np.exp(2 * g.normal(size=(n, 5))),
        lambda g, n: g.standard_t(3, size=(n, 5)),
        lambda g, n: g.exponential(size=(n, 5)),
        lambda g, n: g.integers(0, 3, (n, 5)).astype(float),
        lambda g, n: (g.uniform(size=(n, 5)) < 0.01).astype(float),  # rare, but not far
        lambda g, n: np.where(g.uniform(size=(n, 1)) < 0.2, -9999.0, g.normal(size=(n, 1))),  # a part of the data
    ],
)
@pytest.mark.parametrize("rows", [30, 200, 3000])
def test_ordinary_and_heavy_tails_are_kept(draw, rows):
    found = [len(gross_outliers(draw(GENERATOR(seed), rows))) for seed in range(10)]
    assert sum(found) <= 1 and max(found) <= 1


@pytest.mark.parametrize("shape", [(60, 12), (400, 6), (2000, 15)])
@pytest.mark.parametrize(
    "draw",
    [
        lambda g, shape: g.normal(size=shape),
        lambda g, shape: g.exponential(size=shape),
        lambda g, shape: g.lognormal(size=shape),
        lambda g, shape: g.standard_t(3, size=shape),
        lambda g, shape: g.standard_t(2, size=shape),
    ],
    ids=["normal", "exponential", "log-normal", "t3", "t2"],
)
def test_hardly_a_clean_table_loses_a_row(draw, shape):
    assert sum(bool(gross_outliers(draw(GENERATOR(seed), shape))) for seed in range(100)) <= 4


COUNTS = {
    "poisson": lambda g, shape: g.poisson(0.13, shape),
    "geometric": lambda g, shape: g.geometric(0.9, shape),
    "tenths": lambda g, shape: (3 + g.poisson(0.065, shape) - g.poisson(0.065, shape)) * 0.1,  # 0.4 - 0.3 is not 0.3 - 0.2
}
SPARSE = {
    "indicator": lambda g, shape: g.uniform(size=shape) < 0.002,
    "amount": lambda g, shape: np.where(g.uniform(size=shape) < 0.01, g.lognormal(8, 1, shape), 0),
    "gamma": lambda g, shape: np.where(g.uniform(size=shape) < 0.005, g.gamma(0.5, size=shape), 0),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_counts_are_kept(kind):
    """Half of such tables lost their largest counts: the tail seemed to end at 1."""
    assert sum(bool(gross_outliers(COUNTS[kind](GENERATOR(seed), (5000, 5)).astype(float))) for seed in range(20)) == 0


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("shape", [(30, 5), (500, 2), (2000, 5)])
def test_few_values_beside_zeros_are_kept_and_an_outlier_beside_them_is_found(kind, shape):
    tables = [SPARSE[kind](GENERATOR(seed), shape).astype(float) for seed in range(100)]
    assert sum(bool(gross_outliers(table)) for table in tables) <= 3
    for table in tables:
        table[7, 1] = 1e12
        assert 7 in [each.row for each in gross_outliers(table)]


def test_a_heavy_column_makes_no_row_a_long_one():
    """Among light columns, the lengths of rows seemed to have a light tail: 15 of these tables lost rows."""
    lost = 0
    for seed in range(100):
        table = normal(2000, 10, seed=seed)
        table[:, 9] = np.where(GENERATOR(seed + 100).uniform(size=2000) < 0.02, np.exp(table[:, 9]), 0)
        lost += bool(gross_outliers(table))
    assert lost <= 1


@pytest.mark.parametrize("others", [[], [1.0] * 5, [0.5, 2.0, 3.0]], ids=len)
@pytest.mark.parametrize(("rows", "outliers", "beside"), [(2000, 1, 0), (2000, 1, 5), (2000, 10, 5), (50_000, 500, 0)])
def test_an_outlier_is_found_where_few_rows_differ(others, rows, outliers, beside):
    table = np.column_stack([np.zeros(rows), normal(rows, beside)])
    table[: outliers + len(others), 0] = [1e6] * outliers + others
    assert [each.row for each in gross_outliers(table)] == list(range(outliers))


@pytest.mark.parametrize("value", [-999.0, 1500.0])
@pytest.mark.parametrize(("shape", "ones"), [((1000, 20), 10), ((2000, 100), 40), ((500, 30), 12)])
def test_an_outlier_among_rare_ones_is_found(value, shape, ones):
    """It cost the other rows of the first table six nats."""
    table = np.column_stack([normal(*shape), np.arange(shape[0]) < ones])
    assert gross_outliers(table) == []
    table[-1, -1] = value
    assert [each.row for each in gross_outliers(table)] == [shape[0] - 1]


@pytest.mark.parametrize(("rate", "outliers"), [(0.01, 1), (0.01, 200), (0.1, 200), (0.2, 200)])
def test_an_outlier_is_found_beside_amounts(rate, outliers):
    table = GENERATOR(0).lognormal(size=(20_000, 1)) * (GENERATOR(1).uniform(size=(20_000, 1)) < rate)
    table[:outliers] = 1e6
    assert [each.row for each in gross_outliers(table)] == list(range(outliers))


@pytest.mark.parametrize("constant", [0.0, 3.0, -50.0])
def test_a_single_other_value_is_an_outlier_only_if_huge(constant):
    for value, found in ((1.0, []), (-99_999.0, []), (1e7, [4])):
        assert [each.row for each in gross_outliers(np.array([[constant]] * 4 + [[value]] + [[constant]] * 95))] == found


def test_cauchy_columns_lose_hardly_a_row():
    found = [len(gross_outliers(GENERATOR(seed).standard_cauchy((2000, 10)))) for seed in range(20)]
    assert sum(found) <= 20  # of 40,000 rows


def test_at_most_one_row_of_a_hundred_is_set_aside():
    table = normal(1000, 200)
    table[np.arange(30), np.arange(30)] = 1e6  # each in another column
    assert len(gross_outliers(table)) == 10
    assert gross_outliers(normal(10, 2) * [[1e9], *[[1.0]] * 9]) == []  # too few rows to tell


@pytest.mark.parametrize("rows", [21, 60, 95])
def test_more_rows_than_can_be_set_aside_are_told(tmp_path, rows):
    """One more than 1 %, and the likelihood of all others fell without a word."""
    table = normal(2000, 5)
    table[:rows] *= 1e6
    np.save(tmp_path / "t.npy", table)
    (told,) = load_dataset(str(tmp_path / "t.npy")).notes
    assert told.startswith(f"more rows far from all others than can be set aside: {rows} of 2000 stay in, at the expense")
    assert "row 0 (column " in told
    assert load_dataset(str(tmp_path / "t.npy"), set_outliers_aside=False).notes == ()


def test_a_crowd_is_described_in_one_pass_over_each_column(monkeypatch):
    """One pass for each row took minutes for a million rows."""
    passes, smallest = [], np.ndarray.min
    table = normal(20_000, 3)
    table[:600, 1] = -999.0

    class Counted(np.ndarray):
        def min(self, *args, **options):
            passes.append(self.shape)
            return smallest(np.asarray(self), *args, **options)

    found = crowd_of_outliers(table.view(Counted))
    assert len(found) == 600 and {(each.entry, each.value) for each in found} == {(1, -999.0)}
    assert sum(shape == (19_400,) for shape in passes) == 1


def test_a_larger_crowd_is_counted_whole():
    table = normal(2000, 10)
    table[GENERATOR(0).uniform(size=table.shape) < 0.02] = -999.0
    coded = int((table == -999).any(1).sum())
    assert coded > 0.15 * len(table) and len(crowd_of_outliers(table)) == coded


def test_codes_for_missing_values_of_which_some_stay_are_told(tmp_path):
    table = normal(2000, 10)
    table[GENERATOR(5).uniform(size=table.shape) < 0.004] = -999.0
    coded = np.flatnonzero((table == -999).any(1))
    np.save(tmp_path / "t.npy", table)
    aside, told = load_dataset(str(tmp_path / "t.npy")).notes
    assert aside.startswith("20 of 2000 rows set aside")
    assert told.startswith(f"more rows far from all others than can be set aside: {len(coded) - 20} of 2000 stay in")
    first = int(told.partition("row ")[2].partition(" ")[0])
    assert first in coded and f"row {first} (" not in aside, "rows are numbered as in the file"


def test_clean_tables_are_not_called_crowded():
    shapes = ((60, 12), (400, 6), (2000, 15))
    draws = (
        *(lambda g, s, name=name: getattr(g, name)(size=s) for name in ("normal", "exponential", "lognormal")),
        *(lambda g, s, df=df: g.standard_t(df, size=s) for df in (1, 2, 3)),
        *COUNTS.values(),
        *SPARSE.values(),
        lambda g, s: np.where(g.uniform(size=s) < 0.05, g.lognormal(8, 1, s), 0),
    )
    told = [
        bool(crowd_of_outliers(draw(GENERATOR(seed), s).astype(float))) for draw in draws for s in shapes for seed in range(20)
    ]
    assert sum(told) <= 0.01 * len(told)


def test_set_aside_rows_leave_the_split_of_the_others_as_it_was(tmp_path):
    table = normal(300, 3)
    np.save(tmp_path / "clean.npy", table)
    np.save(tmp_path / "dirty.npy", np.insert(table, 9, [1e7, 0, 0], axis=0))
    clean, dirty = (load_dataset(str(tmp_path / name)) for name in ("clean.npy", "dirty.npy"))
    for part in ("train", "validation", "test"):
        assert getattr(clean, part).dtype == torch.float32
        assert torch.equal(getattr(clean, part), getattr(dirty, part))
    assert [note for note in dirty.notes if note not in clean.notes] == [
        "1 of 301 rows set aside, neither trained nor tested on, because it lies far from all others: row 9 (column 1 is 1e+07, "
        f"others are in [{table[:, 0].min():.4g}, {table[:, 0].max():.4g}]); rows are numbered from 0, as `score` numbers them; "
        "keep it with `--set set_outliers_aside=false`"
    ]


def test_many_outliers_are_listed_briefly():
    table = normal(3000, 2)
    table[:25] *= 1e6
    found = gross_outliers(table)
    assert len(found) == 25
    line = describe_outliers(found, len(table), ["'a'", "'b'"], "option")
    assert (
        line.startswith("25 of 3000 rows set aside")
        and "row 0 ('" in line
        and "rows 3, 4, 5, 6, 7, 8, 9 and 15 more; rows" in line
    )
    assert ", row 3; rows are" in describe_outliers(found[:4], 99, ["'a'", "'b'"], "option")

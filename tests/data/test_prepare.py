"""Between a file and training: dependent columns, float64 where float32 has too few digits, and notes."""

import numpy as np
import pytest
import torch

from selfnorm.data import load_dataset, read_examples
from selfnorm.data.dataset import Dataset
from selfnorm.data.dependence import _Columns, dependent_columns, expect_independent
from selfnorm.data.prepare import expect_float32_spread, note_on_size
from selfnorm.data.resolution import as_resolved, from_origin, origin_of

GENERATOR = np.random.default_rng
LABELS = ["'a'", "'b'", "'c'", "'d'"]


def normal(*shape, seed=0):
    return GENERATOR(seed).normal(size=shape)


# Resolution


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "float64"])
@pytest.mark.parametrize("shape", [(400,), (400, 3), (400, 2, 2)])
def test_what_float32_would_round_stays_as_it_is(tmp_path, dtype, shape):
    if dtype != "float64" and len(shape) == 3:
        pytest.skip("integers of three axes are no table")
    values = (2_024_000_000 + GENERATOR(0).uniform(0, 1e5, shape)).astype(dtype)
    np.save(tmp_path / "array.npy", values)
    examples, _ = read_examples(tmp_path / "array.npy")
    assert examples.dtype == torch.float64
    assert np.array_equal(examples.numpy().reshape(shape), values.astype(np.float64))


@pytest.mark.parametrize(
    ("values", "narrow"),
    [
        (normal(500, 2), True),
        (1e5 + 1e4 * normal(500, 2), True),
        (GENERATOR(0).standard_cauchy((5000, 2)), True),  # far values lose digits, but not relative to how far they are
        (np.exp(3 * normal(5000, 2)), True),
        (np.full((50, 2), 0.1), True),  # constants are told of elsewhere
        (np.arange(100).reshape(-1, 1), True),
        (1e8 + normal(500, 2), False),
        (1e12 + normal(500), False),
        (np.append(1e8 + normal(499), 0.0), False),  # an outlier makes the standard deviation large
        (np.array([1.0, 2.0, 1e300]), False),
    ],
)
def test_float32_is_used_where_it_resolves_the_middle_half(values, narrow):
    assert as_resolved(values).dtype == (np.float32 if narrow else np.float64)


def test_the_origin_moves_with_the_data_and_leaves_exact_distances():
    x = torch.from_numpy(1e12 + normal(300, 2))
    origin = origin_of(x)
    back = x - 1e12
    assert torch.equal(x - origin, back - (origin - 1e12)) and ((x - origin).abs() < 6).all()
    assert torch.equal(from_origin(x, origin), (x - origin).float())
    assert origin_of(x.float()) is None and from_origin(x.float(), None).dtype == torch.float32


def test_wide_and_narrow_parts_do_not_mix():
    wide = torch.from_numpy(normal(5, 2))
    with pytest.raises(ValueError, match=r"expected test in torch.float64 with levels=None, got torch.float32"):
        Dataset("mixed", wide, wide, wide.float())


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (1e35, r"e\+34 in column 2"),
        (1e-35, "e-36 in column 2"),
        (1e-200, r"e-201 in column 2"),
        (1e200, r"e\+199 in column 2"),
    ],
)
def test_a_scale_that_float32_cannot_hold_is_refused_by_name(scale, message):
    table = torch.from_numpy(normal(100, 2) * [1, scale])
    with pytest.raises(ValueError, match=r"far: expected columns with a standard deviation from 1e-30 to 1e\+30"):
        expect_float32_spread(Dataset("far", table, table, table))
    with pytest.raises(ValueError, match=message):
        expect_float32_spread(Dataset("far", table, table, table))
    with pytest.raises(ValueError, match="in column 'b'; change its unit"):
        expect_float32_spread(Dataset("far", table, table, table, columns=("a", "b")))


@pytest.mark.parametrize("width", [50, 1000])
@pytest.mark.parametrize("ending", ["npy", "csv", "parquet"])
def test_times_that_float64_rounds_too_much_are_refused(tmp_path, width, ending):
    """Of 259 different nanoseconds it kept five."""
    values = 1_700_000_000_000_000_000 + GENERATOR(0).integers(0, 1000 if ending == "csv" else width, (260, 2))
    path = tmp_path / f"t.{ending}"
    if ending == "npy":
        np.save(path, values)
    elif ending == "csv":
        np.savetxt(path, values, "%d", ",", header="a,b", comments="")
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"a": values[:, 0], "b": values[:, 1]}), path)
    with pytest.raises(ValueError, match=r"float64 can tell apart, .*in column .*multiples of 256; subtract a constant before"):
        load_dataset(str(path), check_columns=True)
    np.save(tmp_path / "days.npy", values + GENERATOR(0).integers(0, 10**14, (260, 2)))
    assert len(load_dataset(str(tmp_path / "days.npy")).train) == 208


def test_an_entry_of_an_array_that_varies_by_rounding_alone_is_named(tmp_path):
    cube = GENERATOR(0).normal(size=(60, 2, 3))
    cube[:, 1, 2] = 1 + np.spacing(1.0) * GENERATOR(1).integers(-2, 3, 60)
    np.save(tmp_path / "cube.npy", cube)
    with pytest.raises(ValueError, match=r"float64 can tell apart, .*in entry \(2, 3\), where"):
        load_dataset(str(tmp_path / "cube.npy"), check_columns=True)


def test_pixels_in_float32_may_vary_by_rounding_alone(tmp_path):
    """Leaving a column out is no way on for images."""
    images = GENERATOR(0).normal(size=(60, 2, 3)).astype(np.float32)
    images[:, 1, 2] = 1 + np.spacing(np.float32(1)) * GENERATOR(1).integers(-2, 3, 60)
    np.save(tmp_path / "images.npy", images)
    assert len(load_dataset(str(tmp_path / "images.npy"), check_columns=True).train) == 48


# Dependent columns


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("columns", "told"),
    [
        (lambda a, b, c: (a, b, 2 * a + 1), ["column 'c' is 2·'a' + 1"]),
        (lambda a, b, c: (a, a), ["column 'b' is 'a'"]),
        (lambda a, b, c: (a, -a, 3 * a + 5, c), ["column 'b' is -'a'", "column 'c' is 3·'a' + 5"]),
        (lambda a, b, c: (a, b, c, a / 2 - b / 4 + 2 * c - 7), ["column 'd' is 0.5·'a' - 0.25·'b' + 2·'c' - 7"]),
        (lambda a, b, c: (a + 1e4, b, 2 * (a + 1e4)), ["column 'c' is 2·'a'"]),
        (lambda a, b, c: (a, b, a + 1e-4 * c), []),
        (lambda a, b, c: (a, b, a + 1e-5 * c), []),
        (lambda a, b, c: (a, 0.999999 * a + np.sqrt(1 - 0.999999**2) * b), []),
        (lambda a, b, c: (a, a**2, np.exp(a)), []),
        (lambda a, b, c: (a, a + 1e-4 * c, c), ["column 'c' is -1e+04·'a' + 1e+04·'b'"]),
        (lambda a, b, c: (c, a, a + 1e-4 * c, b), ["column 'c' is 0.0001·'a' + 'b'"]),
        (lambda a, b, c: (a, b, a + 2e-5 * b, c), ["column 'c' is 'a' + 2e-05·'b'"]),
        (lambda a, b, c: (a, b, c, a + b + 5e-5 * c), ["column 'd' is 'a' + 'b' + 5e-05·'c'"]),
        (lambda a, b, c: (a, a + 1e-4 * b, b, 2 * a), ["column 'c' is -1e+04·'a' + 1e+04·'b'", "column 'd' is 2·'a'"]),
        (lambda a, b, c: (np.exp(4 * a), np.exp(4 * b), np.exp(4 * a) + np.exp(4 * b)), ["column 'c' is 'a' + 'b'"]),
        (lambda a, b, c: (a > 1, (a <= 1) & (b > 0), (a <= 1) & (b <= 0), c), ["columns 'a', 'b', 'c' always sum to 1"]),
        (lambda a, b, c: (a > 1, b > 1, b <= 1, c > 2), ["column 'c' is -'b' + 1"]),
        (lambda a, b, c: (np.floor(900 * a), np.floor(900 * a) + (c > 2.5), b), []),  # which differ by one in a few rows
        (lambda a, b, c: (a, b, a + b + 1e-4 * c), []),
    ],
)
def test_dependent_columns_are_found_and_close_ones_are_not(columns, told, dtype):
    table = np.stack(columns(*normal(3, 500)), axis=1).astype(dtype)
    assert [each.described(LABELS) for each in dependent_columns(table)] == told


@pytest.mark.parametrize("span", [1e5, 3e7, 1e9])
@pytest.mark.parametrize("rows", [300, 20_000])
def test_the_duration_is_the_end_less_the_start(span, rows):
    start, duration = 1.7e9 + GENERATOR(0).uniform(0, span, rows), GENERATOR(1).exponential(3000, rows)
    (found,) = dependent_columns(np.column_stack([start, start + duration, duration]))
    assert found.described(LABELS) == "column 'c' is -'a' + 'b'"


def test_an_outlier_makes_no_columns_dependent():
    x = normal(500, 3)
    x[7, :2] = 1e6, 3e10
    assert dependent_columns(x) == []
    (found,) = dependent_columns(np.column_stack([x, x[:, 0] - x[:, 2]]))
    assert found.described(()) == "column 4 is column 1 - column 3"


def test_a_difference_too_small_to_learn_is_not_called_none():
    a, b, c = normal(3, 500)
    (found,) = dependent_columns(np.column_stack([a, a + 1e-7 * b, c]))
    assert found.described(LABELS) == "column 'b' is nearly 'a'"


def test_what_is_told_explains_the_column_on_all_rows():
    """Also where a rare value decides: a sample of the rows would not have it."""
    kinds = GENERATOR(0).choice(4, 50_000, p=[0.5, 0.3, 0.19999, 0.00001])
    assert (kinds == 3).sum() == 1
    (found,) = dependent_columns(np.column_stack([normal(50_000), np.eye(4)[kinds]]))
    assert found.described(()) == "columns 2, 3, 4, 5 always sum to 1"
    x = normal(50_000, 5)
    x[:, 4] = x[:, :3].sum(1)
    x[17, 4] += 1
    assert dependent_columns(x) == []
    for seed in range(20):
        x = GENERATOR(seed).normal(size=(400, 6)) * 10.0 ** GENERATOR(seed).integers(-6, 7, 6)
        weights = 10.0 ** GENERATOR(seed).uniform(-5, 5, 5) / x[:, :5].std(0)
        x[:, 5] = x[:, :5] @ weights + 3
        (found,) = dependent_columns(x)
        told = sum(weight * x[:, other] for other, weight in found.others.items()) + found.constant
        assert found.column == 5 and np.abs(told - x[:, 5]).max() < 1e-5 * x[:, 5].std()


def test_many_dependent_columns_of_a_long_table_are_confirmed_together(monkeypatch):
    """6 of 156 columns took 10 s: each was fitted on all 100,000 rows."""
    passes, blocks = [], _Columns._blocks
    monkeypatch.setattr(_Columns, "_blocks", lambda self: passes.append(1) or blocks(self))
    x = normal(20_000, 156)
    x[:, 150:] = x[:, :20] @ normal(20, 6, seed=1)
    assert [each.column for each in dependent_columns(x)] == list(range(150, 156))
    assert 0 < len(passes) <= 4, "two for centres and spreads, two for what is left of all of them"
    assert len(_Columns(x).sampled) < len(x) / 4


@pytest.mark.parametrize("form", ["{:.6g}", "{:.6f}", "{:.5g}"])
def test_a_copy_that_was_rounded_when_written_is_a_copy(form):
    a = normal(300)
    printed = np.array([[float(form.format(x)), float(form.format(1.8 * x + 32))] for x in a])
    assert [each.column for each in dependent_columns(printed)] == [1]


def test_integers_that_happen_to_be_close_are_not_dependent():
    assert dependent_columns(GENERATOR(0).integers(0, 3, (500, 6)).astype(float)) == []


def test_a_column_of_many_is_told_briefly():
    table = normal(300, 20)
    (found,) = dependent_columns(np.column_stack([table, table.sum(1)]))
    assert found.described([f"'x{i}'" for i in range(21)]) == (
        "column 'x20' is a linear combination of 'x0', 'x1', 'x2', 'x3', … (20 columns)"
    )
    assert set(found.others) == set(range(20)) and found.others[7] == pytest.approx(1.0)


def test_fewer_rows_than_columns_are_no_dependence_but_copies_are():
    table = normal(30, 400)
    assert dependent_columns(table) == []
    table[:, 300] = 4 - 3 * table[:, 17]
    (found,) = dependent_columns(table)
    assert (found.column, list(found.others)) == (300, [17])


def test_the_error_names_both_columns_and_a_way_on():
    a = normal(100, 2)
    with pytest.raises(ValueError, match=r"t: expected linearly independent .* column 'c' is 'a' \+ 'b'.*: leave out 'c'$"):
        expect_independent("t", np.column_stack([a, a.sum(1)]), LABELS, "leave out {}")
    with pytest.raises(ValueError, match=r"column 3 is column 1 \+ column 2\. .*: remove column 3 from X$"):
        expect_independent("t", np.column_stack([a, a.sum(1)]), (), "remove {} from X")


def test_grey_levels_are_left_alone(tmp_path):
    images = np.zeros((50, 2, 2), np.uint8)
    images[3] = 255
    np.save(tmp_path / "images.npy", images)
    dataset = load_dataset(str(tmp_path / "images.npy"), check_columns=True)
    assert sum(map(len, (dataset.train, dataset.validation, dataset.test))) == 50
    assert not any("row" in note or "dependent" in note for note in dataset.notes)


# Size


@pytest.mark.parametrize(
    ("rows", "columns", "says"),
    [
        (3, 3, "3 examples to train on, 1 to validate, 1 to test, for 3 columns: with no more rows than columns"),
        (100, 3, "standard error of about 0.32 standard deviations of a single example's"),
        (400, 100, "expect overfitting"),
        (400, 3, ""),
    ],
)
def test_small_data_is_told(rows, columns, says):
    train = torch.zeros(rows, columns)
    held_out = torch.zeros(max(1, rows // 10), columns)
    line = note_on_size(Dataset("small", train, held_out, held_out))
    assert says in line and bool(says) == bool(line)

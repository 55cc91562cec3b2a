"""`SelfNormDensity`: scikit-learn's own checks, and densities with known answers."""

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import selfnorm
from selfnorm import SelfNormDensity

MIX = np.array([[2.0, 0.0], [1.5, 0.5]])
CENTRE = np.array([5.0, -3.0])
# Of N(CENTRE, MIX MIXᵀ): log(2πe) + log|det MIX|, for two dimensions.
ENTROPY = math.log(2 * math.pi * math.e) + math.log(abs(np.linalg.det(MIX)))


def gaussian(n, seed):
    return np.random.default_rng(seed).normal(size=(n, 2)) @ MIX.T + CENTRE


def named(rows, *names):
    """Returns a table with column names that scikit-learn knows."""
    return pytest.importorskip("pyarrow").table(dict(zip(names, np.asarray(rows).T, strict=True)))


def quick(**given):
    return SelfNormDensity(**{"max_steps": 40, "layers": 2, "random_state": 0, **given})


@pytest.mark.filterwarnings("ignore:SelfNormDensity. .*expect overfitting")
@parametrize_with_checks([SelfNormDensity(max_steps=20, layers=2, random_state=0)])
def test_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def fitted():
    return SelfNormDensity(max_steps=600, layers=3, contamination=0.05, random_state=0).fit(gaussian(2000, 0))


def test_the_score_of_a_gaussian_is_its_negative_entropy(fitted):
    assert fitted.score(gaussian(4000, 1)) == pytest.approx(-ENTROPY, abs=0.1)
    assert fitted.validation_nll_ is not None and 0 < fitted.n_steps_ <= 600


def test_scores_are_the_density_itself(fitted):
    rows = gaussian(50, 2)
    centred = np.linalg.solve(MIX, (rows - CENTRE).T)
    truth = -0.5 * (centred**2).sum(0) - math.log(2 * math.pi) - math.log(abs(np.linalg.det(MIX)))
    assert np.abs(fitted.score_samples(rows) - truth).mean() < 0.15
    with torch.no_grad():
        assert np.array_equal(fitted.score_samples(rows), fitted.flow_.log_prob(torch.from_numpy(rows)).numpy())


def test_rows_in_large_numbers_score_as_they_do_alone(fitted):
    rows = np.tile(gaussian(7, 3), (3000, 1))  # more than one batch of the scoring
    scores = fitted.score_samples(rows)
    assert scores.shape == (21_000,)
    assert np.allclose(scores, np.tile(fitted.score_samples(rows[:7]), 3000), atol=1e-9)


def test_far_rows_are_outliers(fitted):
    far = np.array([[50.0, 0.0], [-40.0, 40.0], [5.0, 30.0], [1e30, 0.0]])
    assert (fitted.predict(far) == -1).all()
    assert (fitted.decision_function(far) < 0).all()
    assert fitted.predict([CENTRE]).tolist() == [1]


@pytest.mark.parametrize("contamination", [0.02, 0.1, 0.3])
def test_contamination_is_the_part_of_the_training_rows_called_outliers(contamination):
    rows = gaussian(500, 4)
    labels = quick(contamination=contamination).fit(rows).predict(rows)
    assert set(labels) == {-1, 1}
    assert (labels == -1).mean() == pytest.approx(contamination, abs=0.003)


def test_samples_have_the_moments_of_the_data(fitted):
    for inverse in ("auto", "exact", "learned", "refined"):
        rows = fitted.sample(4000, random_state=0, inverse=inverse)
        assert rows.shape == (4000, 2) and rows.dtype == np.float64
        assert np.allclose(rows.mean(0), CENTRE, atol=0.2)
        assert np.allclose(np.cov(rows.T), MIX @ MIX.T, rtol=0.15)


def test_sampling_repeats_with_a_seed(fitted):
    assert np.array_equal(fitted.sample(5, random_state=1), fitted.sample(5, random_state=1))
    assert not np.array_equal(fitted.sample(5, random_state=1), fitted.sample(5, random_state=2))
    assert not np.array_equal(fitted.sample(5), fitted.sample(5))
    assert fitted.sample().shape == (1, 2)


def test_fitting_repeats_with_random_state_and_leaves_torch_alone():
    rows = gaussian(200, 5)
    state = torch.get_rng_state()
    first, again, other = (quick(random_state=seed).fit(rows).score_samples(rows) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(quick(random_state=np.random.RandomState(1)).fit(rows).score_samples(rows), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 1 and torch.get_default_dtype() == torch.float64


def test_the_callers_default_dtype_makes_no_difference():
    rows = gaussian(200, 5)
    wide = quick().fit(rows).score_samples(rows)
    torch.set_default_dtype(torch.float32)
    assert np.array_equal(quick().fit(rows).score_samples(rows), wide)


def test_the_unit_of_a_column_moves_scores_by_its_logarithm():
    rows = gaussian(300, 6)
    scores = quick().fit(rows).score_samples(rows)
    for scale, shift in ((1e-20, 0.0), (1e6, 0.0), (1.0, 1e8), (1e60, 0.0)):  # float32 has the digits of none but the second
        moved = scale * rows + shift
        # A shift of 1e8 rounds the rows at 1e-8. Adam turns that into steps of R, whose first gradients are as small.
        tolerance = 2e-2 if shift else 1e-3
        assert np.allclose(quick().fit(moved).score_samples(moved), scores - 2 * math.log(scale), atol=tolerance)


def test_a_constant_column_is_left_out_and_contributes_nothing():
    rows = gaussian(100, 7)
    wide = np.insert(rows, 1, 3.0, axis=1)
    with pytest.warns(UserWarning, match=r"same value in all 90 training rows of 'x1': left out"):
        model = quick().fit(wide)
    assert (model.constant_columns_.tolist(), model.constant_values_.tolist()) == ([1], [3.0])
    plain = quick().fit(rows)
    assert plain.constant_columns_.tolist() == []
    assert np.array_equal(model.score_samples(wide), plain.score_samples(rows))
    assert model.offset_ == plain.offset_ and model.validation_nll_ == plain.validation_nll_
    differs = wide[:3] + np.array([[0, 0, 0], [0, 1e-9, 0], [0, 0, 1]])
    assert (model.score_samples(differs) == -np.inf).tolist() == [False, True, False]
    assert model.predict(differs)[1] == -1
    drawn = model.sample(4, random_state=0)
    assert (drawn[:, 1] == 3.0).all()
    assert np.array_equal(np.delete(drawn, 1, axis=1), plain.sample(4, random_state=0))


def test_a_constant_column_goes_by_its_name_and_columns_that_are_all_constant_are_an_error():
    table = named(np.insert(gaussian(60, 7), 2, 2.0, axis=1), "weight", "height", "version")
    with pytest.warns(UserWarning, match="of 'version': left out"):
        model = quick().fit(table)
    assert np.isfinite(model.score_samples(table)).all()
    with pytest.raises(ValueError, match=r"SelfNormDensity: expected columns that vary, .* of every column \('x0', 'x1'\)"):
        quick().fit(np.ones((30, 2)))


def test_a_column_that_varies_only_in_held_out_rows_is_constant():
    rows = gaussian(100, 7)
    rows[:, 1] = 0.0
    rows[np.random.RandomState(0).permutation(100)[0], 1] = 1.0  # the first row of the permutation is held out
    with pytest.warns(UserWarning, match="of 'x1': left out.*; 1 of 10 held-out rows differ in 'x1'"):
        model = quick().fit(rows)
    assert np.isinf(model.score_samples(rows)).sum() == 1 and np.isfinite(model.offset_)


def test_columns_that_determine_each_other_are_named():
    rows = gaussian(200, 7)
    table = named(np.column_stack([rows, 2 * rows[:, 0] + 1]), "a", "b", "twice")
    with pytest.raises(ValueError, match=r"SelfNormDensity: expected linearly independent .*column 'twice' is 2·'a' \+ 1\."):
        quick().fit(table)


def test_too_few_rows():
    with pytest.raises(ValueError, match="minimum of 3 is required"):
        quick().fit(gaussian(2, 0))


@pytest.mark.filterwarnings("ignore:SelfNormDensity. .*with no more rows than columns")
def test_overfitting_ends_training_early_with_the_best_weights():
    model = SelfNormDensity(max_steps=300, random_state=0).fit(gaussian(3, 0))
    assert model.n_steps_ < 300
    assert np.isfinite(model.score_samples(gaussian(3, 0))).all()


@pytest.mark.filterwarnings("ignore::selfnorm.objective.UnstableObjectiveWarning")
def test_divergence_keeps_the_best_weights_and_says_so():
    rows = gaussian(300, 0)
    with pytest.warns(ConvergenceWarning, match="SelfNormDensity: training diverged"):
        model = SelfNormDensity(max_steps=300, reconstruction_weight=0.0, learning_rate=1.0, random_state=0).fit(rows)
    assert np.isfinite(model.score_samples(rows)).all()


@pytest.mark.parametrize("given", [{"contamination": 0.0}, {"contamination": 0.7}, {"validation_fraction": 0}, {"kind": "magic"}])
def test_parameters_are_checked_in_fit(given):
    with pytest.raises(ValueError, match="expected"):
        quick(**given).fit(gaussian(20, 0))


def test_not_fitted():
    for method in ("score_samples", "predict", "decision_function", "score"):
        with pytest.raises(NotFittedError):
            getattr(quick(), method)(gaussian(3, 0))
    with pytest.raises(NotFittedError):
        quick().sample(3)


def test_the_exact_kind_learns_as_well():
    rows = gaussian(500, 8)
    scores = {kind: quick(kind=kind, max_steps=300).fit(rows).score(rows) for kind in ("selfnorm", "exact")}
    assert scores["selfnorm"] == pytest.approx(scores["exact"], abs=0.1)


def test_cross_validation_pipeline_and_search():
    rows = gaussian(150, 9)
    scores = cross_val_score(quick(), rows, cv=3)
    assert scores.shape == (3,) and np.isfinite(scores).all()
    pipeline = make_pipeline(StandardScaler(), quick()).fit(rows)
    assert pipeline.score_samples(rows).shape == pipeline.predict(rows).shape == (150,)
    search = GridSearchCV(quick(), {"layers": [1, 2]}, cv=2).fit(rows)
    assert search.best_params_["layers"] in (1, 2)


def test_clone_and_parameters():
    model = quick(contamination=0.2, device="cpu")
    copy = clone(model)
    assert copy is not model and copy.get_params() == model.get_params()
    assert copy.get_params()["contamination"] == 0.2
    assert copy.set_params(layers=5).layers == 5
    assert not hasattr(clone(model.fit(gaussian(50, 0))), "flow_")


def test_pickled_and_back_it_scores_the_same(fitted):
    rows = gaussian(20, 10)
    back = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(back.score_samples(rows), fitted.score_samples(rows))
    assert np.array_equal(back.predict(rows), fitted.predict(rows))
    assert np.array_equal(back.sample(3, random_state=0), fitted.sample(3, random_state=0))


def test_data_is_left_as_it_was():
    rows = gaussian(50, 11)
    before = rows.copy()
    rows.setflags(write=False)
    quick().fit(rows).score_samples(rows)
    assert np.array_equal(rows, before)


def test_importing_the_package_leaves_the_estimator_and_its_company_for_later():
    code = (
        "import sys, selfnorm; heavy = {'sklearn', 'matplotlib', 'typer', 'rich', 'pandas', 'safetensors'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); "
        "assert {'load', 'SelfNormDensity'} <= set(dir(selfnorm)); "
        "from selfnorm import SelfNormDensity, load; print(SelfNormDensity.__module__, load.__module__); "
        "assert not {'matplotlib', 'typer'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["selfnorm.estimator", "selfnorm.train.checkpoint"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = selfnorm.nonsense


def test_the_validation_nll_is_in_the_rows_own_units():
    rows = gaussian(400, 3)
    near, far = (quick(max_steps=100).fit(scale * rows).validation_nll_ for scale in (1.0, 1000.0))
    assert far - near == pytest.approx(2 * np.log(1000), abs=1e-3)


def test_the_scale_comes_from_the_rows_to_learn_from():
    """The first rows of the permutation are held out; one of them must not move the standardisation."""
    rows = gaussian(100, 4)
    held_out = np.random.RandomState(0).permutation(100)[0]
    first = quick(random_state=0).fit(rows).flow_.bijection[0].scale
    rows[held_out] = 50.0
    assert np.array_equal(first, quick(random_state=0).fit(rows).flow_.bijection[0].scale)


def test_tiny_data_says_what_can_be_trusted():
    rows = np.random.default_rng(0).normal(size=(5, 3))
    with pytest.warns(
        UserWarning, match="4 examples to train on, 1 to validate, for 3 columns: expect overfitting; use more rows"
    ):
        quick(max_steps=5).fit(rows)
    with pytest.warns(UserWarning, match="3 examples to train on, 1 to validate, for 3 columns: with no more rows than columns"):
        quick(max_steps=5).fit(rows[:4])


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e10 / 7])
def test_a_constant_is_the_same_in_float32_and_float64(value):
    rows = np.insert(np.random.default_rng(0).normal(size=(200, 2)), 1, value, axis=1)
    narrow = rows.astype(np.float32)
    other = rows + 0.01 * value
    for seen in (rows, narrow):
        with pytest.warns(UserWarning, match="the same value in all 180 training rows of 'x1'"):
            model = quick(max_steps=5).fit(seen)
        assert all(np.isfinite(model.score_samples(each)).all() for each in (rows, narrow, model.sample(5)))
        assert all((model.score_samples(each) == -np.inf).all() for each in (other, other.astype(np.float32)))


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e300, 1e-310])
def test_a_scale_that_float64_cannot_standardise_is_refused_in_one_line(scale):
    with pytest.raises(ValueError, match=r"SelfNormDensity: expected columns with a standard deviation from 1e-130 to 1e\+130"):
        quick(max_steps=5).fit(np.random.default_rng(0).normal(size=(60, 2)) * scale)


@pytest.mark.parametrize("scale", [1e125, 1e-125])
def test_a_wide_scale_changes_only_the_unit(scale):
    rows = np.random.default_rng(0).normal(size=(60, 2))
    found = quick(max_steps=40).fit(rows * scale).score_samples(rows * scale)
    np.testing.assert_allclose(found, quick(max_steps=40).fit(rows).score_samples(rows) - 2 * np.log(scale), atol=1e-3)


def test_many_constant_columns_are_listed_briefly():
    rows = np.column_stack([np.random.default_rng(0).normal(size=(200, 2)), np.ones((200, 3000))])
    with pytest.warns(UserWarning, match="training rows of 'x2', 'x3', 'x4', 'x5', 'x6' and 2,995 more: left out"):
        quick(max_steps=5).fit(rows)


@pytest.mark.parametrize("device", ["cuda:99", "meta", "gpu"])
def test_a_device_that_is_not_there_is_said(device):
    with pytest.raises(ValueError, match=rf"SelfNormDensity: expected a device of this machine, got '{device}'; use auto"):
        SelfNormDensity(max_steps=2, device=device).fit(gaussian(30, 0))

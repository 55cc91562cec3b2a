from sklearn.utils.estimator_checks import parametrize_with_checks

from selfnorm import SelfNormDensity


@parametrize_with_checks([SelfNormDensity(max_steps=20, layers=2, random_state=0)])
def test_sklearn(estimator, check):
    check(estimator)

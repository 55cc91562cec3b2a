"""An unknown kind of layer: the error names the kinds that exist, and so do the docstrings."""

import inspect

import numpy as np
import pytest

from selfnorm import SelfNormDensity
from selfnorm.models import CONV, LINEAR, MIX, conv_flow, fc_flow, glow
from selfnorm.train.experiments import find_recipe

CHOICES = {
    "fc_flow": (fc_flow, LINEAR, lambda kind: fc_flow(4, linear=kind)),
    "conv_flow": (conv_flow, CONV, lambda kind: conv_flow((1, 8, 8), conv=kind)),
    "glow": (glow, MIX, lambda kind: glow((1, 8, 8), mix=kind)),
    "estimator": (
        SelfNormDensity,
        LINEAR,
        lambda kind: SelfNormDensity(kind=kind).fit(np.random.default_rng(0).normal(size=(9, 3))),
    ),
    "recipe": (None, LINEAR, lambda kind: find_recipe("digits-fc-snf").changed(kind=kind)),
}


@pytest.mark.parametrize("kind", ["magic", ["selfnorm"], None, 3], ids=repr)
@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_kind_names_those_that_exist(name, kind):
    described, kinds, choose = CHOICES[name]
    with pytest.raises(ValueError, match="one of " + ", ".join(kinds)):
        choose(kind)
    if described:
        text = inspect.getdoc(described)
        assert [each for each in kinds if each not in text] == []

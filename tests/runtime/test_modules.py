"""The fast walk over modules finds what torch finds."""

from selfnorm.models import conv_flow, fc_flow, glow
from selfnorm.runtime.modules import all_modules


def test_all_modules_are_those_of_torch():
    for flow in (fc_flow(4), conv_flow((1, 4, 4), blocks=1), glow((1, 8, 8), steps_per_block=2, hidden=4)):
        flow.register_module("empty", None)
        found = all_modules(flow)
        assert len(found) == len(set(found)) and set(found) == set(flow.modules())


def test_a_module_that_is_used_twice_is_found_twice():
    flow = fc_flow(4)
    flow.base.again = flow.bijection
    assert all_modules(flow).count(flow.bijection) == 2

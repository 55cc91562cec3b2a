"""What `import selfnorm` promises."""

import subprocess
import sys

import selfnorm
from selfnorm import Bijection
from support.registry import REGISTRY


def test_all_names_exist():
    assert all(hasattr(selfnorm, name) for name in selfnorm.__all__)


def test_every_public_bijection_is_in_the_registry():
    values = [getattr(selfnorm, name) for name in selfnorm.__all__]  # imported on first use, so not all are in vars(selfnorm)
    public = {v for v in values if isinstance(v, type) and issubclass(v, Bijection)} - {Bijection}
    assert len(public) > 15
    assert public <= {type(module) for case in REGISTRY.values() for module in case.make().modules()}


def test_submodules_are_attributes():
    code = "import selfnorm; print(selfnorm.layers.lu.LULinear is selfnorm.LULinear, hasattr(selfnorm, 'nonsense'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True False\n"


def test_import_brings_in_nothing_heavy_beyond_torch():
    code = "import sys, torch; before = set(sys.modules); import selfnorm; print(*(set(sys.modules) - before))"
    extra = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[0] for name in extra} - set(sys.stdlib_module_names) <= {"selfnorm", "torch", "mpmath", "sympy"}

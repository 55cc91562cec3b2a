"""Self normalizing flows (Keller et al., ICML 2021): flows that learn their own inverse and train without determinants."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from selfnorm.bijection import Bijection, Chain, Surrogate
from selfnorm.evaluate.sampler import Sampler
from selfnorm.flow import Flow, InaccurateInverseWarning
from selfnorm.layers.activation import Logit, SmoothLeakyReLU
from selfnorm.layers.actnorm import ActNorm
from selfnorm.layers.affine import Affine, Standardize
from selfnorm.layers.coupling import AffineCoupling, ConditionalAffine
from selfnorm.layers.emerging import EmergingConv2d
from selfnorm.layers.exact import Conv1x1, ExactConv2d, ExactLinear
from selfnorm.layers.exponential import ExpConv2d
from selfnorm.layers.image import Flatten, Split, Squeeze
from selfnorm.layers.lu import LULinear
from selfnorm.layers.relative import RelativeLinear
from selfnorm.layers.selfnorm import SelfNormConv2d, SelfNormLinear
from selfnorm.layers.spline import SplineActivation
from selfnorm.layers.tracked import TrackedConv2d, TrackedLinear
from selfnorm.linalg.factors import SingularWeightError
from selfnorm.runtime.base import StandardNormal

if TYPE_CHECKING:
    from selfnorm.estimator import SelfNormDensity
    from selfnorm.train.checkpoint import load

__version__ = "0.1.0"

__all__ = [
    "ActNorm",
    "Affine",
    "AffineCoupling",
    "Bijection",
    "Chain",
    "ConditionalAffine",
    "Conv1x1",
    "EmergingConv2d",
    "ExactConv2d",
    "ExactLinear",
    "ExpConv2d",
    "Flatten",
    "Flow",
    "InaccurateInverseWarning",
    "LULinear",
    "Logit",
    "RelativeLinear",
    "Sampler",
    "SelfNormConv2d",
    "SelfNormDensity",
    "SelfNormLinear",
    "SingularWeightError",
    "SmoothLeakyReLU",
    "SplineActivation",
    "Split",
    "Squeeze",
    "StandardNormal",
    "Standardize",
    "Surrogate",
    "TrackedConv2d",
    "TrackedLinear",
    "load",
]

# Imported on first use: scikit-learn and safetensors take as long to import as everything else together.
_LAZY = {"SelfNormDensity": "selfnorm.estimator", "load": "selfnorm.train.checkpoint"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

"""Self normalizing flows (Keller et al., ICML 2021): flows that learn their own inverse and train without determinants."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfnorm.base import StandardNormal
    from selfnorm.bijection import Bijection, Chain, Surrogate
    from selfnorm.estimator import SelfNormDensity
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

# Imported on first use: torch takes seconds, in which the command could not even be interrupted properly.
_NAMES = {
    "selfnorm.base": ("StandardNormal",),
    "selfnorm.bijection": ("Bijection", "Chain", "Surrogate"),
    "selfnorm.estimator": ("SelfNormDensity",),
    "selfnorm.evaluate.sampler": ("Sampler",),
    "selfnorm.flow": ("Flow", "InaccurateInverseWarning"),
    "selfnorm.layers.activation": ("Logit", "SmoothLeakyReLU"),
    "selfnorm.layers.actnorm": ("ActNorm",),
    "selfnorm.layers.affine": ("Affine", "Standardize"),
    "selfnorm.layers.coupling": ("AffineCoupling", "ConditionalAffine"),
    "selfnorm.layers.emerging": ("EmergingConv2d",),
    "selfnorm.layers.exact": ("Conv1x1", "ExactConv2d", "ExactLinear"),
    "selfnorm.layers.exponential": ("ExpConv2d",),
    "selfnorm.layers.image": ("Flatten", "Split", "Squeeze"),
    "selfnorm.layers.lu": ("LULinear",),
    "selfnorm.layers.relative": ("RelativeLinear",),
    "selfnorm.layers.selfnorm": ("SelfNormConv2d", "SelfNormLinear"),
    "selfnorm.layers.spline": ("SplineActivation",),
    "selfnorm.layers.tracked": ("TrackedConv2d", "TrackedLinear"),
    "selfnorm.linalg.factors": ("SingularWeightError",),
    "selfnorm.train.checkpoint": ("load",),
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        globals()[name] = value = getattr(import_module(_PLACES[name]), name)
        return value
    if modules := [module for module in _NAMES if module.split(".")[1] == name]:
        for module in modules:
            import_module(module)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})

"""Self normalizing flows (Keller et al., ICML 2021): flows that learn their own inverse and train without determinants."""

from selfnorm.bijection import Bijection, Chain, Surrogate
from selfnorm.flow import Flow, StandardNormal
from selfnorm.inverses import SingularWeightError
from selfnorm.layers.coupling import AffineCoupling, ConditionalAffine
from selfnorm.layers.elementwise import ActNorm, Affine, Logit, SmoothLeakyReLU, Standardize
from selfnorm.layers.exact import Conv1x1, ExactConv2d, ExactLinear
from selfnorm.layers.image import Flatten, Split, Squeeze
from selfnorm.layers.selfnorm import SelfNormConv2d, SelfNormLinear
from selfnorm.layers.spline import SplineActivation

__version__ = "0.1.0"

__all__ = [
    "ActNorm",
    "Affine",
    "AffineCoupling",
    "Bijection",
    "Chain",
    "ConditionalAffine",
    "Conv1x1",
    "ExactConv2d",
    "ExactLinear",
    "Flatten",
    "Flow",
    "Logit",
    "SelfNormConv2d",
    "SelfNormLinear",
    "SingularWeightError",
    "SmoothLeakyReLU",
    "SplineActivation",
    "Split",
    "Squeeze",
    "StandardNormal",
    "Standardize",
    "Surrogate",
]

"""The old place of `selfnorm.kernels.numerics.correct_truncation`, until its last user has moved."""

from selfnorm.kernels.numerics import correct_truncation as uncut

__all__ = ["uncut"]

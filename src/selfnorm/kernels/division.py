"""The old place of `selfnorm.kernels.numerics.quotient_and_remainder`, until its last user has moved."""

from selfnorm.kernels.numerics import quotient_and_remainder as quotient_and_rest

__all__ = ["quotient_and_rest"]

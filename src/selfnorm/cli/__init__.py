"""The command `selfnorm`: `app`, with one module for each group of verbs."""

from selfnorm.cli import train, compare, sample, score, use, bench  # noqa: F401, I001  (registers the verbs, in the order of the help)
from selfnorm.cli.application import app

__all__ = ["app"]

"""The command `selfnorm`."""

import selfnorm.cli.main  # noqa: F401  (registers the verbs)
from selfnorm.cli.options import app

__all__ = ["app"]

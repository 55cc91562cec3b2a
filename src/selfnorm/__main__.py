"""`python -m selfnorm`, the same as the command `selfnorm`."""

from __future__ import annotations

import selfnorm.cli  # noqa: F401  (fills app with the verbs)
from selfnorm.command import app

app(prog_name="selfnorm")

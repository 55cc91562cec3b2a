"""`python -m selfnorm`, the same as the command `selfnorm`."""

from selfnorm.cli import app

app(prog_name="selfnorm")

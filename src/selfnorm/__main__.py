"""The command `selfnorm`, also as `python -m selfnorm`."""

import signal

from selfnorm.runtime.signals import end_at_once


def main() -> None:
    """Runs the command. Ctrl-C ends it quietly even during the imports, which take seconds."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from selfnorm.cli import app

    app(prog_name="selfnorm")


if __name__ == "__main__":
    main()

"""The command `selfnorm`, also as `python -m selfnorm`."""

import signal
import sys

from selfnorm.runtime.signals import end_at_once


def main() -> None:
    """Runs the command. Ctrl-C ends it quietly even during the imports, which take seconds."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from selfnorm.runtime.standard_output import named_standard_output

    try:
        with named_standard_output():
            from selfnorm.cli import app

            app(prog_name="selfnorm")
    except OSError as error:  # of what no verb prints, such as the help
        if "--debug" in sys.argv:
            raise
        sys.exit(f"selfnorm: {error}")


if __name__ == "__main__":
    main()

"""The `forge` command, and `python -m forge`: load the command line, then run it.

While it loads, Ctrl-C ends the process as it ends a C program: nothing has to be tidied up yet, and a KeyboardInterrupt
inside an import is a traceback. No garbage is looked for meanwhile: what is loaded stays.
"""

import gc
import signal
from typing import NoReturn


def run() -> NoReturn:
    """Run the process's own arguments and exit. The entry point."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    from forge.cli.main import run as run_command_line

    gc.enable()
    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command_line()


if __name__ == "__main__":
    run()

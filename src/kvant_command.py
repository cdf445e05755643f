"""Start the command so that Ctrl-C ends it with exit code 130 and without a traceback.

This file is outside the package, whose import loads libraries, and imports nothing that takes time.
"""

import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes milliseconds in which Ctrl-C would print a traceback
    from typing import NoReturn

EXIT_INTERRUPTED = 130  # as in kvant.errors, which cannot be imported yet


def end_now(signum: int, frame: object) -> "NoReturn":
    """Exit at once: there is nothing to undo while the command starts."""
    os._exit(EXIT_INTERRUPTED)


def main() -> "NoReturn":
    """Run ``kvant`` and exit at once, without the interpreter's clean-up, which takes a tenth of a second."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless the shell ignores it
        signal.signal(signal.SIGINT, end_now)
    if "MLX_RANK" in os.environ:
        os.environ.setdefault("KVANT_LAUNCHER", str(os.getppid()))  # a rank ends with its launcher
    gc.disable()  # imports leave nothing to collect; the command enables it again
    try:
        from kvant.cli import main as command
    except ImportError as error:  # MLX has no back end; the message says how to install one
        sys.stderr.write(f"kvant: error: {error}\n")
        os._exit(1)
    try:
        command(end_now)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads the output any more
        code = code or 1
    os._exit(code)

"""The command's first lines: from here on Ctrl-C ends it with exit code 130 and no traceback.

Outside the package, whose own first lines load libraries. Nothing is imported here that takes time.
"""

import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # its import takes milliseconds in which Ctrl-C is still Python's
    from typing import NoReturn

EXIT_INTERRUPTED = 130  # that of kvant.errors, which cannot be imported yet


def end_now(signum: int, frame: object) -> "NoReturn":
    """Leave without a word: while the command starts there is nothing to undo."""
    os._exit(EXIT_INTERRUPTED)


def main() -> "NoReturn":
    """Run ``kvant`` and leave at once: what the interpreter does at its end takes a tenth of a second, for
    nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell ignores it for us
        signal.signal(signal.SIGINT, end_now)
    if "MLX_RANK" in os.environ:
        os.environ.setdefault("KVANT_LAUNCHER", str(os.getppid()))  # a rank ends with it, however early
    gc.disable()  # imports leave nothing to collect; the command enables it again
    try:
        from kvant.cli import main as command
    except ImportError as error:  # MLX without a back end: its message says how to install one
        sys.stderr.write(f"kvant: error: {error}\n")
        os._exit(1)
    try:
        command(end_now)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads any more; what was written before was said to whoever did
        code = code or 1
    os._exit(code)

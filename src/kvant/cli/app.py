"""The commands. Each error of one becomes one line on standard error and an exit code."""

import gc
import os
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from kvant.cli import interrupts, options
from kvant.cli.options import BadValueError
from kvant.cli.terminal import escaping_standard_error
from kvant.errors import ArgumentError, KvantError, one_line, printable
from kvant.text.process import TextProcess
from kvant_command import EXIT_INTERRUPTED

EXIT_FAILED = 1
# In the order of the help. Each is imported when it is asked for: together they take longer than a short answer.
COMMANDS = ("generate", "chat", "plan", "convert", "report", "pull", "models", "doctor", "bench")
GROUPS = ("bench",)
TALKING = ("generate", "chat")  # they need a tokenizer


def make_app(arguments: list[str]) -> typer.Typer:
    """The command with the one sub-command that the arguments begin with, else with all of them."""
    app = typer.Typer(
        name="kvant",
        help="Run Qwen, Llama, Mistral, SmolLM3 and OLMo 2 models on Apple MLX. "
        "The key/value cache is preallocated and quantized.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name in arguments[:1] if arguments[:1] and arguments[0] in COMMANDS else COMMANDS:
        module = import_module(f"kvant.cli.{name}")
        if name in GROUPS:
            app.add_typer(module.app, name=name)
        else:
            app.command()(getattr(module, name))
    return app


def _print_version(value: bool) -> None:
    if value:
        from kvant import __version__

        print(f"kvant {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> NoReturn:
    """Run the command and exit: 0; 2 for a bad flag or value; 1 for a model, file or context error; 130 interrupted."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the shell closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, for the rest of the process
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    with escaping_standard_error():
        code = _run()
    interrupts.finish()
    sys.exit(code)


def _run() -> int:
    """The command's exit code, its error printed."""
    try:
        # Its start takes as long as the imports beside which it starts.
        process = TextProcess() if sys.argv[1:2] and sys.argv[1] in TALKING else None
        app = make_app(sys.argv[1:])
        gc.freeze()
        gc.enable()
        interrupts.begin()
        code = app(standalone_mode=False, obj=process)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except TyperException as error:  # a bad flag or value
        return _report(printable(" ".join(error.format_message().split())), getattr(error, "exit_code", 2))
    except ArgumentError as error:  # the same, found further down
        return _report(printable(error.worded(options.flag)), BadValueError.exit_code)
    except (KvantError, ImportError) as error:
        return _report(str(error), EXIT_FAILED)
    except (MemoryError, RuntimeError) as error:  # MLX's own, such as an allocation that failed
        return _report(f"failed: {one_line(error)}", EXIT_FAILED)
    except BrokenPipeError:  # the reader of standard output has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        return _report(printable(str(error)), EXIT_FAILED)


def _report(message: str, code: int) -> int:
    print(f"kvant: error: {' '.join(message.split())}", file=sys.stderr)
    return code

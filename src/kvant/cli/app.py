"""The commands. Each error becomes one line on standard error and an exit code."""

import gc
import os
import re
import sys
import warnings
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from kvant.cli import interrupts, ranks
from kvant.cli.defaults import CONFIGURED, BadValueError
from kvant.cli.help import GROUPED, GroupedCommand
from kvant.cli.terminal import escaping_standard_error
from kvant.errors import EXIT_INTERRUPTED, ArgumentError, KvantError, one_line, printable
from kvant.text.process import TextProcess

EXIT_FAILED = 1
# In the order of the help, which shows these summaries. A command and the engine are imported only when
# needed, because that takes longer than a short answer.
COMMANDS = {
    "generate": "Answer one prompt, or the prompts of a file.",
    "chat": "Talk with a model; the history stays in the cache.",
    "serve": "Serve models over HTTP, to many clients at once.",
    "ps": "List the models of running servers, and which of them are loaded.",
    "stop": "Unload a model of a running server.",
    "plan": "Say which memory a run takes, and whether it fits.",
    "import": "Make a model folder from a GGUF file, and print the folder.",
    "convert": "Quantize a model folder, or change its dtype.",
    "report": "Measure the quality that cache formats cost.",
    "pull": "Download a model, verify it, and print its folder.",
    "rm": "Remove a model that was pulled or imported.",
    "models": "List the models known by name, and others pulled or imported.",
    "doctor": "Describe this machine, and check the fused kernel on a GPU.",
    "evidence": "Measure this machine into one file, or check such a file.",
    "bench": "Measure every token's latency, engines side by side.",
    "launch": "Run a command on several machines at once.",
    "config": "Show the config file, and what it sets.",
}
FUNCTIONS = {"import": "import_model"}  # modules and functions of commands that are not valid Python names
NAME = "kvant"
LAUNCHER = "launch"  # its own flags are followed by another command
LAUNCH_LINE = re.compile(rf"\s*\S+\s+{LAUNCHER}\s(.*?\s)?--\s+({NAME}\s+)?(?=\S+\s)", re.DOTALL)
# Messages of typer and of the library that checks its values, and what to say in their place.
WORDINGS = (
    (
        re.compile(r"^Got unexpected extra argument\(s\) \((.*)\)$"),
        r"too many arguments: \1; put text with spaces in quotes",
    ),
    (re.compile(r"^(No such command '.*'\.)$"), rf"\1 `{NAME} --help` lists the commands"),
    (re.compile(r"^(No such option: \S+)$"), r"\1; add --help to see the options"),
    (re.compile(r": Value error, "), ": "),
    (re.compile(r"Input should be a valid integer, .*"), "expected a whole number"),
    (re.compile(r"Input should be a valid number, .*"), "expected a number"),
)
_last_error = ""
TALKING = ("generate", "chat", "serve")  # commands that need a tokenizer


def make_app(arguments: list[str]) -> typer.Typer:
    """Make the command with all sub-commands; only the one named in the arguments can be run."""
    app = typer.Typer(
        name=NAME,
        help="Run Qwen, Llama, Mistral, SmolLM3 and OLMo 2 models on Apple MLX. "
        "The key/value cache is preallocated and quantized.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(root)
    requested = next((text for text in arguments if not text.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name != requested:
            app.command(name, short_help=summary)(lambda: None)
            continue
        function = FUNCTIONS.get(name, name)
        module = import_module(f"kvant.cli.{function}")
        settings = {"allow_interspersed_args": name != LAUNCHER}
        kind = GroupedCommand if name in GROUPED else None
        app.command(name, cls=kind, short_help=summary, context_settings=settings)(getattr(module, function))
    return app


def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from kvant import __version__

        print(f"kvant {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(early: interrupts.Handler | None = None) -> NoReturn:
    """Run the command and exit.

    Exit codes: 0; 2 for a bad flag or value; 1 for a model, file or context error; 130 if interrupted.
    ``early`` handles Ctrl-C until the command is imported.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the shell closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, stays open until the end
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, *_: f"kvant: warning: {message}\n"  # no source line
    with escaping_standard_error():
        code = _run(early)
    ranks.end(code, _last_error)
    interrupts.finish()
    sys.exit(code)


def _run(early: interrupts.Handler | None) -> int:
    """Run the command, print its error, and return the exit code."""
    try:
        # Start what takes as long as the imports, so that both happen at the same time.
        ranks.begin(sys.argv[1:])
        process = TextProcess() if sys.argv[1:2] and sys.argv[1] in TALKING else None
        command = typer.main.get_command(make_app(sys.argv[1:] or _to_complete()))
        gc.freeze()
        gc.enable()
        interrupts.begin(early)
        name = sys.argv[1] if sys.argv[1:2] else ""
        defaults = {name: import_module("kvant.cli.config").defaults(name)} if name in CONFIGURED else {}
        code = command(standalone_mode=False, prog_name=NAME, obj=process, default_map=defaults)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except TyperException as error:  # a bad flag or value
        message = " ".join(error.format_message().split())
        for pattern, wording in WORDINGS:
            message = pattern.sub(wording, message)
        return _report(printable(message), getattr(error, "exit_code", 2))
    except ArgumentError as error:  # a bad value that deeper code detected
        return _report(
            printable(error.worded(import_module("kvant.cli.options").flag)), BadValueError.exit_code
        )
    except (KvantError, ImportError) as error:
        return _report(str(error), EXIT_FAILED)
    except (MemoryError, RuntimeError) as error:  # from MLX, for example a failed allocation
        return _report(f"failed: {one_line(error)}", EXIT_FAILED)
    except SystemExit as ended:  # typer's, after completing a line or if standard output is closed
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BrokenPipeError:  # standard output is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        return _report(printable(str(error)), EXIT_FAILED)


def _to_complete() -> list[str]:
    """Return the words of a line to complete; for the launcher, those of the command that it launches."""
    if f"_{NAME.upper()}_COMPLETE" not in os.environ:
        return []
    variable = "COMP_WORDS" if "COMP_WORDS" in os.environ else "_TYPER_COMPLETE_ARGS"
    line = os.environ.get(variable, "")
    if match := LAUNCH_LINE.match(line):
        line = os.environ[variable] = f"{NAME} {line[match.end() :]}"
        if "COMP_CWORD" in os.environ:
            os.environ["COMP_CWORD"] = str(int(os.environ["COMP_CWORD"]) - len(match[0].split()) + 1)
    return line.split()[1:]


def _report(message: str, code: int) -> int:
    global _last_error
    _last_error = " ".join(message.split())
    print(f"kvant: error: {_last_error}", file=sys.stderr)
    return code

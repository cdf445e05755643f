"""``kvant chat``: hold a conversation line by line."""

import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Annotated, Literal

import typer
from typer.exceptions import TyperException

from kvant.cli import interrupts, options, ranks
from kvant.cli import prompt_cache_file as cache_file
from kvant.cli.chat import commands
from kvant.cli.chat.talk import Talk, View, notice
from kvant.cli.options import RunOptions
from kvant.cli.session import follow, open_session
from kvant.engine.sampling import SamplingOptions
from kvant.errors import KvantError, one_line, printable

ENDS = ("exit", "quit")  # end the conversation if typed on a terminal


@options.with_options
def chat(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    *,
    run: RunOptions,
    sampling: SamplingOptions,
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown/--no-markdown", help="Show answers as markdown on a terminal, or as they are."
        ),
    ] = True,
    overflow: Annotated[
        Literal["forget", "stop"],
        typer.Option(help="When the context is full, forget the oldest turns, or stop."),
    ] = "forget",
    prompt_cache_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep the conversation in this file: load it at the start if it exists, save it at the end.",
        ),
    ] = None,
    disk_cache: options.DiskCacheFolder = None,
    disk_cache_size: options.DiskCacheSize = None,
) -> None:
    """Talk with a model; the history stays in the cache.

    Each message is read once. Type /help in the chat for its commands.
    """
    options.check_text(prompt_cache_file=prompt_cache_file)
    cache_file.check(prompt_cache_file)
    run = replace(run, model=options.choose_model(context, model_argument, run.model))
    ranks.refuse(run.draft_model, prompt_cache_file=prompt_cache_file, disk_cache=disk_cache)
    follow(run)
    disk = options.disk_cache(disk_cache, disk_cache_size)
    if sys.stdin.isatty():
        signal.signal(signal.SIGTERM, interrupts.leave)  # restore the terminal and save the conversation
    with _silent():
        hashes = prompt_cache_file is not None
        session = open_session(
            run, context.obj, sampling, announce=False, talks=True, disk=disk, hashes=hashes
        )
    unchanged = run.raw or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
    view: View = "unchanged" if unchanged else "markdown" if markdown else "plain"
    talk = Talk(run, sampling, session, view, overflow)
    known = (session.name, session.describe_cache(), session.sampling_line, "/help lists the commands")
    notice(" · ".join(known), run.quiet)
    with (
        cache_file.persisted(prompt_cache_file, talk.conversation, run.system_prompt, quiet=run.quiet),
        interrupts.patient(),  # Ctrl-C stops an answer, not the program
        nullcontext() if disk is None else closing(disk),
    ):
        _converse(talk)


def _converse(talk: Talk) -> None:
    """Read and answer until the input ends or the user leaves; an error is one line and ends nothing."""
    read: Callable[[], str] = input
    if sys.stdin.isatty():  # allow editing lines
        from kvant.cli.chat.prompt import Prompt

        read = Prompt(talk).read
    while True:
        try:
            line = read().strip()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            continue  # on a terminal it clears the line
        except EOFError:
            return
        if sys.stdin.isatty() and line in ENDS:
            return
        if not line:
            continue
        try:
            with _silent():
                commands.do(talk, line)
        except EOFError:
            return
        except KeyboardInterrupt:
            notice("stopped")
        except KvantError as error:
            notice(f"error: {error}")
        except TyperException as error:
            notice(f"error: {printable(error.format_message())}")
        except (ValueError, OSError, RuntimeError, MemoryError) as error:  # MLX raises RuntimeErrors
            notice(f"error: {one_line(error)}")


@contextmanager
def _silent() -> Iterator[None]:
    """Ignore keys in the block: on a terminal they would appear in the middle of an answer."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)
    # Without NOFLSH, Ctrl-C would discard output that is not shown yet, and rows would be miscounted.
    local_flags = settings[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    silent = [*settings[:3], local_flags, *settings[4:]]

    def restore() -> None:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(terminal, termios.TCSAFLUSH, settings)

    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        with interrupts.restoring(restore):
            yield
    finally:
        restore()

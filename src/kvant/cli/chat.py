"""``kvant chat``: a conversation, line by line."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import typer

from kvant.cli import interrupts, options, terminal
from kvant.cli.progress import LateProgress
from kvant.cli.session import RunOptions, Session, open_session
from kvant.cli.statistics import RunStatistics
from kvant.engine.conversation import Conversation
from kvant.engine.draw import for_answer
from kvant.engine.generate import GenerationResponse
from kvant.engine.sampling import SamplingOptions
from kvant.errors import ContextError, KvantError, PromptError

HELP = (
    "/reset forgets the conversation, /stats shows its numbers, /help this line, /quit ends; "
    "// begins a message with a slash; Ctrl-C stops an answer"
)


@options.with_options
def chat(
    context: typer.Context, model_argument: options.ModelArgument = None, *, run: RunOptions, sampling: SamplingOptions
) -> None:
    """Talk with a model; the history stays in the cache, and a turn feeds only its own tokens."""
    run = replace(run, model=options.choose_model(context, model_argument, run.model))
    session = open_session(run, context.obj, sampling)
    sampler, processors = session.sampling(sampling)
    _notice(session.sampling_line, run.quiet)
    if not session.tokenizer.has_chat_template:
        raise PromptError("the model has no chat template; kvant generate --ignore-chat-template continues a prompt")
    conversation = Conversation(
        session.model,
        session.tokenizer,
        session.cache,
        system_prompt=run.system_prompt,
        template_variables=session.template_variables,
    )
    answers = count()

    def answer(text: str, **more: Any) -> Iterator[GenerationResponse]:
        return conversation.send(
            text,
            max_tokens=run.max_tokens,
            sampler=for_answer(sampler, next(answers)),
            logits_processors=processors,
            stop=run.stop or (),
            prefill_step_size=run.prefill_step_size,
            **more,
        )

    _notice(HELP, run.quiet)
    with interrupts.patient():  # Ctrl-C stops an answer, not the program
        _loop(session, conversation, answer, run.quiet, run.raw)


def _loop(session: Session, conversation: Conversation, answer: Callable[..., Any], quiet: bool, raw: bool) -> None:
    read_line = _line_reader()
    run = RunStatistics()
    while True:
        try:
            line = read_line().strip()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            continue  # clears the line; on a terminal it is the answer that Ctrl-C stops, not the program
        except EOFError:
            return
        if line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
            run = RunStatistics()
            _notice("the conversation is forgotten", quiet)
        elif line == "/stats":
            _print_statistics(session, conversation, run)
        elif line == "/help":
            _notice(HELP)
        elif line.startswith("/") and not line.startswith("//"):
            _notice(f"{line.split()[0]} is not a command; {HELP}")
        elif line:
            run = _answer(partial(answer, line.removeprefix("/")), quiet, raw)


def _answer(send: Callable[..., Any], quiet: bool, raw: bool) -> RunStatistics:
    """Print one answer as it comes."""
    run = RunStatistics()
    with LateProgress("reading", quiet=quiet) as progress:
        try:
            # Closed whatever happens, so that the turn is recorded with the answer until then.
            with closing(send(prompt_progress_callback=progress.update)) as responses:
                for response in responses:
                    progress.stop()
                    run.add(response)
                    terminal.write_generated(response.text, raw=raw)
        except KeyboardInterrupt:
            progress.stop()
            _notice("\nstopped")
        except ContextError as error:
            _notice(f"{error}; /reset forgets the conversation, --max-kv-size reserves more")
            return run
        except KvantError as error:
            _notice(f"error: {error}")
            return run
    if run.last is not None:
        print(flush=True)
        if run.last.finish_reason == "context":
            _notice("the reserved context is full; /reset forgets the conversation, --max-kv-size reserves more")
        elif run.last.finish_reason == "length":
            _notice("cut at --max-tokens")
    return run


def _print_statistics(session: Session, conversation: Conversation, run: RunStatistics) -> None:
    lines = [f"conversation: {len(conversation.messages)} messages, {conversation.num_tokens} tokens in the cache"]
    if run.last is not None:
        reused = conversation.reused_tokens
        lines.append(f"last turn: {reused} tokens were in the cache, {run.last.prompt_tokens} were fed")
    lines.append(f"cache: {session.describe_cache()}")
    print("\n".join([*lines, *run.lines(session), session.sampling_line]), file=sys.stderr)


def _line_reader() -> Callable[[], str]:
    """Lines from standard input. On a terminal prompt_toolkit reads them, with its prompt on standard error."""
    if not sys.stdin.isatty():
        return input
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    prompt: PromptSession[str] = PromptSession(output=create_output(stdout=terminal.behind(sys.stderr)))
    return lambda: prompt.prompt("> ")


def _notice(text: str, quiet: bool = False) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)

"""A question in tokens: what ``kvant generate`` answers, whether it came as an argument or on a line of a
file.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvant.cli.json_schema import SchemaGrammars
from kvant.cli.options import BadValueError, RunOptions
from kvant.cli.prompts_file import Line
from kvant.cli.session import Session
from kvant.engine.processors import LogitsProcessor
from kvant.engine.sampler import Sampler, for_answer
from kvant.errors import ArgumentError, ContextError, PromptError, library_errors
from kvant.text.prompt import Message, encode_prompt, encode_rendered, render_chat


@dataclass(frozen=True, slots=True)
class Question:
    line: Line
    ids: list[int]
    sampler: Sampler
    processors: tuple[LogitsProcessor, ...]
    max_tokens: int
    stop: Sequence[str]

    def sampler_of(self, number: int) -> Sampler:
        """The sampler of the run's answer ``number``: each has the next seed, but a line with a seed of
        its own.
        """
        return self.sampler if self.line.has_seed else for_answer(self.sampler, number)


def prepare(
    session: Session,
    run: RunOptions,
    line: Line,
    drawn: int,
    *,
    plain: bool,
    begun: str | None = None,
    schema: SchemaGrammars | None = None,
) -> Question:
    """Return a line's question.

    Args:
        session: has the model and the tokenizer.
        run: the flags.
        line: the prompt, and what its line asks for.
        drawn: the seed if nothing says one.
        plain: without the chat template.
        begun: how the answer begins.
        schema: holds the answer to a JSON schema.
    """
    with at(line):
        if plain and not isinstance(line.prompt, str):
            raise ArgumentError(
                "messages", "are given; they need the chat template that --ignore-chat-template leaves out"
            )
        rendered = None
        if plain:
            ids = encode_prompt(session.tokenizer, str(line.prompt), session.model.config.vocab_size)
        else:
            asked = (
                [{"role": "user", "content": line.prompt}] if isinstance(line.prompt, str) else line.prompt
            )
            rendered = _rendered(session, asked, run.system_prompt, begun)
            ids = encode_rendered(session.tokenizer, rendered)
            if not ids:
                raise PromptError("the prompt is empty: the chat template renders nothing")
        sampler, processors = session.sampling(line.sampling, drawn)
        if schema is not None:
            processors = [*processors, schema.processor(rendered)]
    stop = (run.stop or ()) if line.stop is None else line.stop
    return Question(line, ids, sampler, tuple(processors), line.max_tokens or run.max_tokens, stop)


def _rendered(
    session: Session, messages: Sequence[Message], system_prompt: str | None, begun: str | None
) -> str:
    """Messages through the chat template, up to where the answer begins, or with what it has ``begun``."""
    tokenizer, variables = session.tokenizer, session.template_variables
    if not tokenizer.has_chat_template:
        raise PromptError(
            "the model has no chat template; --ignore-chat-template continues the prompt as it is"
        )
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if begun is None:
        return render_chat(tokenizer, messages, variables)
    messages = [*messages, {"role": "assistant", "content": begun}]
    given = {**variables, "tokenize": False, "continue_final_message": True}
    with library_errors(PromptError, "the chat template failed"):
        return str(tokenizer.apply_chat_template(messages, **given))


@contextmanager
def at(line: Line) -> Iterator[None]:
    """Errors of a file's line name it."""
    try:
        yield
    except (PromptError, ContextError) as error:
        raise type(error)(f"{line.where}: {error}") if line.where else error from error
    except ArgumentError as error:
        raise BadValueError(f"{line.where}: {error}") if line.where else error from error

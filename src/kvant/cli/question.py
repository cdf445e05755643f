"""Prepare a question of ``kvant generate``, from arguments or a line of a file, as tokens."""

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
        """Return the sampler of answer ``number``. Seeds are consecutive unless the line sets one."""
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
        session: the model and the tokenizer.
        run: the flags.
        line: the prompt and its options.
        drawn: the default seed.
        plain: do not use the chat template.
        begun: the beginning of the answer.
        schema: a JSON schema that the answer must satisfy.
    """
    with at(line):
        if plain and not isinstance(line.prompt, str):
            raise ArgumentError("messages", "need the chat template, which --ignore-chat-template disables")
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
    """Render messages up to where the answer begins, or with its beginning, ``begun``."""
    tokenizer = session.tokenizer
    variables = session.template_variables
    if not tokenizer.has_chat_template:
        raise PromptError(
            "the model has no chat template; --ignore-chat-template continues the prompt as it is"
        )
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if begun is None:
        return render_chat(tokenizer, messages, variables)
    messages = [*messages, {"role": "assistant", "content": begun}]
    options = {**variables, "tokenize": False, "continue_final_message": True}
    with library_errors(PromptError, "the chat template failed"):
        return str(tokenizer.apply_chat_template(messages, **options))


@contextmanager
def at(line: Line) -> Iterator[None]:
    """Prefix errors with the file's line."""
    try:
        yield
    except (PromptError, ContextError) as error:
        raise type(error)(f"{line.where}: {error}") if line.where else error from error
    except ArgumentError as error:
        raise BadValueError(f"{line.where}: {error}") if line.where else error from error

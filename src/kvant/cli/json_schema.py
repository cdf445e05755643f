"""``--json-schema``: answers held to the JSON schema in a file."""

from importlib.util import find_spec
from typing import Any

from kvant.cli.options import BadValueError, RunOptions
from kvant.cli.session import Session
from kvant.cli.terminal import say
from kvant.errors import GrammarError, KvantError
from kvant.files import parse_json, read_user_file
from kvant.installation import install_command

MAX_BYTES = 64 * 1024  # the most that a grammar may have


def check_flags(path: str | None, run: RunOptions, prefill: str | None) -> None:
    """Refuse flags that --json-schema cannot be used with, and a kvant that lacks the library for it."""
    if path is None:
        return
    if run.ignore_eos:
        raise BadValueError("--ignore-eos continues past the end of an answer, which --json-schema sets")
    if prefill is not None:
        raise BadValueError("--prefill-response begins the answer, which --json-schema holds to a schema")
    if find_spec("llguidance") is None:
        raise KvantError("--json-schema needs llguidance, which is not installed", install_command("serve"))


def read_schema(path: str) -> dict[str, Any]:
    """Return the schema in a file; what is wrong with one is found out when a grammar is made of it."""
    try:
        return parse_json(read_user_file(path, MAX_BYTES), path)
    except KvantError as error:
        raise BadValueError(f"--json-schema: {error}") from error


class SchemaGrammars:
    """The grammars that hold answers to one schema."""

    def __init__(self, session: Session, schema: dict[str, Any]) -> None:
        """Prepare the model's vocabulary, and name what the answers will not be held to."""
        from kvant.text.grammar import Grammars  # takes time, and few runs have a schema
        from kvant.text.grammar_source import unknown_formats

        self._schema = schema
        self._grammars = Grammars(session.tokenizer, session.model.config.vocab_size)
        if formats := sorted(unknown_formats([schema])):
            say(f"--json-schema: answers are not held to the formats {', '.join(map(repr, formats))}")

    def processor(self, prompt: str | None) -> Any:
        """Return what holds the answers to a rendered prompt, whose thinking is free; None: plain text."""
        try:
            return self._grammars.compile("json_schema", self._schema, prompt)
        except GrammarError as error:
            raise BadValueError(f"--json-schema: {error}") from error

    def close(self) -> None:
        """End the process that tries grammars."""
        self._grammars.close()

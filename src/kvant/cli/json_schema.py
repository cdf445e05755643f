"""``--json-schema``: constrain answers to the JSON schema in a file."""

from importlib.util import find_spec
from typing import Any

from kvant.cli.options import BadValueError, RunOptions
from kvant.cli.session import Session
from kvant.cli.terminal import say
from kvant.errors import GrammarError, KvantError
from kvant.files import parse_json, read_user_file
from kvant.installation import install_command

MAX_BYTES = 64 * 1024  # the limit of a grammar


def check_flags(path: str | None, run: RunOptions, prefill: str | None) -> None:
    """Refuse flags that conflict with --json-schema, and an installation without its library."""
    if path is None:
        return
    if run.ignore_eos:
        raise BadValueError(
            "--ignore-eos continues past the end of an answer, which --json-schema determines"
        )
    if prefill is not None:
        raise BadValueError("--prefill-response begins the answer, which --json-schema constrains")
    if find_spec("llguidance") is None:
        raise KvantError("--json-schema needs llguidance, which is not installed", install_command("serve"))


def read_schema(path: str) -> dict[str, Any]:
    """Read the schema in a file. Errors in the schema are detected when its grammar is compiled."""
    try:
        return parse_json(read_user_file(path, MAX_BYTES), path)
    except KvantError as error:
        raise BadValueError(f"--json-schema: {error}") from error


class SchemaGrammars:
    """The grammars that constrain answers to one schema."""

    def __init__(self, session: Session, schema: dict[str, Any]) -> None:
        """Prepare the model's vocabulary, and print the formats that will not be enforced."""
        from kvant.text.grammar import Grammars  # slow, and rarely needed
        from kvant.text.grammar_source import unknown_formats

        self._schema = schema
        self._grammars = Grammars(session.tokenizer, session.model.config.vocab_size)
        if formats := sorted(unknown_formats([schema])):
            say(f"--json-schema: these formats are not enforced: {', '.join(map(repr, formats))}")

    def processor(self, prompt: str | None) -> Any:
        """Compile the grammar of answers to a rendered prompt, whose thinking is free; None: plain text."""
        try:
            return self._grammars.compile("json_schema", self._schema, prompt)
        except GrammarError as error:
            raise BadValueError(f"--json-schema: {error}") from error

    def close(self) -> None:
        """End the process that checks grammars."""
        self._grammars.close()

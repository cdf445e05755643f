"""Answers that have to follow a JSON schema, a regular expression or a grammar: which tokens may come next.

llguidance does the work (github.com/guidance-ai/llguidance). It is imported where a grammar is compiled.
"""

import json
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from kvant.errors import GrammarError, printable
from kvant.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json_object", "json_schema", "regex", "grammar", "tool_calls"]

MAX_SOURCE = 64 * 1024  # bytes
# The model splits forced text into tokens itself: the library would call the tokenizer, in another process, at each.
OPTIONS = '%llguidance {"no_forcing": true}'
# No whitespace between JSON's parts: a model may write it without end. A schema must not change any of these.
JSON_OPTIONS = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
ENDED = ("NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence")


class Grammars:
    """Compiles the grammars of one tokenizer, for threads of this process."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: the model's. Ids that the tokenizer does not have are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def compile(self, kind: Kind, source: Mapping[str, Any] | str | bool = "") -> "Grammar":
        """A grammar that answers can be held to.

        The first call also prepares the vocabulary, which takes a second for a large one.

        Args:
            kind: "json_object": any JSON object. "json_schema": JSON without whitespace that satisfies a schema.
                "regex": text that a regular expression of Rust's syntax matches whole. "grammar": one of llguidance's
                form of Lark's language. "tool_calls": what :func:`build_tool_grammar` returned.
            source: a schema as an object or as JSON text; else text.

        Raises:
            GrammarError: a source that is wrong, too large or takes too long; or a tokenizer that cannot be used.
        """
        from llguidance import LLMatcher

        text = _document(kind, source)
        vocabulary = self._prepare()
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=_limits())
        _check(matcher)
        matcher.compute_bitmask()
        _check(matcher)
        return Grammar(matcher, vocabulary.eos_tokens, self._vocab_size)

    def _prepare(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        with self._lock:
            if self._vocabulary is None:
                vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
                self._vocabulary = LLTokenizer(vocabulary, eos_token=vocabulary.eos_token_ids)  # type: ignore[arg-type]
            return self._vocabulary


class Grammar:
    """A compiled grammar. It goes among the logits processors of a request or a call, and is never changed."""

    def __init__(self, compiled: "LLMatcher", eos_tokens: Collection[int], vocab_size: int) -> None:
        self._compiled = compiled
        self.eos_tokens = frozenset(eos_tokens)
        self.vocab_size = vocab_size

    def check(self, vocab_size: int, stop_tokens: Collection[int]) -> None:
        """Raise a ValueError for a model or for stop tokens that an answer under this grammar cannot have."""
        if vocab_size != self.vocab_size:
            raise ValueError(f"the grammar is for {self.vocab_size} tokens; the model has {vocab_size}")
        if not self.eos_tokens <= set(stop_tokens):
            raise ValueError(
                f"an answer under a grammar ends with its end-of-text tokens, {sorted(self.eos_tokens)}; "
                f"expected them among the stop tokens, which are {sorted(stop_tokens)}"
            )

    def matcher(self) -> "Matcher":
        """For one answer, at its beginning."""
        return Matcher(self._compiled.deep_copy())


class Matcher:
    """How far one answer has come in its grammar. One thread uses it."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def mask(self) -> bytes:
        """A bit for each token, the first in the lowest bit: whether it may come next.

        Where the grammar is complete these are the end-of-text tokens.

        Raises:
            GrammarError: no token may come, or finding out takes too long.
        """
        bits = self._matcher.compute_bitmask()
        _check(self._matcher)  # the library would end the answer instead
        return bits

    def take(self, token: int) -> None:
        """Go on with a token.

        Raises:
            GrammarError: the grammar does not allow it.
        """
        if not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not follow the grammar: {_reason(self._matcher)}")


class _Vocabulary:
    """A tokenizer in the shape that llguidance asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        tokens = tokenizer.token_bytes()
        if tokens is None:
            raise GrammarError("a grammar is not possible with this tokenizer: its tokens do not stand for bytes")
        self.eos_token_ids = sorted(token for token in tokenizer.eos_token_ids if token < vocab_size)
        if not self.eos_token_ids:
            raise GrammarError("a grammar is not possible with this tokenizer: it has no end-of-text token")
        self.eos_token_id = self.eos_token_ids[0]
        self.tokens = [*tokens, *[b""] * (vocab_size - len(tokens))][:vocab_size]
        marks = {*tokenizer.mark_ids, *tokenizer.all_special_ids, *self.eos_token_ids}
        self.special_token_ids = sorted(token for token in marks if token < vocab_size)

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError  # only for text that is forced


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)  # they would quote the answer


def _document(kind: Kind, source: Mapping[str, Any] | str | bool) -> str:
    """The source as llguidance takes it, a JSON document."""
    if kind == "json_object":
        return _with_schema({"type": "object"})
    if kind == "json_schema":
        return _with_schema(_schema(source))
    if not isinstance(source, str):
        raise GrammarError(f"the {kind} is a {type(source).__name__}; expected text")
    _check_size(kind, source)
    if kind == "regex":
        from llguidance import regex_to_lark

        source = f"start: TEXT\nTEXT: /{regex_to_lark(source, '')}/"
    return json.dumps({"grammars": [{"lark_grammar": f"{source}\n{OPTIONS}"}]})


def _with_schema(schema: Mapping[str, Any]) -> str:
    grammars = [
        {"lark_grammar": f"start: @json\n{OPTIONS}"},
        {"name": "json", "json_schema": {**schema, "x-guidance": JSON_OPTIONS}},
    ]
    return json.dumps({"grammars": grammars})


def _schema(source: Mapping[str, Any] | str | bool) -> Mapping[str, Any]:
    """A schema as an object."""
    try:
        text = source if isinstance(source, str) else json.dumps(source)
        _check_size("json_schema", text)
        schema = json.loads(text)
    except RecursionError:
        raise GrammarError("the json_schema is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the json_schema is not JSON: {error}") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError(f"the json_schema is {printable(text, 80)}; expected an object")
    return schema


def _check_size(kind: Kind, text: str) -> None:
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_SOURCE:
        raise GrammarError(f"the {kind} has {size} bytes; expected at most {MAX_SOURCE}")


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error() or matcher.stop_reason() not in ENDED:
        raise GrammarError(_reason(matcher))


def _reason(matcher: "LLMatcher") -> str:
    lines = [line for line in matcher.get_error().splitlines() if line and line != "<non-verbose/>"]
    return printable("; ".join(lines), GrammarError.columns) or matcher.stop_reason()

"""Use llguidance (github.com/guidance-ai/llguidance): convert vocabularies, grammars and errors.

It is imported inside functions because it is an optional dependency that few commands need.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from kvant.errors import GrammarError
from kvant.installation import install_command

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# stop reasons of a matcher that are not failures
FINE = ("NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence")
SHOWN = re.compile(r"\^*|\d+ \|.*|<non-verbose/>")  # lines of an error that show the location in the source
# Text in the library's messages that does not help a client: options it cannot set, a panic's backtrace.
HINT = re.compile(r"[.;] (?:Enable '|either increase limits).*|<backtrace>.*", re.DOTALL)
RENAMED = (("panic: ", "llguidance failed: "), ("Expected f64 for", "Expected a number for"))
DEAD_END = "no text satisfies it, or none from here on"
STOPPED = {  # the library's stop reasons; used as the message if it has no other
    "NoExtension": DEAD_END,
    "NoExtensionBias": DEAD_END,
    "LexerTooComplex": "its texts have too many states",
    "ParserTooComplex": "it can be read in too many ways",
    "MaxTokensTotal": "it allows no more tokens",
    "MaxTokensParser": "it allows no more tokens",
    "InternalError": "llguidance failed on it",
}
MAX_STATES = 50_000  # states of a grammar's automaton, 2 kB each, created as answers need them


class Vocabulary:
    """A model's tokens with the attributes that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], marks: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        """``tokens``: the bytes of each id; empty ones are never allowed.

        ``marks``: ids that are not text, whatever their bytes. ``eos_token_ids``: at least one.
        """
        self.tokens = tokens
        self.special_token_ids = sorted({*marks, *eos_token_ids})
        self.eos_token_ids = list(eos_token_ids)
        self.eos_token_id = self.eos_token_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("only text that a grammar forces is tokenized, and nothing is forced")

    def single_bytes(self) -> str:
        """Return tokens of one byte and marks, enough to compile any grammar, as JSON for :func:`check`."""
        marks = set(self.special_token_ids)
        some = [[i, token.hex()] for i, token in enumerate(self.tokens) if len(token) == 1 or i in marks]
        vocabulary = {
            "size": len(self.tokens),
            "tokens": some,
            "marks": self.special_token_ids,
            "eos": self.eos_token_ids,
        }
        return json.dumps(vocabulary)

    def for_library(self) -> "LLTokenizer":
        """Prepare the tokens for the library: half a second for 150,000, holding Python's lock."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise GrammarError("grammars need llguidance", install_command("serve")) from error
        # LLTokenizer only reads attributes.
        return LLTokenizer(self, eos_token=self.eos_token_ids)  # type: ignore[arg-type]


def check(document: str, vocabulary: str) -> None:
    """Compile a grammar for a vocabulary of :meth:`Vocabulary.single_bytes`, in the worker process."""
    prepared, brace = _from_single_bytes(vocabulary)
    matcher = compiled(prepared, document)
    next_mask(matcher)
    if brace is not None and matcher.validate_tokens([brace]):  # reveals too many optional properties
        matcher.consume_token(brace)
        next_mask(matcher)


@lru_cache(maxsize=1)
def _from_single_bytes(vocabulary: str) -> "tuple[LLTokenizer, int | None]":
    """Prepare the vocabulary of :meth:`Vocabulary.single_bytes`; return it and the id of "{"."""
    parsed = json.loads(vocabulary)
    tokens = [b""] * parsed["size"]
    for place, token in parsed["tokens"]:
        tokens[place] = bytes.fromhex(token)
    brace = tokens.index(b"{") if b"{" in tokens else None
    return Vocabulary(tokens, parsed["marks"], parsed["eos"]).for_library(), brace


def as_lark(expression: str) -> str:
    """Convert a regular expression in Rust's syntax to a terminal of Lark's language."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(expression, '')}/"


def compiled(vocabulary: "LLTokenizer", document: str) -> "LLMatcher":
    """Compile a JSON document of :mod:`kvant.text.grammar_source`; return a matcher at its beginning."""
    from llguidance import LLMatcher, LLParserLimits

    # verbose errors would quote the answer
    limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary, document, log_level=0, limits=limits)
    fail_if_failed(matcher)
    return matcher


def next_mask(matcher: "LLMatcher") -> bytes:
    """Return a byte per token: 0 if it must not come next. The first call detects further errors."""
    mask = matcher.compute_logit_bias()
    fail_if_failed(matcher)
    return mask


def fail_if_failed(matcher: "LLMatcher") -> None:
    """Raise a GrammarError if a matcher has failed; otherwise it would end the answer."""
    if matcher.is_error() or matcher.stop_reason() not in FINE:
        raise GrammarError(reason(matcher))


def reason(matcher: "LLMatcher") -> str:
    """Return in one line why a matcher has failed, without the location."""
    lines = [line.strip() for line in HINT.sub("", matcher.get_error()).splitlines()]
    message = " ".join(line for line in lines if not SHOWN.fullmatch(line)) or matcher.stop_reason()
    for theirs, ours in RENAMED:
        message = message.replace(theirs, ours)
    return STOPPED.get(message, message)

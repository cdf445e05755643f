"""llguidance (github.com/guidance-ai/llguidance): vocabularies and grammars in its shape, and its errors as
kvant's.

It is imported in functions: it is an extra, and few commands need it.
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

# endings of a matcher that are no failure
FINE = ("NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence")
SHOWN = re.compile(r"\^*|\d+ \|.*|<non-verbose/>")  # lines of an error that show the place in the source
# Parts of the library's messages that say nothing to a client: options that it cannot set, a panic's
# backtrace.
HINT = re.compile(r"[.;] (?:Enable '|either increase limits).*|<backtrace>.*", re.DOTALL)
RENAMED = (("panic: ", "llguidance failed: "), ("Expected f64 for", "Expected a number for"))
DEAD_END = "no text satisfies it, or none from here on"
STOPPED = {  # the library's stop reasons, which are its message if it has no other
    "NoExtension": DEAD_END,
    "NoExtensionBias": DEAD_END,
    "LexerTooComplex": "its texts have too many states",
    "ParserTooComplex": "it can be read in too many ways",
    "MaxTokensTotal": "it allows no more tokens",
    "MaxTokensParser": "it allows no more tokens",
    "InternalError": "llguidance failed on it",
}
MAX_STATES = 50_000  # of a grammar's automaton, 2 kB each; they are made as answers need them


class Vocabulary:
    """A model's tokens as llguidance asks for them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], marks: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        """``tokens``: the bytes of each; those that stand for nothing have none, and are never allowed.

        ``marks``: ids of those that are no text, whatever their bytes. ``eos_token_ids``: at least one.
        """
        self.tokens = tokens
        self.special_token_ids = sorted({*marks, *eos_token_ids})
        self.eos_token_ids = list(eos_token_ids)
        self.eos_token_id = self.eos_token_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("only text that a grammar forces is tokenized, and nothing is forced")

    def single_bytes(self) -> str:
        """Tokens of one byte and marks: enough to compile any grammar, as JSON text for :func:`check`."""
        marks = set(self.special_token_ids)
        some = [[i, token.hex()] for i, token in enumerate(self.tokens) if len(token) == 1 or i in marks]
        given = {
            "size": len(self.tokens),
            "tokens": some,
            "marks": self.special_token_ids,
            "eos": self.eos_token_ids,
        }
        return json.dumps(given)

    def for_library(self) -> "LLTokenizer":
        """It, prepared: half a second for 150,000 tokens, in which no other thread of Python goes on."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise GrammarError("grammars need llguidance", install_command("serve")) from error
        return LLTokenizer(self, eos_token=self.eos_token_ids)  # type: ignore[arg-type]  # it only asks for the names


def check(document: str, vocabulary: str) -> None:
    """Compile a grammar for a vocabulary of :meth:`Vocabulary.single_bytes`, in the worker process."""
    prepared, brace = _from_single_bytes(vocabulary)
    matcher = compiled(prepared, document)
    next_mask(matcher)
    if brace is not None and matcher.validate_tokens([brace]):  # too many optional properties show behind it
        matcher.consume_token(brace)
        next_mask(matcher)


@lru_cache(maxsize=1)
def _from_single_bytes(vocabulary: str) -> "tuple[LLTokenizer, int | None]":
    """A prepared vocabulary and the id of "{"."""
    given = json.loads(vocabulary)
    tokens = [b""] * given["size"]
    for place, token in given["tokens"]:
        tokens[place] = bytes.fromhex(token)
    brace = tokens.index(b"{") if b"{" in tokens else None
    return Vocabulary(tokens, given["marks"], given["eos"]).for_library(), brace


def as_lark(expression: str) -> str:
    """A regular expression of Rust's syntax as a terminal of Lark's language."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(expression, '')}/"


def compiled(vocabulary: "LLTokenizer", document: str) -> "LLMatcher":
    """A grammar at its beginning. ``document``: JSON, of :mod:`kvant.text.grammar_source`."""
    from llguidance import LLMatcher, LLParserLimits

    # verbose ones quote the answer
    limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary, document, log_level=0, limits=limits)
    fail_if_failed(matcher)
    return matcher


def next_mask(matcher: "LLMatcher") -> bytes:
    """A byte for each token: 0 where it must not come next. The first one finds what compiling does not."""
    mask = matcher.compute_logit_bias()
    fail_if_failed(matcher)
    return mask


def fail_if_failed(matcher: "LLMatcher") -> None:
    """Raise a GrammarError if a matcher has failed: it would end the answer instead."""
    if matcher.is_error() or matcher.stop_reason() not in FINE:
        raise GrammarError(reason(matcher))


def reason(matcher: "LLMatcher") -> str:
    """Why a matcher has failed, in one line: without the lines that show where."""
    lines = [line.strip() for line in HINT.sub("", matcher.get_error()).splitlines()]
    said = " ".join(line for line in lines if not SHOWN.fullmatch(line)) or matcher.stop_reason()
    for theirs, ours in RENAMED:
        said = said.replace(theirs, ours)
    return STOPPED.get(said, said)

"""Constrain answers to a JSON schema, regular expression or grammar: decide which tokens may come next."""

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

from kvant.errors import GrammarError
from kvant.text import guidance
from kvant.text.grammar_source import Kind, Marked, Source, ToolGrammar, build_tool_grammar, document
from kvant.text.process import TextError, TextProcess
from kvant.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Grammar", "Grammars", "Matcher", "ToolGrammar", "build_tool_grammar"]

TIME_LIMIT_S = 2.0  # processor time to compile a grammar; nearly all take milliseconds
CACHE_BYTES = 256 << 10  # documents of cached grammars; a grammar takes several times its document


class Grammars:
    """Compile the grammars of one tokenizer, for threads of this process.

    A grammar is first compiled in a separate process within 2 seconds of processor time, because some take
    minutes and the library cannot be interrupted. Compiling it again here takes about as long.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: the model's. Ids that the tokenizer does not have are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._prepared: _Prepared | None = None
        # By salt and document, the most recently used last.
        self._compiled: dict[tuple[bytes, str], Grammar] = {}

    def prepare(self) -> "_Prepared":
        """Prepare the vocabulary now, rather than for the first grammar; blocks all Python threads."""
        with self._lock:
            if self._prepared is None:
                self._prepared = _Prepared(self._tokenizer, self._vocab_size)
            return self._prepared

    def close(self) -> None:
        """End the process that checks grammars."""
        with self._lock:
            if self._prepared is not None:
                self._prepared.process.close()

    def compile(self, kind: Kind, source: Source | ToolGrammar = "", prompt: str | None = None) -> "Grammar":
        """Compile a grammar for answers.

        Args:
            kind: "json_object": any JSON object. "json_schema": JSON that satisfies a schema. Both have no
                whitespace between their elements. "regex": text that a regular expression in Rust's syntax
                matches completely. "grammar": llguidance's variant of Lark's language. "tool_calls": a
                :func:`build_tool_grammar`.
            source: a schema as an object or JSON text; otherwise text.
            prompt: the rendered messages, for a model that may think first. Thinking is not constrained.

        Raises:
            GrammarError: the source is invalid, too large or takes too long, or the tokenizer cannot be used.
        """
        return self.compile_document(kind, self.document(kind, source, prompt))

    def document(self, kind: Kind, source: Source | ToolGrammar = "", prompt: str | None = None) -> str:
        """Convert a source to a JSON document for llguidance. Arguments and errors are :meth:`compile`'s."""
        return document(kind, source, self.prepare().marked, prompt)

    def compiled(self, text: str, salt: bytes = b"") -> "Grammar | None":
        """Return the grammar of a recently compiled document with the same salt, or None."""
        with self._lock:
            grammar = self._compiled.pop((salt, text), None)
            if grammar is not None:
                self._compiled[salt, text] = grammar
            return grammar

    def compile_document(self, kind: Kind, text: str, salt: bytes = b"") -> "Grammar":
        """Return the grammar of a document from :meth:`document`; cache it for requests with the same salt.

        Raises:
            GrammarError: the grammar is invalid, or takes too long to compile.
        """
        if (cached := self.compiled(text, salt)) is not None:
            return cached
        prepared = self.prepare()
        try:
            prepared.process.ask(
                {"do": "check_grammar", "document": text, "vocabulary": prepared.single_bytes}
            )
            matcher = guidance.compiled(prepared.vocabulary, text)
            guidance.next_mask(matcher)
        except (TextError, GrammarError) as error:
            raise GrammarError(f"the {kind} cannot be used: {error}") from error
        made = Grammar(matcher, prepared.vocabulary.eos_tokens, self._vocab_size)
        with self._lock:
            self._compiled[salt, text] = made
            while sum(len(document) for _, document in self._compiled) > CACHE_BYTES:
                del self._compiled[next(iter(self._compiled))]
        return made


class Grammar:
    """A compiled grammar. It never changes, and is passed as a logits processor of a request or a call."""

    def __init__(self, compiled: "LLMatcher", eos_tokens: Collection[int], vocab_size: int) -> None:
        self._compiled = compiled
        self.eos_tokens = frozenset(eos_tokens)
        self.vocab_size = vocab_size

    def check(self, vocab_size: int, stop_tokens: Collection[int]) -> None:
        """Raise a ValueError if the model or the stop tokens do not fit this grammar."""
        if vocab_size != self.vocab_size:
            raise ValueError(f"the grammar is for {self.vocab_size} tokens; the model has {vocab_size}")
        if not self.eos_tokens <= set(stop_tokens):
            raise ValueError(
                "an answer under a grammar ends with an end-of-text token, one of "
                f"{sorted(self.eos_tokens)}; not all are among the stop tokens, {sorted(stop_tokens)}"
            )

    def matcher(self) -> "Matcher":
        """Return a matcher at the beginning of an answer."""
        return Matcher(self._compiled.deep_copy())


class Matcher:
    """The state of one answer in its grammar, for use by one thread."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def mask(self) -> bytes:
        """Return a byte for each token of the model: 0 if it must not come next.

        If nothing but the end may follow, the end-of-text tokens are allowed. Raises a GrammarError if this
        takes too long.
        """
        return guidance.next_mask(self._matcher)

    def take(self, token: int) -> None:
        """Add a token; raise a GrammarError if the grammar does not allow it."""
        if not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not follow the grammar: {guidance.reason(self._matcher)}")


class _Prepared:
    """Data that all grammars of a tokenizer share."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        tokens = tokenizer.token_bytes()
        if tokens is None:
            raise GrammarError(
                "a grammar is not possible with this tokenizer: its tokens do not stand for bytes"
            )
        eos = sorted(token for token in tokenizer.eos_token_ids if token < vocab_size)
        if not eos:
            raise GrammarError("a grammar is not possible with this tokenizer: it has no end-of-text token")
        tokens = [*tokens, *[b""] * (vocab_size - len(tokens))][:vocab_size]
        marks = {*tokenizer.mark_ids, *tokenizer.all_special_ids}
        vocabulary = guidance.Vocabulary(tokens, sorted(token for token in marks if token < vocab_size), eos)
        self.vocabulary = vocabulary.for_library()
        self.single_bytes = vocabulary.single_bytes()
        self.marked = Marked(tokenizer, vocabulary.special_token_ids)
        self.process = TextProcess(time_limit_s=TIME_LIMIT_S)

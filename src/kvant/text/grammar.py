"""Answers that have to follow a JSON schema, a regular expression or a grammar: which tokens may come
next.
"""

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

TIME_LIMIT_S = 2.0  # of processor time to compile; nearly all take milliseconds
KEPT_BYTES = 256 << 10  # of documents whose grammars are kept; a grammar takes several times its document


class Grammars:
    """Compiles the grammars of one tokenizer, for threads of this process.

    A grammar is first compiled in a separate process, within 2 seconds of processor time: some take minutes,
    and the library cannot be interrupted. Compiling it again here takes about as long.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: the model's. Ids that the tokenizer does not have are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._prepared: _Prepared | None = None
        # By salt and document, the last used at the end.
        self._compiled: dict[tuple[bytes, str], Grammar] = {}

    def prepare(self) -> "_Prepared":
        """Prepare the vocabulary now. Else the first grammar does, and no other thread goes on meanwhile."""
        with self._lock:
            if self._prepared is None:
                self._prepared = _Prepared(self._tokenizer, self._vocab_size)
            return self._prepared

    def close(self) -> None:
        """End the process of the checks."""
        with self._lock:
            if self._prepared is not None:
                self._prepared.process.close()

    def compile(self, kind: Kind, source: Source | ToolGrammar = "", prompt: str | None = None) -> "Grammar":
        """A grammar that answers can be held to.

        Args:
            kind: "json_object": any JSON object. "json_schema": JSON that satisfies a schema. Both without
                whitespace between their parts. "regex": text that a regular expression of Rust's syntax
                matches whole. "grammar": one in llguidance's form of Lark's language. "tool_calls": of
                :func:`build_tool_grammar`.
            source: a schema as an object or as JSON text; else text.
            prompt: the rendered messages, of a model that may think before it answers. Thinking is free.

        Raises:
            GrammarError: a source that is wrong, too large or takes too long; or a tokenizer that cannot be
                used.
        """
        return self.compile_document(kind, self.document(kind, source, prompt))

    def document(self, kind: Kind, source: Source | ToolGrammar = "", prompt: str | None = None) -> str:
        """Return a source as a JSON document for llguidance. Arguments and errors are :meth:`compile`'s."""
        return document(kind, source, self.prepare().marked, prompt)

    def compiled(self, text: str, salt: bytes = b"") -> "Grammar | None":
        """Return the grammar of a document that was compiled recently with the same salt, or None."""
        with self._lock:
            found = self._compiled.pop((salt, text), None)
            if found is not None:
                self._compiled[salt, text] = found
            return found

    def compile_document(self, kind: Kind, text: str, salt: bytes = b"") -> "Grammar":
        """Return the grammar of a document of :meth:`document`, and keep it for requests with the same salt.

        Raises:
            GrammarError: the grammar is wrong, or takes too long to compile.
        """
        if (found := self.compiled(text, salt)) is not None:
            return found
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
            while sum(len(document) for _, document in self._compiled) > KEPT_BYTES:
                del self._compiled[next(iter(self._compiled))]
        return made


class Grammar:
    """A compiled grammar. It goes among the logits processors of a request or a call, and is never
    changed.
    """

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
                f"an answer under a grammar ends with an end-of-text token, one of "
                f"{sorted(self.eos_tokens)}; "
                f"they are not all among the stop tokens, which are {sorted(stop_tokens)}"
            )

    def matcher(self) -> "Matcher":
        """For one answer, at its beginning."""
        return Matcher(self._compiled.deep_copy())


class Matcher:
    """How far one answer has come in its grammar. One thread uses it."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def mask(self) -> bytes:
        """A byte for each token of the model: 0 where it must not come next.

        Where nothing but the end may follow, the end-of-text tokens are allowed. Taking too long is a
        GrammarError.
        """
        return guidance.next_mask(self._matcher)

    def take(self, token: int) -> None:
        """Go on with a token. One that the grammar does not allow is a GrammarError."""
        if not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not follow the grammar: {guidance.reason(self._matcher)}")


class _Prepared:
    """What all grammars of a tokenizer share."""

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

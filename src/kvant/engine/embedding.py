"""Compute embeddings: texts are fed like prompts, and their last hidden states are pooled."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.cache.pool import Pool
from kvant.engine.request import CHUNK, Request
from kvant.engine.request_state import PromptState
from kvant.errors import ArgumentError, ContextError, PromptError
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit
from kvant.text.pooling import Pooling
from kvant.text.prompt import token_ids
from kvant.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class EmbeddingRequest(Request):
    """A request for a vector of each text, as answer 0, 1 and so on. The pool caches nothing of them."""

    texts: Sequence[Sequence[int]]  # token ids from :func:`encode_text`
    pooling: Pooling
    dimensions: int | None = None  # the length of the vectors, shortened if needed; None: all

    @classmethod
    def of(
        cls, texts: Sequence[Sequence[int]], pooling: Pooling, dimensions: int | None
    ) -> "EmbeddingRequest":
        """Return a request. Its prompt is all texts' tokens, so that usage counts them."""
        tokens = [token for text in texts for token in text]
        return cls(tokens, answers=len(texts), texts=texts, pooling=pooling, dimensions=dimensions)


def encode_text(
    tokenizer: Tokenizer,
    text: str | Sequence[int] | mx.array,
    pooling: Pooling,
    vocab_size: int,
    most: int | None,
) -> list[int]:
    """Return the token ids of a text, including special tokens. Token ids are returned unchanged.

    Raises:
        PromptError: the text has no tokens, or ids outside the vocabulary.
        ContextError: the text has more than ``most`` tokens; None: no limit.
    """
    if isinstance(text, str):
        text = tokenizer.encode(pooling.prompt + text)
    ids = token_ids(text, vocab_size)
    if most is not None and len(ids) > most:
        raise ContextError(f"the text has {len(ids)} tokens; expected at most {most}")
    return ids


def longest_text(model: LanguageModel, reserved: int | None, pooling: Pooling) -> int | None:
    """Return how many tokens a text may have; None: no limit."""
    limits = [context_limit(model, reserved), pooling.max_tokens]
    return min((limit for limit in limits if limit is not None), default=None)


class EmbeddingState(PromptState):
    """The progress of a request for vectors.

    Each pass feeds the longest remaining texts, as many as fit into one chunk, padded to the longest. Padding
    changes no vector, because no token attends to later ones. Other requests run between passes.
    """

    sequences_needed = 1  # it uses more if they are free

    def __init__(
        self, request: EmbeddingRequest, model: LanguageModel, pool: Pool, *, is_exact: bool
    ) -> None:
        """``is_exact``: feed one text at a time, in chunks that end at multiples of 128."""
        super().__init__(request)
        self._texts = request.texts
        self._pooling = request.pooling
        self._dimensions = request.dimensions
        if not self._texts:
            raise PromptError("there are no texts; expected at least one")
        self._is_exact = is_exact
        # Numbers of the remaining texts, longest last, and of those in the current pass, longest first.
        self._left = sorted(self.open, key=lambda number: len(self._texts[number]))
        self._fed: list[int] = []
        self._pooled: mx.array | None = None  # (B, hidden), the pooled states of the pass so far
        self._vectors: list[tuple[int, mx.array]] = []  # not taken yet
        longest = len(self._texts[self._left[-1]])
        context = context_limit(model, pool.max_seq_len)
        if (context is not None and longest > context) or pool.pages_needed(longest) > pool.num_pages:
            raise ContextError(f"a text has {longest} tokens; expected at most {context}")

    @property
    def left(self) -> int:
        """Return how many tokens of the pass remain to be fed, with padding."""
        return len(self._fed) * (self._longest - self.sequences[0].length)

    @property
    def _longest(self) -> int:
        return len(self._texts[self._fed[0]])

    def reserve(self, pool: Pool) -> None:
        """Open the sequences of the next pass, at least one."""
        self._left = [number for number in self._left if number in self.open]  # without cancelled ones
        longest = len(self._texts[self._left[-1]])
        most = 1 if self._is_exact or pool.single else max(1, pool.prefill_step_size // longest)
        while self._left and len(self._fed) < most and (not self._fed or pool.fits(longest)):
            first = self._texts[self._left[-1]][:1]
            # A prompt of one token reuses no prefix, even in a conversation's cache.
            self.sequences.append(pool.sequence(longest, first))
            self._fed.append(self._left.pop())

    def feed(self, model: LanguageModel, pool: Pool, room: int) -> None:
        """Feed a chunk of at most ``room`` tokens, padding included."""
        start = self.sequences[0].length
        end = start + max(1, room // len(self._fed))
        if self._is_exact:
            end = (start // CHUNK + 1) * CHUNK
        end = min(end, self._longest)
        texts = [self._texts[number] for number in self._fed]
        chunk = [[*text[start:end], *[0] * (end - len(text))] for text in texts]
        batch = pool.batch(self.sequences)
        states = model.every_hidden_state(mx.array(chunk), batch)
        self._pooled = self._pool_states(states, start, [len(text) for text in texts])
        mx.eval(self._pooled)
        batch.commit(ids=chunk)
        if end < self._longest:
            mx.clear_cache()  # a chunk's activations
        self._end_texts(end)

    def _pool_states(self, states: mx.array, start: int, lengths: Sequence[int]) -> mx.array:
        """Return the pooling (B, hidden) up to a chunk, given its states (B, S, hidden)."""
        S = states.shape[1]
        if self._pooling.kind == "first":
            return states[:, 0].astype(mx.float32) if self._pooled is None else self._pooled
        left = mx.array(
            [min(length - start, S) for length in lengths]
        )  # (B,) tokens in the chunk, without padding
        if self._pooling.kind == "last":
            last = mx.take_along_axis(states, (left - 1)[:, None, None], axis=1)  # (B, 1, hidden)
            return last[:, 0].astype(mx.float32)
        is_text = mx.arange(S) < left[:, None]  # (B, S)
        total = mx.where(is_text[..., None], states.astype(mx.float32), 0).sum(axis=1)
        return total if self._pooled is None else self._pooled + total

    def _end_texts(self, end: int) -> None:
        """Store the vectors of texts that end by position ``end``, and release their sequences."""
        count = sum(len(self._texts[number]) > end for number in self._fed)
        assert self._pooled is not None
        ended = self._fed[count:]
        if not ended:
            return
        vectors = self._pooled[count:]
        if self._pooling.kind == "mean":
            vectors = vectors / mx.array([[len(self._texts[number])] for number in ended])
        rows = list(self._finished(vectors))
        mx.eval(rows)  # another thread cannot evaluate them
        self._vectors += zip(ended, rows, strict=True)
        for sequence in self.sequences[count:]:
            sequence.release()
        del self.sequences[count:]
        del self._fed[count:]
        self._pooled = self._pooled[:count] if count else None

    def _finished(self, vectors: mx.array) -> mx.array:
        """Shorten pooled states (B, hidden), and normalize them if the model does."""
        width = vectors.shape[-1]
        if self._dimensions is not None:
            if self._dimensions > width:
                raise ArgumentError("dimensions", f"is {self._dimensions}; the model's vectors have {width}")
            vectors = vectors[:, : self._dimensions]
        if self._pooling.normalizes:
            vectors = vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors

    def share(self, **options: bool) -> None:
        """Share nothing."""

    def take(self) -> list[tuple[int, mx.array]]:
        """Return the new vectors (D,), float32, with the numbers of their texts."""
        vectors = self._vectors
        self._vectors = []
        return vectors

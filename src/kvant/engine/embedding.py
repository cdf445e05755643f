"""Texts to vectors: their tokens are fed as prompts are, and their last hidden states are pooled."""

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
    """Texts of which a vector each is wanted, as answer 0, 1 and so on. Nothing of them stays in the pool."""

    texts: Sequence[Sequence[int]]  # token ids, as :func:`encode_text` checks them
    pooling: Pooling
    dimensions: int | None = None  # of a vector, the first ones; None: all

    @classmethod
    def of(
        cls, texts: Sequence[Sequence[int]], pooling: Pooling, dimensions: int | None
    ) -> "EmbeddingRequest":
        """Make a request. Its prompt has the tokens of all texts, so that they are counted."""
        tokens = [token for text in texts for token in text]
        return cls(tokens, answers=len(texts), texts=texts, pooling=pooling, dimensions=dimensions)


def encode_text(
    tokenizer: Tokenizer,
    text: str | Sequence[int] | mx.array,
    pooling: Pooling,
    vocab_size: int,
    most: int | None,
) -> list[int]:
    """Return the token ids of a text, with the special tokens that the tokenizer puts around it; token ids
    are taken as they are.

    Raises:
        PromptError: no tokens, or ids that the model does not know.
        ContextError: more tokens than ``most``; None: any number.
    """
    if isinstance(text, str):
        text = tokenizer.encode(pooling.prompt + text)
    ids = token_ids(text, vocab_size)
    if most is not None and len(ids) > most:
        raise ContextError(f"the text has {len(ids)} tokens; expected at most {most}")
    return ids


def longest_text(model: LanguageModel, reserved: int | None, pooling: Pooling) -> int | None:
    """Return how many tokens a text may have; None: any number."""
    limits = [context_limit(model, reserved), pooling.max_tokens]
    return min((limit for limit in limits if limit is not None), default=None)


class EmbeddingState(PromptState):
    """The progress of a request for vectors.

    A pass feeds the longest texts that are left, as many as one chunk of a prompt has room for. They are
    padded to the longest: no token attends to later ones, so the padding changes no vector. After a pass
    other requests have their turn.
    """

    sequences_needed = 1  # it takes more where they are free

    def __init__(
        self, request: EmbeddingRequest, model: LanguageModel, pool: Pool, *, is_exact: bool
    ) -> None:
        """``is_exact``: a text is fed alone, in chunks that end at multiples of 128."""
        super().__init__(request)
        self._texts = request.texts
        self._pooling = request.pooling
        self._dimensions = request.dimensions
        if not self._texts:
            raise PromptError("there are no texts; expected at least one")
        self._is_exact = is_exact
        # Numbers of the texts that are left, and of those that the pass feeds. The longest is the last one,
        # and the first of a pass.
        self._left = sorted(self.open, key=lambda number: len(self._texts[number]))
        self._fed: list[int] = []
        self._pooled: mx.array | None = None  # (B, hidden) of the pass: what the pooling has so far
        self._vectors: list[tuple[int, mx.array]] = []  # that are to be handed out
        longest = len(self._texts[self._left[-1]])
        context = context_limit(model, pool.max_seq_len)
        if (context is not None and longest > context) or pool.pages_needed(longest) > pool.num_pages:
            raise ContextError(f"a text has {longest} tokens; expected at most {context}")

    @property
    def left(self) -> int:
        """Tokens of the pass that are to be fed, with padding."""
        return len(self._fed) * (self._longest - self.sequences[0].length)

    @property
    def _longest(self) -> int:
        return len(self._texts[self._fed[0]])

    def reserve(self, pool: Pool) -> None:
        """Open the sequences of the next pass, at least one."""
        self._left = [number for number in self._left if number in self.open]  # others were cancelled
        longest = len(self._texts[self._left[-1]])
        most = 1 if self._is_exact or pool.single else max(1, pool.prefill_step_size // longest)
        while self._left and len(self._fed) < most and (not self._fed or pool.fits(longest)):
            first = self._texts[self._left[-1]][:1]
            # Of a prompt of one token nothing is taken from earlier ones, in a conversation's cache either.
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
        )  # (B,) tokens of the chunk, no padding
        if self._pooling.kind == "last":
            last = mx.take_along_axis(states, (left - 1)[:, None, None], axis=1)  # (B, 1, hidden)
            return last[:, 0].astype(mx.float32)
        is_text = mx.arange(S) < left[:, None]  # (B, S)
        total = mx.where(is_text[..., None], states.astype(mx.float32), 0).sum(axis=1)
        return total if self._pooled is None else self._pooled + total

    def _end_texts(self, end: int) -> None:
        """Keep the vectors of the texts that have ended, which are the shortest, and release their
        sequences.
        """
        count = sum(len(self._texts[number]) > end for number in self._fed)
        assert self._pooled is not None
        ended = self._fed[count:]
        if not ended:
            return
        vectors = self._pooled[count:]
        if self._pooling.kind == "mean":
            vectors = vectors / mx.array([[len(self._texts[number])] for number in ended])
        rows = list(self._finished(vectors))
        mx.eval(rows)  # another thread could not
        self._vectors += zip(ended, rows, strict=True)
        for sequence in self.sequences[count:]:
            sequence.release()
        del self.sequences[count:]
        del self._fed[count:]
        self._pooled = self._pooled[:count] if count else None

    def _finished(self, vectors: mx.array) -> mx.array:
        """Shorten pooled states (B, hidden), and divide them by their lengths if the model's are."""
        width = vectors.shape[-1]
        if self._dimensions is not None:
            if self._dimensions > width:
                raise ArgumentError("dimensions", f"is {self._dimensions}; the model's vectors have {width}")
            vectors = vectors[:, : self._dimensions]
        if self._pooling.normalizes:
            vectors = vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors

    def share(self, **options: bool) -> None:
        """Share nothing: no cache of a text is kept."""

    def take(self) -> list[tuple[int, mx.array]]:
        """Return the vectors (D,), float32, that were not taken yet, with the numbers of their texts."""
        vectors = self._vectors
        self._vectors = []
        return vectors

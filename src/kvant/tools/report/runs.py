"""Feed known tokens through caches: compare predictions, check answers, compare single layers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from kvant.cache import AttentionCache, ModelCache
from kvant.errors import KvantError
from kvant.models import Decoder, LanguageModel
from kvant.operators.key_transform import KeyTransform
from kvant.tools.report.divergence import Tally, are_finite, log_probabilities
from kvant.tools.report.formats import CacheFormat
from kvant.tools.report.reference import Reference
from kvant.tools.report.texts import Dialogue, Text

STEP_SIZE = 512  # tokens fed at a time, as `kvant generate` does
LOGITS_BYTES = 64 * 1024 * 1024  # logits of one cache at a time; comparing them takes about six times as much

Fed = Callable[[int], None]  # called with the number of tokens fed


class Reader(Protocol):
    """A model with a cache through which it reads a text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def step_size(self) -> int:
        """The most tokens to read at a time."""

    @property
    def nbytes(self) -> int:
        """Bytes of the cache for its reserved tokens."""

    def begin(self, piece: int) -> None:
        """Empty the cache and start with the text's piece of this number, from 0.

        Only predictions from a file depend on the number.
        """

    def read(self, ids: Sequence[int]) -> mx.array:
        """Read tokens after those in the cache. Returns (S, D) states, evaluated."""

    def logits(self, states: mx.array) -> mx.array:
        """Convert (S, D) states to (S, vocab) logits of the tokens that follow."""


@dataclass(frozen=True, slots=True)
class CacheReader:
    """kvant's model and cache.

    A chunk's keys and values are read back from the cache, quantized, like those before it, so the states are
    the same as when reading token by token.
    """

    model: LanguageModel
    cache: ModelCache

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def step_size(self) -> int:
        """Fewer tokens if the model computes the logits of all of them at once."""
        return (
            STEP_SIZE if isinstance(self.model, Decoder) else min(STEP_SIZE, logits_at_once(self.vocab_size))
        )

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def begin(self, piece: int) -> None:
        self.cache.reset()

    def read(self, ids: Sequence[int]) -> mx.array:
        """Return a decoder's hidden states, or another model's logits."""
        chunk = mx.array([list(ids)])
        if isinstance(self.model, Decoder):
            states = self.model.hidden_states(chunk, cache=self.cache)[0]
            mx.eval(states)
            self.cache.commit()
        else:
            states = self.model(chunk, cache=self.cache)[0]
            mx.eval(states)
        return states

    def logits(self, states: mx.array) -> mx.array:
        return self.model.logits(states) if isinstance(self.model, Decoder) else states


def logits_at_once(vocab_size: int) -> int:
    return max(1, LOGITS_BYTES // (4 * vocab_size))  # float32


def feed(
    reader: Reader, ids: Sequence[int], *, step_size: int = STEP_SIZE, fed: Fed = lambda _: None
) -> Iterator[mx.array]:
    """Read tokens after those in the cache; yield the states of each chunk."""
    step_size = min(step_size, reader.step_size)
    for first in range(0, len(ids), step_size):
        states = reader.read(ids[first : first + step_size])
        fed(len(states))
        yield states


def compare(
    readers: Sequence[Reader],
    ids: Sequence[int],
    tallies: Sequence[Tally],
    *,
    expected: mx.array | None = None,
    step_size: int = STEP_SIZE,
    fed: Fed = lambda _: None,
) -> None:
    """Read tokens through all caches, and count the predictions after every token.

    Args:
        readers: the first one's predictions are the reference, unless ``expected`` are passed.
        ids: the last one is predicted but not read.
        tallies: one for each reader; updated.
        expected: (N, vocab) log-probabilities after the last N tokens that are read; only these are compared.
    """
    step_size = min(step_size, *(reader.step_size for reader in readers))
    runs = [feed(reader, ids[:-1], step_size=step_size, fed=fed) for reader in readers]
    first = 0 if expected is None else len(ids) - 1 - len(expected)
    at_once = logits_at_once(readers[0].vocab_size)
    start = 0  # position of the chunk
    for chunk in zip(*runs, strict=True):
        end = start + len(chunk[0])
        for low in range(max(start, first), end, at_once):
            high = min(low + at_once, end)
            states = [each[low - start : high - start] for each in chunk]
            first_predicted = log_probabilities(readers[0].logits(states[0]))
            mx.eval(first_predicted)
            if not are_finite(first_predicted).all().item():
                raise KvantError(
                    "without quantization the model's logits are not finite; there is nothing to compare"
                )
            right = first_predicted if expected is None else expected[low - first : high - first]
            following = ids[low + 1 : high + 1]
            tallies[0].add(right, first_predicted, following)
            for reader, rows, tally in zip(readers[1:], states[1:], tallies[1:], strict=True):
                tally.add(right, log_probabilities(reader.logits(rows)), following)
        start = end


def read_legs(
    readers: Sequence[Reader],
    text: Text,
    decoded: int = 0,
    *,
    others: Reference | None = None,
    fed: Fed = lambda _: None,
) -> tuple[list[Tally], list[Tally]]:
    """Read a text through all caches, and count the predictions after all tokens except each piece's last.

    Args:
        decoded: how many tokens at the end of the first piece to read one by one.
        others: another engine's predictions of the text, to use instead of the first reader's.

    Returns:
        Each reader's tallies for tokens read in chunks, and for tokens read one by one.
    """
    chunks = [Tally() for _ in readers]
    singles = [Tally() for _ in readers]
    for number, piece in enumerate(text.pieces):
        for reader in readers:
            reader.begin(number)
        single = 0 if number else decoded
        prompt = len(piece) - 1 - single
        expected: mx.array | None = None
        last: mx.array | None = None
        if others is not None:
            rows = others.rows(number)
            expected, last = mx.split(rows, [len(rows) - single])
        compare(readers, piece[: prompt + 1], chunks, expected=expected, fed=fed)
        compare(readers, piece[prompt:], singles, expected=last, step_size=1, fed=fed)
    return chunks, singles


def answer(reader: Reader, dialogue: Dialogue, *, fed: Fed = lambda _: None) -> list[bool]:
    """Return for each answer whether greedy decoding would write it: whether all its tokens are likeliest."""
    reader.begin(0)
    states = mx.concatenate(list(feed(reader, dialogue.ids, fed=fed)))
    return _are_right(reader.logits(states), dialogue)


def answer_after_hit(
    model: LanguageModel, cache: CacheFormat, dialogues: Sequence[Dialogue], *, fed: Fed = lambda _: None
) -> list[bool]:
    """Do the same as :func:`answer`, with everything before the first answer read from shared pages."""
    if not dialogues:
        return []
    most = max(len(dialogue.ids) for dialogue in dialogues)
    sizes = {"sequences": 1, "max_seq_len": most, "prefill_step_size": STEP_SIZE}
    pool = model.make_pool(2 * most, **sizes, options=cache)
    right: list[bool] = []
    for dialogue in dialogues:
        ids = list(dialogue.ids)
        begin = dialogue.answers[0][0]
        for end in (begin, len(ids)):
            sequence = pool.sequence(len(ids), ids[:begin], whole_pages=False)
            batch = pool.batch([sequence])
            logits = [mx.zeros((sequence.length, model.config.vocab_size))]
            for start in range(sequence.length, end, pool.prefill_step_size):
                chunk = ids[start : min(end, start + pool.prefill_step_size)]
                logits.append(model.every_logits(mx.array([chunk]), batch)[0])
                mx.eval(logits)
                batch.commit()
                fed(len(chunk))
            sequence.share_prefix(last_page=True)
            sequence.release()
        if len(logits[0]):  # a short prefix is not shared
            right += _are_right(mx.concatenate(logits), dialogue)
    return right


def _are_right(logits: mx.array, dialogue: Dialogue) -> list[bool]:
    """Return for each answer whether its tokens are the likeliest of (S, vocab) logits after every token."""
    right = []
    for first, last in dialogue.answers:
        rows = logits[first - 1 : last - 1]
        likeliest = mx.argmax(rows, axis=-1) == mx.array(dialogue.ids[first:last])
        right.append(bool((likeliest.all() & mx.isfinite(mx.logsumexp(rows, axis=-1)).all()).item()))
    return right


class SideBySide:
    """Attend through a layer's exact cache, and feed the same keys, values and queries to other caches."""

    def __init__(self, exact: AttentionCache, others: Sequence[AttentionCache]) -> None:
        self._all = (exact, *others)
        # the others must have a bias split if it has one
        self.transform = KeyTransform(bias_split=exact.transform.bias_split)
        # sums of squares: the exact outputs, and the others' differences from them
        self.squares = [0.0] * (1 + len(others))

    def multi_head_cache_attention(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend through all caches; return the exact one's output."""
        exact, *others = (_attend(each, query, key, value, mask, sinks) for each in self._all)
        wide = exact.astype(mx.float32)
        squares = [mx.square(x).sum() for x in (wide, *(other.astype(mx.float32) - wide for other in others))]
        mx.eval(exact, squares)
        added = [float(square.item()) for square in squares]  # type: ignore[arg-type]
        self.squares = [total + new for total, new in zip(self.squares, added, strict=True)]
        return exact

    def error(self, number: int) -> float:
        """Return ||output - exact|| / ||exact|| of another cache; infinite if its output was not finite."""
        exact = self.squares[0]
        difference = self.squares[1 + number]
        if not math.isfinite(difference):
            return math.inf
        return math.sqrt(difference / exact) if exact else math.inf if difference else 0.0


def _attend(
    cache: AttentionCache,
    query: mx.array,
    key: mx.array,
    value: mx.array,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend through a cache with its own transform."""
    transform = cache.transform
    output = cache.multi_head_cache_attention(
        transform.queries(query), transform.keys(key), transform.values(value), mask, sinks
    )
    return transform.values(output)


def layer_errors(
    model: Decoder,
    piece: Sequence[int],
    exact: ModelCache,
    caches: Sequence[ModelCache],
    *,
    fed: Fed = lambda _: None,
) -> list[list[float]]:
    """Return each cache's error in every layer for the queries, keys and values of a run through ``exact``.

    ``exact`` must be a cache of 0 bits, with the bias split if the others have it. All are reset first.
    """
    batches = [cache.batch for cache in (exact, *caches)]
    layers = [SideBySide(layer, others) for layer, *others in zip(*batches, strict=True)]
    for cache in (exact, *caches):
        cache.reset()
    for first in range(0, len(piece), STEP_SIZE):
        chunk = mx.array([piece[first : first + STEP_SIZE]])
        for cache in (exact, *caches):
            cache.batch.begin(chunk)
        mx.eval(model.states(chunk, first, layers))
        for cache in (exact, *caches):
            cache.commit()
        fed(chunk.shape[1])
    return [[layer.error(number) for layer in layers] for number in range(len(caches))]

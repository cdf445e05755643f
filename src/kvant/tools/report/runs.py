"""Runs of right tokens through caches: predictions compared, answers checked, layers by themselves, steps
timed.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median

import mlx.core as mx

from kvant.cache import AttentionCache, ModelCache
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.request import Request
from kvant.errors import KvantError, LogitsError
from kvant.models import Decoder, LanguageModel
from kvant.operators.key_transform import KeyTransform
from kvant.tools.report.divergence import Tally, log_probabilities
from kvant.tools.report.formats import CacheFormat
from kvant.tools.report.texts import Dialogue

STEP_SIZE = 512  # tokens fed at a time, as `kvant generate` does
LOGITS_BYTES = 64 * 1024 * 1024  # logits of one cache at a time; comparing them takes about six times that
STEPS, ROUNDS = 8, 5  # of a timed decode

Fed = Callable[[int], None]  # called with tokens fed


def feed(
    model: LanguageModel,
    ids: Sequence[int],
    cache: ModelCache,
    *,
    step_size: int = STEP_SIZE,
    fed: Fed = lambda _: None,
) -> Iterator[mx.array]:
    """Empty a cache and feed it tokens. Yields a decoder's hidden states of each chunk, another model's
    logits.

    A chunk's own keys and values are read back from the cache, quantized, as those before it: the states are
    those of feeding token by token.
    """
    cache.reset()
    for first in range(0, len(ids), step_size):
        chunk = mx.array([ids[first : first + step_size]])
        if isinstance(model, Decoder):
            mx.eval(states := model.hidden_states(chunk, cache=cache)[0])
            cache.commit()
        else:
            mx.eval(states := model(chunk, cache=cache)[0])
        fed(chunk.shape[1])
        yield states


def compare(
    model: LanguageModel,
    piece: Sequence[int],
    caches: Sequence[ModelCache],
    tallies: Sequence[Tally],
    *,
    reference: LanguageModel | None = None,
    expected: mx.array | None = None,
    step_size: int = STEP_SIZE,
    fed: Fed = lambda _: None,
) -> None:
    """Feed a piece through all caches, emptied first, and count their predictions after every token.

    Args:
        caches: the first one's predictions are taken for right, unless others are expected.
        tallies: one for each cache; added to.
        reference: the model of the first cache; default: ``model``.
        expected: (N, vocab) log-probabilities after the last N tokens before the very last: no others are
            compared.
    """
    models = [reference or model, *[model] * (len(caches) - 1)]
    step_size = min(_step_size(own, step_size) for own in models)
    runs = [
        feed(own, piece, cache, step_size=step_size, fed=fed)
        for own, cache in zip(models, caches, strict=True)
    ]
    most = _logits_at_once(model)
    place, first = 0, 0 if expected is None else len(piece) - 1 - len(expected)
    end = len(piece) if expected is None else len(piece) - 1
    for hidden in zip(*runs, strict=True):
        for low in range(0, len(hidden[0]), most):
            skipped = max(0, first - place)
            states = [own[low : low + most][skipped : end - place] for own in hidden]
            start, place = place + skipped, place + min(most, len(hidden[0]) - low)
            if not len(states[0]):
                continue
            following = piece[start + 1 : start + len(states[0]) + 1]
            given = log_probabilities(_logits(models[0], states[0]))
            mx.eval(given)
            if not mx.isfinite(mx.logsumexp(given, axis=-1)).all().item():
                raise KvantError(
                    "without quantization the model's logits are not finite; there is nothing to compare"
                )
            right = given if expected is None else expected[start - first :][: len(states[0])]
            tallies[0].add(right, given, following)
            for own, tally in zip(states[1:], tallies[1:], strict=True):
                tally.add(right, log_probabilities(_logits(model, own)), following)


def answer(
    model: LanguageModel, cache: ModelCache, dialogue: Dialogue, *, fed: Fed = lambda _: None
) -> list[bool]:
    """Whether each answer would be written greedily: each of its tokens is the likeliest after those
    before it.
    """
    step_size = _step_size(model, STEP_SIZE)
    states = mx.concatenate(list(feed(model, dialogue.ids, cache, step_size=step_size, fed=fed)))
    return _are_right(_logits(model, states), dialogue)


def answer_after_hit(
    model: LanguageModel, cache: CacheFormat, dialogues: Sequence[Dialogue], *, fed: Fed = lambda _: None
) -> list[bool]:
    """As :func:`answer`, where what is before the first answer is read from pages that another sequence
    filled.
    """
    if not dialogues:
        return []
    most = max(len(dialogue.ids) for dialogue in dialogues)
    sizes = {"sequences": 1, "max_seq_len": most, "prefill_step_size": _step_size(model, STEP_SIZE)}
    pool, right = model.make_pool(2 * most, **sizes, options=cache), []
    for dialogue in dialogues:
        ids, begin = list(dialogue.ids), dialogue.answers[0][0]
        for end in (begin, len(ids)):
            sequence = pool.sequence(len(ids), ids[:begin], whole_pages=False)
            batch, logits = pool.batch([sequence]), [mx.zeros((sequence.length, model.config.vocab_size))]
            for start in range(sequence.length, end, pool.prefill_step_size):
                chunk = ids[start : min(end, start + pool.prefill_step_size)]
                logits.append(model.every_logits(mx.array([chunk]), batch)[0])
                mx.eval(logits)
                batch.commit()
                fed(len(chunk))
            sequence.share_prefix(last_page=True)
            sequence.release()
        if len(logits[0]):  # of a short one nothing was shared
            right += _are_right(mx.concatenate(logits), dialogue)
    return right


def _are_right(logits: mx.array, dialogue: Dialogue) -> list[bool]:
    """Of logits (S, vocab) after every token, whether the likeliest are each answer's."""
    right = []
    for first, last in dialogue.answers:
        own = logits[first - 1 : last - 1]
        likeliest = mx.argmax(own, axis=-1) == mx.array(dialogue.ids[first:last])
        right.append(bool((likeliest.all() & mx.isfinite(mx.logsumexp(own, axis=-1)).all()).item()))
    return right


def _logits(model: LanguageModel, states: mx.array) -> mx.array:
    """(S, vocab) logits of a piece of what :func:`feed` yields."""
    return model.logits(states) if isinstance(model, Decoder) else states


def _step_size(model: LanguageModel, step_size: int) -> int:
    """Tokens to feed at a time: fewer if the model makes the logits of all of them at once."""
    return step_size if isinstance(model, Decoder) else min(step_size, _logits_at_once(model))


def _logits_at_once(model: LanguageModel) -> int:
    return max(1, LOGITS_BYTES // (4 * model.config.vocab_size))  # float32


class SideBySide:
    """A layer's exact cache, which it attends through, and others that are given the same keys, values and
    queries.
    """

    def __init__(self, exact: AttentionCache, others: Sequence[AttentionCache]) -> None:
        self._all = (exact, *others)
        # the others must have a bias split if it has one
        self.transform = KeyTransform(bias_split=exact.transform.bias_split)
        # sums, of the exact outputs and of the others' differences from them
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
        exact, *others = (
            each.multi_head_cache_attention(
                each.transform.queries(query), each.transform.keys(key), value, mask, sinks
            )
            for each in self._all
        )
        wide = exact.astype(mx.float32)
        squares = [mx.square(x).sum() for x in (wide, *(given.astype(mx.float32) - wide for given in others))]
        mx.eval(exact, squares)
        self.squares = [total + float(new.item()) for total, new in zip(self.squares, squares, strict=True)]  # type: ignore[arg-type]
        return exact

    def error(self, number: int) -> float:
        """||given - exact|| / ||exact|| of another cache's output; infinite if it was not finite."""
        exact, difference = self.squares[0], self.squares[1 + number]
        if not math.isfinite(difference):
            return math.inf
        return math.sqrt(difference / exact) if exact else math.inf if difference else 0.0


def layer_errors(
    model: Decoder,
    piece: Sequence[int],
    exact: ModelCache,
    caches: Sequence[ModelCache],
    *,
    fed: Fed = lambda _: None,
) -> list[list[float]]:
    """Each cache's error in every layer, given the queries, keys and values of a run through ``exact``.

    That is a cache of 0 bits, with the bias split if the others have it. All are emptied first.
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


def step_ms(model: LanguageModel, caches: Sequence[ModelCache]) -> list[float]:
    """Median milliseconds of a token through each cache; infinite if no token can be drawn.

    Caches take turns, forwards and backwards: a drift favors none. Each has the same tokens, at least
    ``STEPS`` + 1.
    """
    times: list[list[float]] = [[] for _ in caches]
    order = list(range(len(caches)))
    for number in range(1 + ROUNDS):  # the first compiles and fills the processor's caches
        for index in order:
            latencies = _decode(model, caches[index])
            times[index] += latencies if number else []
        order.reverse()
    return [median(own) if own else math.inf for own in times]


def timing_room(model: LanguageModel) -> int:
    """Tokens that :func:`step_ms` may feed behind a text; a decoder's cache goes back instead."""
    return 0 if isinstance(model, Decoder) else (1 + ROUNDS) * (STEPS + 1)


def _decode(model: LanguageModel, cache: ModelCache) -> list[float]:
    if cache.can_trim_to(cache.offset - STEPS - 1):
        cache.trim(STEPS + 1)
    scheduler = CacheScheduler(model, cache)
    request = Request([*scheduler.ids, 0], STEPS + 1, keep_logprobs=True)  # any token takes the same time
    times = []
    with suppress(LogitsError):
        for _ in scheduler.answer([request]):
            times.append(time.perf_counter())  # noqa: PERF401, those before an error count
    return [(after - before) * 1e3 for before, after in pairwise(times)]

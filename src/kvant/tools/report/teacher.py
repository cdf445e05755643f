"""Teacher forcing: the right tokens are fed through each cache, and their predictions are compared."""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.errors import KvantError
from kvant.models import Decoder
from kvant.tools.report.divergence import Tally, log_probabilities

STEP_SIZE = 512  # tokens fed at a time, as `kvant generate` does
LOGITS_BYTES = 64 * 1024 * 1024  # logits of one cache at a time; comparing them takes about six times that

Fed = Callable[[int], None]  # called with tokens fed


def feed(
    model: Decoder, ids: Sequence[int], cache: ModelCache, *, step_size: int = STEP_SIZE, fed: Fed = lambda _: None
) -> Iterator[mx.array]:
    """Empty a cache and feed it tokens: the hidden states (S, hidden) of each chunk, evaluated.

    A chunk's own keys and values are read back from the cache, quantized, as those before it: the states are those of
    feeding token by token.
    """
    cache.reset()
    for first in range(0, len(ids), step_size):
        chunk = mx.array([ids[first : first + step_size]])
        hidden = model.hidden_states(chunk, cache=cache)[0]
        mx.eval(hidden)
        cache.commit()
        fed(chunk.shape[1])
        yield hidden


def compare(
    model: Decoder,
    piece: Sequence[int],
    caches: Sequence[ModelCache],
    tallies: Sequence[Tally],
    *,
    reference: Decoder | None = None,
    step_size: int = STEP_SIZE,
    fed: Fed = lambda _: None,
) -> None:
    """Feed a piece through all caches side by side and count their predictions after every token.

    Args:
        model: the decoder.
        piece: token ids.
        caches: the first one's predictions are taken for right; all are emptied first.
        tallies: one for each; added to.
        reference: the decoder that the first cache is of; default: ``model``.
        step_size: tokens a chunk.

    Raises:
        KvantError: predictions of the first cache that are not finite: there is nothing to compare with.
    """
    decoders = [reference or model, *[model] * (len(caches) - 1)]
    runs = [
        feed(decoder, piece, cache, step_size=step_size, fed=fed)
        for decoder, cache in zip(decoders, caches, strict=True)
    ]
    most = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))  # positions whose logits are there at once
    place = 0
    for hidden in zip(*runs, strict=True):
        for low in range(0, len(hidden[0]), most):
            states = [own[low : low + most] for own in hidden]
            following = piece[place + 1 : place + len(states[0]) + 1]
            place += len(states[0])
            right = log_probabilities(decoders[0].logits(states[0]))
            mx.eval(right)
            if not mx.isfinite(mx.logsumexp(right, axis=-1)).all().item():
                raise KvantError("without quantization the model's logits are not finite; there is nothing to compare")
            tallies[0].add(right, right, following)
            for own, tally in zip(states[1:], tallies[1:], strict=True):
                tally.add(right, log_probabilities(model.logits(own)), following)

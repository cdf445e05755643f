"""Teacher forcing through caches: the right tokens are fed, and what each cache would have predicted is compared."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.errors import KvantError
from kvant.models import Decoder
from kvant.tools.report.divergence import Tally, log_probabilities

STEP_SIZE = 512  # tokens fed at a time: what `kvant generate` takes
LOGITS_BYTES = 64 * 1024 * 1024  # logits of one cache at a time; comparing them takes about six times that

Fed = Callable[[int], None]  # called with tokens fed


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
    """Feed a piece through all caches side by side and count what they predict after every token.

    A chunk's own rows are read back from the cache, quantized, as those before it: the predictions are those of
    feeding token by token.

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
    for cache in caches:
        cache.reset()
    for first in range(0, len(piece), step_size):
        chunk = mx.array([piece[first : first + step_size]])
        hidden = []
        for number, cache in enumerate(caches):
            decoder = reference or model if number == 0 else model
            hidden.append(decoder.hidden_states(chunk, cache=cache)[0])  # (S, hidden)
            mx.eval(hidden[-1])
            cache.commit()
            fed(chunk.shape[1])
        rows = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
        for low in range(0, chunk.shape[1], rows):
            high = min(low + rows, chunk.shape[1])
            following = piece[first + low + 1 : first + high + 1]
            right = log_probabilities((reference or model).logits(hidden[0][low:high]))
            mx.eval(right)
            if not mx.isfinite(mx.logsumexp(right, axis=-1)).all().item():
                raise KvantError("without quantization the model's logits are not finite; there is nothing to compare")
            tallies[0].add(right, right, following)
            for states, tally in zip(hidden[1:], tallies[1:], strict=True):
                tally.add(right, log_probabilities(model.logits(states[low:high])), following)

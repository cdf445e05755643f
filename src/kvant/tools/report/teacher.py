"""Teacher forcing: the right tokens are fed through each cache, and their predictions are compared."""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.errors import KvantError
from kvant.models import Decoder, LanguageModel
from kvant.tools.report.divergence import Tally, log_probabilities

STEP_SIZE = 512  # tokens fed at a time, as `kvant generate` does
LOGITS_BYTES = 64 * 1024 * 1024  # logits of one cache at a time; comparing them takes about six times that

Fed = Callable[[int], None]  # called with tokens fed


def feed(
    model: LanguageModel,
    ids: Sequence[int],
    cache: ModelCache,
    *,
    step_size: int = STEP_SIZE,
    fed: Fed = lambda _: None,
) -> Iterator[mx.array]:
    """Empty a cache and feed it tokens: of each chunk what :func:`logits_of` takes, evaluated.

    A chunk's own keys and values are read back from the cache, quantized, as those before it: the states are those of
    feeding token by token.
    """
    cache.reset()
    for first in range(0, len(ids), step_size):
        chunk = mx.array([ids[first : first + step_size]])
        if isinstance(model, Decoder):
            states = model.hidden_states(chunk, cache=cache)[0]
            mx.eval(states)
            cache.commit()
        else:
            states = model(chunk, cache=cache)[0]
            mx.eval(states)
        fed(chunk.shape[1])
        yield states


def logits_of(model: LanguageModel, states: mx.array) -> mx.array:
    """(S, vocab) logits of a piece of what :func:`feed` yields: hidden states of a decoder, logits of another model."""
    return model.logits(states) if isinstance(model, Decoder) else states


def step_size_of(model: LanguageModel, step_size: int = STEP_SIZE) -> int:
    """Tokens to feed at a time: fewer where a model makes the logits of all of them at once."""
    return step_size if isinstance(model, Decoder) else min(step_size, _logits_at_once(model))


def _logits_at_once(model: LanguageModel) -> int:
    return max(1, LOGITS_BYTES // (4 * model.config.vocab_size))  # float32


def compare(
    model: LanguageModel,
    piece: Sequence[int],
    caches: Sequence[ModelCache],
    tallies: Sequence[Tally],
    *,
    reference: LanguageModel | None = None,
    step_size: int = STEP_SIZE,
    fed: Fed = lambda _: None,
) -> None:
    """Feed a piece through all caches side by side and count their predictions after every token.

    Args:
        model: whose caches are compared.
        piece: token ids.
        caches: the first one's predictions are taken for right; all are emptied first.
        tallies: one for each; added to.
        reference: the model that the first cache is of; default: ``model``.
        step_size: tokens a chunk.

    Raises:
        KvantError: predictions of the first cache that are not finite: there is nothing to compare with.
    """
    models = [reference or model, *[model] * (len(caches) - 1)]
    step_size = min(step_size_of(own, step_size) for own in models)
    runs = [feed(own, piece, cache, step_size=step_size, fed=fed) for own, cache in zip(models, caches, strict=True)]
    most = _logits_at_once(model)  # positions whose logits are there at once
    place = 0
    for hidden in zip(*runs, strict=True):
        for low in range(0, len(hidden[0]), most):
            states = [own[low : low + most] for own in hidden]
            following = piece[place + 1 : place + len(states[0]) + 1]
            place += len(states[0])
            right = log_probabilities(logits_of(models[0], states[0]))
            mx.eval(right)
            if not mx.isfinite(mx.logsumexp(right, axis=-1)).all().item():
                raise KvantError("without quantization the model's logits are not finite; there is nothing to compare")
            tallies[0].add(right, right, following)
            for own, tally in zip(states[1:], tallies[1:], strict=True):
                tally.add(right, log_probabilities(logits_of(model, own)), following)

"""Compute embeddings of texts: the function of the API."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.cache import CacheOptions, ModelCache
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.cache.pool import Pool
from kvant.engine.embedding import EmbeddingRequest, encode_text, longest_text
from kvant.engine.request import PREFILL_STEP_SIZE, check_count
from kvant.engine.scheduler import Scheduler
from kvant.errors import ArgumentError, ContextError, ModelError, PromptError
from kvant.models import LanguageModel
from kvant.text.pooling import PoolingKind, choose_pooling
from kvant.text.tokenizer import Tokenizer


def embed(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str | Sequence[int] | mx.array],
    *,
    pooling: PoolingKind | None = None,
    dimensions: int | None = None,
    batch_size: int = 16,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    kv_bits: int = 0,
    kv_group_size: int | None = None,
) -> mx.array:
    """Return a vector for each text, such that texts with a similar meaning have similar vectors.

    The sentence-transformers files in the model's folder define how the last hidden states of a text become
    its vector (the last token's, their mean, or the first token's), whether vectors are normalized to length
    1, and which prompt precedes each text. The tokenizer adds special tokens. For example, Qwen3-Embedding
    ends every text with the token whose state is used.

    A cache is reserved for the call and released after it. By default it is not quantized, so that the
    vectors are exactly the model's.

    Args:
        model, tokenizer: from :func:`kvant.load`.
        texts: N texts, or sequences of token ids, which are used unchanged.
        pooling: "last" or "mean", overriding the files. Needed for a model without them, whose vectors are
            then normalized.
        dimensions: D, to shorten vectors to their first D numbers, for models trained for this (Matryoshka).
            Normalized vectors are normalized again. None: all.
        batch_size: the maximum number of texts, of similar length, to compute together.
        prefill_step_size: the maximum number of tokens to compute at a time.
        kv_bits, kv_group_size: see :meth:`model.make_cache`; 0 bits: not quantized.

    Returns:
        (N, D) float32, in the order of the texts.

    Raises:
        ArgumentError: an argument is out of range, or neither ``pooling`` nor the folder names a pooling.
        ModelError: the model's files need something that kvant does not support.
        PromptError: a text has no tokens, or ids outside the vocabulary.
        ContextError: a text is longer than the model's context, or the cache does not fit this machine.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise ArgumentError("texts", f"is a {type(texts).__name__}; expected a list of texts")
    check_count("batch_size", batch_size)
    check_count("prefill_step_size", prefill_step_size)
    if dimensions is not None:
        check_count("dimensions", dimensions)
    chosen = choose_pooling(tokenizer.folder, pooling)
    most = longest_text(model, None, chosen)
    encoded = []
    for number, text in enumerate(texts):
        try:
            encoded.append(encode_text(tokenizer, text, chosen, model.config.vocab_size, most))
        except (ContextError, PromptError) as error:
            raise type(error)(f"texts[{number}]: {error}") from error
    if not encoded:
        return mx.zeros((0, dimensions or model.embedding_size or 0))
    rows = min(batch_size, len(encoded))
    _, pool = _reserve(
        model, max(map(len, encoded)), rows, prefill_step_size, CacheOptions(kv_bits, kv_group_size)
    )
    scheduler = Scheduler(model, pool, max_batch=pool.max_sequences, prefill_step_size=prefill_step_size)
    vectors: dict[int, mx.array] = {}
    for token in scheduler.answer([EmbeddingRequest.of(encoded, chosen, dimensions)]):
        assert token.embedding is not None
        vectors[token.answer] = token.embedding
    return mx.stack([vectors[number] for number in range(len(encoded))])


def _reserve(
    model: LanguageModel, longest: int, rows: int, prefill_step_size: int, options: CacheOptions
) -> tuple[ModelCache | None, Pool]:
    """Reserve a pool. If the model supports only one sequence, return that of a cache, which owns it, too."""
    try:
        pool = model.make_pool(
            PAGE_SIZE * max(rows, pages_for(longest)),
            sequences=rows,
            max_seq_len=longest,
            prefill_step_size=prefill_step_size,
            options=options,
        )
        return None, pool
    except ModelError:
        if model.divided:
            raise
        cache = model.reserve_cache(longest, options)
        return cache, cache.pool

"""Vectors of texts: the function of the API."""

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
    """Return a vector of each text, such that texts with a similar meaning have similar vectors.

    The sentence-transformers files of the model's folder say how the last hidden states of a text become its
    vector: those of the last token, their mean, or those of the first token; whether vectors have length 1;
    and which prompt is put before each text. Special tokens are put around a text as the tokenizer is set
    up: Qwen3-Embedding's ends every text with the token whose state counts.

    A cache is reserved for the call and released after it. It is not quantized by default: keys and values
    keep the compute dtype, so that the vectors are the model's own.

    Args:
        model, tokenizer: from :func:`kvant.load`.
        texts: N texts, or rows of token ids, which are taken as they are.
        pooling: "last" or "mean", for a model without these files, whose vectors then have length 1; or in
            place of the way that they name.
        dimensions: D, the first numbers of a vector to keep, which is then divided by its new length if the
            model's vectors have length 1. Models are trained for it (Matryoshka). None: all.
        batch_size: texts that are computed together, at most. Texts of about the same length are.
        prefill_step_size: tokens that are computed at a time, at most.
        kv_bits, kv_group_size: as of :meth:`model.make_cache`; 0 bits: not quantized.

    Returns:
        (N, D) float32, in the order of the texts.

    Raises:
        ArgumentError: an argument out of range, or no ``pooling`` where the folder names none.
        ModelError: a model whose files ask for something that kvant does not compute.
        PromptError: a text without tokens, or ids that the model does not know.
        ContextError: a text that is longer than the model's context, or a cache that does not fit this
            machine.
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
    """Reserve a pool, or a conversation's cache, with which its pool lives, for a model that takes one
    sequence at a time.
    """
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

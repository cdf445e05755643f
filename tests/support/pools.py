"""Steps of a pool, models to take them with, and whether a pool's pages add up."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.pool import Pool, PoolSequence
from kvant.cache.pool_batch import PoolBatch, PoolLayerView
from kvant.models import Decoder, load_decoder
from kvant.models.bias import split_pairs
from support.checkpoints import qwen2_config, write_reference
from support.prefill import prefill as prefill_cache

TEXT = [(7 * i * i + 3 * i) % 290 for i in range(1000)]


def prefill(
    model: Decoder, pool: Pool, sequence: PoolSequence, ids: Sequence[int], step: int = 128
) -> mx.array:
    """Feed a text. Returns the logits (1, vocab) of its last token."""
    return prefill_cache(model, ids, pool.batch([sequence]), step)


def decode(model: Decoder, pool: Pool, sequences: Sequence[PoolSequence], ids: Sequence[int]) -> mx.array:
    """Logits (B, vocab) after one more token of each."""
    batch = pool.batch(sequences)
    logits = model.next_logits(mx.array(list(ids))[:, None], batch)
    mx.eval(logits)
    batch.commit()
    return logits


def close(given: mx.array, expected: mx.array, tolerance: float = 1e-5) -> bool:
    """Whether they differ by no more than this part of the largest."""
    return bool((mx.abs(given - expected).max() <= tolerance * mx.abs(expected).max()).item())


def next_logits(model: Decoder, ids: Sequence[int]) -> mx.array:
    """The logits (1, vocab) of a text's last token, without any cache."""
    return model.logits(model.hidden_states(mx.array([list(ids)]))[:, -1])


def tiny_model(folder: Path, windows: Sequence[int | None] = (None,), **changes: Any) -> Decoder:
    """A random Qwen2 with the window of each layer, and biases of which some rotary pairs are split off."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    model = load_decoder(
        write_reference(folder, qwen2_config(num_hidden_layers=len(windows), **sizes | changes))[0]
    )
    layers = []
    for layer, window in zip(model.layers, windows, strict=True):
        bias = split_pairs(model.config, layer.self_attn.qkv_bias.whole, (0, 3, 5))
        layers.append(replace(layer, self_attn=replace(layer.self_attn, window=window, qkv_bias=bias)))
    model.layers = tuple(layers)
    model.config = replace(model.config, windows=tuple(windows))
    return model


def check_pages(pool: Pool, sequences: Sequence[PoolSequence]) -> None:
    """Every page is held as often as it has holders, what nobody holds is free, and promises are those
    made.
    """
    assert pool.num_sequences == len(sequences) <= pool.max_sequences
    for number, part in enumerate(pool.groups):
        tables = [sequence.tables[number] for sequence in sequences]
        holders = Counter(page for table in tables for page in table.pages) + Counter(part.prefix.pages)
        assert [part.pages.refcount(page) for page in range(part.pages.num)] == [
            holders[page] for page in range(part.pages.num)
        ]
        assert part.pages.num_free == part.pages.num - len(holders)
        assert len(set(part.prefix.pages)) == len(part.prefix.pages)
        for table in tables:
            assert len(set(table.pages)) == len(table.pages) <= table.limit
        if part.window is None:
            held = {page for table in tables for page in table.pages}
            assert part.promised == sum(table.limit - len(table.pages) for table in tables)
            assert part.num_free == part.pages.num - len(held) - part.promised >= 0
        else:
            assert part.promised == sum(table.limit for table in tables) <= part.pages.num


class Changeable(PoolLayerView):
    """A layer whose methods can be replaced."""


def with_layers(cache: ModelCache, change: Callable[[int, Any], None]) -> ModelCache:
    """A cache whose layers are changed, whenever a model asks for them."""
    kind: type[PoolBatch] = type(cache.batch)

    class Changed(kind):  # type: ignore[valid-type, misc]
        def __iter__(self) -> Iterator[Any]:
            for number, view in enumerate(super().__iter__()):
                layer = Changeable(view.batch, view.group, view.layer)
                change(number, layer)
                yield layer

    cache.batch.__class__ = Changed
    return cache

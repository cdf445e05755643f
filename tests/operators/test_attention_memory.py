"""Attention of a chunk to a long past makes no score matrix of queries times context."""

import mlx.core as mx
import pytest
from support.counts import count

from kvant.cache import QuantizedKVCache
from kvant.operators.cached_attention import append_and_attend, write_tokens
from kvant.operators.cpu_attention import BLOCK_SCORE_BYTES

KV_HEADS, HEAD_DIM, CHUNK = 2, 64, 512
PAST = count(8192, 16384) - CHUNK


@pytest.mark.parametrize("heads", [4, 14])
@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU's attention makes no scores")
def test_scores_of_a_chunk_stay_under_the_bound(heads: int) -> None:
    cache = QuantizedKVCache(PAST + CHUNK, KV_HEADS, HEAD_DIM)
    past = mx.random.normal((1, KV_HEADS, PAST, HEAD_DIM), key=mx.random.key(0))
    arrays, options = (cache.cache, cache.scale), {"quant_bit": 8, "quant_group": 32}
    write_tokens(past, past, 0, *arrays, **options)
    mx.eval(arrays)
    query = mx.random.normal((1, heads, CHUNK, HEAD_DIM), key=mx.random.key(1))
    current = mx.random.normal((1, KV_HEADS, CHUNK, HEAD_DIM), key=mx.random.key(2))
    mx.eval(query, current)
    mx.synchronize()
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(append_and_attend(query, current, current, PAST, *arrays, **options))
    used = mx.get_peak_memory() - resting
    print(f"{heads} heads: {used / 2**20:.1f} MiB above the resting state")
    floats = 2 * KV_HEADS * (PAST + CHUNK) * HEAD_DIM * 4
    assert used > floats  # or the past was not read
    outputs = 4 * query.nbytes  # the blocks, joined and transposed
    assert used < floats + outputs + 8 * BLOCK_SCORE_BYTES
    assert used < heads * CHUNK * (PAST + CHUNK) * 4  # the bytes of one score matrix

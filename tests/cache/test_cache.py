"""The caches: exact bytes, no growth, no copy, and what trimming and resetting leave."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.numbers import relative_error

from kvant.cache import FullKVCache, QuantizedKVCache
from kvant.engine.run import Run
from kvant.errors import ContextError
from kvant.models import Decoder, load_decoder

Make = Callable[..., tuple[Path, nn.Module]]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def _rows(count: int, seed: int = 0, heads: int = KV_HEADS) -> mx.array:
    return mx.random.normal((1, heads, count, HEAD_DIM), key=mx.random.key(seed))


def _feed(cache: QuantizedKVCache | FullKVCache, count: int, seed: int) -> mx.array:
    return cache.attend(_rows(count, seed, HEADS), _rows(count, seed + 1), _rows(count, seed + 2))


@pytest.mark.parametrize(
    ("kv_bits", "kv_group_size", "scale_dtype", "expected"),
    [
        # 2 kv heads x (key, value) x 100 tokens x (64 values + 64 / group scales)
        (8, 32, mx.float16, 400 * (64 + 2 * 2)),
        (8, 8, mx.float32, 400 * (64 + 8 * 4)),
        (4, 32, mx.float16, 400 * (32 + 2 * 2)),
        (0, 32, mx.float16, 400 * 64 * 2),
    ],
)
def test_bytes_are_exact_before_and_after(
    kv_bits: int, kv_group_size: int, scale_dtype: mx.Dtype, expected: int
) -> None:
    cache = QuantizedKVCache(
        100, KV_HEADS, HEAD_DIM, kv_bits=kv_bits, kv_group_size=kv_group_size, scale_dtype=scale_dtype
    )
    assert cache.nbytes == expected
    mx.eval(_feed(cache, 70, 0), _feed(cache, 30, 1))
    assert (cache.offset, cache.nbytes) == (100, expected)


def test_memory_is_reserved_when_the_cache_is_made() -> None:
    mx.synchronize()
    before = mx.get_active_memory()
    cache = QuantizedKVCache(10_000, KV_HEADS, HEAD_DIM)
    assert mx.get_active_memory() - before >= cache.nbytes


def test_a_full_cache_refuses_and_stays() -> None:
    cache = QuantizedKVCache(8, KV_HEADS, HEAD_DIM)
    mx.eval(_feed(cache, 6, 0))
    quantized, scales = mx.array(cache.cache), mx.array(cache.scale)
    with pytest.raises(ContextError, match="3 more tokens do not fit: 6 of the 8 reserved tokens are used"):
        _feed(cache, 3, 1)
    with pytest.raises(ValueError, match="2 kv heads"):
        cache.attend(_rows(1, heads=HEADS), _rows(1, heads=1), _rows(1, heads=1))
    assert cache.offset == 6
    assert mx.array_equal(cache.cache, quantized)
    assert mx.array_equal(cache.scale, scales)


@pytest.mark.parametrize("kind", ["quantized", "full"])
def test_trimmed_and_reset_rows_do_not_matter(kind: str) -> None:
    def new() -> QuantizedKVCache | FullKVCache:
        return (
            QuantizedKVCache(32, KV_HEADS, HEAD_DIM, scale_dtype=mx.float32) if kind == "quantized" else FullKVCache()
        )

    used, fresh = new(), new()
    _feed(used, 9, 40)
    used.reset()
    assert used.offset == 0
    for cache in (used, fresh):
        _feed(cache, 5, 0)
    used.attend(*(mx.full((1, heads, 3, HEAD_DIM), 1e3) for heads in (HEADS, KV_HEADS, KV_HEADS)))
    assert used.trim(3) == 3
    assert relative_error(_feed(used, 2, 3), _feed(fresh, 2, 3)) == 0
    assert used.trim(100) == 7
    assert used.offset == 0
    with pytest.raises(ValueError, match="num_tokens is -1"):
        used.trim(-1)


@pytest.mark.parametrize(("kv_bits", "bound"), [(0, 1e-6), (8, 0.02), (4, 0.3)])
def test_quantized_and_full_cache_agree(kv_bits: int, bound: float) -> None:
    quantized = QuantizedKVCache(32, KV_HEADS, HEAD_DIM, kv_bits=kv_bits, dtype=mx.float32)
    full = FullKVCache()
    for count, seed in ((11, 0), (1, 5), (4, 9)):
        error = relative_error(_feed(quantized, count, seed), _feed(full, count, seed))
        assert error <= bound
        assert kv_bits == 0 or error > bound / 100  # it did go through quantized values


@pytest.mark.parametrize("kind", ["quantized", "full"])
def test_masks(kind: str) -> None:
    """Every shape says the same; what does not fit is refused and nothing is appended."""
    T, S = 9, 4
    keep = mx.tri(S, T, T - S - 2).astype(mx.bool_)
    outputs = []
    for mask in (
        keep,
        keep[None],
        keep[None, None],
        mx.broadcast_to(keep, (1, HEADS, S, T)),
        mx.where(keep, 0.0, -1e9),
    ):
        cache = QuantizedKVCache(T, KV_HEADS, HEAD_DIM) if kind == "quantized" else FullKVCache()
        _feed(cache, T - S, 0)
        for wrong in (keep[:, 1:], keep[0], mx.zeros((S, T), mx.int32), mx.zeros((3, S, T)), mx.zeros((1, 1, 1, T))):
            with pytest.raises(ValueError, match="mask has"):
                cache.attend(_rows(S, 1, HEADS), _rows(S, 2), _rows(S, 3), mask=wrong)
        assert cache.offset == T - S
        outputs.append(cache.attend(_rows(S, 1, HEADS), _rows(S, 2), _rows(S, 3), mask=mask))
    for output in outputs:
        assert relative_error(output, outputs[0]) < 1e-5
    assert relative_error(outputs[0], outputs[0] * 1.01) > 1e-5


def test_full_cache_contract() -> None:
    cache = FullKVCache()
    key, value, offset, mask = cache.update_and_fetch(_rows(3, 1), _rows(3, 2), mask_length=3, mask="causal")
    assert (offset, mask, key.shape) == (3, "causal", (1, KV_HEADS, 3, HEAD_DIM))
    key, value, offset, mask = cache.update_and_fetch(_rows(2, 3), _rows(2, 4))
    assert (offset, mask) == (5, None)
    assert mx.array_equal(key, mx.concatenate([_rows(3, 1), _rows(2, 3)], axis=2))
    assert mx.array_equal(value, mx.concatenate([_rows(3, 2), _rows(2, 4)], axis=2))
    assert cache.nbytes == 2 * 5 * KV_HEADS * HEAD_DIM * 4
    with pytest.raises(ValueError, match="the cache holds"):
        cache.update_and_fetch(_rows(1, heads=1), _rows(1, heads=1))


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_seq_len": 0}, {"num_kv_heads": -1}, {"head_dim": True}, {"kv_bits": 3},
        {"kv_group_size": 48}, {"kv_group_size": 0}, {"scale_dtype": mx.bfloat16},
        {"dtype": mx.int8},
    ],
)  # fmt: skip
def test_bad_arguments(arguments: dict[str, object]) -> None:
    good = {"max_seq_len": 8, "num_kv_heads": 2, "head_dim": 64}
    with pytest.raises(ValueError, match=next(iter(arguments))):
        QuantizedKVCache(**(good | arguments))


def _peak_of_decoding(model: Decoder, max_seq_len: int, *, hold: bool = False) -> int:
    """Bytes above the resting state while the engine's own loop decodes 40 tokens."""
    prompt = list(range(1, 9))
    cache = model.make_cache(max_seq_len)
    steps = Run(model, prompt, cache, max_tokens=48)
    for _ in range(8):
        next(steps)
    mx.synchronize()
    held = [layer.cache[..., :1, :] for layer in cache] if hold else []
    mx.eval(held)
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in steps:
        pass
    return mx.get_peak_memory() - resting


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_decoding_never_copies_the_cache(make_checkpoint: Make, layers: int) -> None:
    """The peak of the real loop does not know how much is reserved: 256 tokens, or 65,536 (17.8 MB a layer)."""
    model = load_decoder(make_checkpoint(num_hidden_layers=layers, max_position_embeddings=65536)[0])
    small, large = (_peak_of_decoding(model, tokens) for tokens in (256, 65536))
    assert large - small < 200_000


def test_the_meter_sees_a_copy(make_checkpoint: Make) -> None:
    """What holds a cache's buffer makes MLX copy it, and the measurement above shows that."""
    model = load_decoder(make_checkpoint(max_position_embeddings=65536)[0])
    layer_bytes = model.make_cache(65536)[0].cache.nbytes
    assert _peak_of_decoding(model, 65536, hold=True) > 0.9 * layer_bytes

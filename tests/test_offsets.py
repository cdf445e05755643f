"""A step of several sequences, each at an offset of its own: every row is what the sequence is alone."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import oracle
import pytest
from checkpoints import llama_config, qwen2_config, qwen3_config, reference_logits, reference_model, save_checkpoint
from conftest import relative_error

from kvant.cache import FullKVCache, QuantizedKVCache, StaticAppend
from kvant.errors import ContextError
from kvant.models import Decoder, load_decoder
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.rotary import Rotary

ROW_TOLERANCE = 1e-5  # of the largest logit, against the sequence alone
MODEL_TOLERANCE = 1e-4  # against mlx-lm's model
LONGEST = 300
VOCABULARY = 300
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": qwen2_config(hidden_size=448, num_attention_heads=7, num_key_value_heads=1),
    "qwen3": qwen3_config(),
    "llama": llama_config(),
    "mistral": llama_config(
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        attention_bias=False,
        mlp_bias=False,
        sliding_window=None,
        num_key_value_heads=1,
    ),
}
# Models without biases have nothing to split.
KINDS = [(kind, split) for kind in CONFIGS for split in (False, True) if not split or kind in ("qwen2", "llama")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Decoder, nn.Module]]:
    """kvant's and mlx-lm's model of a kind, with some keys' biases large enough to be split off."""
    made: dict[str, tuple[Decoder, nn.Module]] = {}

    def model(kind: str) -> tuple[Decoder, nn.Module]:
        if kind not in made:
            reference = reference_model(CONFIGS[kind])
            for layer in reference.model.layers:
                if "bias" in layer.self_attn.k_proj:
                    bias = layer.self_attn.k_proj.bias
                    layer.self_attn.k_proj.bias = bias * mx.where(mx.arange(bias.size) % 32 == 5, 30.0, 1.0)
            folder = save_checkpoint(tmp_path_factory.mktemp(kind), CONFIGS[kind], reference)
            made[kind] = load_decoder(folder), reference
        return made[kind]

    return model


class Draw:
    """B sequences of different lengths, and the new tokens of some steps."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.batch = int(rng.integers(2, 6))
        self.lengths = [int(n) for n in rng.integers(1, LONGEST + 1, self.batch)]
        self.lengths[0] = (1, LONGEST, 128)[seed % 3]
        self.steps = [1, int(rng.integers(2, 9)), 1]
        self.total = max(self.lengths) + sum(self.steps)
        self.prompts = [[int(i) for i in rng.integers(0, VOCABULARY, n)] for n in self.lengths]
        self.new = rng.integers(0, VOCABULARY, (self.batch, sum(self.steps)))

    def fed(self) -> list[mx.array]:
        """The (B, S) ids of each step."""
        bounds = np.cumsum([0, *self.steps])
        return [mx.array(self.new[:, a:b]) for a, b in pairwise(bounds)]


def feed(model: Decoder, cache: Sequence[Any], steps: Sequence[mx.array]) -> mx.array:
    """Logits of all steps, (B, S of all, vocab)."""
    logits = mx.concatenate([model(ids, cache=cache) for ids in steps], axis=1)
    mx.eval(logits)
    return logits


def feed_ragged(model: Decoder, cache: Sequence[QuantizedKVCache], prompts: Sequence[Sequence[int]]) -> None:
    """Prompts of different lengths, filled up to the longest; what was filled up is forgotten."""
    longest = max(map(len, prompts))
    mx.eval(model(mx.array([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]), cache=cache))
    for layer in cache:
        layer.trim([longest - len(prompt) for prompt in prompts])


def poison(cache: Sequence[QuantizedKVCache]) -> None:
    """NaN in every sequence's rows past its own length."""
    for layer in cache:
        for b, length in enumerate(layer.lengths):
            layer.arrays[-1][0, b, :, :, length:] = float("nan")
        mx.eval(layer.arrays)


class Given:
    """A layer's cache that records the keys and values it is given, or takes recorded ones in their place."""

    def __init__(self, layer: QuantizedKVCache, replayed: Sequence[tuple[mx.array, ...]] | None = None) -> None:
        self.layer = layer
        self.rows: list[tuple[mx.array, ...]] = []
        self._replayed = None if replayed is None else iter(replayed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def attend(self, query: mx.array, *rows: mx.array) -> mx.array:
        if self._replayed is not None:
            own, rows = rows, next(self._replayed)
            assert all(relative_error(*pair) < ROW_TOLERANCE for pair in zip(own, rows, strict=True))
        self.rows.append(rows)
        return self.layer.attend(query, *rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "bias_split"), KINDS)
def test_rows_are_the_sequences_alone(models: Callable[..., Any], kind: str, seed: int, bias_split: bool) -> None:
    model, reference = models(kind)
    drawn = Draw(seed)
    options = {"quant_bit": 0, "bias_split": bias_split}
    cache = model.make_cache(drawn.total + 3, batch=drawn.batch, **options)
    if bias_split:
        assert all(layer.bias_split is not None and layer.bias_split.pairs for layer in cache)
    feed_ragged(model, cache, drawn.prompts)
    poison(cache)
    batched = feed(model, cache, drawn.fed())
    assert cache[0].lengths == tuple(n + sum(drawn.steps) for n in drawn.lengths)
    for b, prompt in enumerate(drawn.prompts):
        alone = model.make_cache(drawn.total + 3, **options)
        mx.eval(model(mx.array([prompt]), cache=alone))
        expected = feed(model, alone, [ids[b : b + 1] for ids in drawn.fed()])[0]
        assert relative_error(batched[b], expected) < ROW_TOLERANCE
        whole = reference_logits(reference, [*prompt, *drawn.new[b].tolist()])[len(prompt) :]
        assert relative_error(batched[b], whole) < MODEL_TOLERANCE


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("kind", "bias_split"), KINDS)
def test_quantized_rows_are_the_sequences_alone(
    models: Callable[..., Any], kind: str, bits: int, bias_split: bool
) -> None:
    """Given the same bytes. Products of several rows are rounded otherwise, which can flip a quantized value."""
    model, _ = models(kind)
    drawn = Draw(bits + len(kind))
    options = {"quant_bit": bits, "quant_group": 16, "bias_split": bias_split}
    cache = model.make_cache(drawn.total + 3, batch=drawn.batch, **options)
    feed_ragged(model, cache, drawn.prompts)
    expected, recorded = [], []
    for b, prompt in enumerate(drawn.prompts):
        alone = model.make_cache(drawn.total + 3, **options)
        mx.eval(model(mx.array([prompt]), cache=alone))
        for layer, one in zip(cache, alone, strict=True):
            for array, row in zip(layer.arrays, one.arrays, strict=True):
                array[:, b] = row[:, 0]
        recording = [Given(layer) for layer in alone]
        expected.append(feed(model, recording, [ids[b : b + 1] for ids in drawn.fed()])[0])
        recorded.append([layer.rows for layer in recording])
    poison(cache)
    replayed = [
        Given(layer, [tuple(map(mx.concatenate, zip(*step, strict=True))) for step in zip(*sequences, strict=True)])
        for layer, sequences in zip(cache, zip(*recorded, strict=True), strict=True)
    ]
    batched = feed(model, replayed, drawn.fed())
    for row, alone_row in zip(batched, expected, strict=True):
        assert relative_error(row, alone_row) < ROW_TOLERANCE


def test_equal_lengths_are_one_offset(models: Callable[..., Any]) -> None:
    """Sequences that come to the same length are read in one go again, and the rows say the same."""
    model, _ = models("llama")
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    cache = model.make_cache(16, batch=2, quant_bit=0)
    feed_ragged(model, cache, prompts)
    feed(model, cache, [mx.array([[9, 10], [11, 12]])])
    for layer in cache:
        layer.trim([2, 0])
    assert cache[0].lengths == (5, 5)
    logits = model(mx.array([[13], [14]]), offset=5, cache=cache)
    for b, ids in enumerate(([1, 2, 3, 4, 5, 13], [6, 7, 8, 11, 12, 14])):
        assert relative_error(logits[b, -1], model(mx.array([ids]))[0, -1]) < ROW_TOLERANCE


# ---- one layer -------------------------------------------------------------------------------------------------------

OFFSETS = (0, 9, 19, 4)
ROOM = 28


def split_of(K: int, D: int) -> BiasSplit:
    pairs = (3, D // 2 - 1)
    return BiasSplit(
        key_bias=mx.random.normal((K, 2, 2), key=mx.random.key(3)) * 30,
        pairs=pairs,
        rotation=rotation_table(Rotary.plain(D, 1e4), pairs, ROOM),
        value_bias=mx.random.normal((K, D), key=mx.random.key(4)),
    )


def ragged_layer(K: int, D: int, past: mx.array, **options: Any) -> QuantizedKVCache:
    """A cache of one layer with rows of ``past`` at OFFSETS, poisoned past them."""
    cache = QuantizedKVCache(ROOM, K, D, batch=len(OFFSETS), dtype=mx.float32, **options)
    cache.attend(past, past, past + 1)
    cache.trim([past.shape[2] - n for n in OFFSETS])
    poison([cache])
    return cache


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("kind", ["none", "bool", "float", "of each"])
@pytest.mark.parametrize("S", [1, 3, 8])
@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 64), (4, 4, 80)], ids=str)
def test_attention_is_the_oracle_s(shape: tuple[int, int, int], S: int, kind: str) -> None:
    """In float64, a sequence at a time; columns of a mask past a sequence's own rows would let poison in."""
    H, K, D = shape
    B, T = len(OFFSETS), max(OFFSETS) + S
    past, query, key = normal(1, B, K, ROOM, D), normal(2, B, H, S, D), normal(5, B, K, S, D)
    cache = ragged_layer(K, D, past, quant_bit=0)
    rng = np.random.default_rng(6)
    keep = rng.random((B, H, S, T) if kind == "of each" else (H, S, T)) > 0.3
    mask = {"none": None, "float": np.where(keep, rng.standard_normal(keep.shape), -np.inf).astype(np.float32)}
    given = mask.get(kind, keep)
    output = cache.attend(query, key, key * 2, mask=None if given is None else mx.array(given))
    for b, offset in enumerate(OFFSETS):
        rows = [  # (1, T, K, D)
            np.array(mx.concatenate([old[b : b + 1, :, :offset], new[b : b + 1]], axis=2)).swapaxes(1, 2)
            for old, new in ((past, key), (past + 1, key * 2))
        ]
        own = given[b : b + 1] if kind == "of each" else given
        expected = oracle.attend(
            np.array(query[b : b + 1]).swapaxes(1, 2), *rows, is_causal=True, attn_mask=own
        ).swapaxes(1, 2)
        assert np.abs(np.array(output[b : b + 1]) - expected).max() < 1e-5 * (1 + np.abs(expected).max())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 64), (4, 4, 80)], ids=str)
def test_a_static_append_is_the_same_attention(shape: tuple[int, int, int], bits: int, split: bool) -> None:
    H, K, D = shape
    B, group = len(OFFSETS), 16
    options = {"quant_bit": bits, "quant_group": group, "bias_split": split_of(K, D) if split else None}
    past, query, key = normal(1, B, K, ROOM, D), normal(2, B, H, 1, D), normal(5, B, K, 1, D)
    for rows in (20, ROOM):
        eager, static = (ragged_layer(K, D, mx.repeat(past, H // K, axis=1)[:, :: H // K], **options) for _ in range(2))
        expected = eager.attend(query, key, key * 2)
        given = StaticAppend(static, mx.array(OFFSETS), rows).attend(query, key, key * 2)
        assert relative_error(given, expected) < 2e-5
        assert static.lengths == OFFSETS
        for mine, theirs in zip(static.arrays, eager.arrays, strict=True):
            assert mx.array_equal(mine, theirs, equal_nan=True).item()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("bits", [8, 4, 0])
def test_the_fused_kernel_is_the_same_attention(checked_gpu: None, bits: int, S: int, split: bool) -> None:
    H, K, D = 4, 2, 64
    B = len(OFFSETS)
    options = {"quant_bit": bits, "bias_split": split_of(K, D) if split else None}
    past, query, key = normal(1, B, K, ROOM, D), normal(2, B, H, S, D), normal(5, B, K, S, D)
    caches = [ragged_layer(K, D, past, kernels=kernels, **options) for kernels in ("composed", "fused", "fused")]
    expected, given = (cache.attend(query, key, key * 2) for cache in caches[:2])
    assert relative_error(given, expected) < 2e-5
    for mine, theirs in zip(caches[1].arrays, caches[0].arrays, strict=True):
        assert mx.array_equal(mine, theirs, equal_nan=True).item()
    if S == 1:
        static = StaticAppend(caches[2], mx.array(OFFSETS), 0).attend(query, key, key * 2)
        assert relative_error(static, expected) < 2e-5


def peak_of_appends(room: int, bits: int, *, static: bool, hold: bool = False) -> int:
    """Bytes above the resting state while 10 rows are appended to two sequences of different lengths."""
    cache = QuantizedKVCache(room, 2, 64, batch=2, quant_bit=bits, dtype=mx.float32)
    query, rows = normal(1, 2, 4, 3, 64), normal(2, 2, 2, 3, 64)
    mx.eval(cache.attend(query, rows, rows))
    cache.trim([0, 2])
    held = [cache.cache[..., :1, :]] if hold else []
    mx.eval(held)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(10):
        if static:
            layer = StaticAppend(cache, mx.array(cache.lengths), 32)
            mx.eval(layer.attend(query[:, :, :1], rows[:, :, :1], rows[:, :, :1]), cache.arrays)
            cache.advance(1)
        else:
            mx.eval(cache.attend(query, rows, rows))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bits", [8, 0])
def test_appends_are_in_place(bits: int, static: bool) -> None:
    """The peak does not know how much is reserved: 64 rows, or 65,536 (33 MB at 8 bits). A copy would show."""
    small, large = (peak_of_appends(room, bits, static=static) for room in (64, 65536))
    assert large - small < 100_000
    assert peak_of_appends(65536, bits, static=static, hold=True) > 30_000_000


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_offset_of_another_kind_is_refused(models: Callable[..., Any]) -> None:
    model, _ = models("qwen3")
    cache = model.make_cache(16, batch=2)
    feed_ragged(model, cache, [[1, 2, 3], [4]])
    ids = mx.array([[5], [6]])
    expected = r"expected an int or an array of integers \(2,\)"
    for offset, message in (
        (mx.array([3.0, 1.0]), rf"offset is an array of mlx.core.float32 \(2,\); {expected}"),
        (mx.array([3, 1, 0]), rf"offset is an array of mlx.core.int32 \(3,\); {expected}"),
        (mx.array(3), rf"offset is an array of mlx.core.int32 \(\); {expected}"),
        (mx.array([[3], [1]]), rf"\(2, 1\); {expected}"),
        ([3, 1], rf"offset is \[3, 1\]; {expected}"),
        (3.0, rf"offset is 3.0; {expected}"),
        (3, r"offset is 3; the cache holds \[3, 1\] tokens"),
        (mx.array([1, 3]), r"offset is \[1, 3\]; the cache holds \[3, 1\] tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, offset=offset, cache=cache)
    with pytest.raises(ValueError, match=r"offset is \[1, 0\]; the cache holds 0 tokens"):
        model(ids, offset=mx.array([1, 0]))
    with pytest.raises(ValueError, match=r"the cache is for a batch of 2, .* given 3"):
        model(mx.array([[5], [6], [7]]), cache=cache)
    assert {layer.lengths for layer in cache} == {(3, 1)}
    model(ids, offset=mx.array([3, 1]), cache=cache)
    assert {layer.lengths for layer in cache} == {(4, 2)}
    cache[1].trim([1, 0])
    with pytest.raises(ValueError, match=r"different numbers of tokens: \[3, 2\], \[4, 2\]"):
        model(ids, cache=cache)


def test_the_longest_sequence_must_have_room() -> None:
    cache = QuantizedKVCache(8, 2, 64, batch=2)
    rows = normal(1, 2, 2, 6, 64)
    cache.attend(rows, rows, rows)
    cache.trim([0, 5])
    levels = mx.array(cache.cache)
    with pytest.raises(ContextError, match="3 more tokens do not fit: 6 of the 8 reserved tokens are used"):
        cache.attend(rows[:, :, :3], rows[:, :, :3], rows[:, :, :3])
    assert cache.lengths == (6, 1)
    assert mx.array_equal(cache.cache, levels)


def test_each_sequence_is_trimmed() -> None:
    cache = QuantizedKVCache(8, 2, 64, batch=3)
    rows = normal(1, 3, 2, 6, 64)
    cache.attend(rows, rows, rows)
    assert cache.trim([1, 0, 9]) == 6
    assert (cache.lengths, cache.offset) == ((5, 6, 0), 6)
    assert cache.trim(2) == 2
    assert cache.lengths == (3, 4, 0)
    for wrong, message in (
        ([1, 2], "num_tokens has 2 numbers; the cache has 3 sequences"),
        ([1, -1, 0], r"num_tokens is \[1, -1, 0\]; expected"),
        ([1, True, 0], "expected an int, 0 or more"),
        (1.5, "num_tokens is 1.5; expected an int, 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.trim(wrong)
    assert cache.lengths == (3, 4, 0)
    cache.reset()
    assert cache.lengths == (0, 0, 0)


def test_a_cache_that_grows_has_one_length() -> None:
    cache = FullKVCache()
    assert cache.lengths == (0,)
    rows = normal(1, 3, 2, 6, 64)
    cache.attend(rows, rows, rows)
    assert cache.lengths == (6, 6, 6)

"""The bias split: attention is the same with and without it, against a float64 oracle."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from bias_split import plant
from support import oracle
from support.numbers import relative_error

from kvant.models import Decoder, load_decoder
from kvant.operators import multi_head_cache_attention
from kvant.operators.bias_split import MAX_SCORE_QUERIES, BiasSplit, rotation_table
from kvant.operators.rotary import Rotary

Make = Callable[..., tuple[Path, nn.Module]]
H, K, D, THETA = 4, 2, 64, 1e6
FLOAT32_EPSILON = 2**-23


def _rotate(x: np.ndarray, first: int) -> np.ndarray:
    """Rotary positions of (B, S, heads, D) rows from ``first``, halves paired, in float64."""
    half = x.shape[-1] // 2
    angle = (first + np.arange(x.shape[1]))[:, None, None] * THETA ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


class _Layer:
    """Random projections and biases, what a whole and a split cache are given, and what they must return."""

    def __init__(self, tokens: int, size: float, pairs: tuple[int, ...], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.query = _rotate(rng.normal(size=(1, tokens, H, D)), 0)
        key, value = rng.normal(size=(2, 1, tokens, K, D))
        key_bias = rng.uniform(-size, size, (K, D))
        self.value_bias = rng.uniform(-3, 3, (K, D))
        split_off = np.tile(np.isin(np.arange(D // 2), pairs), 2)
        self.whole = _rotate(key + key_bias, 0), value + self.value_bias
        self.stored = _rotate(key + np.where(split_off, 0, key_bias), 0), value
        self.split = BiasSplit(
            key_bias=mx.array(key_bias.reshape(K, 2, D // 2)[..., list(pairs)].astype(np.float32)),
            pairs=pairs,
            rotation=rotation_table(Rotary.plain(D, THETA), pairs, tokens + 3),
            value_bias=mx.array(self.value_bias.astype(np.float32)),
        )
        self.expected = oracle.attend(self.query, *self.whole, is_causal=True)
        scores = np.einsum("bskd,btkd->bkst", self.query[:, :, :: H // K], self.whole[0]) / math.sqrt(D)
        largest_value = np.abs(self.whole[1]).max()
        self.tolerance = 8 * FLOAT32_EPSILON * max(1.0, np.abs(scores).max()) * largest_value

    def attend(self, bounds: list[int], split: bool) -> np.ndarray:
        """The operator in steps of given bounds, through a cache without quantization."""
        tokens = self.query.shape[1]
        cache = mx.full((1, 1, 2, K, tokens + 2, D), math.nan)
        key, value = self.stored if split else self.whole
        outputs = []
        for first, last in pairwise(bounds):
            rows = [mx.array(x[:, first:last].astype(np.float32)) for x in (self.query, key, value)]
            outputs.append(
                multi_head_cache_attention(
                    *rows, first, cache, num_heads=H, num_kv_heads=K, head_dim=D, is_causal=True, cache_layout=1,
                    bias_split=self.split if split else None,
                )
            )  # fmt: skip
        return np.array(mx.concatenate(outputs, axis=1))


PAIRS = {"none": (), "last": (31,), "some": (3, 17, 30, 31), "all": tuple(range(32))}
STEPS = {
    "prefill": [0, 40],
    "chunks": [0, 13, 26, 40],
    "decode": [0, 37, 38, 39, 40],
    "few queries": [0, 20, 20 + MAX_SCORE_QUERIES, 40],
}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 900.0])
def test_attention_is_exact(size: float, pairs: str, steps: str, split: bool) -> None:
    layer = _Layer(40, size, PAIRS[pairs], seed=int(size) + len(PAIRS[pairs]))
    error = np.abs(layer.attend(STEPS[steps], split) - layer.expected).max()
    assert error < layer.tolerance


def test_the_tolerance_notices_a_missing_bias() -> None:
    layer = _Layer(40, 900.0, PAIRS["some"], seed=5)
    wrong = _Layer(40, 900.0, PAIRS["some"], seed=6)
    for bounds in STEPS.values():
        layer.split = wrong.split
        assert np.abs(layer.attend(bounds, split=True) - layer.expected).max() > layer.tolerance


def test_a_query_with_every_key_masked_gives_zeros() -> None:
    layer = _Layer(4, 5.0, PAIRS["last"], seed=0)
    rows = [mx.array(x.astype(np.float32)) for x in (layer.query, *layer.stored)]
    mask = mx.array(np.tri(4, k=-1, dtype=bool))  # the first query sees nothing
    output = multi_head_cache_attention(
        *rows, 0, mx.zeros((1, 1, 2, K, 4, D)), None, mask, num_heads=H, num_kv_heads=K, head_dim=D, is_causal=True,
        cache_layout=1, bias_split=layer.split,
    )  # fmt: skip
    assert not output[:, 0].any().item()
    expected = oracle.attend(layer.query, *layer.whole, attn_mask=np.tri(4, k=-1, dtype=bool), is_causal=True)
    assert np.abs(np.array(output) - expected).max() < layer.tolerance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": (31, 31)}, r"pairs \(31, 31\)"),
        ({"pairs": (32,)}, r"pairs \(32,\)"),
        ({"pairs": (1, 2)}, "key_bias"),
        ({"key_bias": mx.zeros((K, 2, 2))}, "key_bias"),
        ({"rotation": mx.zeros((2, 1, 3))}, "rotation"),
        ({"value_bias": mx.zeros((H, D))}, "value_bias"),
        ({"value_bias": mx.zeros((K, D), mx.float16)}, "value_bias"),
    ],
)
def test_a_split_that_does_not_fit_is_refused_before_anything_is_written(change: dict[str, Any], message: str) -> None:
    layer = _Layer(4, 5.0, PAIRS["last"], seed=0)
    fields = {name: getattr(layer.split, name) for name in ("key_bias", "pairs", "rotation", "value_bias")}
    layer.split = BiasSplit(**(fields | change))
    cache = mx.ones((1, 1, 2, K, 4, D))
    rows = [mx.array(x.astype(np.float32)) for x in (layer.query, *layer.stored)]
    with pytest.raises(ValueError, match=message):
        multi_head_cache_attention(
            *rows, 0, cache, num_heads=H, num_kv_heads=K, head_dim=D, is_causal=True, cache_layout=1,
            bias_split=layer.split,
        )  # fmt: skip
    assert (cache == 1).all().item()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("constant", [0.0, 900.0])
def test_attention_of_the_pocket_model_is_exact(
    pocket_folder: Path, tmp_path: Path, heldout_ids: list[int], constant: float, steps: str, split: bool
) -> None:
    """Every layer on real inputs, through the engine's cache, against the oracle on the whole keys and values."""
    model = load_decoder(plant(pocket_folder, tmp_path / "planted", constant))
    x = model._embed_tokens.rows(mx.array([heldout_ids[:40]]))
    for layer, cache in zip(model.layers, model.make_cache(42, kv_bits=0, bias_split=split), strict=True):
        normed = mx.fast.rms_norm(x, layer.norms["before_attention"], layer.rms_norm_eps)
        heads = (np.array(layer.self_attn.qkv_proj(normed)) + np.array(layer.self_attn.qkv_bias.whole)).astype(float)
        heads = heads.reshape(1, 40, H + 2 * K, D)
        query, key, value = _rotate(heads[:, :, :H], 0), _rotate(heads[:, :, H : H + K], 0), heads[:, :, H + K :]
        expected = oracle.attend(query, key, value, is_causal=True)
        given = []
        cache.reset()
        own = layer.self_attn
        bias = own.qkv_bias.stored if split else own.qkv_bias.whole
        for first, last in pairwise(STEPS[steps]):
            qkv = (own.qkv_proj(normed[:, first:last]) + bias).reshape(1, last - first, H + 2 * K, D)
            qkv = qkv.transpose(0, 2, 1, 3)
            turned = mx.fast.rope(qkv[:, : H + K], D, traditional=False, base=THETA, scale=1.0, offset=first)
            given.append(cache.attend(turned[:, :H], turned[:, H:], qkv[:, H + K :]))
            cache.sequence.commit(last - first)
        scores = np.abs(np.einsum("bskd,btkd->bkst", query[:, :, :: H // K], key)).max() / math.sqrt(D)
        tolerance = 8 * FLOAT32_EPSILON * max(1.0, scores) * np.abs(value).max()
        error = np.abs(np.array(mx.concatenate(given, axis=2)).transpose(0, 2, 1, 3) - expected).max()
        assert error < tolerance
        x = layer(x, Rotary.plain(D, THETA).at(0, 40, mx.float32), None)


def _with_large_key_bias(make: Make, size: float, elements: tuple[int, ...], **changes: Any) -> Decoder:
    """A random model whose keys have a constant at given elements of every head."""
    folder, _ = make(**changes)
    path = folder / "model.safetensors"
    weights = {name: mx.array(x) for name, x in mx.load(str(path)).items()}
    for name, x in weights.items():
        if name.endswith("k_proj.bias"):
            bias = x.reshape(-1, 64)
            bias[:, mx.array(elements)] = size
            weights[name] = bias.flatten()
    mx.save_safetensors(str(path), weights)
    return load_decoder(folder)


def test_the_model_chooses_the_pairs_that_outweigh_the_rest(make_checkpoint: Make) -> None:
    model = _with_large_key_bias(make_checkpoint, 300.0, (31, 40))
    for layer in model.layers:
        assert {31, 8} <= set(layer.self_attn.qkv_bias.pairs)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("size", [0.5, 900.0])
def test_models_agree_with_and_without(make_checkpoint: Make, size: float, bits: int | None) -> None:
    """The same logits for prefill, chunks and decode; a constant in the slowest pair cancels in the softmax."""
    model = _with_large_key_bias(make_checkpoint, size, (31, 63))
    ids = mx.random.randint(0, 300, (1, 40), key=mx.random.key(3))
    expected = model(ids)
    for bounds in STEPS.values():
        cache = model.make_cache(64, kv_bits=0)
        assert all(layer.bias_split is not None for layer in cache)
        parts = [model(ids[:, a:b], cache=cache) for a, b in pairwise(bounds)]
        error = mx.abs(mx.concatenate(parts, axis=1) - expected).max() / mx.abs(expected).max()
        # Scores reach about 10 * size; their rounding moves the weights of the softmax by as much.
        assert error.item() < 40 * FLOAT32_EPSILON * max(1.0, 10 * size)


ROPES = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_models_with_other_rotary_positions_agree(make_checkpoint: Make, kind: str) -> None:
    """A constant in a pair of the middle, which every one of these kinds turns by another angle than the plain one."""
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    model = _with_large_key_bias(make_checkpoint, 30.0, (16, 48), rope_parameters=rope, max_position_embeddings=24)
    assert all(16 in layer.self_attn.qkv_bias.pairs for layer in model.layers)
    plain, turned = Rotary.plain(64, 1e4), model.config.rope.rotary(64)
    tables = [rotation_table(rotary, [16], 40) for rotary in (plain, turned)]
    assert mx.abs(tables[0] - tables[1]).max().item() > 0.01
    ids = mx.random.randint(0, 300, (1, 40), key=mx.random.key(3))
    expected = model(ids)
    for bounds in STEPS.values():
        cache = model.make_cache(40, kv_bits=0)
        parts = [model(ids[:, a:b], cache=cache) for a, b in pairwise(bounds)]
        assert relative_error(mx.concatenate(parts, axis=1), expected) < 40 * FLOAT32_EPSILON * 10 * 30


def test_split_off_stores_whole_keys_and_split_on_stores_none_of_the_bias(make_checkpoint: Make) -> None:
    model = _with_large_key_bias(make_checkpoint, 300.0, (31, 63))
    ids = mx.random.randint(0, 300, (1, 40), key=mx.random.key(3))
    largest = {}
    for split in (True, False):
        cache = model.make_cache(64, kv_bits=0, bias_split=split)
        mx.eval(model(ids, cache=cache))
        largest[split] = max(mx.abs(layer.cache[:, :, 0]).max().item() for layer in cache)
        assert all((layer.bias_split is not None) == split for layer in cache)
    assert largest[True] < 30 < 250 < largest[False]


def test_four_bits_need_the_split(make_checkpoint: Make) -> None:
    model = _with_large_key_bias(make_checkpoint, 300.0, (31, 63), num_hidden_layers=3)
    ids = mx.random.randint(0, 300, (1, 64), key=mx.random.key(3))
    expected = model(ids)
    error = {}
    for split in (True, False):
        logits = model(ids, cache=model.make_cache(64, kv_bits=4, kv_group_size=32, bias_split=split))
        error[split] = mx.abs(logits - expected).mean().item()
    assert error[True] < 0.3 * error[False]


def test_the_tables_are_counted(make_checkpoint: Make) -> None:
    model = _with_large_key_bias(make_checkpoint, 300.0, (31, 63))
    tokens = 100
    for layer, cache in zip(model.layers, model.make_cache(tokens), strict=True):
        pairs = len(layer.self_attn.qkv_bias.pairs)
        levels_and_scales = 2 * 2 * tokens * (64 + 2 * 2)
        tables = 4 * (2 * pairs * tokens + 2 * 2 * pairs + 2 * 64)
        assert cache.nbytes == levels_and_scales + tables
    plain = model.make_cache(tokens, bias_split=False)
    assert [cache.nbytes for cache in plain] == [levels_and_scales] * len(plain)

"""The bias split: attention is the same with and without it, against a float64 oracle."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from bias_split import plant
from support import oracle
from support.checkpoints import load_reference
from support.numbers import relative_error

from kvant.models import Decoder, load_decoder
from kvant.operators import multi_head_cache_attention
from kvant.operators.bias_split import MAX_SCORE_QUERIES, BiasSplit, rotation_table
from kvant.operators.rotary import Rotary

Make = Callable[..., tuple[Path, nn.Module]]
H, K, D, THETA = 4, 2, 64, 1e6
FLOAT32_EPSILON = 2**-23
IDS = mx.random.randint(0, 300, (1, 40), key=mx.random.key(3))


def _rotate(x: np.ndarray, first: int) -> np.ndarray:
    """Rotary positions of (B, S, heads, D) rows from ``first``, halves paired, in float64."""
    half = x.shape[-1] // 2
    angle = (first + np.arange(x.shape[1]))[:, None, None] * THETA ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1
    )


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

    def rows(self, split: bool) -> list[mx.array]:
        return [mx.array(x.astype(np.float32)) for x in (self.query, *(self.stored if split else self.whole))]

    def attend(self, bounds: list[int], split: bool) -> np.ndarray:
        """The operator in steps of given bounds, through a cache without quantization."""
        cache = mx.full((1, 1, 2, K, self.query.shape[1] + 2, D), math.nan)
        rows, bias = self.rows(split), self.split if split else None
        return np.concatenate(
            [_operator([x[:, a:b] for x in rows], a, cache, bias_split=bias) for a, b in pairwise(bounds)],
            axis=1,
        )


def _operator(
    rows: list[mx.array], start: int, cache: mx.array, mask: mx.array | None = None, **rest: Any
) -> mx.array:
    sizes = {"num_heads": H, "num_kv_heads": K, "head_dim": D, "is_causal": True, "cache_layout": 1}
    return multi_head_cache_attention(*rows, start, cache, None, mask, **sizes, **rest)


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
    # the first query sees nothing
    layer, mask = _Layer(4, 5.0, PAIRS["last"], seed=0), np.tri(4, k=-1, dtype=bool)
    output = _operator(
        layer.rows(True), 0, mx.zeros((1, 1, 2, K, 4, D)), mx.array(mask), bias_split=layer.split
    )
    assert not output[:, 0].any().item()
    expected = oracle.attend(layer.query, *layer.whole, attn_mask=mask, is_causal=True)
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
def test_a_split_that_does_not_fit_is_refused_before_anything_is_written(
    change: dict[str, Any], message: str
) -> None:
    layer, cache = _Layer(4, 5.0, PAIRS["last"], seed=0), mx.ones((1, 1, 2, K, 4, D))
    with pytest.raises(ValueError, match=message):
        _operator(layer.rows(True), 0, cache, bias_split=replace(layer.split, **change))
    assert (cache == 1).all().item()


def _with_large_key_bias(
    make: Make, size: float, elements: tuple[int, ...], **changes: Any
) -> tuple[Decoder, Any]:
    """A random model whose keys have a constant at given elements of every head, and mlx-lm's with its
    weights.
    """
    folder, _ = make(**changes)
    path = folder / "model.safetensors"
    weights = {name: mx.array(x) for name, x in mx.load(str(path)).items()}
    for name, x in weights.items():
        if name.endswith("k_proj.bias"):
            bias = x.reshape(-1, 64)
            bias[:, mx.array(elements)] = size
            weights[name] = bias.flatten()
    mx.save_safetensors(str(path), weights)
    return load_decoder(folder), load_reference(folder)


def _check_model(model: Decoder, reference: Any, ids: mx.array, size: float) -> None:
    expected = reference(ids)
    for split, bounds in product((True, False), STEPS.values()):
        cache = model.make_cache(64, kv_bits=0, bias_split=split)
        assert all((layer.transform.bias_split is not None) == split for layer in cache)
        parts = [model(ids[:, a:b], cache=cache) for a, b in pairwise(bounds)]
        # Scores reach about 10 * size; their rounding moves the weights of the softmax by as much.
        assert relative_error(mx.concatenate(parts, axis=1), expected) < 40 * FLOAT32_EPSILON * max(
            1.0, 10 * size
        )


@pytest.mark.parametrize("constant", [0.0, 900.0])
def test_the_pocket_model_agrees_with_mlx_lm(
    pocket_folder: Path, tmp_path: Path, heldout_ids: list[int], constant: float
) -> None:
    """A constant in the slowest pair cancels in the softmax."""
    folder = plant(pocket_folder, tmp_path / "planted", constant)
    _check_model(load_decoder(folder), load_reference(folder), mx.array([heldout_ids[:40]]), constant)


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
    """A constant in a pair of the middle, which every one of these kinds turns by another angle than the
    plain one.
    """
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    changes = {"rope_parameters": rope, "max_position_embeddings": 24}
    model, reference = _with_large_key_bias(make_checkpoint, 30.0, (16, 48), **changes)
    assert all(16 in layer.self_attn.qkv_bias.pairs for layer in model.layers)
    # Of dynamic mlx-lm makes other angles; the model itself, without a cache, is what there is.
    _check_model(model, model if kind == "dynamic" else reference, IDS, 30.0)


def test_what_the_split_is_for(make_checkpoint: Make) -> None:
    """Pairs that outweigh the rest are chosen, nothing of their bias is stored, and four bits are enough."""
    model, _ = _with_large_key_bias(make_checkpoint, 300.0, (31, 40), num_hidden_layers=3)
    assert all({31, 8} <= set(layer.self_attn.qkv_bias.pairs) for layer in model.layers)
    expected = model(IDS)
    largest, error = {}, {}
    for split in (True, False):
        plain, cache = (model.make_cache(64, kv_bits=b, kv_group_size=32, bias_split=split) for b in (0, 4))
        mx.eval(model(IDS, cache=plain))
        largest[split] = max(mx.abs(layer.layer.arrays[0][0]).max().item() for layer in plain)
        error[split] = mx.abs(model(IDS, cache=cache) - expected).mean().item()
    assert largest[True] < 30 < 250 < largest[False]
    assert error[True] < 0.3 * error[False]

"""A step of several sequences, each at an offset of its own: every row is what the sequence is alone."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.checkpoints import CONFIGS as ARCHITECTURES
from support.checkpoints import (
    mistral_config,
    qwen2_config,
    qwen3_config,
    reference_logits,
    reference_model,
    save_checkpoint,
)
from support.counts import count
from support.numbers import relative_error
from support.ragged import poison

from kvant.cache import ModelCache, QuantizedKVCache
from kvant.models import Decoder, load_decoder
from kvant.operators.bias_split import BiasSplit

ROW_TOLERANCE = 1e-5  # of the largest logit, against the sequence alone
MODEL_TOLERANCE = 1e-4  # against mlx-lm's model
LONGEST = 300
VOCABULARY = 300
CONFIGS: dict[str, dict[str, Any]] = ARCHITECTURES | {
    "qwen2": qwen2_config(hidden_size=448, num_attention_heads=7, num_key_value_heads=1),
    "qwen3": qwen3_config(),
    "mistral": mistral_config(num_key_value_heads=1),
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


def feed(
    model: Decoder, cache: ModelCache, steps: Sequence[mx.array], layers: Sequence["Given"] | None = None
) -> mx.array:
    """Logits of all steps, (B, S of all, vocab); attention is that of ``layers``, by default the cache's own."""
    logits = []
    for ids in steps:
        if layers is None:
            logits.append(model(ids, cache=cache))
        else:
            lengths = cache.begin(ids)
            logits.append(model.logits(model.states(ids, mx.array(lengths), layers)))
            cache.commit()
        mx.eval(logits[-1])
    return mx.concatenate(logits, axis=1)


def feed_ragged(model: Decoder, cache: Sequence[QuantizedKVCache], prompts: Sequence[Sequence[int]]) -> None:
    """Prompts of different lengths, filled up to the longest; what was filled up is forgotten."""
    longest = max(map(len, prompts))
    mx.eval(model(mx.array([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]), cache=cache))
    for layer in cache:
        layer.trim([longest - len(prompt) for prompt in prompts])


class Given:
    """A layer's cache that records the keys and values it is given, or takes recorded ones in their place."""

    def __init__(self, layer: QuantizedKVCache, replayed: Sequence[tuple[mx.array, ...]] | None = None) -> None:
        self.layer = layer
        self.rows: list[tuple[mx.array, ...]] = []
        self._replayed = None if replayed is None else iter(replayed)

    @property
    def bias_split(self) -> BiasSplit | None:
        return self.layer.bias_split

    def attend(self, query: mx.array, *rows: mx.array) -> mx.array:
        if self._replayed is not None:
            own, rows = rows, next(self._replayed)
            assert all(relative_error(*pair) < ROW_TOLERANCE for pair in zip(own, rows, strict=True))
        self.rows.append(rows)
        return self.layer.attend(query, *rows)


@pytest.mark.parametrize("seed", range(count(2, 3)))
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
        expected.append(feed(model, alone, [ids[b : b + 1] for ids in drawn.fed()], recording)[0])
        recorded.append([layer.rows for layer in recording])
    poison(cache)
    replayed = [
        Given(layer, [tuple(map(mx.concatenate, zip(*step, strict=True))) for step in zip(*sequences, strict=True)])
        for layer, sequences in zip(cache, zip(*recorded, strict=True), strict=True)
    ]
    batched = feed(model, cache, drawn.fed(), replayed)
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


@pytest.mark.parametrize("bits", [8, 0])
def test_a_static_step_is_the_same_step(models: Callable[..., Any], bits: int) -> None:
    """The step that is compiled on a GPU, with offsets (B,) as its input."""
    model, _ = models("llama")
    eager, static = (model.make_cache(64, batch=3, quant_bit=bits) for _ in range(2))
    for cache in (eager, static):
        feed_ragged(model, cache, [[1, 2, 3, 4, 5], [6], [7, 8, 9]])
        poison(cache)
    offsets = mx.array(static.lengths)
    for tokens in ([[10], [11], [12]], [[10, 13], [11, 14], [12, 15]]):
        expected = model.hidden_states(mx.array(tokens), cache=eager)
        given = model.states(mx.array(tokens), offsets, static.compiled_views(offsets, 40))
        assert relative_error(given, expected) < 2e-5
    assert static[0].lengths == (5, 1, 3)


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
    with pytest.raises(ValueError, match="the cache is for a batch of 2; given 3"):
        model(mx.array([[5], [6], [7]]), cache=cache)
    assert {layer.lengths for layer in cache} == {(3, 1)}
    model(ids, offset=mx.array([3, 1]), cache=cache)
    assert {layer.lengths for layer in cache} == {(4, 2)}
    cache[1].trim([1, 0])
    assert {layer.lengths for layer in cache} == {(3, 2)}  # one cache: of every layer
